// What the readout kernels bring into shared memory: the rows of the readout, the history, the window.
#pragma once
#include "readout.cuh"

// -------------------------------------------------------------------------------------------------- readout tile

// Copies of the block's readout rows to shared memory. `from`: of the block's first row.
DEVICE void readout_copy_start(unsigned char* tile, const StateRows& from, u64* barrier) {
#if BULK_COPY
    if constexpr (NVFP4) {
        if (threadIdx.x != THREADS - 32) return;
        bulk_copies_start(tile, from.codes, CTA_STATE_ROWS * CODE_BYTES, tile + CODES_SIZE, from.block_scales,
                          CTA_STATE_ROWS * BLOCK_SCALE_BYTES, barrier);
        return;
    }
#endif
    constexpr int CHUNKS = CODE_BYTES / 16;
    for (int i = threadIdx.x; i < CTA_STATE_ROWS * CHUNKS; i += THREADS)
        copy_async_16(tile + i / CHUNKS * CODE_STRIDE + i % CHUNKS * 16, from.codes + i * 16, true);
    if constexpr (NVFP4)
        for (int i = threadIdx.x; i < CTA_STATE_ROWS * BLOCK_SCALE_BYTES / 16; i += THREADS)
            copy_async_16(tile + CODES_SIZE + i * 16, from.block_scales + i * 16, true);
}
// Call after a __syncthreads that follows readout_copy_start and copy_async_wait.
DEVICE void readout_copy_wait(u64* barrier) {
#if BULK_COPY
    if constexpr (NVFP4) bulk_copy_wait(barrier);
#endif
}
// A warp's own rows again, after it has written them; `tile` is the block's, `row` the warp's first row in it.
DEVICE void readout_copy_again(unsigned char* tile, int row, const StateRows& from) {
    constexpr int CHUNKS = CODE_BYTES / 16;
    for (int i = threadIdx.x % 32; i < CTA_ROWS * CHUNKS; i += 32)
        copy_async_16(tile + (row + i / CHUNKS) * CODE_STRIDE + i % CHUNKS * 16, from.codes + i * 16, true);
    if constexpr (NVFP4)
        for (int i = threadIdx.x % 32; i < CTA_ROWS * BLOCK_SCALE_BYTES / 16; i += 32)
            copy_async_16(tile + CODES_SIZE + row * BLOCK_SCALE_BYTES + i * 16, from.block_scales + i * 16, true);
}
// The other way: a warp's own rows of an nvfp4 readout, which it has put into the tile, to memory.
DEVICE void readout_store_own(const unsigned char* tile, int row, const StateRows& to) {
    const uint4* codes = (const uint4*)(tile + row * CODE_STRIDE);
    const uint4* scales = (const uint4*)(tile + (CODES_SIZE + row * BLOCK_SCALE_BYTES));
    for (int i = threadIdx.x % 32; i < CTA_ROWS * CODE_BYTES / 16; i += 32) ((uint4*)to.codes)[i] = codes[i];
    for (int i = threadIdx.x % 32; i < CTA_ROWS * BLOCK_SCALE_BYTES / 16; i += 32) ((uint4*)to.block_scales)[i] = scales[i];
}

// Ring entry of an index below twice the ring's length, in one instruction beside the sum that it is.
DEVICE u32 wrapped_entry(u32 entry) {
    const u32 before = entry - RING_LEN;
    return entry < before ? entry : before;
}

// Copies `width` elements of a history's tokens to rows of shared memory, KEY_STRIDE or OWN_STRIDE elements apart, and
// zeros the rows from `zeros` on; rows between the history and `zeros` are left alone. `count` threads share the work.
// ring: of the slot, at its first element to be copied.
template <int WIDTH, int TO_STRIDE, int FROM_STRIDE, int COUNT>
DEVICE void stage_history(u16* to, const u16* ring, int first_entry, int history, int zeros, u32 thread) {
    constexpr u32 CHUNKS = WIDTH / 8;
    if constexpr (COUNT % CHUNKS == 0) {
        constexpr u32 STEP = COUNT / CHUNKS;
        const u32 k0 = thread / CHUNKS, offset = thread % CHUNKS * 8;
        u32 at = shared_address(to + (k0 * TO_STRIDE + offset));
        hold_until_here(at);
        const u16* from = computed(ring + offset);
#pragma unroll
        for (u32 n = 0; n < (TOKEN_ROWS + STEP - 1) / STEP; n++) {
            const int k = (int)(k0 + n * STEP);
            if (TOKEN_ROWS % STEP && k >= TOKEN_ROWS) break;
            const bool valid = k < history;
            const u16* row = (const u16*)((const char*)from + (u64)wrapped_entry(first_entry + k) * (2 * FROM_STRIDE));
            if (valid || k >= zeros) copy_async_16_to(at + n * STEP * TO_STRIDE * 2, row, valid);
        }
    } else {
#pragma unroll
        for (u32 n = 0; n < (TOKEN_ROWS * CHUNKS + COUNT - 1) / COUNT; n++) {
            const u32 i = n * COUNT + thread, k = i / CHUNKS, offset = i % CHUNKS * 8;
            if (TOKEN_ROWS * CHUNKS % COUNT && k >= TOKEN_ROWS) break;
            const bool valid = (int)k < history;
            const int entry = wrapped(first_entry + (valid ? (int)k : 0));
            if (valid || (int)k >= zeros)
                copy_async_16(to + (k * TO_STRIDE + offset), ring + (entry * FROM_STRIDE + (int)offset), valid);
        }
    }
}

// body(row, offset) for chunks of 8 of `length` rows of WIDTH elements, at most MAX_WINDOW rows.
template <int WIDTH, int COUNT, class Body>
DEVICE void for_window_chunks(int length, u32 thread, const Body& body) {
    constexpr u32 CHUNKS = WIDTH / 8;
#pragma unroll
    for (u32 n = 0; n < (MAX_WINDOW * CHUNKS + COUNT - 1) / COUNT; n++) {
        const u32 i = n * COUNT + thread, w = i / CHUNKS;
        if ((int)w < length) body((int)w, (int)(i % CHUNKS * 8));
    }
}
