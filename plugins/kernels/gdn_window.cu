// Gated DeltaNet over a replayed history: decode and verify windows of up to MAX_WINDOW tokens, and longer (prefill) rows
// token by token. One thread block per (row of the batch, value head, CTA_ROWS rows of the state). The window's u solve a
// unit lower triangular system, one lane per state row. See plugins/reference/gdn.py.
//
// Stamped in: NUM_K_HEADS, NUM_V_HEADS, HEAD_K_DIM, HEAD_V_DIM, ROW_TILES, CTA_ROWS, BUFFER_LEN, MAX_WINDOW,
// STATE_FORMAT, ACTIVATION_FORMAT, U_PLANES, BULK_COPY, MIN_CTAS, SHARED_BYTES.
#include "gdn_window.cuh"

// Queries of the state: q of every window token (outputs), then k of every window token (what the state predicts).
constexpr int QUERIES = 2 * MAX_WINDOW;
constexpr int QUERY_TILES = (QUERIES + 7) / 8;
constexpr int SCORE_TILES = (QUERIES + 15) / 16;
constexpr int COEFFICIENT_STRIDE = HISTORY_ROWS + 4;
constexpr int STAGE_STRIDE = QUERIES + 1;

struct Shared {
    alignas(128) state_t tile[PADDED_ROWS * COLUMNS];
    alignas(16) activation_t k[HISTORY_ROWS * TOKEN_STRIDE];
    alignas(16) activation_t queries[QUERIES * TOKEN_STRIDE];
    alignas(16) u16 u[U_PLANES][HISTORY_ROWS * VALUE_STRIDE];
    alignas(16) activation_t v[MAX_WINDOW * VALUE_STRIDE];
    alignas(16) float coefficients[QUERY_TILES * 8 * COEFFICIENT_STRIDE];  // of the history's u
    float pairs[QUERIES * WINDOW_ROWS];                                    // of the window's u
    float stage[PADDED_ROWS * STAGE_STRIDE];
    Decays decays;
    float beta[WINDOW_ROWS];
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// L2-normalises one row of queries in place; a warp works on it.
DEVICE void normalize_row(activation_t* row) {
    const int lane = threadIdx.x % 32;
    float sum = 0.f;
    for (int i = lane; i < COLUMNS / 2; i += 32) {
        const u32 pair = ((const u32*)row)[i];
        sum += activation_low(pair) * activation_low(pair) + activation_high(pair) * activation_high(pair);
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    const float scale = rsqrtf(sum + L2_NORM_EPS);
    for (int i = lane; i < COLUMNS / 2; i += 32) {
        const u32 pair = ((const u32*)row)[i];
        ((u32*)row)[i] = (u32)float_to_activation(activation_low(pair) * scale) |
                         (u32)float_to_activation(activation_high(pair) * scale) << 16;
    }
}

KERNEL(THREADS, MIN_CTAS)
gdn_window(
    // [T, Hk, dk], [T, Hk, dk], [T, Hv, dv], [T, Hv], [T, Hv]: tokens are *_stride elements apart, otherwise dense
    const activation_t* q, const activation_t* k, const activation_t* v, const activation_t* a, const activation_t* b,
    // [Hv]
    const float* A_log, const float* dt_bias,
    // state parts, slots are *_stride elements apart
    const state_t* checkpoint_in, const int* position_in, const activation_t* ring_k_in, const u16* ring_u_in,
    const float* ring_g_in, const int* error_flag_in,
    // [rows]
    const int* seq_lens, const int* window_starts, const int* window_lens, const int* state_batch_indices,
    int num_tokens, int num_slots, int max_seq_len, int layer, int skip_prefill, int q_stride, int k_stride,
    int v_stride, int a_stride, int b_stride, int checkpoint_stride, int position_stride, int ring_k_stride,
    int ring_u_stride, int ring_g_stride,
    // [T, Hv, dv] dense, then the state parts again: in place, written through these
    activation_t* o, state_t* checkpoint, int* position, activation_t* ring_k, u16* ring_u, float* ring_g,
    int* error_flag) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS, tile_index = block.tile;
    const int k_column = block.group * COLUMNS, v_column = block.head * ROWS + block.first_row;
    const int u_column = block.head * U_PLANES * ROWS + block.first_row;

    // All that is known before the slot, then all that the slot tells, then the tile: nothing here waits for more than
    // the row's slot. A fresh sequence ignores the tile.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const float log_A = A_log[block.head], bias = dt_bias[block.head];
    const LaterRow later = look_ahead(seq_lens, state_batch_indices, num_slots);
    const bool has_slot = slot >= 0 && slot < num_slots;
    int tile_position = 0, later_position = 0;
    if (has_slot) {
        tile_position = position_in[(long long)slot * position_stride + tile_index];
        tile_copy_start(shared.tile, checkpoint_in + (long long)slot * checkpoint_stride + state_offset,
                        &shared.barrier);
    }
    if (later.exists) later_position = position_in[(long long)later.slot * position_stride + tile_index];
    // The window's own inputs travel while the checkpoint position does; a row that turns out invalid ignores them.
    const bool readable = start >= 0 && window_length >= 0 && (long long)start + window_length <= num_tokens;
    const int copied = readable && window_length <= MAX_WINDOW ? window_length : 0;
    constexpr int K_CHUNKS = COLUMNS / 8, V_CHUNKS = CTA_ROWS / 8;
    const activation_t* row_q = computed(q + (long long)(copied ? start : 0) * q_stride + k_column);
    const activation_t* row_k = computed(k + (long long)(copied ? start : 0) * k_stride + k_column);
    const activation_t* row_v = v + (long long)(copied ? start : 0) * v_stride + v_column;
    spread<QUERIES * K_CHUNKS>([&](int i) {
        const int n = i / K_CHUNKS, offset = i % K_CHUNKS * 8, w = n % MAX_WINDOW;
        const bool valid = w < copied, is_q = n < MAX_WINDOW;
        const int token = (valid ? w : 0) * (is_q ? q_stride : k_stride);
        copy_async_16(shared.queries + n * TOKEN_STRIDE + offset, (is_q ? row_q : row_k) + (token + offset), valid);
    });
    spread_from_end<MAX_WINDOW * V_CHUNKS>([&](int i) {
        const int w = i / V_CHUNKS, offset = i % V_CHUNKS * 8;
        const bool valid = w < copied;
        copy_async_16(shared.v + w * VALUE_STRIDE + offset, row_v + ((valid ? w : 0) * v_stride + offset), valid);
    });
    copy_async_commit();
    float raw_a = 0.f, raw_b = 0.f;
    if (warp == 0 && lane < copied) {
        raw_a = activation_to_float(a[(long long)(start + lane) * a_stride + block.head]);
        raw_b = activation_to_float(b[(long long)(start + lane) * b_stride + block.head]);
    }
    const Row row = make_row(slot, seq_len, start, window_length, tile_position, num_tokens, num_slots, max_seq_len,
                             MAX_HISTORY);
    activation_t* output = o + v_column;
    if (!row.active || row.length > MAX_WINDOW) {
        copy_async_wait();
        sync_threads();
        if (has_slot) tile_copy_wait(&shared.barrier);
        if (!row.active) {
            if (row.error && tid == 0) atomic_or(error_flag, row.error);
            write_zeros(row, output, HEADS * ROWS);
            return;
        }
        if (skip_prefill) return;  // the row belongs to gdn_prefill.cu
        const SerialInputs inputs = {
            q + (long long)row.start * q_stride + k_column, k + (long long)row.start * k_stride + k_column,
            v + (long long)row.start * v_stride + v_column, a + (long long)row.start * a_stride + block.head,
            b + (long long)row.start * b_stride + block.head, q_stride, k_stride, v_stride, a_stride, b_stride,
            ring_k_in + (long long)slot * ring_k_stride + k_column,
            ring_u_in + (long long)slot * ring_u_stride + u_column,
            ring_g_in + (long long)slot * ring_g_stride + block.head, -expf(log_A), bias};
        const SerialStores stores = {checkpoint + (long long)slot * checkpoint_stride + state_offset, row.length,
                                     nullptr, 0};
        for (int first = warp * 4; first < CTA_ROWS; first += WARPS * 4)
            serial_rows<4, false>(inputs, row, first,
                                  checkpoint_in + (long long)slot * checkpoint_stride + state_offset, stores,
                                  output + (long long)row.start * (HEADS * ROWS), nullptr);
        if (tid < CTA_TILES)
            position[(long long)slot * position_stride + tile_index + tid] = row.seq_len + row.length;
        return;
    }

    const int c = row.checkpoint_position, history = row.seq_len - c, length = row.length;
    const bool flush = history > 0 && history + length > BUFFER_LEN;
    const int first_entry = c % RING_LEN;  // of the history in the ring
    float g_past = 0.f;
    if (warp == 0 && lane < history)
        g_past = ring_g_in[(long long)slot * ring_g_stride + wrapped(first_entry + lane) * HEADS + block.head];
    const activation_t* slot_ring_k = ring_k_in + (long long)slot * ring_k_stride + k_column;
    const u16* slot_ring_u = ring_u_in + (long long)slot * ring_u_stride + u_column;
    spread<HISTORY_ROWS * K_CHUNKS>([&](int i) {
        const int j = i / K_CHUNKS, offset = i % K_CHUNKS * 8;
        const bool valid = j < history;
        const int entry = wrapped(first_entry + (valid ? j : 0)) * (GROUPS * COLUMNS);
        copy_async_16(shared.k + j * TOKEN_STRIDE + offset, slot_ring_k + (entry + offset), valid);
    });
    spread<HISTORY_ROWS * U_PLANES * V_CHUNKS>([&](int i) {
        const int j = i / V_CHUNKS / U_PLANES, plane = i / V_CHUNKS % U_PLANES, offset = i % V_CHUNKS * 8;
        const bool valid = j < history;
        const int entry = (wrapped(first_entry + (valid ? j : 0)) * (HEADS * U_PLANES) + plane) * ROWS;
        copy_async_16(&shared.u[0][0] + (plane * HISTORY_ROWS + j) * VALUE_STRIDE + offset,
                      slot_ring_u + (entry + offset), valid);
    });
    copy_async_commit();
    if (later.exists)
        prefetch_ring(later, later_position, [&](int entry) {
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++)
                prefetch(ring_u_in + ((long long)later.slot * ring_u_stride +
                                      (entry * (HEADS * U_PLANES) + plane) * ROWS + u_column),
                         CTA_ROWS * sizeof(u16));
            if (block.first_of_group)
                prefetch(ring_k_in + ((long long)later.slot * ring_k_stride + entry * (GROUPS * COLUMNS) + k_column),
                         COLUMNS * sizeof(activation_t));
            if (block.first_of_head && block.head % 8 == 0)
                prefetch_sector(ring_g_in + ((long long)later.slot * ring_g_stride + entry * HEADS + block.head));
        });
    copy_async_wait_but_last();
    sync_threads();
    for (int n = warp; n < QUERIES; n += WARPS)
        if (n % MAX_WINDOW < length) normalize_row(shared.queries + n * TOKEN_STRIDE);
    float g_new = 0.f;
    if (warp == 0) {
        if (lane < length) g_new = -expf(log_A) * softplus(raw_a + bias);
        scan_decays(shared.decays, g_past, g_new);
        if (lane < WINDOW_ROWS) shared.beta[lane] = sigmoid(raw_b);
    }
    copy_async_wait();
    sync_threads();

