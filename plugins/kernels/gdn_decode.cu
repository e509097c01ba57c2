// Gated DeltaNet, one new token per row (MAX_WINDOW 1) and an fp32 state: gdn_window.cu with everything laid out for
// one q and one k. The state products run on the plain arithmetic units, eight lanes a row, so that shared memory is
// read without bank conflicts; what a warp needs besides the tile it fetches itself, so that the block meets at one
// barrier. Prefill rows as there. One thread block per (row of the batch, value head, CTA_ROWS rows of the state).
//
// Stamped in: as for gdn_window.cu.
#include "gdn_replay.cuh"
#include "gdn_parameters.cuh"
#include "gdn_rows.cuh"

static_assert(MAX_WINDOW == 1 && STATE_FORMAT == FORMAT_FP32, "one token");

constexpr int K_CHUNKS = COLUMNS / 8;  // of 16 bytes
// The lanes that normalise q, and as many for k, take a chunk each in every step.
constexpr int NORM_STEPS = (K_CHUNKS + 15) / 16;
// k . q and k . k of the history: a warp takes every WARPS-th group of 32 columns, of which a lane takes 8 neighbours.
constexpr int SCORE_GROUPS = (COLUMNS + 31) / 32;
constexpr int SCORE_STEPS = (SCORE_GROUPS + WARPS - 1) / WARPS;
constexpr int PARTIALS = SCORE_GROUPS < WARPS ? SCORE_GROUPS : WARPS;  // warps that have one
// The state product: lane l takes columns l % 8 * LANE_COLUMNS .. of every group of 8 * LANE_COLUMNS.
constexpr int DOT_COLUMNS = 8 * LANE_COLUMNS;
constexpr int DOT_STEPS = (COLUMNS + DOT_COLUMNS - 1) / DOT_COLUMNS;
constexpr int GATE_WARP = 1 % WARPS;
// Blocks of columns that a fold works on at once. H200, qwen122b, batch 256, every row flushing: 605 us at 1, 600 at 2.
constexpr int DECODE_FOLD_UNROLL = 2;

struct Shared {
    alignas(128) state_t tile[PADDED_ROWS * COLUMNS];
    alignas(16) u16 u[WARPS][U_ROWS * 16];
    alignas(16) activation_t k[HISTORY_ROWS * TOKEN_STRIDE];   // of a history that is folded
    alignas(16) activation_t queries[WARPS][2][COLUMNS];       // q and k, every warp its own
    alignas(8) float partial[PARTIALS][2][16 * HISTORY_TILES];  // of q . k and k . k; row 0: of the new token's k
    float g, beta;
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

DEVICE uint4 load_16(const activation_t* from, bool valid) {
    return valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}
// First of the lane's columns in step s of its warp's scores.
DEVICE int score_column(int s) { return (threadIdx.x / 32 + s * WARPS) * 32 + 8 * (threadIdx.x % 4); }
DEVICE bool score_column_exists(int s) {
    return (SCORE_GROUPS % WARPS == 0 && COLUMNS % 32 == 0) || score_column(s) < COLUMNS;
}

// Row that a lane finishes among its warp's 16; lanes 2 i and 2 i + 1 share one, for q and k.
DEVICE u32 own_row() { return (threadIdx.x / 2 % 4) * 4 + threadIdx.x % 32 / 8; }

// The lane's q or k of `queries` at `column`.
DEVICE void load_query(const activation_t* queries, int column, float (&values)[LANE_COLUMNS]) {
    u32 pairs[LANE_COLUMNS / 2];
    load_words(queries + column, pairs);
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 2; i++)
        values[2 * i] = activation_low(pairs[i]), values[2 * i + 1] = activation_high(pairs[i]);
}
// sum += s . query over the lane's columns, in one order wherever it runs.
DEVICE void add_columns(float& sum, const float (&s)[LANE_COLUMNS], const float (&query)[LANE_COLUMNS]) {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) sum = multiply_add(s[i], query[i], sum);
}

