// Mamba2 over a replayed history: decode and verify windows of up to MAX_WINDOW tokens, and longer (prefill) rows token
// by token. One thread block per (row of the batch, head, CTA_ROWS rows of the state). See plugins/reference/mamba2.py.
//
// Stamped in: NHEADS, HEADDIM, DSTATE, NGROUPS, ROW_TILES, CTA_ROWS, BUFFER_LEN, MAX_WINDOW, STATE_FORMAT,
// ACTIVATION_FORMAT, BULK_COPY, MIN_CTAS, SHARED_BYTES.
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#include "replay.cuh"
#include "mamba2_serial.cuh"

constexpr int QUERY_TILES = WINDOW_ROWS / 8;
// A window follows its history without a gap while both fit HISTORY_ROWS; behind a folded history it starts there.
constexpr int TOKEN_ROWS = HISTORY_ROWS + WINDOW_ROWS;
constexpr int COEFFICIENT_STRIDE = TOKEN_ROWS + 4;

struct Shared {
    alignas(128) state_t tile[PADDED_ROWS * COLUMNS];
    alignas(16) activation_t B[TOKEN_ROWS * TOKEN_STRIDE];
    alignas(16) activation_t C[MAX_WINDOW * TOKEN_STRIDE];
    alignas(16) activation_t x[TOKEN_ROWS * VALUE_STRIDE];
    alignas(16) float coefficients[QUERY_TILES * 8 * COEFFICIENT_STRIDE];
    Decays decays;
    float dt_history[HISTORY_ROWS];
    float dt_window[WINDOW_ROWS];
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

KERNEL(THREADS, MIN_CTAS)
mamba2_window(
    // [T, H, P], [T, H], [T, G, N], [T, G, N]: the last dimension is dense, tokens are *_stride elements apart
    const activation_t* x, const activation_t* dt, const activation_t* B, const activation_t* C,
    // [H]
    const float* A_log, const float* D, const float* dt_bias,
    // state parts, slots are *_stride elements apart
    const state_t* checkpoint_in, const int* position_in, const activation_t* ring_x_in, const activation_t* ring_B_in,
    const float* ring_dt_in, const int* error_flag_in,
    // [rows]
    const int* seq_lens, const int* window_starts, const int* window_lens, const int* state_batch_indices,
    int num_tokens, int num_slots, int max_seq_len, int layer, int skip_prefill, int x_stride, int dt_stride,
    int B_stride, int C_stride, int checkpoint_stride, int position_stride, int ring_x_stride, int ring_B_stride,
    int ring_dt_stride,
    // [T, H, P] dense, then the state parts again: in place, written through these
    activation_t* y, state_t* checkpoint, int* position, activation_t* ring_x, activation_t* ring_B, float* ring_dt,
    int* error_flag) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS, tile_index = block.tile;