    // Coefficients of u: decay and k . q or k . k of every (query, token) pair.
    const int history_tasks = flush ? 0 : HISTORY_BLOCKS;
    for (int task = warp; task < (history_tasks + WINDOW_ROWS / 8) * SCORE_TILES; task += WARPS) {
        const int m = task % SCORE_TILES, token_block = task / SCORE_TILES, window_block = token_block - history_tasks;
        const int query_row = m * 16 + (QUERY_TILES == 1 ? lane % 8 : lane % 16);
        const activation_t* token = shared.k + (token_block * 8 + lane % 8) * TOKEN_STRIDE;
        if (window_block >= 0) {
            const int w = window_block * 8 + lane % 8;
            token = shared.queries + (MAX_WINDOW + (w < MAX_WINDOW ? w : MAX_WINDOW - 1)) * TOKEN_STRIDE;
        }
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        scores<(QUERY_TILES > 1)>(sum, shared.queries + (query_row < QUERIES ? query_row : QUERIES - 1) * TOKEN_STRIDE,
                                  token);
#pragma unroll
        for (int i = 0; i < (QUERY_TILES == 1 ? 2 : 4); i++) {
            const int n = m * 16 + g + 8 * (i / 2), j = 2 * t + i % 2, w = n % MAX_WINDOW;
            const bool is_output = n < MAX_WINDOW, live = (n < QUERIES) & (w < length);
            const float score = is_output ? QUERY_SCALE * sum[i] : sum[i];
            const bool past = window_block < 0;
            const int from = past ? token_block * 8 + j : window_block * 8 + j;
            const float exponent = past ? shared.decays.history[from] + shared.decays.prefix[w]
                                        : window_log_decay(shared.decays, from, w);
            const bool used = live & (past ? from < history : (from < w) | (is_output & (from == w)));
            const float value = used ? decay_of(exponent) * score : 0.f;
            if (past && n < QUERY_TILES * 8) shared.coefficients[n * COEFFICIENT_STRIDE + from] = value;
            if (!past && n < QUERIES) shared.pairs[n * WINDOW_ROWS + from] = value;
        }
    }

    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    const int first_new = row.seq_len % RING_LEN, from_end = THREADS - 1 - tid;
    if (block.first_of_group)
        spread_from_end<MAX_WINDOW * K_CHUNKS>([&](int i) {
            const int w = i / K_CHUNKS, offset = i % K_CHUNKS * 8;
            if (w < length)
                *(uint4*)(ring_k + ((long long)slot * ring_k_stride + wrapped(first_new + w) * (GROUPS * COLUMNS) +
                                    k_column + offset)) =
                    *(const uint4*)(shared.queries + (MAX_WINDOW + w) * TOKEN_STRIDE + offset);
        });
    if (block.first_of_head && from_end < length)
        ring_g[(long long)slot * ring_g_stride + wrapped(first_new + from_end) * HEADS + block.head] =
            shared.decays.window[from_end];
    if ((flush || row.seq_len == 0) && from_end < CTA_TILES)
        position[(long long)slot * position_stride + tile_index + from_end] = row.seq_len;
    sync_threads();

