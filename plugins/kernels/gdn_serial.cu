// Gated DeltaNet token by token. BASELINE: the plain kernel that every comparison starts from: it rewrites the state
// for one new token, and stores a snapshot after each of several. Otherwise the serial-exact mode of the replay state.
#include "gdn_window.cuh"

constexpr int PASS_ROWS = CTA_ROWS % 16 == 0 && COLUMNS <= 128 ? 16 : 8;

KERNEL(THREADS, MIN_CTAS)
gdn_serial(
    // as in gdn_parameters.cuh; parts that the mode does not keep are null
    const activation_t* q, const activation_t* k, const activation_t* v, const activation_t* a, const activation_t* b,
    const float* A_log, const float* dt_bias, const state_t* checkpoint_in, const int* position_in,
    const activation_t* ring_k_in, const ring_u_t* ring_u_in, const float* ring_g_in, const state_t* snapshots_in,
    const int* error_flag_in, const int* seq_lens, const int* window_starts, const int* window_lens,
    const int* state_batch_indices, int num_tokens, int num_slots, int max_seq_len, int layer, int q_stride,
    int k_stride, int v_stride, int a_stride, int b_stride, int checkpoint_stride, int position_stride,
    int ring_k_stride, int ring_u_stride, int ring_g_stride, int snapshots_stride, activation_t* o,
    state_t* checkpoint, int* position, activation_t* ring_k, ring_u_t* ring_u, float* ring_g, state_t* snapshots,
    int* error_flag) {
    const int tid = threadIdx.x, warp = tid / 32;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS;
    const Row row = read_row(blockIdx.y, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                             num_slots, max_seq_len, BASELINE ? nullptr : position_in + block.tile, position_stride,
                             MAX_HISTORY);
    const int k_column = block.group * COLUMNS, v_column = block.head * ROWS + block.first_row;
    const int u_column = block.head * U_PLANES * ROWS + block.first_row;
    activation_t* output = o + v_column;
    if (!row.active) {
        if (row.error && tid == 0) atomic_or(error_flag, row.error);
        write_zeros(row, output, HEADS * ROWS);
        return;
    }
    const long long slot = row.slot;
    const SerialInputs inputs = SERIAL_INPUTS(row.start, row.slot, block.head, k_column, v_column, u_column,
                                              -expf(A_log[block.head]), dt_bias[block.head]);
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
    ring_u_t* appended_u = BASELINE || prefill ? nullptr : ring_u + slot * ring_u_stride + u_column;
    for (int first = warp * PASS_ROWS; first < CTA_ROWS; first += WARPS * PASS_ROWS)
        serial_rows<PASS_ROWS, true>(inputs, row, first, checkpoint_in + slot * checkpoint_stride + state_offset,
                                     stores, output + (long long)row.start * (HEADS * ROWS), appended_u);
    if (BASELINE) return;
    sync_threads();  // everyone has read the positions
    if ((prefill || flush || row.seq_len == 0) && tid < CTA_TILES)
        position[slot * position_stride + block.tile + tid] = row.seq_len + (prefill ? row.length : 0);
    if (prefill) return;
    if (block.first_of_group && warp == 0)
        for (int w = 0; w < row.length; w++) {
            float normalized[SERIAL_COLUMNS];
            serial_load(inputs.k + (long long)w * k_stride, normalized);
            serial_normalize(normalized);
            activation_t* to =
                ring_k + slot * ring_k_stride + (row.seq_len + w) % RING_LEN * (GROUPS * COLUMNS) + k_column;
#pragma unroll
            for (int i = 0; i < SERIAL_COLUMNS; i++)
                if (serial_column_exists(i)) to[serial_column(i)] = float_to_activation(normalized[i]);
        }
    if (block.first_of_head && tid < row.length)
        ring_g[slot * ring_g_stride + (row.seq_len + tid) % RING_LEN * HEADS + block.head] =
            inputs.A * softplus(activation_to_float(inputs.a[(long long)tid * a_stride]) + inputs.dt_bias);
}
