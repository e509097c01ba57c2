// What a captured step computes from its inputs before the network runs. See plugins/step_ends.py.
//
// Stamped in: THREADS, WINDOW, LAST_CHOSEN (in place of a row's first token: what its slot's last step chose).
#include "primitives.cuh"

KERNEL(THREADS, 1)
step_begin(
    // given int64 [count]; seq_lens, slots [count / WINDOW]; last_tokens int64 [num_slots + 1], the last one of rows
    // without a slot, or null; tokens int64, positions [count]
    const long long* given, const int* seq_lens, const int* slots, const long long* last_tokens, int count,
    int num_slots, long long* tokens, int* positions) {
    const int i = (int)blockIdx.x * THREADS + (int)threadIdx.x;
    if (i >= count) return;
    const int row = i / WINDOW, place = i % WINDOW, slot = slots[row];
    long long token = given[i];
    if (last_tokens != nullptr && place == 0 && token == LAST_CHOSEN)
        token = last_tokens[slot >= 0 && slot < num_slots ? slot : num_slots];
    tokens[i] = token;
    positions[i] = seq_lens[row] + place;
}