    // All that is known before the slot, then all that the slot tells, then the tile: nothing here waits for more than
    // the row's slot. A fresh sequence ignores the tile.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const float log_A = A_log[block.head], D_head = D[block.head], bias = dt_bias[block.head];
    const LaterRow later = look_ahead(seq_lens, state_batch_indices, num_slots);
    const bool has_slot = slot >= 0 && slot < num_slots;
    int tile_position = 0, later_position = 0;
    if (has_slot) {
        tile_position = position_in[(long long)slot * position_stride + tile_index];
        tile_copy_start(shared.tile, checkpoint_in + (long long)slot * checkpoint_stride + state_offset,
                        &shared.barrier);
    }
    if (later.exists) later_position = position_in[(long long)later.slot * position_stride + tile_index];
    const Row row = make_row(slot, seq_len, start, window_length, tile_position, num_tokens, num_slots, max_seq_len,
                             MAX_HISTORY);
    activation_t* output = y + (long long)block.head * ROWS + block.first_row;
    const bool prefill = row.length > MAX_WINDOW;
    if (!row.active || prefill) {
        copy_async_wait();
        sync_threads();
        if (has_slot) tile_copy_wait(&shared.barrier);
        if (!row.active) {
            if (row.error && tid == 0) atomic_or(error_flag, row.error);
            write_zeros(row, output, HEADS * ROWS);
            return;
        }
        if (skip_prefill) return;  // the row belongs to mamba2_prefill.cu
        const SerialInputs inputs = {
            x + (long long)row.start * x_stride + block.head * ROWS + block.first_row,
            dt + (long long)row.start * dt_stride + block.head,
            B + (long long)row.start * B_stride + block.group * COLUMNS,
            C + (long long)row.start * C_stride + block.group * COLUMNS,
            x_stride, dt_stride, B_stride, C_stride,
            ring_x_in + (long long)slot * ring_x_stride + block.head * ROWS + block.first_row,
            ring_B_in + (long long)slot * ring_B_stride + block.group * COLUMNS,
            ring_dt_in + (long long)slot * ring_dt_stride + block.head,
            -expf(log_A), D_head, bias};
        const SerialStores stores = {checkpoint + (long long)slot * checkpoint_stride + state_offset, row.length,
                                     nullptr, 0};
        for (int first = warp * 4; first < CTA_ROWS; first += WARPS * 4)
            serial_rows<4, false>(inputs, row, first,
                                  checkpoint_in + (long long)slot * checkpoint_stride + state_offset, stores,
                                  output + (long long)row.start * HEADS * ROWS);
        if (tid < CTA_TILES)
            position[(long long)slot * position_stride + tile_index + tid] = row.seq_len + row.length;
        return;
    }

    const int c = row.checkpoint_position, history = row.seq_len - c, length = row.length;
    const bool flush = history > 0 && history + length > BUFFER_LEN;
    const int window_row = flush ? HISTORY_ROWS : history;  // of the token rows in shared memory
    const int first_entry = c % RING_LEN;                  // of the history in the ring
    const int x_column = block.head * ROWS + block.first_row, B_column = block.group * COLUMNS;
    const activation_t* slot_ring_x = computed(ring_x_in + ((long long)slot * ring_x_stride + x_column));
    const activation_t* slot_ring_B = computed(ring_B_in + ((long long)slot * ring_B_stride + B_column));
    const activation_t* row_x = computed(x + ((long long)row.start * x_stride + x_column));
    const activation_t* row_B = computed(B + ((long long)row.start * B_stride + B_column));
    const activation_t* row_C = C + ((long long)row.start * C_stride + B_column);

