// Gated DeltaNet over a replayed history whose outputs read a low-precision copy of the state: decode and verify windows
// of up to MAX_WINDOW tokens, and longer (prefill) rows token by token. One thread block per (row of the batch, CTA_WARPS
// warps of CTA_ROWS state rows each). A step that flushes folds, and then goes on as if the history had been empty. The
// window's u solve a unit lower triangular system, one lane per state row. See plugins/reference/gdn.py and readout.cuh.
//
// Stamped in: NUM_K_HEADS, NUM_V_HEADS, HEAD_K_DIM, HEAD_V_DIM, ROW_TILES, CTA_ROWS, CTA_WARPS, BUFFER_LEN, MAX_WINDOW,
// STATE_FORMAT, STOCHASTIC, READOUT_FORMAT, ACTIVATION_FORMAT, U_PLANES, U_FROM_CHECKPOINT, BULK_COPY, MIN_CTAS,
// EARLY_16THS, ORDERED_ROWS, SHARED_BYTES.
#define HEADS NUM_V_HEADS
#define GROUPS NUM_K_HEADS
#define ROWS HEAD_V_DIM
#define COLUMNS HEAD_K_DIM
// head_k_dim^-1/2, applied to q in fp32.
#define QUERY_SCALE rsqrtf((float)COLUMNS)
#include "gdn_readout_rows.cuh"
#include "readout_parts.cuh"
#include "row_order.cuh"

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
    u32 early_rows[MAX_ORDERED_ROWS / 32];
    float pairs[ONE ? 1 : WARPS * QUERIES * WINDOW_ROWS];  // coefficients of the window's u
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// Two rows of the warp that one lane solves for: neighbours or, for a window of one token, those whose sums the lane has.
constexpr int ROW_STEP = ONE ? 8 : 1;
DEVICE int first_of_pair(int share) {
    const int lane = threadIdx.x % 32;
    return ONE ? 16 * (lane % 4 + 4 * share) + lane / 4 : 64 * share + 2 * lane;
}
DEVICE u32 load_pair(const u16* at) { return ONE ? at[0] | (u32)at[ROW_STEP] << 16 : *(const u32*)at; }
DEVICE void store_pair(u16* at, u32 word, bool both) {
    if constexpr (ONE) {
        at[0] = (u16)word;
        if (both) at[ROW_STEP] = (u16)(word >> 16);
    } else {
        *(u32*)at = word;
    }
}

// Folds a prefill row token by token, tile by tile, all warps on each. inputs(tile's first row among all heads', its head)
// and rows(the same row) say where, key(head) how to round.
template <class Inputs, class Rows, class Key>
DEVICE void prefill_tiles(float* stage, const Row& row, int block_row, activation_t* o, const Inputs& inputs,
                          const Rows& rows, const Key& key) {
    for (int tile = 0; tile < WARPS * CTA_TILES; tile++) {
        const int first = block_row + tile * TILE_ROWS, head = first / ROWS;
        const SerialInputs tile_inputs = inputs(first, head);
        const StateRows tile_rows = rows(first);
        const SerialStores stores = {nullptr, row.length, nullptr, 0, stage, tile_rows.checkpoint_scales};
        for (int r = threadIdx.x / 32 * 4; r < TILE_ROWS; r += WARPS * 4)
            serial_rows<4, false>(tile_inputs, row, r, tile_rows.checkpoint, stores,
                                  o + offset_of(row.start, HEADS * ROWS) + first, nullptr);
        sync_threads();
        store_staged_tile(stage, tile_rows, first % ROWS, key(head));
        sync_threads();
    }
}

// The readout of a warp's rows on its way: codes in registers where they are few, the scales of blocks in shared memory.
struct Readout {
    ReadoutRows rows[NVFP4 ? M_TILES : 1];
    // Of the rows that the lane solves for; or of rows 8 n + g where n % 4 is t, for all lanes of the quad.
    static constexpr int ROW_SCALES = ONE ? 2 * SHARES : (ROW_GROUPS + 3) / 4;
    u32 row_scales[ROW_SCALES];

