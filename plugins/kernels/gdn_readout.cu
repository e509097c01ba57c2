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
#include "gdn_readout.cuh"
#include "readout_flush.cuh"
#include "readout_parts.cuh"
#include "readout_stage.cuh"

// Products of a row that lane 4 g + t passes on to the lane that solves for it: its own q and k, or all queries.
constexpr int STAGE_STRIDE = ONE ? 8 : QUERIES + 1;
constexpr int STAGED_SIZE = 8 * 2 * M_TILES * STAGE_STRIDE;  // of a warp
constexpr int AREA_SIZE = round_up(larger(WARPS * STAGED_SIZE * 4, FOLD_KEYS_SIZE), 16);

struct Shared {
    // The fold's keys, then staged products. With u behind them also the states of a prefill row.
    alignas(128) unsigned char area[AREA_SIZE];
    alignas(16) u16 u[larger(WARPS * U_SIZE, (STAGE_SIZE - AREA_SIZE) / 2)];
    alignas(16) activation_t k[TOKEN_ROWS * KEY_STRIDE];
    alignas(16) activation_t queries[QUERIES * KEY_STRIDE];
    alignas(16) u16 half_queries[QUERIES * KEY_STRIDE];
    alignas(16) activation_t v[WARPS * MAX_WINDOW * CTA_ROWS];
    alignas(16) unsigned char block_scales[NVFP4 ? WARPS * CTA_ROWS * BLOCK_SCALE_BYTES : 16];
    Gates gates[BLOCK_HEADS];
    float pairs[ONE ? 1 : WARPS * QUERIES * WINDOW_ROWS];  // coefficients of the window's u
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

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
    const u32 thread = threadIdx.x, first_index = blockIdx.x * WARPS, index = first_index + thread / 32;
    const int tid = thread, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int first_part = first_index, part = index;
    const int head = index / CTAS_PER_HEAD, group = first_index / CTAS_PER_HEAD / HEADS_PER_GROUP;
    const int first_row = index % CTAS_PER_HEAD * CTA_ROWS, block_row = first_part * CTA_ROWS;
    const int own_row = part * CTA_ROWS, k_column = group * COLUMNS;  // rows count through all heads
    const int u_column = head * U_PLANES * ROWS + first_row, tile_index = part * CTA_TILES;
    const bool first_of_group = first_index % (CTAS_PER_HEAD * HEADS_PER_GROUP) == 0;