    float sum[QUERY_TILES][4] = {};
    Products<QUERY_TILES> products;
    products.clear();
    const int own_column = warp * 16 + (lane / 8 & 1) * 8;
    if (!flush) {
#pragma unroll
        for (int k8 = 0; k8 < HISTORY_BLOCKS; k8++)
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++) {
                u32 pairs[2];
                load_matrix_x2_transposed(pairs, shared.u[plane] + (k8 * 8 + lane % 8) * VALUE_STRIDE + own_column);
                const float halves[4] = {bf16_low(pairs[0]), bf16_low(pairs[1]), bf16_high(pairs[0]),
                                         bf16_high(pairs[1])};
                combine<QUERY_TILES, COEFFICIENT_STRIDE>(sum, halves,
                                                         shared.coefficients + g * COEFFICIENT_STRIDE + k8 * 8);
            }
    }
    const activation_t* query[QUERY_TILES];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
        query[n] = shared.queries + (n * 8 + g < QUERIES ? n * 8 + g : QUERIES - 1) * TOKEN_STRIDE;
    tile_copy_wait(&shared.barrier);
    if (flush) {
        float values[HISTORY_BLOCKS][4];
#pragma unroll
        for (int k8 = 0; k8 < HISTORY_BLOCKS; k8++) {
            const int j = k8 * 8 + 2 * t;
            const float even = j < history ? decay_of(shared.decays.history[j]) : 0.f;
            const float odd = j + 1 < history ? decay_of(shared.decays.history[j + 1]) : 0.f;
            float u[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++) {
                u32 pairs[2];
                load_matrix_x2_transposed(pairs, shared.u[plane] + (k8 * 8 + lane % 8) * VALUE_STRIDE + own_column);
                u[0] += bf16_low(pairs[0]), u[1] += bf16_low(pairs[1]);
                u[2] += bf16_high(pairs[0]), u[3] += bf16_high(pairs[1]);
            }
            values[k8][0] = even * u[0], values[k8][1] = even * u[1];
            values[k8][2] = odd * u[2], values[k8][3] = odd * u[3];
        }
        fold_and_dot_tile<QUERY_TILES>(products, shared.tile,
                                       checkpoint + (long long)slot * checkpoint_stride + state_offset, c > 0,
                                       decay_of(shared.decays.total), values, shared.k, query);
    } else if (c > 0) {
        dot_tile<QUERY_TILES>(products, shared.tile, query);
    }

    // From here on a warp needs only its own rows. One lane solves for a row of the state: u of its tokens one after the
    // other, then their outputs. What tokens behind the window's end compute is never stored.
    const float base = flush ? 0.f : shared.decays.total;
    const auto combined = [&](int n, int i, int query_index) {
        const float scale = query_index < MAX_WINDOW ? QUERY_SCALE : 1.f;
        const float decay = decay_of(base + shared.decays.prefix[query_index % MAX_WINDOW]);
        return sum[n][i] + scale * decay * products.value(n, i);
    };
    const auto solve_row = [&](int own, const float(&outputs)[MAX_WINDOW], const float(&predictions)[MAX_WINDOW]) {
        float u[MAX_WINDOW];
#pragma unroll
        for (int w = 0; w < MAX_WINDOW; w++) {
            float predicted = predictions[w], out = outputs[w];
#pragma unroll
            for (int j = 0; j < w; j++) {
                predicted += shared.pairs[(MAX_WINDOW + w) * WINDOW_ROWS + j] * u[j];
                out += shared.pairs[w * WINDOW_ROWS + j] * u[j];
            }
            u[w] = shared.beta[w] * (activation_to_float(shared.v[w * VALUE_STRIDE + own]) - predicted);
            out += shared.pairs[w * WINDOW_ROWS + w] * u[w];
            const u16 rounded = float_to_bf16(u[w]);
            shared.u[0][w * VALUE_STRIDE + own] = rounded;
            if (U_PLANES == 2)
                shared.u[U_PLANES - 1][w * VALUE_STRIDE + own] =
                    float_to_bf16(u[w] - bits_to_float((u32)rounded << 16));
            shared.v[w * VALUE_STRIDE + own] = float_to_activation(out);
        }
    };
    if constexpr (MAX_WINDOW == 1) {
        // Lane 4 g already holds both queries of rows g and g + 8.
        if (t == 0) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float outputs[MAX_WINDOW] = {combined(0, 2 * half, 0)};
                const float predictions[MAX_WINDOW] = {combined(0, 2 * half + 1, 1)};
                solve_row(warp * 16 + g + 8 * half, outputs, predictions);
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int query_index = n * 8 + 2 * t + i % 2;
                if (query_index < QUERIES)
                    shared.stage[(warp * 16 + g + 8 * (i / 2)) * STAGE_STRIDE + query_index] =
                        combined(n, i, query_index);
            }
        sync_warp();
        if (lane < 16) {
            const float* stage = shared.stage + (warp * 16 + lane) * STAGE_STRIDE;
            float outputs[MAX_WINDOW], predictions[MAX_WINDOW];
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++) outputs[w] = stage[w], predictions[w] = stage[MAX_WINDOW + w];
            solve_row(warp * 16 + lane, outputs, predictions);
        }
    }
    sync_warp();
    u16* to_u = ring_u + (long long)slot * ring_u_stride + u_column;
    for (int i = lane; i < 2 * (U_PLANES + 1) * length; i += 32) {
        const int offset = warp * 16 + i % 2 * 8, plane = i / 2 % (U_PLANES + 1), w = i / 2 / (U_PLANES + 1);
        if (offset >= CTA_ROWS) continue;
        if (plane < U_PLANES)
            *(uint4*)(to_u + ((row.seq_len + w) % RING_LEN * HEADS * U_PLANES + plane) * ROWS + offset) =
                *(const uint4*)(shared.u[plane < U_PLANES ? plane : 0] + w * VALUE_STRIDE + offset);
        else
            *(uint4*)(output + (long long)(row.start + w) * (HEADS * ROWS) + offset) =
                *(const uint4*)(shared.v + w * VALUE_STRIDE + offset);
    }
}
