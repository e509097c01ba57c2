// Mamba2, one new token per row (MAX_WINDOW 1): mamba2_window.cu with everything laid out for a single query. The state
// product runs on the plain arithmetic units, eight lanes a row, so that shared memory is read without bank conflicts;
// what a warp needs besides the tile it fetches itself, so that the block meets at one barrier. Prefill rows as there.
// One thread block per (row of the batch, head, CTA_ROWS rows of the state).
//
// Stamped in: as for mamba2_window.cu.
#define HEADS NHEADS
#define GROUPS NGROUPS
#define ROWS HEADDIM
#define COLUMNS DSTATE
#include "replay.cuh"
#include "mamba2_parameters.cuh"
#include "mamba2_rows.cuh"

static_assert(MAX_WINDOW == 1, "one query");

// B . C of the history: a warp takes every WARPS-th group of 32 columns, of which a lane takes 8 neighbours.
constexpr int SCORE_GROUPS = (COLUMNS + 31) / 32;
constexpr int SCORE_STEPS = (SCORE_GROUPS + WARPS - 1) / WARPS;
constexpr int PARTIALS = SCORE_GROUPS < WARPS ? SCORE_GROUPS : WARPS;  // warps that have one
constexpr int SCORE_TILES = (HISTORY_BLOCKS + 1) / 2;                  // of 16 tokens
// 16-byte pieces of the history's x, per thread.
constexpr int X_CHUNKS = CTA_ROWS / 8;
constexpr int X_STEPS = (HISTORY_ROWS * X_CHUNKS + THREADS - 1) / THREADS;
// The state product: lane l takes columns l % 8 * LANE_COLUMNS .. of every group of 8 * LANE_COLUMNS.
constexpr int DOT_COLUMNS = 8 * LANE_COLUMNS;
constexpr int DOT_STEPS = (COLUMNS + DOT_COLUMNS - 1) / DOT_COLUMNS;

// With 16-bit states more blocks run at once and registers are short: what is not needed while folding then waits in
// shared memory.
constexpr bool PARKS = STATE_FORMAT != FORMAT_FP32;

// With fp32 states shared memory is short: what x and the B of a fold would take together costs a block per
// multiprocessor, and a fold needs B once it has x in registers. That B is dense, and swizzled, where a row has whole
// groups of 8 chunks. (With 16-bit states a swizzled B was tried: a flush of every row took 9 % longer.)
constexpr bool OVERLAID = !PARKS;
constexpr bool SWIZZLED = OVERLAID && COLUMNS % 64 == 0;
constexpr int FOLDED_STRIDE = SWIZZLED ? COLUMNS : TOKEN_STRIDE;

struct Past {
    alignas(16) activation_t x[HISTORY_ROWS * VALUE_STRIDE];
    float partial[PARTIALS][HISTORY_ROWS + 1];  // of B . C; the last is the new token's
};
struct Shared {
    alignas(128) state_t tile[PADDED_ROWS * COLUMNS];
    union {
        Past past;
        alignas(16) activation_t overlaid_B[OVERLAID ? HISTORY_ROWS * FOLDED_STRIDE : 8];
    };
    alignas(16) activation_t separate_B[OVERLAID ? 8 : HISTORY_ROWS * FOLDED_STRIDE];
    alignas(16) activation_t C[COLUMNS];  // where a history is folded
    float new_dt;
    float parked[2][PARKS ? THREADS : 1];
    alignas(8) u64 barrier;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "plugins/geometry.py computes the size of the dynamic shared memory");

// Whether step s of the lane's warp has columns at all.
DEVICE bool score_column_exists(int s) {
    return (SCORE_GROUPS % WARPS == 0 && COLUMNS % 32 == 0) ||
           ((threadIdx.x / 32 + s * WARPS) * 32 + 8 * (threadIdx.x % 4)) < COLUMNS;
}
DEVICE uint4 load_16(const activation_t* from, bool valid) {
    return valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}

// Row k of the history is the token HISTORY_ROWS - k before the new one, so its ring entry does not depend on the
// checkpoint position; rows before the checkpoint are no history.
struct History {
    uint4 B[SCORE_STEPS][HISTORY_BLOCKS], x[X_STEPS];
    float dt;

