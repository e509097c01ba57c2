// Gated DeltaNet over a replayed history whose outputs read a low-precision copy of the state: decode and verify windows
// of up to MAX_WINDOW tokens, and longer (prefill) rows token by token. One thread block per (row of the batch, CTA_WARPS
// warps of CTA_ROWS state rows each). A step that flushes folds, and then goes on as if the history had been empty. The
// window's u solve a unit lower triangular system, one lane per state row. See plugins/reference/gdn.py and readout.cuh.
//
// Stamped in: NUM_K_HEADS, NUM_V_HEADS, HEAD_K_DIM, HEAD_V_DIM, ROW_TILES, CTA_ROWS, CTA_WARPS, BUFFER_LEN, MAX_WINDOW,
// STATE_FORMAT, STOCHASTIC, READOUT_FORMAT, ACTIVATION_FORMAT, U_PLANES, U_FROM_CHECKPOINT, BULK_COPY, MIN_CTAS,
// AHEAD_ROWS, AHEAD_TILE, SHARED_BYTES.
#define HEADS NUM_V_HEADS
#define GROUPS NUM_K_HEADS
#define ROWS HEAD_V_DIM
#define COLUMNS HEAD_K_DIM
// head_k_dim^-1/2, applied to q in fp32.
#define QUERY_SCALE rsqrtf((float)COLUMNS)
#include "readout_dot.cuh"
#include "readout_flush.cuh"
#include "readout_parts.cuh"
#include "readout_stage.cuh"
#include "gdn_serial.cuh"

// Queries of the state: q of every window token (outputs), then k of every window token (what the state predicts). A
// window of one token has them alternate in a tile of eight.
constexpr int QUERIES = 2 * MAX_WINDOW;
constexpr bool ONE = MAX_WINDOW == 1;
constexpr int QUERY_TILES = (QUERIES + 7) / 8;
constexpr int SCORE_TILES = (QUERY_TILES + 1) / 2;
constexpr int WINDOW_TILES = WINDOW_ROWS / 8;
constexpr int OWN_SIZE = TOKEN_ROWS * OWN_STRIDE;  // one plane of a warp's u
constexpr int STAGE_STRIDE = QUERIES + 1;

struct Shared {
    alignas(128) unsigned char tile[TILE_SIZE];  // readout; in a flush first the fold's keys; states of a prefill row
    alignas(16) activation_t k[TOKEN_ROWS * KEY_STRIDE];
    alignas(16) activation_t queries[QUERIES * KEY_STRIDE];
    alignas(16) u16 half_queries[QUERIES * KEY_STRIDE];
    alignas(16) u16 u[WARPS * U_PLANES * OWN_SIZE];
    alignas(16) activation_t v[WARPS * MAX_WINDOW * OWN_STRIDE];
    float unit[QUERIES];
    float pairs[ONE ? 1 : WARPS * QUERIES * WINDOW_ROWS];  // coefficients of the window's u
    float stage[ONE ? 1 : WARPS * 32 * STAGE_STRIDE];
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// Query in column n of a tile; the last one where there is none.
DEVICE int query_of(int tile, int n) {
    const int query = tile * 8 + n;
    return ONE ? n % 2 : query < QUERIES ? query : QUERIES - 1;
}

// One row of q or k, L2-normalised and rounded to the activation format; a warp works on it.
DEVICE void normalize_row(activation_t* to, const activation_t* from) {
    const int lane = threadIdx.x % 32;
    constexpr int WORDS = COLUMNS / 2, COUNT = (WORDS + 31) / 32;
    u32 words[COUNT];
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        words[n] = n * 32 + lane < WORDS ? ((const u32*)from)[n * 32 + lane] : 0u;
        sum += activation_low(words[n]) * activation_low(words[n]) + activation_high(words[n]) * activation_high(words[n]);
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    const float scale = rsqrtf(sum + L2_NORM_EPS);
#pragma unroll
    for (int n = 0; n < COUNT; n++)
        if (n * 32 + lane < WORDS)
            ((u32*)to)[n * 32 + lane] = (u32)float_to_activation(activation_low(words[n]) * scale) |
                                        (u32)float_to_activation(activation_high(words[n]) * scale) << 16;
}

// Coefficients of u in 16 tokens for 8 queries, split into bf16 halves, as a second operand.
struct SplitPairs {
    u32 high[2], low[2];