    // All that is known before the slot, then all that the slot tells: nothing here waits for more than the row's slot.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    // The block that does the same part of a row AHEAD_ROWS further on will find its history in the second-level cache.
    const u32 later_row = blockIdx.y + AHEAD_ROWS;
    int later_slot = -1, later_seq_len = 0, later_position = 0;
    if (AHEAD_ROWS && later_row < gridDim.y) later_slot = state_batch_indices[later_row], later_seq_len = seq_lens[later_row];
    const bool has_slot = slot >= 0 && slot < num_slots;
    const int position_now = has_slot ? position_in[offset_of(slot, position_stride) + first_part * CTA_TILES] : 0;
    ReadoutRows readout_rows[NVFP4 ? M_TILES : 1];
    unsigned char* own_scales = shared.block_scales + (NVFP4 ? warp * (CTA_ROWS * BLOCK_SCALE_BYTES) : 0);
    u32 scale_of_row[2 * (ONE ? SHARES : M_TILES)];  // of rows 8 i + g, or of those that the lane solves for
    const auto load_readout = [&](int from_slot) {
        const StateRows rows = STATE_ROWS(from_slot).from(own_row);
        if constexpr (NVFP4) {
            const unsigned char* codes = lane_codes(rows);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) readout_rows[m].load(codes, m);
            for (int i = lane * 16; i < CTA_ROWS * BLOCK_SCALE_BYTES; i += 512)
                copy_async_16(own_scales + i, rows.block_scales + i, true);
        }
#pragma unroll
        for (int i = 0; i < 2 * (ONE ? SHARES : M_TILES); i++) {
            const int of_warp = ONE ? 2 * (t + i / 2 * 4) + i % 2 : i;
            scale_of_row[i] = !WIDE && of_warp < ROW_GROUPS ? rows.row_scales[8 * of_warp + g] : 127u;
        }
    };
    load_readout(has_slot ? slot : 0);
    if (later_slot >= 0 && later_slot < num_slots && later_seq_len > 0)
        later_position = position_in[offset_of(later_slot, position_stride) + first_part * CTA_TILES];
    // The window's gates and queries, as far as there are any.
    const bool readable = start >= 0 && window_length >= 0 && (long long)start + window_length <= num_tokens;
    const int readable_length = !readable ? 0 : window_length < MAX_WINDOW ? window_length : MAX_WINDOW;
    activation_t* own_v = shared.v + warp * (MAX_WINDOW * CTA_ROWS);
    for_window_chunks<CTA_ROWS, 32>(readable_length, lane, [&](int w, int offset) {
        copy_async_16(own_v + w * CTA_ROWS + offset, v + (offset_of(start + w, v_stride) + (own_row + offset)), true);
    });
    // The last warps have the gates of a head each, while the first ones normalise queries.
    const int first_head = first_index / CTAS_PER_HEAD, gate_head = first_head + WARPS - 1 - warp;
    const bool has_gates = gate_head <= (int)(first_index + WARPS - 1) / CTAS_PER_HEAD;
    u32 raw_a = 0, raw_b = 0;
    float log_A = 0.f, bias = 0.f;
    if (has_gates) {
        log_A = A_log[gate_head], bias = dt_bias[gate_head];
        if (lane < readable_length) {
            raw_a = a[offset_of(start + lane, a_stride) + gate_head];
            raw_b = b[offset_of(start + lane, b_stride) + gate_head];
        }
    }