    // Fetches the last `count` tokens, zeros before them. `entry` is the new token's ring entry.
    DEVICE_MEMBER void load(const activation_t* ring_B, const activation_t* ring_x, const float* ring_dt, int entry,
                            int count) {
        const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
        const int first = HISTORY_ROWS - count;
        const auto entry_of = [&](int k) {
            const int e = entry - HISTORY_ROWS + k;
            return e < 0 ? e + RING_LEN : e;
        };
        dt = (int)lane >= first && lane < HISTORY_ROWS ? ring_dt[entry_of(lane) * HEADS] : 0.f;
#pragma unroll
        for (int r = 0; r < HISTORY_BLOCKS; r++) {
            const int k = 8 * r + (int)g;
            const activation_t* row = ring_B + entry_of(k) * (GROUPS * COLUMNS) + (warp * 32 + 8 * t);
#pragma unroll
            for (int s = 0; s < SCORE_STEPS; s++)
                B[s][r] = load_16(row + s * WARPS * 32, k >= first && score_column_exists(s));
        }
#pragma unroll
        for (int s = 0; s < X_STEPS; s++) {
            const u32 i = s * THREADS + tid;
            const int k = i / X_CHUNKS;
            x[s] = load_16(ring_x + (entry_of(k) * (HEADS * ROWS) + (int)(i % X_CHUNKS) * 8),
                           k >= first && (HISTORY_ROWS * X_CHUNKS % THREADS == 0 || k < HISTORY_ROWS));
        }
    }
};

// Element (row, column) of the folded B; columns in 8s are not torn apart. Rows 2 t and the next lie in banks of their
// own.
DEVICE int folded_at(int row, int column) {
    return row * FOLDED_STRIDE + (SWIZZLED ? column ^ (row / 2 % 4 * 16) : column);
}
DEVICE void store_folded(activation_t* B, const uint4 (&history)[SCORE_STEPS][HISTORY_BLOCKS]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int s = 0; s < SCORE_STEPS; s++)
#pragma unroll
        for (int r = 0; r < HISTORY_BLOCKS; r++)
            if (score_column_exists(s))
                *(uint4*)(B + folded_at(8 * r + lane / 4, (warp + s * WARPS) * 32 + 8 * (lane % 4))) = history[s][r];
}
struct FoldedTokens {
    const activation_t* rows;
    int column;

    DEVICE_MEMBER FoldedTokens at(int column) const { return {rows, column}; }
    DEVICE_MEMBER u32 pair(int k, int odd, int) const {
        return *(const u32*)(rows + folded_at(k * 8 + 2 * ((int)threadIdx.x % 4) + odd, column));
    }
};

// sum += s . query over the lane's columns, in one order wherever it runs.
DEVICE void add_products(float& sum, const float (&s)[LANE_COLUMNS], const float (&query)[LANE_COLUMNS]) {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) sum = multiply_add(s[i], query[i], sum);
}
DEVICE void widen(const u32 (&pairs)[LANE_COLUMNS / 2], float (&query)[LANE_COLUMNS]) {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 2; i++)
        query[2 * i] = activation_low(pairs[i]), query[2 * i + 1] = activation_high(pairs[i]);
}

// Row that a lane finishes among its warp's 16; lanes 2 i and 2 i + 1 share one.
DEVICE u32 own_row() { return (threadIdx.x / 2 % 4) * 4 + threadIdx.x % 32 / 8; }

// The state's product with the query for the lane's own row. Partial sums of eight lanes are added in pairs that lie 4,
// 2 and 1 apart, as `fold_and_dot` does.
DEVICE float dot(const state_t* tile, const u32 (&query)[DOT_STEPS][LANE_COLUMNS / 2]) {
    const u32 lane = threadIdx.x % 32, column = lane % 8 * LANE_COLUMNS;
    const state_t* rows = tile + ((threadIdx.x / 32) * 16 + lane / 8) * COLUMNS + column;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int s = 0; s < DOT_STEPS; s++)
        if (COLUMNS % DOT_COLUMNS == 0 || s * DOT_COLUMNS + column < COLUMNS) {
            float c[LANE_COLUMNS];
            widen(query[s], c);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float values[LANE_COLUMNS];
                load_lane_columns(rows + r * 4 * COLUMNS + s * DOT_COLUMNS, values);
                add_products(sum[r], values, c);
            }
        }
    const bool upper = lane & 4, second = lane & 2;
    float first = upper ? sum[2] : sum[0], other = upper ? sum[3] : sum[1];
    first += shuffle_xor(upper ? sum[0] : sum[2], 4);
    other += shuffle_xor(upper ? sum[1] : sum[3], 4);
    float mine = second ? other : first;
    mine += shuffle_xor(second ? first : other, 2);
    return mine + shuffle_xor(mine, 1);
}

