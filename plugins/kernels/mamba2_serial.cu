// Mamba2 token by token. BASELINE: the plain kernel that every comparison starts from: it rewrites the state for one
// new token, and stores a snapshot after each of several. Otherwise the serial-exact mode of the replay state, whose
// outputs are bit-equal to the baseline's. See plugins/reference/recurrent.py.
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#include "replay.cuh"
#include "mamba2_serial.cuh"

constexpr int PASS_ROWS = CTA_ROWS % 16 == 0 && COLUMNS <= 128 ? 16 : 8;

KERNEL(THREADS, MIN_CTAS)
mamba2_serial(
    // as in mamba2_window.cu; parts that the mode does not keep are null
    const activation_t* x, const activation_t* dt, const activation_t* B, const activation_t* C, const float* A_log,
    const float* D, const float* dt_bias, const state_t* checkpoint_in, const int* position_in,
    const activation_t* ring_x_in, const activation_t* ring_B_in, const float* ring_dt_in, const state_t* snapshots_in,
    const int* error_flag_in, const int* seq_lens, const int* window_starts, const int* window_lens,
    const int* state_batch_indices, int num_tokens, int num_slots, int max_seq_len, int layer, int x_stride,
    int dt_stride, int B_stride, int C_stride, int checkpoint_stride, int position_stride, int ring_x_stride,
    int ring_B_stride, int ring_dt_stride, int snapshots_stride, activation_t* y, state_t* checkpoint, int* position,
    activation_t* ring_x, activation_t* ring_B, float* ring_dt, state_t* snapshots, int* error_flag) {
    const int tid = threadIdx.x, warp = tid / 32;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS;
    const Row row = read_row(blockIdx.y, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                             num_slots, max_seq_len, BASELINE ? nullptr : position_in + block.tile, position_stride, MAX_HISTORY);
    activation_t* output = y + (long long)block.head * ROWS + block.first_row;
    if (!row.active) {
        if (row.error && tid == 0) atomic_or(error_flag, row.error);
        write_zeros(row, output, HEADS * ROWS);
        return;
    }
    const int x_column = block.head * ROWS + block.first_row, B_column = block.group * COLUMNS;
    const long long slot = row.slot;
    const SerialInputs inputs = {
        x + (long long)row.start * x_stride + x_column, dt + (long long)row.start * dt_stride + block.head,
        B + (long long)row.start * B_stride + B_column, C + (long long)row.start * C_stride + B_column,
        x_stride, dt_stride, B_stride, C_stride, ring_x_in + slot * ring_x_stride + x_column,
        ring_B_in + slot * ring_B_stride + B_column, ring_dt_in + slot * ring_dt_stride + block.head,
        -expf(A_log[block.head]), D[block.head], dt_bias[block.head]};
    const bool prefill = row.length > MAX_WINDOW;
    const int history = row.seq_len - row.checkpoint_position;
    const bool flush = history > 0 && history + row.length > BUFFER_LEN;
    SerialStores stores = {checkpoint + slot * checkpoint_stride + state_offset, -1, nullptr, HEADS * ROWS * COLUMNS};
    if (prefill || (BASELINE && row.length == 1))
        stores.store_after = row.length;
    else if (BASELINE)
        stores.snapshots = snapshots + slot * snapshots_stride + state_offset;
    else if (flush)
        stores.store_after = 0;
    for (int first = warp * PASS_ROWS; first < CTA_ROWS; first += WARPS * PASS_ROWS)
        serial_rows<PASS_ROWS, true>(inputs, row, first, checkpoint_in + slot * checkpoint_stride + state_offset,
                                     stores, output + (long long)row.start * (HEADS * ROWS));
    if (BASELINE) return;
    sync_threads();  // everyone has read the positions
    if ((prefill || flush || row.seq_len == 0) && tid < CTA_TILES)
        position[slot * position_stride + block.tile + tid] = row.seq_len + (prefill ? row.length : 0);
    if (prefill) return;
    for (int i = tid; i < row.length * CTA_ROWS; i += THREADS) {
        const int w = i / CTA_ROWS, r = i % CTA_ROWS;
        ring_x[slot * ring_x_stride + (row.seq_len + w) % RING_LEN * (HEADS * ROWS) + x_column + r] =
            inputs.x[(long long)w * x_stride + r];
    }
    if (block.first_of_group)
        for (int i = tid; i < row.length * COLUMNS; i += THREADS) {
            const int w = i / COLUMNS, n = i % COLUMNS;
            ring_B[slot * ring_B_stride + (row.seq_len + w) % RING_LEN * (GROUPS * COLUMNS) + B_column + n] =
                inputs.B[(long long)w * B_stride + n];
        }
    if (block.first_of_head && tid < row.length)
        ring_dt[slot * ring_dt_stride + (row.seq_len + tid) % RING_LEN * HEADS + block.head] =
            softplus(activation_to_float(inputs.dt[(long long)tid * dt_stride]) + inputs.dt_bias);
}
