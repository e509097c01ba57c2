// What the decode and the window kernel of Gated DeltaNet do alike with a row that has no window for them, and for a
// later row.
#pragma once
#include "gdn_window.cuh"

// The block's part of a row without work (zeros, and its error bits raised), or of a prefill row, which goes token by
// token unless `skip_prefill` leaves it to gdn_prefill.cu. `from`, `to`: that part of the checkpoint; `position`: of
// its tiles.
DEVICE void finish_other_row(const Row& row, bool skip_prefill, const SerialInputs& inputs, const state_t* from, state_t* to,
                             int* position, activation_t* output, int* error_flag) {
    if (!row.active) {
        if (row.error && threadIdx.x == 0) atomic_or(error_flag, row.error);
        write_zeros(row, output, HEADS * ROWS);
        return;
    }
    if (skip_prefill) return;
    const SerialStores stores = {to, row.length, nullptr, 0};
    for (int first = threadIdx.x / 32 * 4; first < CTA_ROWS; first += WARPS * 4)
        serial_rows<4, false>(inputs, row, first, from, stores, output + offset_of(row.start, HEADS * ROWS), nullptr);
    if (threadIdx.x < CTA_TILES) position[threadIdx.x] = row.seq_len + row.length;
}

// Asks for the part of a later row's ring that the block will read, sector by sector: a warp-wide instruction each.
DEVICE void prefetch_history(const LaterRow& later, int checkpoint_position, const Block& block, const activation_t* ring_k,
                             const u16* ring_u, const float* ring_g) {
    const int history = later.seq_len - checkpoint_position, lane = threadIdx.x % 32;
    if (checkpoint_position < 0 || history > MAX_HISTORY) return;
    const int first = (u32)checkpoint_position % RING_LEN;
    constexpr int U_SECTORS = CTA_ROWS * 2 / 32, K_SECTORS = COLUMNS * 2 / 32;  // of 32 bytes
    constexpr int SECTORS = U_PLANES * U_SECTORS;
#pragma unroll
    for (int i = 0; i < (MAX_HISTORY * SECTORS + 31) / 32; i++) {
        const u32 n = i * 32 + lane, j = n / SECTORS, plane = n % SECTORS / U_SECTORS, sector = n % U_SECTORS;
        const int offset = wrapped(first + j) * (HEADS * U_PLANES * ROWS) + (int)(plane * ROWS + sector * 16);
        prefetch_sector(ring_u + offset, (int)j < history);
    }
    if (block.first_of_group)
#pragma unroll
        for (int i = 0; i < (MAX_HISTORY * K_SECTORS + 31) / 32; i++) {
            const u32 n = i * 32 + lane, j = n / K_SECTORS, sector = n % K_SECTORS;
            prefetch_sector(ring_k + (wrapped(first + j) * (GROUPS * COLUMNS) + (int)sector * 16), (int)j < history);
        }
    if (block.first_of_head && block.head % 8 == 0)
        prefetch_sector(ring_g + wrapped(first + lane) * HEADS, lane < history);
}