// Folds the history, stores the state and returns the stored state's product with the query for the lane's own row.
template <class Tokens>
DEVICE float fold_and_dot(const state_t* tile, state_t* global, bool has_state, float decay,
                          const float (&values)[HISTORY_BLOCKS][4], const Tokens& tokens,
                          const activation_t* query) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    // Rows g and g + 8; blocks of columns alternate between two sums, which two lanes hold in `dot`.
    float sum[2] = {}, next[2] = {};
    fold_tile(tile, global, has_state, decay, values, tokens,
              [&](int column, const float(&s0)[LANE_COLUMNS], const float(&s1)[LANE_COLUMNS]) {
                  u32 pairs[LANE_COLUMNS / 2];
                  float c[LANE_COLUMNS];
                  load_query_columns(query + column + t * LANE_COLUMNS, pairs);
                  widen(pairs, c);
                  const float before[2] = {next[0], next[1]};
                  add_products(sum[0], s0, c);
                  add_products(sum[1], s1, c);
                  next[0] = sum[0], next[1] = sum[1], sum[0] = before[0], sum[1] = before[1];
              });
    float total[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] = sum[r] + next[r];
        total[r] += shuffle_xor(total[r], 2);
        total[r] += shuffle_xor(total[r], 1);
    }
    const u32 own = own_row();
    const float low = shuffle_from(total[0], own % 8 * 4), high = shuffle_from(total[1], own % 8 * 4);
    return own < 8 ? low : high;
}

KERNEL(THREADS, MIN_CTAS)
mamba2_decode(ENTRY_IN, ENTRY_SCALARS, ENTRY_OUT) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const u32 from_end = THREADS - 1 - tid;
    const Block block = this_block();
    const int state_offset = (block.head * ROWS + block.first_row) * COLUMNS, tile_index = block.tile;
    const int x_column = block.head * ROWS + block.first_row, B_column = block.group * COLUMNS;

    wait_for_previous_grid();
    // All that is known before the slot, then all that the slot tells, then the tile: nothing here waits for more than
    // the row's slot. A fresh sequence ignores the tile.
    const int slot = state_batch_indices[blockIdx.y], seq_len = seq_lens[blockIdx.y];
    const int start = window_starts[blockIdx.y], window_length = window_lens[blockIdx.y];
    const float log_A = A_log[block.head], D_head = D[block.head], bias = dt_bias[block.head];
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
    // would wait for them.
    const bool decodes = window_length == 1 && start >= 0 && start < num_tokens;
    const activation_t* new_x = x + (offset_of(start, x_stride) + x_column);
    const activation_t* new_B = B + (offset_of(start, B_stride) + B_column);
    const activation_t* new_C = C + (offset_of(start, C_stride) + B_column);
    const u32 own = warp * 16 + own_row();
    const bool owns = decodes && (CTA_ROWS % 16 == 0 || own < CTA_ROWS);
    const u32 raw_dt = decodes && warp == WARPS - 1 ? dt[offset_of(start, dt_stride) + block.head] : 0;
    u32 own_x = owns ? new_x[own] : 0;
    uint4 score_B[SCORE_STEPS], score_C[SCORE_STEPS];