// The state's product with q (even lanes) or k for the lane's own row. Partial sums of eight lanes are added in pairs
// that lie 4, 2 and 1 apart, as `fold_and_dot` does.
DEVICE float dot(const state_t* tile, const activation_t* queries) {
    const u32 lane = threadIdx.x % 32, column = lane % 8 * LANE_COLUMNS;
    const state_t* rows = tile + ((threadIdx.x / 32) * 16 + lane / 8) * COLUMNS + column;
    float sum[4][2] = {};
#pragma unroll
    for (int s = 0; s < DOT_STEPS; s++)
        if (COLUMNS % DOT_COLUMNS == 0 || s * DOT_COLUMNS + column < COLUMNS) {
            float q[LANE_COLUMNS], k[LANE_COLUMNS];
            load_query(queries, s * DOT_COLUMNS + column, q);
            load_query(queries + COLUMNS, s * DOT_COLUMNS + column, k);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float values[LANE_COLUMNS];
                load_lane_columns(rows + r * 4 * COLUMNS + s * DOT_COLUMNS, values);
                add_columns(sum[r][0], values, q);
                add_columns(sum[r][1], values, k);
            }
        }
    const bool upper = lane & 4, second = lane & 2, is_k = lane & 1;
    float half[2][2], row[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float kept = upper ? sum[2 + i / 2][i % 2] : sum[i / 2][i % 2];
        half[i / 2][i % 2] = kept + shuffle_xor(upper ? sum[i / 2][i % 2] : sum[2 + i / 2][i % 2], 4);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        row[i] = (second ? half[1][i] : half[0][i]) + shuffle_xor(second ? half[0][i] : half[1][i], 2);
    return (is_k ? row[1] : row[0]) + shuffle_xor(is_k ? row[0] : row[1], 1);
}

// Folds the history, stores the state and returns what `dot` does of the stored state.
DEVICE float fold_and_dot(const state_t* tile, state_t* global, bool has_state, float decay,
                          const float (&weights)[HISTORY_TILES][4], const u16* u, const activation_t* tokens,
                          const activation_t* queries) {
    const u32 lane = threadIdx.x % 32, t = lane % 4;
    // Rows g and g + 8; blocks of columns alternate between two sums, which two lanes hold in `dot`.
    float sum[2][2] = {}, next[2][2] = {};
    const auto multiply = [&](int block, const float(&s0)[LANE_COLUMNS], const float(&s1)[LANE_COLUMNS]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float query[LANE_COLUMNS];
            load_query(queries + i * COLUMNS, block * BLOCK_COLUMNS + (int)t * LANE_COLUMNS, query);
            float now[2] = {sum[0][i], sum[1][i]};
            add_columns(now[0], s0, query);
            add_columns(now[1], s1, query);
            sum[0][i] = next[0][i], sum[1][i] = next[1][i], next[0][i] = now[0], next[1][i] = now[1];
        }
    };
    FoldedU folded;
    folded.load(u, weights);
    fold_rows<DECODE_FOLD_UNROLL>(tile, global, has_state, decay, folded, tokens, multiply);
    float total[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float& value = total[i / 2][i % 2];
        value = sum[i / 2][i % 2] + next[i / 2][i % 2];
        value += shuffle_xor(value, 2);
        value += shuffle_xor(value, 1);
    }
    const u32 own = own_row(), from = own % 8 * 4;
    const float low[2] = {shuffle_from(total[0][0], from), shuffle_from(total[0][1], from)};
    const float high[2] = {shuffle_from(total[1][0], from), shuffle_from(total[1][1], from)};
    return own < 8 ? (lane & 1 ? low[1] : low[0]) : (lane & 1 ? high[1] : high[0]);
}