    float raw_dt = 0.f, dt_past = 0.f;
    if (warp == 0) {
        if (lane < length) raw_dt = activation_to_float(dt[(long long)(start + lane) * dt_stride + block.head]);
        if (lane < history)
            dt_past = ring_dt_in[(long long)slot * ring_dt_stride + wrapped(first_entry + lane) * HEADS + block.head];
    }
    // Row k of B and x in shared memory: history, window, or zero.
    const auto load_B = [&](int k, int offset) {
        const int w = k - window_row;
        const bool past = k < history, valid = past | ((u32)w < (u32)length);
        const int entry = wrapped(first_entry + (past ? k : 0)) * (GROUPS * COLUMNS), token = (valid ? w : 0) * B_stride;
        copy_async_16(shared.B + k * TOKEN_STRIDE + offset,
                      (past ? slot_ring_B : row_B) + ((past ? entry : token) + offset), valid);
    };
    const auto load_x = [&](int k, int offset) {
        const int w = k - window_row;
        const bool past = k < history, valid = past | ((u32)w < (u32)length);
        const int entry = wrapped(first_entry + (past ? k : 0)) * (HEADS * ROWS), token = (valid ? w : 0) * x_stride;
        copy_async_16(shared.x + k * VALUE_STRIDE + offset,
                      (past ? slot_ring_x : row_x) + ((past ? entry : token) + offset), valid);
    };
    constexpr int B_CHUNKS = COLUMNS / 8, X_CHUNKS = CTA_ROWS / 8;
    spread<HISTORY_ROWS * B_CHUNKS>([&](int i) { load_B(i / B_CHUNKS, i % B_CHUNKS * 8); });
    spread<HISTORY_ROWS * X_CHUNKS>([&](int i) { load_x(i / X_CHUNKS, i % X_CHUNKS * 8); });
    spread_from_end<MAX_WINDOW * B_CHUNKS>([&](int i) {
        const int w = i / B_CHUNKS, offset = i % B_CHUNKS * 8;
        const bool valid = w < length;
        copy_async_16(shared.C + w * TOKEN_STRIDE + offset, row_C + ((valid ? w : 0) * C_stride + offset), valid);
    });
    if (flush) {
        spread<WINDOW_ROWS * B_CHUNKS>([&](int i) { load_B(HISTORY_ROWS + i / B_CHUNKS, i % B_CHUNKS * 8); });
        spread<WINDOW_ROWS * X_CHUNKS>([&](int i) { load_x(HISTORY_ROWS + i / X_CHUNKS, i % X_CHUNKS * 8); });
    }
    if (later.exists)
        prefetch_ring(later, later_position, [&](int entry) {
            prefetch(ring_x_in + ((long long)later.slot * ring_x_stride + entry * (HEADS * ROWS) + x_column),
                     CTA_ROWS * sizeof(activation_t));
            if (block.first_of_group)
                prefetch(ring_B_in + ((long long)later.slot * ring_B_stride + entry * (GROUPS * COLUMNS) + B_column),
                         COLUMNS * sizeof(activation_t));
            if (block.first_of_head && block.head % 8 == 0)
                prefetch_sector(ring_dt_in + ((long long)later.slot * ring_dt_stride + entry * HEADS + block.head));
        });
    if (warp == 0) {
        const float A = -expf(log_A), dt_new = lane < length ? softplus(raw_dt + bias) : 0.f;
        scan_decays(shared.decays, A * dt_past, A * dt_new);
        if (lane < HISTORY_ROWS) shared.dt_history[lane] = dt_past;
        if (lane < WINDOW_ROWS) shared.dt_window[lane] = dt_new;
    }
    copy_async_wait();
    sync_threads();

