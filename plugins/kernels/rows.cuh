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

// `position` is the checkpoint position of a slot's tile, or null where the layer keeps none.
DEVICE Row read_row(int b, const int* seq_lens, const int* window_starts, const int* window_lens,
                    const int* state_batch_indices, int num_tokens, int num_slots, int max_seq_len,
                    const int* position, int position_stride, int max_history) {
    Row row;
    row.slot = state_batch_indices[b];
    row.seq_len = seq_lens[b];
    row.start = window_starts[b];
    row.length = window_lens[b];
    row.error = 0;
    row.checkpoint_position = row.seq_len;
    const bool idle = row.slot == -1 || row.length == 0;
    if (row.slot < 0 || row.slot >= num_slots)
        row.error |= ERROR_SLOT_OUT_OF_RANGE;
    else if (position)
        row.checkpoint_position = row.seq_len ? position[(long long)row.slot * position_stride] : 0;
    if (row.seq_len < row.checkpoint_position || row.seq_len < 0) row.error |= ERROR_SEQ_LEN_BELOW_CHECKPOINT;
    if (position && (long long)row.seq_len - row.checkpoint_position > max_history)
        row.error |= ERROR_HISTORY_OUT_OF_RANGE;
    row.in_range = row.length >= 0 && row.start >= 0 && (long long)row.start + row.length <= num_tokens;
    if (!row.in_range) row.error |= ERROR_WINDOW_OUT_OF_RANGE;
    if ((long long)row.seq_len + row.length > max_seq_len) row.error |= ERROR_POSITION_PAST_LIMIT;
    if (idle) row.error = 0;
    row.active = !idle && !row.error;
    return row;
}