// The history's part of what q (even lanes) and k read for the lane's own row, decayed to the end of the history.
DEVICE float history_product(const float (*partial)[2][16 * HISTORY_TILES], const float (&weights)[HISTORY_TILES][4],
                             const u16* u) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float sum[1][4] = {};
#pragma unroll
    for (int m = 0; m < HISTORY_TILES; m++) {
        float value[1][4] = {};
#pragma unroll
        for (int p = 0; p < PARTIALS; p++) {
            const float* from = partial[p][g % 2] + m * 16 + 2 * t;
            const float2 low = *(const float2*)from, high = *(const float2*)(from + 8);
            value[0][0] += low.x, value[0][1] += low.y, value[0][2] += high.x, value[0][3] += high.y;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) value[0][i] *= weights[m][i];
        add_history(sum, value, u, u_of_lane(), m);
    }
    // Lane 4 g + t holds q and k of rows g and g + 8.
    const float chosen = t == 0 ? sum[0][0] : t == 1 ? sum[0][1] : t == 2 ? sum[0][2] : sum[0][3];
    const u32 own = own_row();
    return shuffle_from(chosen, own % 8 * 4 + own / 8 * 2 + lane % 2);
}

KERNEL(THREADS, MIN_CTAS)
gdn_decode(ENTRY_IN, ENTRY_SCALARS, ENTRY_OUT) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const u32 from_end = THREADS - 1 - tid;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS, tile_index = block.tile;
    const int k_column = block.group * COLUMNS, v_column = block.head * ROWS + block.first_row;
    const int u_column = block.head * U_PLANES * ROWS + block.first_row;

    wait_for_previous_grid();
    // Blocks of the next grid may take places as they fall free: from the start where all blocks of this one run at
    // once and nothing competes with them, else late (H200, qwen4b, batch 256, a flush of every row: 302.2 us from the
    // barrier on, 303.4 from the start).
    const bool runs_at_once = gridDim.y <= AHEAD_ROWS;
    if (runs_at_once) let_next_grid_start();
    // All that is known before the slot, then all that the slot tells, then the tile: nothing here waits for more than
    // the row's slot. A fresh sequence ignores the tile.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const float log_A = A_log[block.head], bias = dt_bias[block.head];
    const LaterRow later = look_ahead(seq_lens, state_batch_indices, num_slots);
    const bool has_slot = slot >= 0 && slot < num_slots;
    const state_t* slot_state = checkpoint_in + (offset_of(slot, checkpoint_stride) + state_offset);
    int tile_position = 0, later_position = 0;
    if (has_slot) {
        tile_position = position_in[offset_of(slot, position_stride) + tile_index];
        tile_copy_start(shared.tile, slot_state, &shared.barrier);
    }
    if (later.exists) later_position = position_in[offset_of(later.slot, position_stride) + tile_index];

    // The token's own inputs travel while the checkpoint position does. They are widened where they are used: here that
    // would wait for them. Lanes 0 to 15 take q, the others k.
    const bool decodes = window_length == 1 && start >= 0 && start < num_tokens;
    const bool is_k = lane >= 16;
    const activation_t* new_query = (is_k ? k : q) + (offset_of(start, is_k ? k_stride : q_stride) + k_column);
    uint4 raw[NORM_STEPS];