#pragma unroll
    for (int i = 0; i < (QUERIES + WARPS - 1) / WARPS; i++) {
        const int n = i * WARPS + warp, w = n % MAX_WINDOW;
        if (QUERIES % WARPS && n >= QUERIES) break;
        const activation_t* from = n < MAX_WINDOW ? q + offset_of(start + w, q_stride) : k + offset_of(start + w, k_stride);
        normalize_row(shared.queries + n * KEY_STRIDE, shared.half_queries + n * KEY_STRIDE, from + k_column,
                      w < readable_length);
    }
    const Row row = make_row(slot, seq_len, start, window_length, position_now, num_tokens, num_slots, max_seq_len,
                             MAX_HISTORY);
    if (!row.active || row.length > MAX_WINDOW) copy_async_wait();
    if (!row.active) {
        if (row.error && tid == 0) atomic_or(error_flag, row.error);
        if (!row.in_range) return;
        for (int i = lane; i < row.length * (CTA_ROWS / 8); i += 32)
            *(uint4*)(o + offset_of(row.start + i / (CTA_ROWS / 8), HEADS * ROWS) + own_row + i % (CTA_ROWS / 8) * 8) =
                make_uint4(0, 0, 0, 0);
        return;
    }
    if (row.length > MAX_WINDOW) {
        if (skip_prefill) return;
        float* stage = (float*)shared.area;
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
    const int first_entry = (u32)row.checkpoint_position % RING_LEN;
    u16* own_u = shared.u + warp * U_SIZE;
    stage_u(own_u, ring_u_in + (offset_of(slot, ring_u_stride) + u_column), first_entry, history);
    float g_past = 0.f;
    if (has_gates && lane < history)
        g_past = ring_g_in[offset_of(slot, ring_g_stride) + (wrapped(first_entry + lane) * HEADS + gate_head)];
    stage_history<COLUMNS, KEY_STRIDE, GROUPS * COLUMNS, THREADS>(
        shared.k, ring_k_in + (offset_of(slot, ring_k_stride) + k_column), first_entry, history, history, tid);
    if (flush && row.checkpoint_position > 0 && lane == 0)
        prefetch(STATE_ROWS(slot).checkpoint + own_row * COLUMNS, CTA_ROWS * COLUMNS * sizeof(state_t));
    if (AHEAD_ROWS && later_position > 0 && later_seq_len - later_position <= MAX_HISTORY)
        prefetch_history(later_seq_len - later_position, (u32)later_position % RING_LEN,
                         ring_u_in + (offset_of(later_slot, ring_u_stride) + u_column),
                         ring_k_in + (offset_of(later_slot, ring_k_stride) + k_column), first_of_group);
    const int first_new = (u32)row.seq_len % RING_LEN;
    if (has_gates) {
        const float g_new = lane < length ? -expf(log_A) * softplus(activation_to_float(raw_a) + bias) : 0.f;
        shared.gates[gate_head - first_head].scan(g_past, g_new, activation_to_float(raw_b), history);
        if (gate_head * CTAS_PER_HEAD >= first_part && lane < length)
            ring_g[offset_of(slot, ring_g_stride) + (wrapped(first_new + lane) * HEADS + gate_head)] = g_new;
    }
    copy_async_wait();
    sync_threads();

    const Gates& gates = shared.gates[head - first_head];
    if (flush) {
        build_fold_keys((uint4*)shared.area, shared.k);
        sync_threads();
        float weights[4 * TOKEN_STEPS];  // of tokens 8 (i / 2) + 2 t + i % 2
#pragma unroll
        for (int i = 0; i < 4 * TOKEN_STEPS; i++) weights[i] = gates.past[i / 2 * 8 + 2 * t + i % 2];
        const auto own_values = [&](int group, int step, float(&values)[4]) {
            u32 words[U_PLANES][2];
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++)
                load_matrix_x2_transposed(words[plane], own_u + (plane * TOKEN_ROWS + 16 * step + lane % 16) * OWN_STRIDE +
                                                            8 * group);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                values[i] = i % 2 ? bf16_high(words[0][i / 2]) : bf16_low(words[0][i / 2]);
                if (U_PLANES == 2)
                    values[i] += i % 2 ? bf16_high(words[U_PLANES - 1][i / 2]) : bf16_low(words[U_PLANES - 1][i / 2]);
                values[i] *= weights[4 * step + i];
            }
        };
        fold_rows(own_values, (const uint4*)shared.area, STATE_ROWS(slot).from(own_row), row.checkpoint_position > 0,
                  gates.history, first_row, ROUNDING_KEY(head, row.seq_len));
        sync_threads();
        // An empty history from here on, and the readout as it has been stored.
        load_readout(slot);
        for (int i = lane; i < U_SIZE / 8; i += 32) ((uint4*)own_u)[i] = make_uint4(0, 0, 0, 0);
        history = 0;
        copy_async_wait();
        sync_warp();
    }

    // Computed again from these: addresses kept until here would cost registers.
    u32 slot_now = slot, start_now = start;
    hold_until_here(slot_now), hold_until_here(start_now);
    const StateRows own_rows = STATE_ROWS((int)slot_now).from(own_row);
    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    if (first_of_group)
        for_window_chunks<COLUMNS, THREADS>(length, tid, [&](int w, int offset) {
            *(uint4*)(ring_k + (offset_of((int)slot_now, ring_k_stride) +
                                (wrapped(first_new + w) * (GROUPS * COLUMNS) + k_column + offset))) =
                *(const uint4*)(shared.queries + (MAX_WINDOW + w) * KEY_STRIDE + offset);
        });
    if ((flush || row.seq_len == 0) && lane < CTA_TILES)
        position[offset_of((int)slot_now, position_stride) + tile_index + lane] = row.seq_len;

    // Coefficients of u: of the history for the matrix unit, of the window for the lanes that solve.
    Scores scores;
    scores.compute(shared.k, (int)(shared.queries - shared.k), history);
    SplitPairs coefficients[QUERY_TILES][TOKEN_STEPS];
    float* pairs = shared.pairs + (ONE ? 0 : warp * QUERIES * WINDOW_ROWS);
    float pair_of_one = 0.f;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        float past[2], end[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int query = query_of(n, 2 * t + e);
            end[e] = gates.prefix[query % MAX_WINDOW];
            past[e] = gates.window[query % MAX_WINDOW] * (query < MAX_WINDOW ? QUERY_SCALE : 1.f);
        }
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            float c[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = 16 * step + i / 2 * 8 + g, j = token - history, e = i % 2;
                const float score = scores.value[step][n][i];
                c[i] = gates.past[token] * past[e] * score;
                if (j >= 0) c[i] = 0.f;
                if (ONE && e == 0) pair_of_one += j == 0 ? score : 0.f;
                if constexpr (!ONE) {
                    const int query = n * 8 + 2 * t + e, w = query % MAX_WINDOW;
                    const bool is_output = query < MAX_WINDOW, used = j < w || (is_output && j == w);
                    const float exponent = end[e] - gates.prefix[j < 0 || j >= MAX_WINDOW ? 0 : j];
                    if (query < QUERIES && j >= 0 && j < WINDOW_ROWS)
                        pairs[query * WINDOW_ROWS + j] =
                            used ? (j == w ? 1.f : decay_of(exponent)) * (is_output ? QUERY_SCALE : 1.f) * score : 0.f;
                }
            }
            coefficients[n][step].split(c);
        }
    }
    if constexpr (ONE) {
        // q . k: the only token of the window is the one behind the history, of which lane 4 g has query 0.
        pair_of_one = QUERY_SCALE * shuffle_from(pair_of_one, history % 8 * 4);
    }

    const bool has_state = row.checkpoint_position > 0 || flush;
    float* stage = (float*)shared.area + warp * STAGED_SIZE;
    float past_sum[ONE ? SHARES : 1][4] = {};  // a window of one token: of rows 16 m + g and + 8, q and k each
    StateQueries state_queries;
    state_queries.set(shared.half_queries);
    // What turns products into outputs and predictions, of queries 2 t and 2 t + 1 of every eight.
    float factor[QUERY_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * QUERY_TILES; i++) {
        const int query = query_of(i / 2, 2 * t + i % 2);
        factor[i / 2][i % 2] = (flush ? gates.window : gates.all)[query % MAX_WINDOW] * (query < MAX_WINDOW ? QUERY_SCALE : 1.f);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float product[QUERY_TILES][4] = {}, exact[QUERY_TILES][4] = {};
        if (has_state) {
            LaneScales scales;
            scales.load(own_scales, m);
            if constexpr (!NVFP4) readout_rows[0].load(lane_codes(own_rows), m);
            multiply_readout(product, readout_rows[NVFP4 ? m : 0], scales, state_queries);
            if constexpr (U_FROM_CHECKPOINT) dot_checkpoint(exact, own_rows, m, shared.queries);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!rows_exist(m, half)) continue;
            float* staged = stage + (16 * m + 8 * half + g) * STAGE_STRIDE;
            if constexpr (ONE) {
                if (U_FROM_CHECKPOINT) product[0][2 * half + 1] = t == 0 ? exact[0][2 * half + 1] : 0.f;
                *(float2*)(staged + 2 * t) = make_float2(product[0][2 * half], product[0][2 * half + 1]);
            } else {
                const float unit = READOUT_UNIT * e4m3_scale((unsigned char)scale_of_row[ONE ? 0 : 2 * m + half]);
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int query = n * 8 + 2 * t + e;
                        const bool from_checkpoint = U_FROM_CHECKPOINT && query >= MAX_WINDOW;
                        const float state = from_checkpoint ? exact[n][2 * half + e] : product[n][2 * half + e] * unit;
                        product[n][2 * half + e] = has_state ? state * factor[n][e] : 0.f;
                    }
            }
        }
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++)
            if constexpr (ONE) {
                // Only the columns of the lanes that solve for these rows.
                add_history(past_sum[ONE ? m / 4 : 0], own_u, coefficients[0][step].masked(g / 2 == m % 4), step, m);
            } else {
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) add_history(product[n], own_u, coefficients[n][step], step, m);
            }
        if constexpr (!ONE)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!rows_exist(m, half)) continue;
                float* staged = stage + (16 * m + 8 * half + g) * STAGE_STRIDE;
