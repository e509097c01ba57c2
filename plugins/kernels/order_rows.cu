// The rows of a step with those first whose histories fold in it. See plugins/row_order.py.
//
// Stamped in: THREADS, BUFFER_LEN.
#include "primitives.cuh"

KERNEL(THREADS, 1)
order_rows(
    // [rows]; position: a layer's checkpoint positions, slots are position_stride elements apart
    const int* seq_lens, const int* window_starts, const int* window_lens, const int* state_batch_indices,
    const int* position, int position_stride, int num_slots, int rows,
    // [4, rows]: the first four
    int* ordered) {
    DYNAMIC_SHARED(memory);
    u32* words = (u32*)memory;  // a bit for each row: whether it folds
    const u32 lane = threadIdx.x % 32u, count = ((u32)rows + 31u) / 32u;
    for (u32 word = threadIdx.x / 32u; word < count; word += THREADS / 32) {
        const u32 row = 32 * word + lane;
        const int slot = row < (u32)rows ? state_batch_indices[row] : -1;
        const bool has_slot = slot >= 0 && slot < num_slots;
        const int seq_len = has_slot ? seq_lens[row] : 0, length = has_slot ? window_lens[row] : 0;
        const int history = seq_len > 0 ? seq_len - position[offset_of(slot, position_stride)] : 0;
        const u32 folds = ballot(history > 0 && history + length > BUFFER_LEN);
        if (lane == 0) words[word] = folds;
    }
    sync_threads();
    for (u32 row = threadIdx.x; row < (u32)rows; row += THREADS) {
        u32 before = 0, total = 0;  // rows that fold: before this one, and all
        for (u32 word = 0; word < count; word++) {
            const u32 below = word < row / 32 ? ~0u : word > row / 32 ? 0u : (1u << lane) - 1u;
            before += (u32)count_bits(words[word] & below), total += (u32)count_bits(words[word]);
        }
        int* to = ordered + (words[row / 32] >> lane & 1u ? before : total + row - before);
        to[0] = seq_lens[row], to[rows] = window_starts[row];
        to[2 * rows] = window_lens[row], to[3 * rows] = state_batch_indices[row];
    }
}