#pragma unroll
    for (int s = 0; s < NORM_STEPS; s++) {
        const u32 chunk = lane % 16 + 16 * s;
        raw[s] = load_16(new_query + chunk * 8, decodes && (K_CHUNKS % 16 == 0 || chunk < K_CHUNKS));
    }
    const u32 own = warp * 16 + own_row();
    const bool owns = decodes && (CTA_ROWS % 16 == 0 || own < CTA_ROWS);
    u32 own_v = owns ? v[offset_of(start, v_stride) + (v_column + (int)own)] : 0;
    u32 raw_a = 0, raw_b = 0;
    if (decodes && warp == GATE_WARP) {
        raw_a = a[offset_of(start, a_stride) + block.head];
        raw_b = b[offset_of(start, b_stride) + block.head];
    }
    // Row k of the history is the token HISTORY_ROWS - k before the new one, so its ring entry does not depend on the
    // checkpoint position, and where to find it is known before; rows before the checkpoint are no history.
    const activation_t* slot_ring_k = ring_k_in + (offset_of(slot, ring_k_stride) + k_column);
    const u16* slot_ring_u = ring_u_in + (offset_of(slot, ring_u_stride) + u_column);
    const float* slot_ring_g = ring_g_in + (offset_of(slot, ring_g_stride) + block.head);
    const int new_entry = (u32)seq_len % RING_LEN;
    const auto entry_of = [&](int index) {
        const int e = new_entry - HISTORY_ROWS + index;
        return e < 0 ? e + RING_LEN : e;
    };
    const float* from_g = computed(slot_ring_g + entry_of(lane) * HEADS);
    const activation_t* from_k[HISTORY_BLOCKS];
#pragma unroll
    for (int r = 0; r < HISTORY_BLOCKS; r++)
        from_k[r] = computed(slot_ring_k + (entry_of(8 * r + g) * (GROUPS * COLUMNS) + score_column(0)));
    constexpr int U_CHUNKS = U_PLANES * CTA_ROWS / 8, U_STEPS = (HISTORY_ROWS * U_CHUNKS + THREADS - 1) / THREADS;
    const u16* from_u[U_STEPS];
#pragma unroll
    for (int s = 0; s < U_STEPS; s++) {
        const u32 i = s * THREADS + tid;
        const int plane = i % U_CHUNKS / (CTA_ROWS / 8), chunk = i % (CTA_ROWS / 8);
        const int entry = entry_of(i / U_CHUNKS);
        from_u[s] = computed(slot_ring_u + (entry * (HEADS * U_PLANES * ROWS) + plane * ROWS + chunk * 8));
    }

    activation_t* output = o + v_column;
    const int c = seq_len ? tile_position : 0, history = seq_len - c, first = HISTORY_ROWS - history;
    // The ordinary row, in few instructions; make_row says what is wrong with another.
    if (!has_slot || !decodes || (u32)seq_len >= (u32)max_seq_len || (u32)seq_len - (u32)c > (u32)MAX_HISTORY) {
        const Row row = make_row(slot, seq_len, start, window_length, tile_position, num_tokens, num_slots, max_seq_len,
                                 MAX_HISTORY);
        const SerialInputs inputs =
            SERIAL_INPUTS(start, slot, block.head, k_column, v_column, u_column, -expf(log_A), bias);
        copy_async_wait();
        sync_threads();
        if (has_slot) tile_copy_wait(&shared.barrier);
        finish_other_row(row, skip_prefill, inputs, slot_state,
                         checkpoint + (offset_of(slot, checkpoint_stride) + state_offset),
                         position + (offset_of(slot, position_stride) + tile_index), output, error_flag);
        return;
    }

    const bool flush = history > 0 && history + 1 > BUFFER_LEN;
    const float past_g = (int)lane >= first && lane < HISTORY_ROWS ? *from_g : 0.f;
    uint4 past_k[SCORE_STEPS][HISTORY_BLOCKS];
#pragma unroll
    for (int r = 0; r < HISTORY_BLOCKS; r++)
#pragma unroll
        for (int s = 0; s < SCORE_STEPS; s++)
            past_k[s][r] = load_16(from_k[r] + s * WARPS * 32, 8 * r + (int)g >= first && score_column_exists(s));