    DEVICE_MEMBER void load(const StateRows& from, unsigned char* block_scales) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if constexpr (NVFP4) {
            const unsigned char* codes = lane_codes(from);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) rows[m].load(codes, m);
            for (int i = lane * 16; i < CTA_ROWS * BLOCK_SCALE_BYTES; i += 512)
                copy_async_16(block_scales + i, from.block_scales + i, true);
        }
#pragma unroll
        for (int i = 0; i < ROW_SCALES; i++) {
            const int row_group = ONE ? 2 * (t + i / 2 * 4) + i % 2 : 4 * i + t;
            row_scales[i] = !WIDE && row_group < ROW_GROUPS ? from.row_scales[8 * row_group + g] : 127u;
        }
    }
    // Of the i-th row that the lane solves for; or of its row of group i, for all lanes to call.
    DEVICE_MEMBER float scale(int i) const {
        const u32 bits = row_scales[(ONE ? i : i / 4) % ROW_SCALES];
        const float all = bits_to_float(bits);
        const u32 field = ONE ? bits : float_to_bits(shuffle_from(all, threadIdx.x % 32 / 4 * 4 + i % 4));
        return READOUT_UNIT * e4m3_scale((unsigned char)field);
    }

    // Products with all queries of rows 16 m + g and + 8.
    DEVICE_MEMBER void multiply(float (&product)[QUERY_TILES][4], const StateRows& from, const unsigned char* block_scales,
                                const StateQueries& queries, int m) {
        LaneScales scales;
        scales.load(block_scales, m);
        if constexpr (!NVFP4) rows[0].load(lane_codes(from), m);
        multiply_readout(product, rows[NVFP4 ? m : 0], scales, queries);
    }
};

// Products of the warp's rows of the state and all queries. For a window of one token they wait, without their rows' scales,
// in shared memory for the lanes that solve.
struct StateProducts {
    float value[ONE ? 1 : M_TILES][QUERY_TILES][4];

    // queries: as the ring has them, for products with the checkpoint.
    DEVICE_MEMBER void compute(float* stage, Readout& readout, const StateRows& from, const unsigned char* block_scales,
                               const StateQueries& state_queries, const activation_t* queries) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float product[QUERY_TILES][4], exact[QUERY_TILES][4];
            readout.multiply(product, from, block_scales, state_queries, m);
            if constexpr (U_FROM_CHECKPOINT) dot_checkpoint(exact, from, m, queries);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!rows_exist(m, half)) continue;
                if constexpr (ONE) {
                    if (U_FROM_CHECKPOINT) product[0][2 * half + 1] = t == 0 ? exact[0][2 * half + 1] : 0.f;
                    *(float2*)(stage + (16 * m + 8 * half + g) * STAGE_STRIDE + 2 * t) =
                        make_float2(product[0][2 * half], product[0][2 * half + 1]);
                } else {
                    const float unit = readout.scale(ONE ? 0 : 2 * m + half);
#pragma unroll
                    for (int i = 0; i < 2 * QUERY_TILES; i++) {
                        const int n = i / 2, e = i % 2;
                        const bool from_checkpoint = U_FROM_CHECKPOINT && n * 8 + 2 * t + e >= MAX_WINDOW;
                        value[ONE ? 0 : m][n][2 * half + e] =
                            from_checkpoint ? exact[n][2 * half + e] : product[n][2 * half + e] * unit;
                    }
                }
            }
        }
    }
};

// What the state and the history add up to, on its way to the lanes that solve.
struct Sums {
    float past[ONE ? SHARES : 1][4];  // of one token: the history's part, for the lane's own rows: q and k of each
    float factor[QUERY_TILES][2];     // decays and scale of queries 2 t and 2 t + 1 of every eight