    DEVICE_MEMBER void split(int i, float first, float second) {
        high[i] = pack_bf16(first, second);
        low[i] = pack_bf16(first - bf16_low(high[i]), second - bf16_high(high[i]));
    }
};

// Products of the checkpoint's rows g and g + 8 (from `rows` on) and all queries, exact to fp32's rounding.
DEVICE void dot_checkpoint(float (&product)[QUERY_TILES][4], const StateRows& rows, bool both,
                           const activation_t* queries) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float scale0 = STATE_FORMAT == FORMAT_FP8 ? e4m3_scale(rows.checkpoint_scales[g]) : 1.f;
    const float scale1 = STATE_FORMAT == FORMAT_FP8 && both ? e4m3_scale(rows.checkpoint_scales[8 + g]) : 1.f;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) product[n][i] = 0.f;
#pragma unroll 1
    for (int pair = 0; pair < PAIRS; pair++) {
        const int column = 32 * pair + 4 * t;
        RawState raw[2] = {};
        load_raw(raw[0], rows.checkpoint + g * COLUMNS, column);
        if (both) load_raw(raw[1], rows.checkpoint + (8 + g) * COLUMNS, column);
        float s0[8], s1[8];
        widen(raw[0], scale0, s0);
        widen(raw[1], scale1, s1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a[4] = {s0[2 * i], s1[2 * i], s0[2 * i + 1], s1[2 * i + 1]};
            float h[4];
#pragma unroll
            for (int e = 0; e < 4; e++) h[e] = tf32_high(a[e]);
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) {
                const u32 b = *(const u32*)(queries + query_of(n, g) * KEY_STRIDE + column + i / 2 * 16 + i % 2 * 2);
                mma_tf32(product[n], h[0], h[1], h[2], h[3], activation_low(b), activation_high(b));
                mma_tf32(product[n], a[0] - h[0], a[1] - h[1], a[2] - h[2], a[3] - h[3], activation_low(b),
                         activation_high(b));
            }
        }
    }
}

