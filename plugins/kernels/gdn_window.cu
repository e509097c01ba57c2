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
    int num_tokens, int num_slots, int max_seq_len, int layer, int q_stride, int k_stride, int v_stride, int a_stride,
    int b_stride, int checkpoint_stride, int position_stride, int ring_k_stride, int ring_u_stride, int ring_g_stride,
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

    // The tile is asked for before anything else is known about the row; a fresh sequence ignores what arrives.
    const int slot = state_batch_indices[blockIdx.y];
    const bool has_slot = slot >= 0 && slot < num_slots;
    if (has_slot)
        tile_copy_start(shared.tile, checkpoint_in + (long long)slot * checkpoint_stride + state_offset,
                        &shared.barrier);
    const Row row = read_row(blockIdx.y, seq_lens, window_starts, window_lens, state_batch_indices, num_tokens,
                             num_slots, max_seq_len, position_in + tile_index, position_stride, MAX_HISTORY);
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
        const SerialInputs inputs = {
            q + (long long)row.start * q_stride + k_column, k + (long long)row.start * k_stride + k_column,
            v + (long long)row.start * v_stride + v_column, a + (long long)row.start * a_stride + block.head,
            b + (long long)row.start * b_stride + block.head, q_stride, k_stride, v_stride, a_stride, b_stride,
            ring_k_in + (long long)slot * ring_k_stride + k_column,
            ring_u_in + (long long)slot * ring_u_stride + u_column,
            ring_g_in + (long long)slot * ring_g_stride + block.head, -expf(A_log[block.head]), dt_bias[block.head]};
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
    const int blocks = (history + 7) / 8;
    for (int i = tid; i < blocks * COLUMNS; i += THREADS) {  // 8 rows of COLUMNS / 8 chunks each
        const int j = i / (COLUMNS / 8), offset = i % (COLUMNS / 8) * 8;
        const bool valid = j < history;
        const activation_t* from = ring_k_in + (long long)slot * ring_k_stride + k_column +
                                   (valid ? (c + j) % RING_LEN * (GROUPS * COLUMNS) + offset : 0);
        copy_async_16(shared.k + j * TOKEN_STRIDE + offset, from, valid);
    }
    for (int i = tid; i < QUERIES * (COLUMNS / 8); i += THREADS) {
        const int n = i / (COLUMNS / 8), offset = i % (COLUMNS / 8) * 8, w = n % MAX_WINDOW;
        const bool valid = w < length;
        const activation_t* from = n < MAX_WINDOW ? q + (long long)(row.start + (valid ? w : 0)) * q_stride
                                                  : k + (long long)(row.start + (valid ? w : 0)) * k_stride;
        copy_async_16(shared.queries + n * TOKEN_STRIDE + offset, from + k_column + offset, valid);
    }
    for (int i = tid; i < blocks * U_PLANES * CTA_ROWS; i += THREADS) {  // 8 rows of CTA_ROWS / 8 chunks each
        const int j = i / (CTA_ROWS / 8) / U_PLANES, plane = i / (CTA_ROWS / 8) % U_PLANES;
        const int offset = i % (CTA_ROWS / 8) * 8;
        const bool valid = j < history;
        const u16* from = ring_u_in + (long long)slot * ring_u_stride + u_column + plane * ROWS + offset +
                          (valid ? (c + j) % RING_LEN * (HEADS * U_PLANES * ROWS) : 0);
        copy_async_16(shared.u[plane] + j * VALUE_STRIDE + offset, from, valid);
    }
    for (int i = tid; i < MAX_WINDOW * (CTA_ROWS / 8); i += THREADS) {
        const int w = i / (CTA_ROWS / 8), offset = i % (CTA_ROWS / 8) * 8;
        const bool valid = w < length;
        copy_async_16(shared.v + w * VALUE_STRIDE + offset,
                      v + (long long)(row.start + (valid ? w : 0)) * v_stride + v_column + offset, valid);
    }
    float g_new = 0.f;
    if (warp == 0) {
        const float g_past = lane < history ? ring_g_in[(long long)slot * ring_g_stride +
                                                        (c + lane) % RING_LEN * HEADS + block.head]
                                            : 0.f;
        float beta = 0.f;
        if (lane < length) {
            const float raw = activation_to_float(a[(long long)(row.start + lane) * a_stride + block.head]);
            g_new = -expf(A_log[block.head]) * softplus(raw + dt_bias[block.head]);
            beta = sigmoid(activation_to_float(b[(long long)(row.start + lane) * b_stride + block.head]));
        }
        scan_decays(shared.decays, g_past, g_new);
        if (lane < WINDOW_ROWS) shared.beta[lane] = beta;
    }
    copy_async_wait();
    sync_threads();
    for (int n = warp; n < QUERIES; n += WARPS)
        if (n % MAX_WINDOW < length) normalize_row(shared.queries + n * TOKEN_STRIDE);
    sync_threads();

    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    if (block.first_of_group) {
        activation_t* to = ring_k + (long long)slot * ring_k_stride + k_column;
        for (int i = tid; i < length * (COLUMNS / 8); i += THREADS) {
            const int w = i / (COLUMNS / 8), offset = i % (COLUMNS / 8) * 8;
            *(uint4*)(to + (row.seq_len + w) % RING_LEN * (GROUPS * COLUMNS) + offset) =
                *(const uint4*)(shared.queries + (MAX_WINDOW + w) * TOKEN_STRIDE + offset);
        }
    }
    if (block.first_of_head && tid < length)
        ring_g[(long long)slot * ring_g_stride + (row.seq_len + tid) % RING_LEN * HEADS + block.head] = g_new;
    if ((flush || row.seq_len == 0) && tid < CTA_TILES)
        position[(long long)slot * position_stride + tile_index + tid] = row.seq_len;

    // Coefficients of u: decay and k . q or k . k of every (query, token) pair.
    const int history_tasks = flush ? 0 : blocks;
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
            const bool is_output = n < MAX_WINDOW, live = n < QUERIES && w < length;
            const float score = is_output ? QUERY_SCALE * sum[i] : sum[i];
            if (window_block < 0) {
                const int k8 = token_block * 8 + j;
                const float decay =
                    live && k8 < history ? decay_of(shared.decays.history[k8] + shared.decays.prefix[w]) : 0.f;
                if (n < QUERY_TILES * 8)
                    shared.coefficients[n * COEFFICIENT_STRIDE + k8] = decay > 0.f ? decay * score : 0.f;
            } else if (n < QUERIES) {
                const int from = window_block * 8 + j;
                const bool used = live && (from < w || (is_output && from == w));
                shared.pairs[n * WINDOW_ROWS + from] = used ? window_decay(shared.decays, from, w) * score : 0.f;
            }
        }
    }
    sync_threads();

    float sum[QUERY_TILES][4] = {}, high[QUERY_TILES][4] = {}, low[QUERY_TILES][4] = {};
    const int own_column = warp * 16 + (lane / 8 & 1) * 8;
    for (int k8 = 0; k8 < history_tasks; k8++) {
#pragma unroll
        for (int plane = 0; plane < U_PLANES; plane++) {
            u32 pairs[2];
            load_matrix_x2_transposed(pairs, shared.u[plane] + (k8 * 8 + lane % 8) * VALUE_STRIDE + own_column);
            const float halves[4] = {bf16_low(pairs[0]), bf16_low(pairs[1]), bf16_high(pairs[0]), bf16_high(pairs[1])};
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
            if (k8 >= blocks) break;
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
        fold_and_dot_tile<QUERY_TILES>(high, low, shared.tile,
                                       checkpoint + (long long)slot * checkpoint_stride + state_offset, c > 0,
                                       decay_of(shared.decays.total), values, shared.k, blocks, query);
    } else if (c > 0) {
        dot_tile<QUERY_TILES>(high, low, shared.tile, query);
    }

    // From here on a warp needs only its own rows. Gather all queries of a row in one lane.
    const float base = flush ? 0.f : shared.decays.total;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int query_index = n * 8 + 2 * t + i % 2, w = query_index % MAX_WINDOW;
            if (query_index >= QUERIES || w >= length) continue;
            const float scale = query_index < MAX_WINDOW ? QUERY_SCALE : 1.f;
            shared.stage[(warp * 16 + g + 8 * (i / 2)) * STAGE_STRIDE + query_index] =
                sum[n][i] + scale * decay_of(base + shared.decays.prefix[w]) * (high[n][i] + low[n][i]);
        }
    sync_warp();
    if (lane < 16 && warp * 16 + lane < CTA_ROWS) {
        const int own = warp * 16 + lane;
        const float* stage = shared.stage + own * STAGE_STRIDE;
        float u[MAX_WINDOW];
#pragma unroll
        for (int w = 0; w < MAX_WINDOW; w++) {
            if (w >= length) break;
            float predicted = stage[MAX_WINDOW + w], out = stage[w];
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
