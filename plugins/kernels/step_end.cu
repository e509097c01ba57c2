// What a captured step makes of the tokens that it chose: the answer to the host, what each slot's step chose last, and
// in steps of one token the next step's inputs. See plugins/step_ends.py.
//
// Stamped in: THREADS, WINDOW.
#include "primitives.cuh"

KERNEL(THREADS, 1)
step_end(
    // largest fp32, chosen int64 [count]; error_flag [1]; window_lens, slots [count / WINDOW]; answer int64
    // [2 count + 1]; last_tokens int64 [num_slots + 1] or null; token_ids int64 [count], seq_lens [count / WINDOW]
    const float* largest, const long long* chosen, const int* error_flag, const int* window_lens, const int* slots,
    int count, int num_slots, long long* answer, long long* last_tokens, long long* token_ids, int* seq_lens) {
    const int i = (int)blockIdx.x * THREADS + (int)threadIdx.x;
    if (i == 0) answer[2 * count] = *error_flag;
    if (i >= count) return;
    const int row = i / WINDOW, place = i % WINDOW, slot = slots[row], length = window_lens[row];
    const long long token = chosen[i];
    const u32 exponent = float_to_bits(largest[i]) & 0x7f800000u;
    answer[i] = token;
    answer[count + i] = exponent != 0x7f800000u;
    if (last_tokens != nullptr && place == (length > 1 ? length : 1) - 1)
        last_tokens[slot >= 0 && slot < num_slots ? slot : num_slots] = token;
    if constexpr (WINDOW == 1) {
        token_ids[i] = token;
        seq_lens[row] += length;
    }
}