KERNEL(THREADS, MIN_CTAS)
gdn_readout(
    // [T, Hk, dk], [T, Hk, dk], [T, Hv, dv], [T, Hv], [T, Hv]: tokens are *_stride elements apart, otherwise dense
    const activation_t* q, const activation_t* k, const activation_t* v, const activation_t* a, const activation_t* b,
    // [Hv]
    const float* A_log, const float* dt_bias,
    // state parts, slots are *_stride elements apart
    STATE_PARTS_IN const activation_t* ring_k_in, const u16* ring_u_in, const float* ring_g_in,
    const int* error_flag_in,
    // [rows]
    const int* seq_lens, const int* window_starts, const int* window_lens, const int* state_batch_indices,
    int num_tokens, int num_slots, int max_seq_len, int layer, ROUNDING_SCALARS int skip_prefill, int q_stride,
    int k_stride, int v_stride, int a_stride, int b_stride, STATE_PARTS_STRIDES int ring_k_stride, int ring_u_stride,
    int ring_g_stride,
    // [T, Hv, dv] dense, then the state parts again: in place, written through these
    activation_t* o, STATE_PARTS_OUT activation_t* ring_k, u16* ring_u, float* ring_g, int* error_flag) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const int first_part = (int)blockIdx.x * WARPS, part = first_part + warp;
    const int head = part / CTAS_PER_HEAD, group = first_part / CTAS_PER_HEAD / HEADS_PER_GROUP;
    const int first_row = part % CTAS_PER_HEAD * CTA_ROWS, block_row = first_part * CTA_ROWS;
    const int own_row = part * CTA_ROWS, k_column = group * COLUMNS;  // rows count through all heads
    const int u_column = head * U_PLANES * ROWS + first_row, tile_index = part * CTA_TILES;
    const bool first_of_group = first_part % (CTAS_PER_HEAD * HEADS_PER_GROUP) == 0, first_of_head = first_row == 0;

    // All that is known before the slot, then all that the slot tells: nothing here waits for more than the row's slot.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const LaterRow later = look_ahead(seq_lens, state_batch_indices, num_slots);
    const bool has_slot = slot >= 0 && slot < num_slots;
    int position_now = 0, later_position = 0;
    RowScales row_scales;
    if (has_slot) {
        position_now = position_in[offset_of(slot, position_stride) + first_part * CTA_TILES];
        readout_copy_start(shared.tile, STATE_ROWS(slot).from(block_row), &shared.barrier);
        row_scales.load(STATE_ROWS(slot).from(own_row));
    }
    if (later.exists) later_position = position_in[offset_of(later.slot, position_stride) + first_part * CTA_TILES];
    const float log_A = A_log[head], bias = dt_bias[head];
    const Row row = make_row(slot, seq_len, start, window_length, position_now, num_tokens, num_slots, max_seq_len,
                             MAX_HISTORY);
    if (!row.active || row.length > MAX_WINDOW) {
        copy_async_wait();
        sync_threads();
        if (has_slot) readout_copy_wait(&shared.barrier);
        if (!row.active) {
            if (row.error && tid == 0) atomic_or(error_flag, row.error);
            if (!row.in_range) return;
            for (int i = lane; i < row.length * (CTA_ROWS / 8); i += 32)
                *(uint4*)(o + offset_of(row.start + i / (CTA_ROWS / 8), HEADS * ROWS) + own_row + i % (CTA_ROWS / 8) * 8) =
                    make_uint4(0, 0, 0, 0);
            return;
        }
        if (skip_prefill) return;
        sync_threads();
        float* stage = (float*)shared.tile;
        for (int tile = 0; tile < WARPS * CTA_TILES; tile++) {
            // Whole tiles one after the other, all warps on each.
            const int rows_before = block_row + tile * TILE_ROWS, tile_head = rows_before / ROWS;
            const int tile_row = rows_before % ROWS;
            const SerialInputs inputs = {
                q + offset_of(row.start, q_stride) + k_column, k + offset_of(row.start, k_stride) + k_column,
                v + offset_of(row.start, v_stride) + rows_before, a + offset_of(row.start, a_stride) + tile_head,
                b + offset_of(row.start, b_stride) + tile_head, q_stride, k_stride, v_stride, a_stride, b_stride,
                ring_k_in + offset_of(slot, ring_k_stride) + k_column,
                ring_u_in + offset_of(slot, ring_u_stride) + tile_head * U_PLANES * ROWS + tile_row,
                ring_g_in + offset_of(slot, ring_g_stride) + tile_head, -expf(A_log[tile_head]), dt_bias[tile_head]};
            const StateRows rows = STATE_ROWS(slot).from(rows_before);
            const SerialStores stores = {nullptr, row.length, nullptr, 0, stage, rows.checkpoint_scales};
            for (int first = warp * 4; first < TILE_ROWS; first += WARPS * 4)
                serial_rows<4, false>(inputs, row, first, rows.checkpoint, stores,
                                      o + offset_of(row.start, HEADS * ROWS) + rows_before, nullptr);
            sync_threads();
            store_staged_tile(stage, rows, tile_row, ROUNDING_KEY(tile_head, row.seq_len + row.length));
            sync_threads();
        }
        if (lane < CTA_TILES)
            position[offset_of(slot, position_stride) + tile_index + lane] = row.seq_len + row.length;
        return;
    }

    const int length = row.length;
    int history = row.seq_len - row.checkpoint_position;
    const bool flush = history > 0 && history + length > BUFFER_LEN;
    constexpr int K_CHUNKS = COLUMNS / 8, V_CHUNKS = CTA_ROWS / 8;
    u16* own_u = shared.u + warp * (U_PLANES * OWN_SIZE);
    activation_t* own_v = shared.v + warp * (MAX_WINDOW * OWN_STRIDE);

    // The history's k and u, zeros beyond it, and the window's v.
    float g_past = 0.f, raw_a = 0.f, raw_b = 0.f;
    const int first_entry = row.checkpoint_position % RING_LEN;
    if (lane < history)
        g_past = ring_g_in[offset_of(slot, ring_g_stride) + (wrapped(first_entry + lane) * HEADS + head)];
    if (lane < length) {
        raw_a = activation_to_float(a[offset_of(start + lane, a_stride) + head]);
        raw_b = activation_to_float(b[offset_of(start + lane, b_stride) + head]);
    }
    const activation_t* slot_ring_k = computed(ring_k_in + (offset_of(slot, ring_k_stride) + k_column));
    const u16* slot_ring_u = computed(ring_u_in + (offset_of(slot, ring_u_stride) + u_column));
