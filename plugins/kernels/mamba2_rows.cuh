// What the decode and the window kernel of Mamba2 do alike with a row that has no window for them, and for a later row.
#pragma once
#include "mamba2_serial.cuh"

// A row without work (zeros, and its error bits raised), or a prefill row, which goes token by token unless
// `skip_prefill` leaves it to mamba2_prefill.cu. Waits for the block's copies first. `from`, `to`: the block's part of
// the checkpoint;
// `position`: of its tiles.
DEVICE void finish_other_row(const Row& row, bool has_slot, u64* barrier, bool skip_prefill, const SerialInputs& inputs,
                             const state_t* from, state_t* to, int* position, activation_t* output, int* error_flag) {
    copy_async_wait();
    sync_threads();
    if (has_slot) tile_copy_wait(barrier);
    if (!row.active) {
        if (row.error && threadIdx.x == 0) atomic_or(error_flag, row.error);
        write_zeros(row, output, HEADS * ROWS);
        return;
    }
    if (skip_prefill) return;
    const SerialStores stores = {to, row.length, nullptr, 0};
    for (int first = threadIdx.x / 32 * 4; first < CTA_ROWS; first += WARPS * 4)
        serial_rows<4, false>(inputs, row, first, from, stores, output + offset_of(row.start, HEADS * ROWS));
    if (threadIdx.x < CTA_TILES) position[threadIdx.x] = row.seq_len + row.length;
}

// Asks for the later row's ring, of which the block's heads read the columns given.
DEVICE void prefetch_mamba2_ring(const LaterRow& later, int checkpoint_position, const Block& block,
                                 const activation_t* ring_x, int ring_x_stride, const activation_t* ring_B,
                                 int ring_B_stride, const float* ring_dt, int ring_dt_stride) {
    if (!later.exists) return;
    const int x_column = block.head * ROWS + block.first_row, B_column = block.group * COLUMNS;
    prefetch_ring(later, checkpoint_position, [&](int entry) {
        prefetch(ring_x + (offset_of(later.slot, ring_x_stride) + (entry * (HEADS * ROWS) + x_column)),
                 CTA_ROWS * sizeof(activation_t));
        if (block.first_of_group)
            prefetch(ring_B + (offset_of(later.slot, ring_B_stride) + (entry * (GROUPS * COLUMNS) + B_column)),
                     COLUMNS * sizeof(activation_t));
        if (block.first_of_head && block.head % 8 == 0)
            prefetch_sector(ring_dt + (offset_of(later.slot, ring_dt_stride) + (entry * HEADS + block.head)));
    });
}
