// What a row of the call has to do. Mirrors plugins/reference/rows.py and contract.ErrorBit.
#pragma once
#include "formats.cuh"

#define ERROR_SLOT_OUT_OF_RANGE 1
#define ERROR_SEQ_LEN_BELOW_CHECKPOINT 2
#define ERROR_WINDOW_OUT_OF_RANGE 4
#define ERROR_POSITION_PAST_LIMIT 8
#define ERROR_HISTORY_OUT_OF_RANGE 16

struct Row {
    int slot, seq_len, start, length, checkpoint_position;
    bool in_range;  // the window lies within the packed tokens
    bool active;
    int error;
};

// `checkpoint_position` is what the slot's tile holds, or seq_len where the layer keeps none (max_history 0 then).
DEVICE Row make_row(int slot, int seq_len, int start, int length, int checkpoint_position, int num_tokens,
                    int num_slots, int max_seq_len, int max_history) {
    Row row = {slot, seq_len, start, length, seq_len, false, false, 0};
    const bool idle = slot == -1 || length == 0;
    if (slot < 0 || slot >= num_slots)
        row.error |= ERROR_SLOT_OUT_OF_RANGE;
    else
        row.checkpoint_position = seq_len ? checkpoint_position : 0;
    if (seq_len < row.checkpoint_position || seq_len < 0) row.error |= ERROR_SEQ_LEN_BELOW_CHECKPOINT;
    // Differences and sums of what is not negative fit into 32 bits without a sign; the rest has another error already.
    if (seq_len > row.checkpoint_position && (u32)seq_len - (u32)row.checkpoint_position > (u32)max_history)
        row.error |= ERROR_HISTORY_OUT_OF_RANGE;
    row.in_range = (start | length) >= 0 && (u32)start + (u32)length <= (u32)num_tokens;
    if (!row.in_range) row.error |= ERROR_WINDOW_OUT_OF_RANGE;
    if (seq_len + (long long)length > max_seq_len) row.error |= ERROR_POSITION_PAST_LIMIT;
    if (idle) row.error = 0;
    row.active = !idle && !row.error;
    return row;
}

// Row `b` of the call. `position` points at the tile's checkpoint position in slot 0, or is null.
DEVICE Row read_row(int b, const int* seq_lens, const int* window_starts, const int* window_lens,
                    const int* state_batch_indices, int num_tokens, int num_slots, int max_seq_len,
                    const int* position, int position_stride, int max_history) {
    const int slot = state_batch_indices[b], seq_len = seq_lens[b];
    int checkpoint_position = seq_len;
    if (position && slot >= 0 && slot < num_slots) checkpoint_position = position[(long long)slot * position_stride];
    return make_row(slot, seq_len, window_starts[b], window_lens[b], checkpoint_position, num_tokens, num_slots,
                    max_seq_len, max_history);
}