#pragma unroll
    for (int n = 0; n < (TOKEN_ROWS * K_CHUNKS + THREADS - 1) / THREADS; n++) {
        const int i = n * THREADS + tid, j = i / K_CHUNKS, offset = i % K_CHUNKS * 8;
        if (TOKEN_ROWS * K_CHUNKS % THREADS && j >= TOKEN_ROWS) break;
        const bool valid = j < history;
        copy_async_16(shared.k + j * KEY_STRIDE + offset,
                      slot_ring_k + (wrapped(first_entry + (valid ? j : 0)) * (GROUPS * COLUMNS) + offset), valid);
    }
#pragma unroll
    for (int n = 0; n < (TOKEN_ROWS * U_PLANES * V_CHUNKS + 31) / 32; n++) {
        const int i = n * 32 + lane, j = i / V_CHUNKS / U_PLANES, plane = i / V_CHUNKS % U_PLANES;
        const int offset = i % V_CHUNKS * 8;
        if (TOKEN_ROWS * U_PLANES * V_CHUNKS % 32 && j >= TOKEN_ROWS) break;
        const bool valid = j < history;
        copy_async_16(own_u + plane * OWN_SIZE + j * OWN_STRIDE + offset,
                      slot_ring_u + ((wrapped(first_entry + (valid ? j : 0)) * (HEADS * U_PLANES) + plane) * ROWS + offset),
                      valid);
    }
    for (int i = lane; i < length * V_CHUNKS; i += 32)
        copy_async_16(own_v + i / V_CHUNKS * OWN_STRIDE + i % V_CHUNKS * 8,
                      v + (offset_of(start + i / V_CHUNKS, v_stride) + (own_row + i % V_CHUNKS * 8)), true);
    if (flush && row.checkpoint_position > 0)
        for (int r = lane; r < CTA_ROWS; r += 32)
            prefetch(STATE_ROWS(slot).checkpoint + (own_row + r) * COLUMNS, COLUMNS * sizeof(state_t));
    if (later.exists) {
        prefetch_ring(later, later_position, [&](int entry) {
            for (int p = first_part; p < first_part + WARPS; p++)
                for (int plane = 0; plane < U_PLANES; plane++)
                    prefetch(ring_u_in + (offset_of(later.slot, ring_u_stride) +
                                          ((entry * HEADS + p / CTAS_PER_HEAD) * U_PLANES + plane) * ROWS +
                                          p % CTAS_PER_HEAD * CTA_ROWS),
                             CTA_ROWS * sizeof(u16));
            if (first_of_group)
                prefetch(ring_k_in + (offset_of(later.slot, ring_k_stride) + (entry * (GROUPS * COLUMNS) + k_column)),
                         COLUMNS * sizeof(activation_t));
            prefetch_sector(ring_g_in + (offset_of(later.slot, ring_g_stride) + (entry * HEADS + head)));
        });
        if (AHEAD_TILE && lane == 31) {
            const StateRows rows = STATE_ROWS(later.slot).from(block_row);
            prefetch(rows.codes, CTA_STATE_ROWS * CODE_BYTES);
            if (NVFP4) prefetch(rows.block_scales, CTA_STATE_ROWS * BLOCK_SCALE_BYTES);
        }
    }
    // The window's queries as the ring keeps them and in fp16, while the rings travel. Rows behind its end stay zero.
    for (int n = warp; n < QUERIES; n += WARPS) {
        const int w = n % MAX_WINDOW;
        activation_t* query = shared.queries + n * KEY_STRIDE;
        if (w < length)
            normalize_row(query, n < MAX_WINDOW ? q + (offset_of(start + w, q_stride) + k_column)
                                                : k + (offset_of(start + w, k_stride) + k_column));
        else
            for (int i = lane; i < COLUMNS / 2; i += 32) ((u32*)query)[i] = 0u;
        sync_warp();
        halve_row<false>(shared.half_queries + n * KEY_STRIDE, shared.unit + n, query);
    }
    const float g_new = lane < length ? -expf(log_A) * softplus(raw_a + bias) : 0.f, beta = sigmoid(raw_b);
    // Log decays: `suffix` from behind history token `lane` - 1 to the history's end, `prefix` of the window up to token
    // `lane`. Every sum runs over its own terms: differences of one running sum would cancel.
    float suffix = g_past, prefix = g_new;