    DEVICE_MEMBER void compute(float* stage, StateProducts& products, const float (&decays)[MAX_WINDOW], bool has_state,
                               const u16* u, const Coefficients& c) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4 * (ONE ? SHARES : 1); i++) past[i / 4][i % 4] = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * QUERY_TILES; i++) {
            const int query = query_of(i / 2, 2 * t + i % 2);
            factor[i / 2][i % 2] = decays[query % MAX_WINDOW] * query_scale(query);
        }
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            if constexpr (ONE) {
                // Only the columns of the lanes that solve for these rows.
#pragma unroll
                for (int step = 0; step < TOKEN_STEPS; step++)
                    add_history(past[ONE ? m / 4 : 0], u, c.past[0][step].masked(g / 2 == m % 4), step, m);
            } else {
                float(&sum)[QUERY_TILES][4] = products.value[ONE ? 0 : m];
#pragma unroll
                for (int i = 0; i < 4 * QUERY_TILES; i++)
                    sum[i / 4][i % 4] = has_state ? sum[i / 4][i % 4] * factor[i / 4][i % 2] : 0.f;
#pragma unroll
                for (int i = 0; i < TOKEN_STEPS * QUERY_TILES; i++)
                    add_history(sum[i % QUERY_TILES], u, c.past[i % QUERY_TILES][i / QUERY_TILES], i / QUERY_TILES, m);
#pragma unroll
                for (int i = 0; i < 4 * QUERY_TILES; i++) {
                    const int query = i / 4 * 8 + 2 * t + i % 2, half = i / 2 % 2;
                    if (rows_exist(m, half) && query < QUERIES)
                        stage[(16 * m + 8 * half + g) * STAGE_STRIDE + query] = sum[i / 4][i % 4];
                }
            }
        }
    }
    // Outputs and predictions of a row of the lane, from the state and the history.
    DEVICE_MEMBER void take(float (&outputs)[MAX_WINDOW], float (&predicted)[MAX_WINDOW], const float* stage, int row,
                            const Readout& readout, bool has_state, int share, int half) const {
        const float* staged = stage + row * STAGE_STRIDE;
        if constexpr (ONE) {
            const float4 first = ((const float4*)staged)[0], second = ((const float4*)staged)[1];
            const float unit = readout.scale(2 * share + half);
            const float of_q = ((first.x + first.z) + (second.x + second.z)) * unit * factor[0][0];
            const float of_k = ((first.y + first.w) + (second.y + second.w)) * (U_FROM_CHECKPOINT ? 1.f : unit) * factor[0][1];
            outputs[0] = past[ONE ? share : 0][2 * half] + (has_state ? of_q : 0.f);
            predicted[0] = past[ONE ? share : 0][2 * half + 1] + (has_state ? of_k : 0.f);
        } else {
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++) outputs[w] = staged[w], predicted[w] = staged[MAX_WINDOW + w];
        }
    }
};