#pragma unroll
    for (int s = 0; s < U_STEPS; s++) {
        const u32 i = s * THREADS + tid;
        const int index = i / U_CHUNKS, plane = i % U_CHUNKS / (CTA_ROWS / 8), chunk = i % (CTA_ROWS / 8);
        if (HISTORY_ROWS * U_CHUNKS % THREADS == 0 || index < HISTORY_ROWS)
            copy_async_16(shared.u[chunk / 2] + u_offset(index, plane, chunk % 2), from_u[s], index >= first);
    }
    if (warp == GATE_WARP) {
        const float g_new = -expf(log_A) * softplus(activation_to_float(raw_a) + bias);
        const float beta = sigmoid(activation_to_float(raw_b));
        if (lane == 0) shared.g = g_new, shared.beta = beta;
    }

    // L2-normalises q and k, rounded as the ring keeps them.
    float norm = 0.f;
#pragma unroll
    for (int s = 0; s < NORM_STEPS; s++) {
        const u32 words[4] = {raw[s].x, raw[s].y, raw[s].z, raw[s].w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            norm = multiply_add(activation_low(words[e]), activation_low(words[e]), norm);
            norm = multiply_add(activation_high(words[e]), activation_high(words[e]), norm);
        }
    }
#pragma unroll
    for (int mask = 8; mask; mask /= 2) norm += shuffle_xor(norm, mask);
    const float scale = rsqrtf(norm + L2_NORM_EPS);
    activation_t* queries = shared.queries[warp][0];