#pragma unroll
    for (int delta = 1; delta < MAX_HISTORY; delta *= 2) {
        const float after = shuffle_down(suffix, delta);
        if (lane + delta < 32) suffix += after;
    }
#pragma unroll
    for (int delta = 1; delta < MAX_WINDOW; delta *= 2) {
        const float before = shuffle_up(prefix, delta);
        if (lane >= delta) prefix += before;
    }
    float total = shuffle_from(suffix, 0);
    const float behind = shuffle_down(suffix, 1);
    float weight = lane < history ? decay_of(lane < 31 ? behind : 0.f) : 0.f;  // of history token `lane`
    copy_async_wait();
    sync_threads();
    readout_copy_wait(&shared.barrier);

    u32 slot_now = slot, start_now = start;
    if (flush) {
        hold_until_here(slot_now);
        sync_threads();
        build_fold_keys((uint4*)shared.tile, shared.k);
        sync_threads();
        const auto own_values = [&](int group, int step, float(&v)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = 0.f;
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++) {
                u32 pairs[2];
                load_matrix_x2_transposed(pairs, own_u + plane * OWN_SIZE + (16 * step + lane % 16) * OWN_STRIDE + 8 * group);
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] += i % 2 ? bf16_high(pairs[i / 2]) : bf16_low(pairs[i / 2]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] *= shuffle_from(weight, 16 * step + i / 2 * 8 + 2 * t + i % 2);
        };
        const StateRows own_rows = STATE_ROWS((int)slot_now).from(own_row);
        fold_rows(own_values, (const uint4*)shared.tile, own_rows, row.checkpoint_position > 0, decay_of(total), first_row,
                  ROUNDING_KEY(head, row.seq_len));
        sync_threads();
        hold_until_here(slot_now), hold_until_here(start_now);
        const StateRows written = STATE_ROWS((int)slot_now).from(own_row);
        readout_copy_again(shared.tile, warp * CTA_ROWS, written);
        row_scales.load(written);
        // An empty history from here on: its weights are zero, and so are the products of its u.
        for (int i = lane; i < U_PLANES * OWN_SIZE / 8; i += 32) ((uint4*)own_u)[i] = make_uint4(0, 0, 0, 0);
        for (int i = tid; i < TOKEN_ROWS * KEY_STRIDE / 8; i += THREADS) ((uint4*)shared.k)[i] = make_uint4(0, 0, 0, 0);
        history = 0, total = 0.f, weight = 0.f;
        copy_async_wait();
        sync_threads();
    }

    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    const int first_new = row.seq_len % RING_LEN;
    if (first_of_group)
        for (int i = tid; i < length * K_CHUNKS; i += THREADS) {
            const int w = i / K_CHUNKS, offset = i % K_CHUNKS * 8;
            *(uint4*)(ring_k + (offset_of((int)slot_now, ring_k_stride) +
                                (wrapped(first_new + w) * (GROUPS * COLUMNS) + k_column + offset))) =
                *(const uint4*)(shared.queries + (MAX_WINDOW + w) * KEY_STRIDE + offset);
        }
    if (first_of_head && lane < length)
        ring_g[offset_of((int)slot_now, ring_g_stride) + (wrapped(first_new + lane) * HEADS + head)] = g_new;
    if ((flush || row.seq_len == 0) && lane < CTA_TILES)
        position[offset_of((int)slot_now, position_stride) + tile_index + lane] = row.seq_len;

    // Products of queries and keys, of the history and of the window: query g, and g + 8 of a second tile; tokens 2 t and
    // 2 t + 1 of every eight.
    float score[SCORE_TILES][2 * TOKEN_STEPS][4] = {}, own_score[SCORE_TILES][WINDOW_TILES][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int column = 16 * step + 4 * t;
        uint2 keys[2 * TOKEN_STEPS], own_keys[WINDOW_TILES];
#pragma unroll
        for (int k8 = 0; k8 < 2 * TOKEN_STEPS; k8++)
            keys[k8] = *(const uint2*)(shared.k + (k8 * 8 + g) * KEY_STRIDE + column);
#pragma unroll
        for (int k8 = 0; k8 < WINDOW_TILES; k8++) {
            const int w = k8 * 8 + g;
            own_keys[k8] = *(const uint2*)(shared.queries +
                                           (MAX_WINDOW + (w < MAX_WINDOW ? w : MAX_WINDOW - 1)) * KEY_STRIDE + column);
        }
#pragma unroll
        for (int s = 0; s < SCORE_TILES; s++) {
            const uint2 first = *(const uint2*)(shared.queries + query_of(2 * s, g) * KEY_STRIDE + column);
            uint2 second = make_uint2(0, 0);
            if (2 * s + 1 < QUERY_TILES)
                second = *(const uint2*)(shared.queries + query_of(2 * s + 1, g) * KEY_STRIDE + column);
#pragma unroll
            for (int k8 = 0; k8 < 2 * TOKEN_STEPS; k8++)
                mma_16bit<ACTIVATION_FORMAT>(score[s][k8], first.x, second.x, first.y, second.y, keys[k8].x, keys[k8].y);
#pragma unroll
            for (int k8 = 0; k8 < WINDOW_TILES; k8++)
                mma_16bit<ACTIVATION_FORMAT>(own_score[s][k8], first.x, second.x, first.y, second.y, own_keys[k8].x,
                                             own_keys[k8].y);
        }
    }
    // Coefficients of u.
    SplitPairs coefficients[QUERY_TILES][TOKEN_STEPS];
    float* pairs = shared.pairs + (ONE ? 0 : warp * QUERIES * WINDOW_ROWS);
    const float window_decay = decay_of(prefix);
    float pair_of_one = 0.f;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        const int query = query_of(n, g), w = query % MAX_WINDOW;
        const bool is_output = query < MAX_WINDOW;
        const float scale = is_output ? QUERY_SCALE : 1.f;
        const float past = scale * shuffle_from(window_decay, w);
        float value[TOKEN_STEPS][4];