#pragma unroll
    for (int s = 0; s < SCORE_STEPS; s++) {
        const bool valid = decodes && g == 0 && score_column_exists(s);
        score_B[s] = load_16(new_B + (warp * 32 + 8 * t) + s * WARPS * 32, valid);
        score_C[s] = load_16(new_C + (warp * 32 + 8 * t) + s * WARPS * 32, valid);
    }
    u32 query[DOT_STEPS][LANE_COLUMNS / 2] = {};
    if (decodes) {
        const u32 column = lane % 8 * LANE_COLUMNS;
#pragma unroll
        for (int s = 0; s < DOT_STEPS; s++)
            if (COLUMNS % DOT_COLUMNS == 0 || s * DOT_COLUMNS + column < COLUMNS)
                load_query_columns(new_C + column + s * DOT_COLUMNS, query[s]);
    }
    const activation_t* slot_ring_x = ring_x_in + (offset_of(slot, ring_x_stride) + x_column);
    const activation_t* slot_ring_B = ring_B_in + (offset_of(slot, ring_B_stride) + B_column);
    const float* slot_ring_dt = ring_dt_in + (offset_of(slot, ring_dt_stride) + block.head);
    const int new_entry = (u32)seq_len % RING_LEN;

    const Row row = make_row(slot, seq_len, start, window_length, tile_position, num_tokens, num_slots, max_seq_len,
                             MAX_HISTORY);
    activation_t* output = y + x_column;
    if (!row.active || row.length > 1) {
        const SerialInputs inputs = {new_x,
                                     dt + (offset_of(start, dt_stride) + block.head),
                                     new_B,
                                     new_C,
                                     x_stride,
                                     dt_stride,
                                     B_stride,
                                     C_stride,
                                     slot_ring_x,
                                     slot_ring_B,
                                     slot_ring_dt,
                                     -expf(log_A),
                                     D_head,
                                     bias};
        finish_other_row(row, has_slot, &shared.barrier, skip_prefill, inputs, slot_state,
                         checkpoint + (offset_of(slot, checkpoint_stride) + state_offset),
                         position + (offset_of(slot, position_stride) + tile_index), output, error_flag);
        return;
    }

    const int c = row.checkpoint_position, history = seq_len - c;
    const bool flush = history > 0 && history + 1 > BUFFER_LEN;
    History past;
    past.load(slot_ring_B, slot_ring_x, slot_ring_dt, new_entry, history);
    if (warp == WARPS - 1) {
        const float new_dt = softplus(activation_to_float(raw_dt) + bias);
        if (lane == 0) shared.new_dt = new_dt;
    }
    const float A = -expf(log_A);

    // Lane k: log decay behind history token k.
    float suffix = A * past.dt;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const float after = shuffle_down(suffix, delta);
        if (lane + delta < 32) suffix += after;
    }
    const float total = shuffle_from(suffix, 0), shifted = shuffle_down(suffix, 1), behind = lane < 31 ? shifted : 0.f;

    // The warp's columns of B . C: token rows against C in column 0.
    float score[SCORE_TILES][4] = {}, new_score[4] = {};
#pragma unroll
    for (int s = 0; s < SCORE_STEPS; s++) {
        const uint4 b = score_C[s], n = score_B[s];
        mma_16bit<ACTIVATION_FORMAT>(new_score, n.x, 0, n.y, 0, b.x, b.y);
        mma_16bit<ACTIVATION_FORMAT>(new_score, n.z, 0, n.w, 0, b.z, b.w);
        if (flush) continue;
#pragma unroll
        for (int r = 0; r < SCORE_TILES; r++) {
            constexpr int LAST = HISTORY_BLOCKS - 1;
            const uint4 low = past.B[s][2 * r];
            const uint4 high = 2 * r < LAST ? past.B[s][2 * r < LAST ? 2 * r + 1 : LAST] : make_uint4(0, 0, 0, 0);
            mma_16bit<ACTIVATION_FORMAT>(score[r], low.x, high.x, low.y, high.y, b.x, b.y);
            mma_16bit<ACTIVATION_FORMAT>(score[r], low.z, high.z, low.w, high.w, b.z, b.w);
        }
    }
    if (warp < PARTIALS && t == 0) {
#pragma unroll
        for (int r = 0; r < HISTORY_BLOCKS; r++) shared.past.partial[warp][8 * r + g] = score[r / 2][r % 2 * 2];
        if (g == 0) shared.past.partial[warp][HISTORY_ROWS] = new_score[0];
    }
    if (flush)
#pragma unroll
        for (int s = 0; s < SCORE_STEPS; s++) {
            const u32 column = (warp + s * WARPS) * 32 + 8 * t;
            // The form of these conditions decides whether the compiler spills (nano4b, fp32 and 16-bit states).
            if (OVERLAID && g == 0 && score_column_exists(s)) *(uint4*)(shared.C + column) = score_C[s];
            if (OVERLAID || !score_column_exists(s)) continue;
            if (g == 0) *(uint4*)(shared.C + column) = score_C[s];
#pragma unroll
            for (int r = 0; r < HISTORY_BLOCKS; r++)
                *(uint4*)(shared.separate_B + (8 * r + g) * TOKEN_STRIDE + column) = past.B[s][r];
        }