// u of a row's tokens one after the other, then their outputs. What tokens behind the window's end compute is never stored.
DEVICE void solve(float (&outputs)[MAX_WINDOW], float (&u)[MAX_WINDOW], float (&predicted)[MAX_WINDOW],
                  const float (&v)[MAX_WINDOW], const float (&beta)[MAX_WINDOW], const float* pairs, float pair) {
#pragma unroll
    for (int w = 0; w < MAX_WINDOW; w++) {
#pragma unroll
        for (int j = 0; j < w; j++) {
            predicted[w] += pairs[(MAX_WINDOW + w) * WINDOW_ROWS + j] * u[j];
            outputs[w] += pairs[w * WINDOW_ROWS + j] * u[j];
        }
        u[w] = beta[w] * (v[w] - predicted[w]);
        outputs[w] += (ONE ? pair : pairs[w * WINDOW_ROWS + w]) * u[w];
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
    const u32 thread = threadIdx.x, first_index = blockIdx.x * WARPS, index = first_index + thread / 32;
    const int tid = thread, lane = thread % 32, warp = thread / 32, t = lane % 4;
    const int first_part = first_index, part = index;
    const int head = index / CTAS_PER_HEAD, group = first_index / CTAS_PER_HEAD / HEADS_PER_GROUP;
    const int first_row = index % CTAS_PER_HEAD * CTA_ROWS, block_row = first_part * CTA_ROWS;
    const int own_row = part * CTA_ROWS, k_column = group * COLUMNS;  // rows count through all heads
    const int u_column = head * U_PLANES * ROWS + first_row, tile_index = part * CTA_TILES;
    const bool first_of_group = first_index % (CTAS_PER_HEAD * HEADS_PER_GROUP) == 0;

    const int first_head = first_index / CTAS_PER_HEAD, gate_head = first_head + WARPS - 1 - warp;
    // The last warps have the gates of a head each, while the first ones normalise queries.
    const bool has_gates = gate_head <= (int)(first_index + WARPS - 1) / CTAS_PER_HEAD;
    unsigned char* own_scales = shared.block_scales + (NVFP4 ? warp * (CTA_ROWS * BLOCK_SCALE_BYTES) : 0);
    activation_t* own_v = shared.v + warp * (MAX_WINDOW * CTA_ROWS);
    const auto position_of = [&](int of_slot) {
        return position_in[offset_of(of_slot, position_stride) + first_part * CTA_TILES];
    };
    const auto ordered_row = [&] {
        return row_at(blockIdx.y, shared.early_rows, [&](u32 row) {
            const int slot = state_batch_indices[row], seq_len = seq_lens[row];
            return slot >= 0 && slot < num_slots && may_fold(seq_len, position_of(slot), window_lens[row]);
        });
    };
    u32 batch_row = blockIdx.y;
    bool is_placed = !rows_are_ordered();
    if (!is_placed && batch_row < early_places()) batch_row = ordered_row(), is_placed = true;
    Readout own_readout;
    Row row;
    for (;;) {
        // All that is known before the slot, then all that the slot tells: nothing here waits for more than the slot.
        const int slot = state_batch_indices[batch_row], seq_len = seq_lens[batch_row];
        const int start = window_starts[batch_row], window_length = window_lens[batch_row];
        const bool has_slot = slot >= 0 && slot < num_slots;
        const int position_now = has_slot ? position_of(slot) : 0;
        own_readout.load(STATE_ROWS(has_slot ? slot : 0).from(own_row), own_scales);
        // The window's v and queries, as far as there are any.
        const bool readable = start >= 0 && window_length >= 0 && (long long)start + window_length <= num_tokens;
        const int readable_length = !readable ? 0 : window_length < MAX_WINDOW ? window_length : MAX_WINDOW;
        for_window_chunks<CTA_ROWS, 32>(readable_length, lane, [&](int w, int offset) {
            copy_async_16(own_v + w * CTA_ROWS + offset, v + (offset_of(start + w, v_stride) + (own_row + offset)), true);
        });
        copy_async_commit();
#pragma unroll
        for (int i = 0; i < (QUERIES + WARPS - 1) / WARPS; i++) {
            const int n = i * WARPS + warp, w = n % MAX_WINDOW;
            if (QUERIES % WARPS && n >= QUERIES) break;
            const activation_t* from =
                n < MAX_WINDOW ? q + offset_of(start + w, q_stride) : k + offset_of(start + w, k_stride);
            normalize_row(shared.queries + n * KEY_STRIDE, shared.half_queries + n * KEY_STRIDE, from + k_column,
                          w < readable_length);
        }
        row = make_row(slot, seq_len, start, window_length, position_now, num_tokens, num_slots, max_seq_len, MAX_HISTORY);
        if (is_placed || !has_slot || !may_fold(seq_len, position_now, window_length)) break;
        // This row has gone to the front, and another one has come here.
        copy_async_wait();
        sync_threads();
        const u32 other = ordered_row();
        is_placed = true;
        if (other == batch_row) break;
        batch_row = other;
    }
    int slot = row.slot, start = row.start, seq_len = row.seq_len, length = row.length;
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
        const auto inputs = [&](int first, int tile_head) {
            return SerialInputs{
                q + offset_of(row.start, q_stride) + k_column, k + offset_of(row.start, k_stride) + k_column,
                v + offset_of(row.start, v_stride) + first, a + offset_of(row.start, a_stride) + tile_head,
                b + offset_of(row.start, b_stride) + tile_head, q_stride, k_stride, v_stride, a_stride, b_stride,
                ring_k_in + offset_of(slot, ring_k_stride) + k_column,
                ring_u_in + offset_of(slot, ring_u_stride) + tile_head * U_PLANES * ROWS + first % ROWS,
                ring_g_in + offset_of(slot, ring_g_stride) + tile_head, -expf(A_log[tile_head]), dt_bias[tile_head]};
        };
        prefill_tiles((float*)shared.area, row, block_row, o, inputs, [&](int first) { return STATE_ROWS(slot).from(first); },
                      [&](int tile_head) { return ROUNDING_KEY(tile_head, row.seq_len + row.length); });
        if (lane < CTA_TILES)
            position[offset_of(slot, position_stride) + tile_index + lane] = row.seq_len + row.length;
        return;
    }

    int history = seq_len - row.checkpoint_position;
    const bool flush = history > 0 && history + length > BUFFER_LEN;
    const int first_entry = (u32)row.checkpoint_position % RING_LEN;
    u16* own_u = shared.u + warp * U_SIZE;
    stage_u(own_u, ring_u_in + (offset_of(slot, ring_u_stride) + u_column), first_entry, history);
    float g_past = 0.f, log_A = 0.f, bias = 0.f;
    u32 raw_a = 0, raw_b = 0;
    if (has_gates) log_A = A_log[gate_head], bias = dt_bias[gate_head];
    if (has_gates && lane < length) {
        raw_a = a[offset_of(start + lane, a_stride) + gate_head];
        raw_b = b[offset_of(start + lane, b_stride) + gate_head];
    }
    if (has_gates && lane < history)
        g_past = ring_g_in[offset_of(slot, ring_g_stride) + (wrapped(first_entry + lane) * HEADS + gate_head)];
    stage_history<COLUMNS, KEY_STRIDE, GROUPS * COLUMNS, THREADS>(
        shared.k, ring_k_in + (offset_of(slot, ring_k_stride) + k_column), first_entry, history, history, tid);
    if (flush && row.checkpoint_position > 0 && lane == 0)
        prefetch(STATE_ROWS(slot).checkpoint + own_row * COLUMNS, CTA_ROWS * COLUMNS * sizeof(state_t));
    // The state's products need neither the history nor the gates, which are still on their way.
    copy_async_commit();
    copy_async_wait_but_last();
    sync_threads();
    StateQueries state_queries;
    state_queries.set(shared.half_queries);
    float* stage = (float*)shared.area + warp * STAGED_SIZE;
    StateProducts products;
    if (row.checkpoint_position > 0 && !flush)
        products.compute(stage, own_readout, STATE_ROWS(slot).from(own_row), own_scales, state_queries, shared.queries);
    if (has_gates) {
        const int first_new = (u32)seq_len % RING_LEN;
        // Held back, or else comparisons with them are kept in registers from further up.
        u32 history_now = history, length_now = length;
        hold_until_here(history_now), hold_until_here(length_now);
        const float g_new = lane < (int)length_now ? -expf(log_A) * softplus(activation_to_float(raw_a) + bias) : 0.f;
        shared.gates[gate_head - first_head].scan(g_past, g_new, activation_to_float(raw_b), (int)history_now);
        if (gate_head * CTAS_PER_HEAD >= first_part && lane < (int)length_now)
            ring_g[offset_of(slot, ring_g_stride) + (wrapped(first_new + lane) * HEADS + gate_head)] = g_new;
    }
    copy_async_wait();
    sync_threads();

    const Gates& gates = shared.gates[head - first_head];
    if (flush) {
        build_fold_keys((uint4*)shared.area, shared.k);
        sync_threads();
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
                values[i] *= gates.past[16 * step + i / 2 * 8 + 2 * t + i % 2];
            }
        };
        fold_rows(own_values, (const uint4*)shared.area, STATE_ROWS(slot).from(own_row), row.checkpoint_position > 0,
                  gates.history, first_row, ROUNDING_KEY(head, row.seq_len));
        sync_threads();
        // An empty history from here on, and the readout as it has been stored.
        slot = state_batch_indices[batch_row];
        own_readout.load(STATE_ROWS(slot).from(own_row), own_scales);
        for (int i = lane; i < U_SIZE / 8; i += 32) ((uint4*)own_u)[i] = make_uint4(0, 0, 0, 0);
        history = 0;
        copy_async_wait();
        sync_warp();
        state_queries.set(shared.half_queries);
        products.compute(stage, own_readout, STATE_ROWS(slot).from(own_row), own_scales, state_queries, shared.queries);
    }

    if (!ONE || flush) {
        // Kept until here all that would cost registers.
        slot = state_batch_indices[batch_row], seq_len = seq_lens[batch_row];
        start = window_starts[batch_row], length = window_lens[batch_row];
    }
    u32 slot_now = slot, start_now = start, thread_now = threadIdx.x;
    hold_until_here(slot_now), hold_until_here(start_now), hold_until_here(thread_now);
    const u32 index_now = blockIdx.x * WARPS + thread_now / 32;
    const int first_new = (u32)seq_len % RING_LEN;
    // Append the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    if (first_of_group)
        for_window_chunks<COLUMNS, THREADS>(length, tid, [&](int w, int offset) {
            *(uint4*)(ring_k + (offset_of((int)slot_now, ring_k_stride) +
                                (wrapped(first_new + w) * (GROUPS * COLUMNS) + k_column + offset))) =
                *(const uint4*)(shared.queries + (MAX_WINDOW + w) * KEY_STRIDE + offset);
        });
    if ((flush || seq_len == 0) && lane < CTA_TILES)
        position[offset_of((int)slot_now, position_stride) + index_now * CTA_TILES + lane] = seq_len;

    Scores scores;
    scores.compute(shared.k, (int)(shared.queries - shared.k), history);
    float* pairs = shared.pairs + (ONE ? 0 : warp * QUERIES * WINDOW_ROWS);
    Coefficients coefficients;
    coefficients.compute(scores, gates, pairs, history);
    const bool has_state = row.checkpoint_position > 0 || flush;
    Sums sums;
    sums.compute(stage, products, flush ? gates.window : gates.all, has_state, own_u, coefficients);
    sync_warp();

    u16* to_u = ring_u + (offset_of((int)slot_now, ring_u_stride) +
                          (index_now / CTAS_PER_HEAD * (U_PLANES * ROWS) + index_now % CTAS_PER_HEAD * CTA_ROWS));