    // Coefficients of x: decay, dt and B . C of every (window token, token) pair; D sits on the diagonal.
    const int first_block = flush ? HISTORY_BLOCKS : 0, last_block = HISTORY_BLOCKS + (flush ? WINDOW_ROWS / 8 : 0);
    for (int k8 = first_block + warp; k8 < last_block; k8 += WARPS) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        const int query_row = QUERY_TILES == 1 ? lane % 8 : lane % 16;
        scores<(QUERY_TILES > 1)>(sum, shared.C + (query_row < MAX_WINDOW ? query_row : MAX_WINDOW - 1) * TOKEN_STRIDE,
                                  shared.B + (k8 * 8 + lane % 8) * TOKEN_STRIDE);
#pragma unroll
        for (int i = 0; i < 2 * QUERY_TILES; i++) {
            const int w = g + 8 * (i / 2), k = k8 * 8 + 2 * t + i % 2, j = k - window_row;
            const bool past = j < 0, live = (w < length) & (j <= w);
            const int token = past ? k : j < WINDOW_ROWS ? j : 0;
            const float dt_token = (past ? shared.dt_history : shared.dt_window)[token];
            const float exponent = past ? shared.decays.history[token] + shared.decays.prefix[w]
                                        : window_log_decay(shared.decays, token, w);
            const float value = dt_token * decay_of(exponent) * sum[i];
            shared.coefficients[w * COEFFICIENT_STRIDE + k] = live ? (j == w ? value + D_head : value) : 0.f;
        }
    }

    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    const int first_new = row.seq_len % RING_LEN;
    spread_from_end<MAX_WINDOW * X_CHUNKS>([&](int i) {
        const int w = i / X_CHUNKS, offset = i % X_CHUNKS * 8;
        if (w < length)
            *(uint4*)(ring_x + ((long long)slot * ring_x_stride + wrapped(first_new + w) * (HEADS * ROWS) +
                                block.head * ROWS + block.first_row + offset)) =
                *(const uint4*)(shared.x + (window_row + w) * VALUE_STRIDE + offset);
    });
    if (block.first_of_group)
        spread_from_end<MAX_WINDOW * B_CHUNKS>([&](int i) {
            const int w = i / B_CHUNKS, offset = i % B_CHUNKS * 8;
            if (w < length)
                *(uint4*)(ring_B + ((long long)slot * ring_B_stride + wrapped(first_new + w) * (GROUPS * COLUMNS) +
                                    block.group * COLUMNS + offset)) =
                    *(const uint4*)(shared.B + (window_row + w) * TOKEN_STRIDE + offset);
        });
    const int from_end = THREADS - 1 - tid;
    if (block.first_of_head && from_end < length)
        ring_dt[(long long)slot * ring_dt_stride + wrapped(first_new + from_end) * HEADS + block.head] =
            shared.dt_window[from_end];
    if ((flush || row.seq_len == 0) && from_end < CTA_TILES)
        position[(long long)slot * position_stride + tile_index + from_end] = row.seq_len;
    sync_threads();

    float sum[QUERY_TILES][4] = {};
    Products<QUERY_TILES> products;
    products.clear();
    const activation_t* own_x = shared.x + (lane % 8) * VALUE_STRIDE + warp * 16 + (lane / 8 & 1) * 8;
    const auto combine_block = [&](int k8) {
        u32 pairs[2];
        load_matrix_x2_transposed(pairs, own_x + k8 * 8 * VALUE_STRIDE);
        const float a[4] = {activation_low(pairs[0]), activation_low(pairs[1]), activation_high(pairs[0]),
                            activation_high(pairs[1])};
        combine<QUERY_TILES, COEFFICIENT_STRIDE>(sum, a, shared.coefficients + g * COEFFICIENT_STRIDE + k8 * 8);
    };
    if (flush) {
#pragma unroll
        for (int k8 = 0; k8 < WINDOW_ROWS / 8; k8++) combine_block(HISTORY_BLOCKS + k8);
    } else {
#pragma unroll
        for (int k8 = 0; k8 < HISTORY_BLOCKS; k8++) combine_block(k8);
    }
    const activation_t* query[QUERY_TILES];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
        query[n] = shared.C + (n * 8 + g < MAX_WINDOW ? n * 8 + g : MAX_WINDOW - 1) * TOKEN_STRIDE;
    tile_copy_wait(&shared.barrier);
    if (flush) {
        float values[HISTORY_BLOCKS][4];
#pragma unroll
        for (int k8 = 0; k8 < HISTORY_BLOCKS; k8++) {
            u32 pairs[2];
            load_matrix_x2_transposed(pairs, own_x + k8 * 8 * VALUE_STRIDE);
            const int k = k8 * 8 + 2 * t;
            const float even = shared.dt_history[k] * decay_of(shared.decays.history[k]);
            const float odd = shared.dt_history[k + 1] * decay_of(shared.decays.history[k + 1]);
            values[k8][0] = even * activation_low(pairs[0]), values[k8][1] = even * activation_low(pairs[1]);
            values[k8][2] = odd * activation_high(pairs[0]), values[k8][3] = odd * activation_high(pairs[1]);
        }
        fold_and_dot_tile<QUERY_TILES>(products, shared.tile,
                                       checkpoint + (long long)slot * checkpoint_stride + state_offset, c > 0,
                                       decay_of(shared.decays.total), values, shared.B, query);
    } else if (c > 0) {
        dot_tile<QUERY_TILES>(products, shared.tile, query);
    }

    // Each warp gathers its 16 rows of every token in its own columns of x, which nobody else reads any more.
    sync_warp();
    const float base = flush ? 0.f : shared.decays.total;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int w = n * 8 + 2 * t + i % 2;
            const float value = sum[n][i] + decay_of(base + shared.decays.prefix[w]) * products.value(n, i);
            if (w < length)
                shared.x[w * VALUE_STRIDE + warp * 16 + g + 8 * (i / 2)] = float_to_activation(value);
        }
    sync_warp();
    for (int i = lane; i < 2 * length; i += 32) {
        const int w = i / 2, offset = warp * 16 + i % 2 * 8;
        if (offset < CTA_ROWS)
            *(uint4*)(output + (long long)(row.start + w) * (HEADS * ROWS) + offset) =
                *(const uint4*)(shared.x + w * VALUE_STRIDE + offset);
    }
}