#pragma unroll
                for (int i = 0; i < 2 * QUERY_TILES; i++)
                    if (i / 2 * 8 + 2 * t + i % 2 < QUERIES)
                        staged[i / 2 * 8 + 2 * t + i % 2] = product[i / 2][2 * half + i % 2];
            }
    }
    sync_warp();

    // u of a row's tokens one after the other, then their outputs. What tokens behind the window's end compute is never
    // stored.
    float strength[MAX_WINDOW];
#pragma unroll
    for (int w = 0; w < MAX_WINDOW; w++) strength[w] = gates.beta[w];
    u16* to_u = ring_u + (offset_of((int)slot_now, ring_u_stride) + u_column);
#pragma unroll
    for (int share = 0; share < SHARES; share++) {
        const int m = t + 4 * share;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!rows_exist(m, half)) continue;
            const int row_of_warp = 16 * m + 8 * half + g;
            float outputs[MAX_WINDOW], u_new[MAX_WINDOW];
            const float* staged = stage + row_of_warp * STAGE_STRIDE;
            float predicted[MAX_WINDOW];
            if constexpr (ONE) {
                const float4 first = ((const float4*)staged)[0], second = ((const float4*)staged)[1];
                const float row_factor = READOUT_UNIT * e4m3_scale((unsigned char)scale_of_row[2 * share + half]);
                const float of_q = ((first.x + first.z) + (second.x + second.z)) * row_factor * factor[0][0];
                const float of_k = ((first.y + first.w) + (second.y + second.w)) *
                                   (U_FROM_CHECKPOINT ? factor[0][1] : row_factor * factor[0][1]);
                outputs[0] = past_sum[ONE ? share : 0][2 * half] + (has_state ? of_q : 0.f);
                predicted[0] = past_sum[ONE ? share : 0][2 * half + 1] + (has_state ? of_k : 0.f);
            } else {
#pragma unroll
                for (int w = 0; w < MAX_WINDOW; w++) outputs[w] = staged[w], predicted[w] = staged[MAX_WINDOW + w];
            }
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++) {
#pragma unroll
                for (int j = 0; j < w; j++) {
                    predicted[w] += pairs[(MAX_WINDOW + w) * WINDOW_ROWS + j] * u_new[j];
                    outputs[w] += pairs[w * WINDOW_ROWS + j] * u_new[j];
                }
                u_new[w] = strength[w] * (activation_to_float(own_v[w * CTA_ROWS + row_of_warp]) - predicted[w]);
                outputs[w] += (ONE ? pair_of_one : pairs[w * WINDOW_ROWS + w]) * u_new[w];
            }
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++) {
                if (w >= length) continue;
                const u16 high = float_to_bf16(u_new[w]);
                u16* at = to_u + (u32)(wrapped(first_new + w) * (HEADS * U_PLANES * ROWS) + row_of_warp);
                at[0] = high;
                if (U_PLANES == 2) at[(U_PLANES - 1) * ROWS] = float_to_bf16(u_new[w] - bits_to_float((u32)high << 16));
                o[offset_of((int)start_now + w, HEADS * ROWS) + (own_row + row_of_warp)] = float_to_activation(outputs[w]);
            }
        }
    }
}