#pragma unroll
    for (int share = 0; share < SHARES; share++) {
        const int first = first_of_pair(share);
        const bool both = first + ROW_STEP < CTA_ROWS;
        if (first >= CTA_ROWS) continue;
        float outputs[2][MAX_WINDOW], u[2][MAX_WINDOW];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float predicted[MAX_WINDOW], values[MAX_WINDOW];
            sums.take(outputs[half], predicted, stage, first + half * ROW_STEP, own_readout, has_state, share, half);
#pragma unroll
            for (int w = 0; w < MAX_WINDOW; w++) {
                const u32 pair = load_pair(own_v + w * CTA_ROWS + first);
                values[w] = half ? activation_high(pair) : activation_low(pair);
            }
            solve(outputs[half], u[half], predicted, values, gates.beta, pairs, coefficients.pair);
        }
#pragma unroll
        for (int w = 0; w < MAX_WINDOW; w++) {
            if (w >= length) continue;
            u16* at = to_u + (u32)(wrapped(first_new + w) * (HEADS * U_PLANES * ROWS) + first);
            const u32 high = pack_bf16(u[0][w], u[1][w]);
            store_pair(at, high, both);
            if (U_PLANES == 2)
                store_pair(at + (U_PLANES - 1) * ROWS, pack_bf16(u[0][w] - bf16_low(high), u[1][w] - bf16_high(high)), both);
            store_pair(o + (offset_of((int)start_now + w, HEADS * ROWS) + (index_now * CTA_ROWS + first)),
                       pack_activation(outputs[0][w], outputs[1][w]), both);
        }
    }
}