#pragma unroll
    for (int s = 0; s < NORM_STEPS; s++) {
        const u32 words[4] = {raw[s].x, raw[s].y, raw[s].z, raw[s].w};
        u32 done[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            done[e] = pack_activations(activation_low(words[e]) * scale, activation_high(words[e]) * scale);
        raw[s] = make_uint4(done[0], done[1], done[2], done[3]);
        const u32 chunk = lane % 16 + 16 * s;
        if (K_CHUNKS % 16 == 0 || chunk < K_CHUNKS) *(uint4*)(queries + (is_k ? COLUMNS : 0) + chunk * 8) = raw[s];
    }
    sync_warp();

    // Lane k: decay behind history token k. Then those of the tokens that the lane has in matrix operands.
    float suffix = past_g;
#pragma unroll
    for (int delta = 1; delta < HISTORY_ROWS; delta *= 2) {
        const float after = shuffle_down(suffix, delta);
        if (lane + delta < 32) suffix += after;
    }
    const float total = shuffle_from(suffix, 0), shifted = shuffle_down(suffix, 1);
    const float behind = (int)lane >= first && lane < HISTORY_ROWS ? decay_of(lane < 31 ? shifted : 0.f) : 0.f;
    float weights[HISTORY_TILES][4];
#pragma unroll
    for (int m = 0; m < HISTORY_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) weights[m][i] = shuffle_from(behind, m * 16 + i / 2 * 8 + 2 * t + i % 2);

    // The warp's columns of k . q and k . k: token rows against q in even columns, k in odd ones. A history that is not
    // folded leaves row 0 free: it stands for the new token.
    float score[HISTORY_TILES][4] = {};
#pragma unroll
    for (int s = 0; s < SCORE_STEPS; s++) {
        const int column = score_column_exists(s) ? score_column(s) : 0;
        const uint4 query = load_16(queries + g % 2 * COLUMNS + column, score_column_exists(s));
        const uint4 key = load_16(queries + COLUMNS + column, score_column_exists(s));
#pragma unroll
        for (int m = 0; m < HISTORY_TILES; m++) {
            constexpr int LAST = HISTORY_BLOCKS - 1;
            const uint4 low = m == 0 && g == 0 ? key : past_k[s][2 * m];
            const uint4 high = 2 * m < LAST ? past_k[s][2 * m < LAST ? 2 * m + 1 : LAST] : make_uint4(0, 0, 0, 0);
            mma_16bit<ACTIVATION_FORMAT>(score[m], low.x, high.x, low.y, high.y, query.x, query.y);
            mma_16bit<ACTIVATION_FORMAT>(score[m], low.z, high.z, low.w, high.w, query.z, query.w);
        }
    }
    if (warp < PARTIALS)
#pragma unroll
        for (int m = 0; m < HISTORY_TILES; m++) {
            const float value = t == 0 ? score[m][0] : t == 1 ? score[m][1] : t == 2 ? score[m][2] : score[m][3];
            shared.partial[warp][t % 2][m * 16 + t / 2 * 8 + g] = value;
        }
    if (flush)
#pragma unroll
        for (int s = 0; s < SCORE_STEPS; s++) {
            if (!score_column_exists(s)) continue;
#pragma unroll
            for (int r = 0; r < HISTORY_BLOCKS; r++)
                *(uint4*)(shared.k + (8 * r + g) * TOKEN_STRIDE + score_column(s)) = past_k[s][r];
        }
    copy_async_wait();  // of u, and of the tile where there is no copy engine
    sync_threads();
    if (!runs_at_once) let_next_grid_start();

    hold_until_here(own_v);
    // Append the token to the ring, whose entry is no row's history yet, so nobody reads it during this launch. Every
    // thread has read the old position.
    const float g_new = shared.g, beta = shared.beta;
    if (block.first_of_group && warp == 0 && is_k) {
        activation_t* to = ring_k + (offset_of(slot, ring_k_stride) + (new_entry * (GROUPS * COLUMNS) + k_column));
#pragma unroll
        for (int s = 0; s < NORM_STEPS; s++) {
            const u32 chunk = lane % 16 + 16 * s;
            if (K_CHUNKS % 16 == 0 || chunk < K_CHUNKS) *(uint4*)(to + chunk * 8) = raw[s];
        }
    }
    if (block.first_of_head && from_end == 0)
        ring_g[offset_of(slot, ring_g_stride) + (new_entry * HEADS + block.head)] = g_new;
    if ((flush || seq_len == 0) && from_end < CTA_TILES)
        position[offset_of(slot, position_stride) + (tile_index + (int)from_end)] = seq_len;
    if (later.exists)
        prefetch_history(later, later_position, block, ring_k_in + (offset_of(later.slot, ring_k_stride) + k_column),
                         ring_u_in + (offset_of(later.slot, ring_u_stride) + u_column),
                         ring_g_in + (offset_of(later.slot, ring_g_stride) + block.head));

    const u16* past_u = shared.u[warp];
    float own_score = 0.f, past = 0.f, product = 0.f;
#pragma unroll
    for (int p = 0; p < PARTIALS; p++) own_score += shared.partial[p][0][0];
    if (!flush) past = history_product(shared.partial, weights, past_u);
    tile_copy_wait(&shared.barrier);
    if (flush)
        product = fold_and_dot(shared.tile + warp * 16 * COLUMNS,
                               checkpoint + (offset_of(slot, checkpoint_stride) +
                                             (state_offset + (int)warp * 16 * COLUMNS)),
                               c > 0, decay_of(total), weights, past_u, shared.k, queries);
    else if (c > 0)
        product = dot(shared.tile, queries);
    // Even lanes hold what q reads, odd ones what k does.
    const float mine = decay_of(g_new) * multiply_add(flush ? 1.f : decay_of(total), product, past);
    const float other = shuffle_xor(mine, 1);
    const bool odd = lane & 1;
    const float u = beta * (activation_to_float(own_v) - (odd ? mine : other));
    const float out = QUERY_SCALE * multiply_add(own_score, u, odd ? other : mine);
    if (!owns) return;
    const u32 high = float_to_bf16(u);
    u16* to_u =
        ring_u + (offset_of(slot, ring_u_stride) + (new_entry * (HEADS * U_PLANES * ROWS) + u_column + (int)own));
    u16* to = odd ? to_u : output + (offset_of(start, HEADS * ROWS) + own);
    *to = odd ? (u16)high : float_to_activation(out);
    if (U_PLANES == 2 && !odd) to_u[(U_PLANES - 1) * ROWS] = float_to_bf16(u - bf16_low(high));
}