#pragma unroll
        for (int i = 0; i < 4 * TOKEN_STEPS; i++)
            value[i / 4][i % 4] =
                shuffle_from(weight, i / 2 * 8 + 2 * t + i % 2) * past * score[n / 2][i / 2][n % 2 * 2 + i % 2];
#pragma unroll
        for (int i = 0; i < 2 * TOKEN_STEPS; i++)
            coefficients[n][i / 2].split(i % 2, value[i / 2][i % 2 * 2], value[i / 2][i % 2 * 2 + 1]);
        if constexpr (ONE) {
            // Query 0 is that of lane 0, its only token too.
            pair_of_one = shuffle_from(QUERY_SCALE * own_score[0][0][0], 0);
        } else {
            const float end = shuffle_from(prefix, w);
#pragma unroll
            for (int i = 0; i < 2 * WINDOW_TILES; i++) {
                const int j = i / 2 * 8 + 2 * t + i % 2;
                const float exponent = end - shuffle_from(prefix, j);
                const bool used = j < w || (is_output && j == w);
                const float decayed = j == w ? 1.f : decay_of(exponent);
                if (n * 8 + g < QUERIES)
                    pairs[query * WINDOW_ROWS + j] =
                        used ? decayed * scale * own_score[n / 2][i / 2][n % 2 * 2 + i % 2] : 0.f;
            }
        }
    }

    // What turns products into outputs and predictions, of queries 2 t and 2 t + 1 of every eight.
    const int own_query = lane < QUERIES ? lane : QUERIES - 1;
    const float own_decay = decay_of(total + shuffle_from(prefix, own_query % MAX_WINDOW)) *
                            (own_query < MAX_WINDOW ? QUERY_SCALE : 1.f);
    const float own_unit = own_decay * shared.unit[own_query];
    float unit[QUERY_TILES][2], decay[QUERY_TILES][2];
    Queries<QUERY_TILES> query;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        query.set(n, shared.half_queries + query_of(n, g) * KEY_STRIDE);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            unit[n][e] = shuffle_from(own_unit, query_of(n, 2 * t + e));
            decay[n][e] = U_FROM_CHECKPOINT ? shuffle_from(own_decay, query_of(n, 2 * t + e)) : 0.f;
        }
    }
    float own_beta = ONE ? shuffle_from(beta, 0) : beta;
    const bool has_state = row.checkpoint_position > 0 || flush;
    sync_warp();
    // u of a row's tokens one after the other, then their outputs, which replace v. What tokens behind the window's end
    // compute is never stored.
    const auto solve_row = [&](int row_of_warp, const float(&outputs)[MAX_WINDOW], const float(&predictions)[MAX_WINDOW]) {
        const bool exists = row_of_warp < CTA_ROWS;
        const int own = exists ? row_of_warp : 0;
        float u[MAX_WINDOW];
#pragma unroll
        for (int w = 0; w < MAX_WINDOW; w++) {
            float predicted = predictions[w], out = outputs[w];
#pragma unroll
            for (int j = 0; j < w; j++) {
                predicted += pairs[(MAX_WINDOW + w) * WINDOW_ROWS + j] * u[j];
                out += pairs[w * WINDOW_ROWS + j] * u[j];
            }
            const float strength = ONE ? own_beta : shuffle_from(own_beta, w);
            u[w] = strength * (activation_to_float(own_v[w * OWN_STRIDE + own]) - predicted);
            out += (ONE ? pair_of_one : pairs[w * WINDOW_ROWS + w]) * u[w];
            const u16 rounded = float_to_bf16(u[w]);
            if (w >= length || !exists) continue;
            own_u[w * OWN_STRIDE + own] = rounded;
            if (U_PLANES == 2)
                own_u[(U_PLANES - 1) * OWN_SIZE + w * OWN_STRIDE + own] =
                    float_to_bf16(u[w] - bits_to_float((u32)rounded << 16));
            own_v[w * OWN_STRIDE + own] = float_to_activation(out);
        }
    };
    float* stage = shared.stage + (ONE ? 0 : warp * 32 * STAGE_STRIDE);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float sum[QUERY_TILES][4] = {}, product[QUERY_TILES][4] = {}, exact[QUERY_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++)
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++) {
                u32 values[4];
                load_matrix_x4_transposed(values, own_u + plane * OWN_SIZE +
                                                      (16 * step + lane % 8 + lane / 16 * 8) * OWN_STRIDE + 16 * m +
                                                      lane / 8 % 2 * 8);
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) {
                    const SplitPairs& c = coefficients[n][step];
                    mma_16bit<FORMAT_BF16>(sum[n], values[0], values[1], values[2], values[3], c.high[0], c.high[1]);
                    if (plane == 0)  // the low halves' product is below fp32's rounding
                        mma_16bit<FORMAT_BF16>(sum[n], values[0], values[1], values[2], values[3], c.low[0], c.low[1]);
                }
            }
        float row_scale[2] = {1.f, 1.f};
        if (has_state) {
            const int at = warp * CTA_ROWS + 16 * m + g;
            dot_readout<QUERY_TILES, false>(product, shared.tile + at * CODE_STRIDE,
                                            shared.tile + CODES_SIZE + at * BLOCK_SCALE_BYTES, query);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (16 * m + 8 * half >= CTA_ROWS) continue;
                row_scale[half] = row_scales.of_group(2 * m + half);
            }
            if constexpr (U_FROM_CHECKPOINT)
                dot_checkpoint(exact, STATE_ROWS((int)slot_now).from(own_row + 16 * m), 16 * m + 8 < CTA_ROWS,
                               shared.queries);
        }
        const auto combined = [&](int n, int i) {
            const bool from_checkpoint = U_FROM_CHECKPOINT && query_of(n, 2 * t + i % 2) >= MAX_WINDOW;
            const float state = from_checkpoint ? exact[n][i] * decay[n][i % 2]
                                                : product[n][i] * unit[n][i % 2] * row_scale[i / 2];
            return has_state ? sum[n][i] + state : sum[n][i];
        };
        if constexpr (ONE) {
            // Every lane of a quad holds both queries of rows g and g + 8; the first two solve for one each.
            const int half = t % 2;
            const float outputs[MAX_WINDOW] = {half ? combined(0, 2) : combined(0, 0)};
            const float predictions[MAX_WINDOW] = {half ? combined(0, 3) : combined(0, 1)};
            if (t < 2) solve_row(16 * m + g + 8 * half, outputs, predictions);
        } else {
            // Two matrix steps give every lane a row.
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int column = n * 8 + 2 * t + i % 2;
                    if (column < QUERIES) stage[(m % 2 * 16 + g + 8 * (i / 2)) * STAGE_STRIDE + column] = combined(n, i);
                }
            if (m % 2 == 0 && m + 1 < M_TILES) continue;
            sync_warp();
            float outputs[MAX_WINDOW], predictions[MAX_WINDOW];
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++)
                outputs[w] = stage[lane * STAGE_STRIDE + w], predictions[w] = stage[lane * STAGE_STRIDE + MAX_WINDOW + w];
            solve_row(16 * (m - m % 2) + lane, outputs, predictions);
            sync_warp();
        }
    }
    sync_warp();
    u16* to_u = ring_u + (offset_of((int)slot_now, ring_u_stride) + u_column);
    for (int i = lane; i < length * (U_PLANES + 1) * V_CHUNKS; i += 32) {
        const int offset = i % V_CHUNKS * 8, plane = i / V_CHUNKS % (U_PLANES + 1), w = i / V_CHUNKS / (U_PLANES + 1);
        if (plane < U_PLANES)
            *(uint4*)(to_u + ((wrapped(first_new + w) * (HEADS * U_PLANES) + plane) * ROWS + offset)) =
                *(const uint4*)(own_u + plane * OWN_SIZE + w * OWN_STRIDE + offset);
        else
            *(uint4*)(o + (offset_of((int)start_now + w, HEADS * ROWS) + (own_row + offset))) =
                *(const uint4*)(own_v + w * OWN_STRIDE + offset);
    }
}