#pragma unroll
    for (int s = 0; s < X_STEPS; s++) {
        const u32 i = s * THREADS + tid;
        if (HISTORY_ROWS * X_CHUNKS % THREADS == 0 || i < HISTORY_ROWS * X_CHUNKS)
            *(uint4*)(shared.past.x + i / X_CHUNKS * VALUE_STRIDE + i % X_CHUNKS * 8) = past.x[s];
    }
    copy_async_wait();  // of the tile, where there is no copy engine
    sync_threads();

    hold_until_here(own_x);
    // Append the token to the ring, whose entry is no row's history yet, so nobody reads it during this launch. Every
    // thread has read the old position.
    const uint4 append_x = load_16(new_x + from_end * 8, from_end < X_CHUNKS);
    const float new_dt = shared.new_dt, new_decay = A * new_dt;
    if (block.first_of_group && g == 0) {
        activation_t* to = ring_B + (offset_of(slot, ring_B_stride) + (new_entry * (GROUPS * COLUMNS) + B_column));
#pragma unroll
        for (int s = 0; s < SCORE_STEPS; s++)
            if (score_column_exists(s)) *(uint4*)(to + (warp * 32 + 8 * t) + s * WARPS * 32) = score_B[s];
    }
    if (block.first_of_head && from_end == 0)
        ring_dt[offset_of(slot, ring_dt_stride) + (new_entry * HEADS + block.head)] = new_dt;
    if ((flush || seq_len == 0) && from_end < CTA_TILES)
        position[offset_of(slot, position_stride) + (tile_index + (int)from_end)] = seq_len;
    prefetch_mamba2_ring(later, later_position, block, ring_x_in, ring_x_stride, ring_B_in, ring_B_stride, ring_dt_in,
                         ring_dt_stride);

    float new_sum = 0.f, history_sum = 0.f, product = 0.f;
#pragma unroll
    for (int p = 0; p < PARTIALS; p++) new_sum += shared.past.partial[p][HISTORY_ROWS];
    if (!flush) {
        float sum = 0.f;
        if (lane < HISTORY_ROWS)
#pragma unroll
            for (int p = 0; p < PARTIALS; p++) sum += shared.past.partial[p][lane];
        const float coefficient = past.dt * decay_of(behind + new_decay) * sum;
        const activation_t* column = shared.past.x + lane % 2 * VALUE_STRIDE + own;  // a row's lanes take every other token
#pragma unroll
        for (int i = 0; i < HISTORY_ROWS / 2; i++) {
            const float factor = shuffle_from(coefficient, 2 * i + lane % 2);
            history_sum = multiply_add(factor, activation_to_float(column[2 * i * VALUE_STRIDE]), history_sum);
        }
        history_sum += shuffle_xor(history_sum, 1);
    }
    const float new_coefficient = multiply_add(new_dt, new_sum, D_head);
    float rest = multiply_add(new_coefficient, activation_to_float(own_x), history_sum);
    float decay = decay_of((flush ? 0.f : total) + new_decay);
    if (from_end < X_CHUNKS)
        *(uint4*)(ring_x + (offset_of(slot, ring_x_stride) + (new_entry * (HEADS * ROWS) + x_column)) + from_end * 8) =
            append_x;
    if (!OVERLAID || !flush) tile_copy_wait(&shared.barrier);
    if (flush) {
        if (PARKS) shared.parked[0][tid] = rest, shared.parked[1][tid] = decay;
        const float weight = past.dt * decay_of(behind);
        float values[HISTORY_BLOCKS][4];
#pragma unroll
        for (int k8 = 0; k8 < HISTORY_BLOCKS; k8++) {
            u32 pairs[2];
            load_matrix_x2_transposed(
                pairs, shared.past.x + (k8 * 8 + lane % 8) * VALUE_STRIDE + warp * 16 + (lane / 8 & 1) * 8);
            const float even = shuffle_from(weight, k8 * 8 + 2 * t), odd = shuffle_from(weight, k8 * 8 + 2 * t + 1);
            values[k8][0] = even * activation_low(pairs[0]), values[k8][1] = even * activation_low(pairs[1]);
            values[k8][2] = odd * activation_high(pairs[0]), values[k8][3] = odd * activation_high(pairs[1]);
        }
        if (OVERLAID) {
            sync_threads();
            store_folded(shared.overlaid_B, past.B);
            sync_threads();
            tile_copy_wait(&shared.barrier);
        }
        state_t* global = checkpoint + (offset_of(slot, checkpoint_stride) + state_offset);
        if constexpr (OVERLAID)
            product = fold_and_dot(shared.tile, global, c > 0, decay_of(total), values,
                                   FoldedTokens{shared.overlaid_B, 0}, shared.C);
        else
            product = fold_and_dot(shared.tile, global, c > 0, decay_of(total), values, SharedTokens{shared.separate_B},
                                   shared.C);
        if (PARKS) rest = shared.parked[0][tid], decay = shared.parked[1][tid];
    } else if (c > 0) {
        product = dot(shared.tile, query);
    }
    // Not earlier: blocks of the next grid that wait beside these cost a flush of few rows 2 us.
    let_next_grid_start();
    const float value = multiply_add(decay, product, rest);
    if (lane % 2 == 0 && owns) output[offset_of(start, HEADS * ROWS) + own] = float_to_activation(value);
}
