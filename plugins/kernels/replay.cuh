// Building blocks shared by the replay operators. A thread block owns CTA_ROWS consecutive rows of one head's state
// (whole row tiles of the contract) for one row of the batch; each warp owns 16 of them. The operator's source defines
// HEADS, GROUPS, ROWS and COLUMNS before it includes this; the build stamps in ROW_TILES, CTA_ROWS, BUFFER_LEN,
// MAX_WINDOW, STATE_FORMAT and ACTIVATION_FORMAT.
//
// Everything that enters an output is computed on tensor cores from operands split so that no mantissa bit that matters
// is lost: state and coefficients as a high and a low tf32 half, activations exactly. Sums run in the same order
// whether or not the step flushed, which is what makes a repeated step bit-equal.
#pragma once
#include "rows.cuh"
#include "state_formats.cuh"

constexpr int RING_LEN = larger(BUFFER_LEN, MAX_WINDOW) + MAX_WINDOW;
constexpr int MAX_HISTORY = larger(BUFFER_LEN, MAX_WINDOW);
constexpr int HISTORY_ROWS = round_up(MAX_HISTORY, 8);
constexpr int HISTORY_BLOCKS = HISTORY_ROWS / 8;
constexpr int WINDOW_ROWS = round_up(MAX_WINDOW, 8);
#ifdef CTA_WARPS  // the readout kernels: each of so many warps owns CTA_ROWS rows
constexpr int WARPS = CTA_WARPS;
#else
constexpr int WARPS = round_up(CTA_ROWS, 16) / 16;
#endif
constexpr int THREADS = WARPS * 32;
constexpr int PADDED_ROWS = WARPS * 16;
constexpr int CTAS_PER_HEAD = ROWS / CTA_ROWS;
constexpr int CTA_TILES = ROW_TILES / CTAS_PER_HEAD;
constexpr int HEADS_PER_GROUP = HEADS / GROUPS;
// 16 bytes of padding spread the rows of a matrix over all banks.
constexpr int TOKEN_STRIDE = COLUMNS + 8;
constexpr int VALUE_STRIDE = PADDED_ROWS + 8;
// Consecutive columns that one lane takes from a row: 16 bytes where the row is long enough.
constexpr int LANE_COLUMNS = (STATE_FORMAT == FORMAT_FP32 || COLUMNS % 32) ? 4 : 8;
constexpr int BLOCK_COLUMNS = 4 * LANE_COLUMNS;
// Blocks of columns that a fold works on at once. H200, super120b fp32, batch 256, every row flushing: decode 581 us at
// 1, 575 at 2; verify of 5 598 at 1, 590 at 2, 616 at 4 (spills). Elsewhere registers are too few for two.
constexpr int FOLD_UNROLL = STATE_FORMAT == FORMAT_FP32 && MAX_WINDOW <= 8 && HISTORY_ROWS <= 16 ? 2 : 1;

static_assert(MAX_HISTORY <= 32 && MAX_WINDOW <= 16, "one warp scans the history; two query tiles hold a window");
static_assert(COLUMNS % 16 == 0 && CTA_ROWS % 8 == 0 && ROWS % CTA_ROWS == 0, "copies move 16 bytes");

// ---------------------------------------------------------------------------------------------- blocks and rows

// Which part of the state a thread block owns: `first_row` of `head`, whose first tile has the index `tile` in a slot's
// checkpoint positions. What the heads of a group or the blocks of a head share is written by the first of them.
struct Block {
    int head, group, first_row, tile;
    bool first_of_head, first_of_group;
};

DEVICE Block this_block() {
    disturb();
    const int head = (int)blockIdx.x / CTAS_PER_HEAD, part = (int)blockIdx.x % CTAS_PER_HEAD;
    return {head,
            head / HEADS_PER_GROUP,
            part * CTA_ROWS,
            head * ROW_TILES + part * CTA_TILES,
            part == 0,
            part == 0 && head % HEADS_PER_GROUP == 0};
}

// body(i) for every i < TOTAL, spread over the block's threads in a fixed number of steps without branches between
// them.
template <int TOTAL, class Body>
DEVICE void spread(const Body& body) {
#pragma unroll
    for (int n = 0; n < (TOTAL + THREADS - 1) / THREADS; n++) {
        const u32 i = n * THREADS + threadIdx.x;
        if (TOTAL % THREADS == 0 || i < TOTAL) body(i);
    }
}
// The same from the last thread on: for side work beside the first warps' part of the critical path.
template <int TOTAL, class Body>
DEVICE void spread_from_end(const Body& body) {
#pragma unroll
    for (int n = 0; n < (TOTAL + THREADS - 1) / THREADS; n++) {
        const u32 i = n * THREADS + THREADS - 1 - threadIdx.x;
        if (TOTAL % THREADS == 0 || i < TOTAL) body(i);
    }
}

// Ring entry of an index below twice the ring's length.
DEVICE int wrapped(int entry) { return entry < RING_LEN ? entry : entry - RING_LEN; }

// Zeros in the output rows of a row without work. `output` points at (token 0, first row of the block).
DEVICE void write_zeros(const Row& row, activation_t* output, int token_stride) {
    if (!row.in_range) return;
    for (int i = threadIdx.x; i < row.length * (CTA_ROWS / 8); i += THREADS) {
        const int token = i / (CTA_ROWS / 8), chunk = i % (CTA_ROWS / 8);
        *(uint4*)(output + (long long)(row.start + token) * token_stride + chunk * 8) = make_uint4(0, 0, 0, 0);
    }
}

// ------------------------------------------------------------------------------------------------- state tile

// The last warp asks for it, whose thread waits for its fences; the first warps have more to do.
DEVICE void tile_copy_start(state_t* tile, const state_t* global, u64* barrier) {
#if BULK_COPY
    if (threadIdx.x == THREADS - 32) bulk_copy_start(tile, global, CTA_ROWS * COLUMNS * sizeof(state_t), barrier);
#else
    constexpr int PER_COPY = 16 / sizeof(state_t);
    for (int i = threadIdx.x; i < CTA_ROWS * COLUMNS / PER_COPY; i += THREADS)
        copy_async_16(tile + i * PER_COPY, global + i * PER_COPY, true);
#endif
}
// Call only after a __syncthreads that follows tile_copy_start and copy_async_wait.
DEVICE void tile_copy_wait(u64* barrier) {
#if BULK_COPY
    bulk_copy_wait(barrier);
#endif
}

// ------------------------------------------------------------------------------------------------ looking ahead

// A block's reads depend on each other (slot, checkpoint position, ring) and on memory's latency; while its last warp
// waits for its own, it asks for those of the block that does the same part of the row AHEAD_ROWS further on, which
// will then find them in the second-level cache. Nothing is computed from them here. AHEAD_ROWS 0 switches it off.
struct LaterRow {
    int slot, seq_len;
    bool exists;  // in this thread's view: only the last warp looks ahead
};

DEVICE LaterRow look_ahead(const int* seq_lens, const int* state_batch_indices, int num_slots) {
    LaterRow later = {-1, 0, false};
    const u32 b = blockIdx.y + AHEAD_ROWS;
    if (AHEAD_ROWS == 0 || threadIdx.x < THREADS - 32 || b >= gridDim.y) return later;
    later.slot = state_batch_indices[b];
    later.seq_len = seq_lens[b];
    later.exists = later.slot >= 0 && later.slot < num_slots && later.seq_len > 0;
    return later;
}

// Calls body(entry) for every ring entry of the later row's history, which starts at `checkpoint_position`.
template <class Body>
DEVICE void prefetch_ring(const LaterRow& later, int checkpoint_position, const Body& body) {
    const int history = later.seq_len - checkpoint_position, lane = threadIdx.x % 32;
    if (checkpoint_position >= 0 && history <= MAX_HISTORY && lane < history)
        body(wrapped(checkpoint_position % RING_LEN + lane));
}

DEVICE void load_lane_columns(const state_t* from, float (&s)[LANE_COLUMNS]) {
    if constexpr (STATE_FORMAT == FORMAT_FP32) {
        const float4 v = *(const float4*)from;
        s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
    } else {
        u32 words[LANE_COLUMNS / 2];
        if constexpr (LANE_COLUMNS == 8) {
            const uint4 v = *(const uint4*)from;
            words[0] = v.x, words[1] = v.y, words[LANE_COLUMNS / 2 - 2] = v.z, words[LANE_COLUMNS / 2 - 1] = v.w;
        } else {
            const uint2 v = *(const uint2*)from;
            words[0] = v.x, words[1] = v.y;
        }
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++) {
            s[2 * i] = state_to_float((state_t)(words[i] & 0xffffu));
            s[2 * i + 1] = state_to_float((state_t)(words[i] >> 16));
        }
    }
}

// Rounds to the checkpoint format, stores, and leaves the rounded values behind.
DEVICE void store_lane_columns(state_t* to, float (&s)[LANE_COLUMNS], bool valid) {
    if constexpr (STATE_FORMAT == FORMAT_FP32) {
        if (valid) *(float4*)to = make_float4(s[0], s[1], s[2], s[3]);
    } else {
        u32 words[LANE_COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++) {
            const state_t low = float_to_state(s[2 * i]), high = float_to_state(s[2 * i + 1]);
            words[i] = (u32)low | (u32)high << 16;
            s[2 * i] = state_to_float(low);
            s[2 * i + 1] = state_to_float(high);
        }
        if (!valid) return;
        if constexpr (LANE_COLUMNS == 8)
            *(uint4*)to = make_uint4(words[0], words[1], words[LANE_COLUMNS / 2 - 2], words[LANE_COLUMNS / 2 - 1]);
        else
            *(uint2*)to = make_uint2(words[0], words[1]);
    }
}

DEVICE void load_query_columns(const activation_t* from, u32 (&pairs)[LANE_COLUMNS / 2]) {
    if constexpr (LANE_COLUMNS == 8) {
        const uint4 v = *(const uint4*)from;
        pairs[0] = v.x, pairs[1] = v.y, pairs[LANE_COLUMNS / 2 - 2] = v.z, pairs[LANE_COLUMNS / 2 - 1] = v.w;
    } else {
        const uint2 v = *(const uint2*)from;
        pairs[0] = v.x, pairs[1] = v.y;
    }
}

// ------------------------------------------------------------------------------------------------ matrix steps

// Products of the warp's 16 state rows and all queries. Four sums each (high and low halves of fp32 states, even and
// odd steps) keep the matrix unit's latency hidden; `value` adds them in one order.
template <int TILES>
struct Products {
    float high[TILES][2][4], low[TILES][2][4];

    DEVICE_MEMBER void clear() {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 8; i++) high[n][i / 4][i % 4] = low[n][i / 4][i % 4] = 0.f;
    }
    DEVICE_MEMBER float value(int n, int i) const {
        return (high[n][0][i] + high[n][1][i]) + (low[n][0][i] + low[n][1][i]);
    }
};

// Adds the part of the lane's columns. A k-step of the matrix unit takes any pairing of columns to its slots, as long
// as both operands use the same one: lane t holds LANE_COLUMNS neighbouring columns and feeds two of them per step.
template <int TILES>
DEVICE void dot_columns(Products<TILES>& products, const float (&s0)[LANE_COLUMNS], const float (&s1)[LANE_COLUMNS],
                        const activation_t* const (&query)[TILES], int column) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        u32 pairs[LANE_COLUMNS / 2];
        load_query_columns(query[n] + column, pairs);
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++) {
            const float b0 = activation_low(pairs[i]), b1 = activation_high(pairs[i]);
            const float a0 = s0[2 * i], a1 = s1[2 * i], a2 = s0[2 * i + 1], a3 = s1[2 * i + 1];
            if constexpr (STATE_FORMAT == FORMAT_FP32) {
                const float h0 = tf32_high(a0), h1 = tf32_high(a1), h2 = tf32_high(a2), h3 = tf32_high(a3);
                mma_tf32(products.high[n][i % 2], h0, h1, h2, h3, b0, b1);
                mma_tf32(products.low[n][i % 2], a0 - h0, a1 - h1, a2 - h2, a3 - h3, b0, b1);
            } else {
                mma_tf32(products.high[n][i % 2], a0, a1, a2, a3, b0, b1);
            }
        }
    }
}

// From the tile in shared memory.
template <int TILES>
DEVICE void dot_tile(Products<TILES>& products, const state_t* tile, const activation_t* const (&query)[TILES]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const state_t* rows = tile + ((threadIdx.x / 32) * 16 + g) * COLUMNS + t * LANE_COLUMNS;
#pragma unroll 8
    for (int column = 0; column < COLUMNS; column += BLOCK_COLUMNS) {
        float s0[LANE_COLUMNS], s1[LANE_COLUMNS];
        load_lane_columns(rows + column, s0);
        load_lane_columns(rows + 8 * COLUMNS + column, s1);
        dot_columns<TILES>(products, s0, s1, query, column + t * LANE_COLUMNS);
    }
}

// The rows B of the history in shared memory, zero beyond it.
struct SharedTokens {
    const activation_t* rows;

    // From column `column` on.
    DEVICE_MEMBER SharedTokens at(int column) const { return {rows + column}; }
    // The first two columns of the lane's even or odd row of block k, 8 k + 2 t or the next.
    DEVICE_MEMBER u32 pair(int k, int odd, int t) const {
        return *(const u32*)(rows + (k * 8 + 2 * t + odd) * TOKEN_STRIDE);
    }
};

// Folds the history into the warp's 16 rows, stores them, and passes what is stored on: consume(column, s0, s1) gets
// the lane's LANE_COLUMNS values of rows g and g + 8 in the block of columns that starts at `column`.
// values[k] are the coefficients of the rank-1 updates of history block k in the layout of mma_tf32's first operand,
// where slot t is token 2 t and slot t + 4 is token 2 t + 1; `tokens` gives the rows of the history, as SharedTokens
// does.
template <class Tokens, class Consume>
DEVICE void fold_tile(const state_t* tile, state_t* global, bool has_state, float decay,
                      const float (&values)[HISTORY_BLOCKS][4], const Tokens& tokens, const Consume& consume) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = (threadIdx.x / 32) * 16;
    const state_t* rows = tile + (first + g) * COLUMNS + t * LANE_COLUMNS;
    state_t* stored = global + (first + g) * COLUMNS + t * LANE_COLUMNS;
#pragma unroll FOLD_UNROLL
    for (int column = 0; column < COLUMNS; column += BLOCK_COLUMNS) {
        float s0[LANE_COLUMNS], s1[LANE_COLUMNS];
        if (has_state) {
            load_lane_columns(rows + column, s0);
            load_lane_columns(rows + 8 * COLUMNS + column, s1);
        }
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++) {
            float d[4] = {0.f, 0.f, 0.f, 0.f};
            if (has_state)
                d[0] = decay * s0[2 * i], d[1] = decay * s0[2 * i + 1], d[2] = decay * s1[2 * i],
                d[3] = decay * s1[2 * i + 1];
            // Accumulator columns 2 t and 2 t + 1 must be the lane's own state columns, so column g of the second
            // operand is the one that lane g / 2 owns.
            const Tokens token = tokens.at(column + (g / 2) * LANE_COLUMNS + 2 * i);
#pragma unroll
            for (int k = 0; k < HISTORY_BLOCKS; k++) {
                const u32 even = token.pair(k, 0, t), odd = token.pair(k, 1, t);
                const float b0 = (g & 1) ? activation_high(even) : activation_low(even);
                const float b1 = (g & 1) ? activation_high(odd) : activation_low(odd);
                const float h0 = tf32_high(values[k][0]), h1 = tf32_high(values[k][1]);
                const float h2 = tf32_high(values[k][2]), h3 = tf32_high(values[k][3]);
                mma_tf32(d, h0, h1, h2, h3, b0, b1);
                mma_tf32(d, values[k][0] - h0, values[k][1] - h1, values[k][2] - h2, values[k][3] - h3, b0, b1);
            }
            s0[2 * i] = d[0], s0[2 * i + 1] = d[1], s1[2 * i] = d[2], s1[2 * i + 1] = d[3];
        }
        store_lane_columns(stored + column, s0, first + g < CTA_ROWS);
        store_lane_columns(stored + 8 * COLUMNS + column, s1, first + 8 + g < CTA_ROWS);
        consume(column, s0, s1);
    }
}

// The same, multiplying the stored values by all queries.
template <int TILES>
DEVICE void fold_and_dot_tile(Products<TILES>& products, const state_t* tile, state_t* global, bool has_state,
                              float decay, const float (&values)[HISTORY_BLOCKS][4], const activation_t* tokens,
                              const activation_t* const (&query)[TILES]) {
    fold_tile(tile, global, has_state, decay, values, SharedTokens{tokens},
              [&](int column, const float(&s0)[LANE_COLUMNS], const float(&s1)[LANE_COLUMNS]) {
                  dot_columns<TILES>(products, s0, s1, query, column + (int)threadIdx.x % 4 * LANE_COLUMNS);
              });
}

// sum[.] of one block: (16 query rows) . (8 token rows). Lane 4 g + t receives (g, 2t), (g, 2t+1), (g+8, 2t),
// (g+8, 2t+1). `query_low/high` are the lane's row addresses for matrix loads; with one half only, the other is zero.
template <bool TWO_HALVES>
DEVICE void scores(float (&sum)[4], const activation_t* query, const activation_t* token) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int column = 0; column < COLUMNS; column += 16) {
        u32 b[2];
        load_matrix_x2(b, token + column + ((lane / 8) & 1) * 8);
        if constexpr (TWO_HALVES) {
            u32 a[4];
            load_matrix_x4(a, query + column + (lane / 16) * 8);
            mma_16bit<ACTIVATION_FORMAT>(sum, a[0], a[1], a[2], a[3], b[0], b[1]);
        } else {
            u32 a[2];
            load_matrix_x2(a, query + column + ((lane / 8) & 1) * 8);
            mma_16bit<ACTIVATION_FORMAT>(sum, a[0], 0, a[1], 0, b[0], b[1]);
        }
    }
}

// sum[n] += (16 rows x 8 tokens, exact) . (8 tokens x 8 queries, fp32). a is laid out as in fold_and_dot_tile;
// `coefficients` points at the coefficients of the lane's query in tile 0 for the block's first token.
template <int TILES, int STRIDE>
DEVICE void combine(float (&sum)[TILES][4], const float (&a)[4], const float* coefficients) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const float2 b = *(const float2*)(coefficients + n * 8 * STRIDE + 2 * t);
        const float h0 = tf32_high(b.x), h1 = tf32_high(b.y);
        mma_tf32(sum[n], a[0], a[1], a[2], a[3], h0, h1);
        mma_tf32(sum[n], a[0], a[1], a[2], a[3], b.x - h0, b.y - h1);
    }
}

// ------------------------------------------------------------------------------------------------------ decays

// Log decays of one step, written by warp 0. All are relative to the checkpoint or to the start of the window, so that
// the window's own are the same whether or not the history was folded first. Every sum runs over its own terms:
// differences of one running sum would cancel.
struct Decays {
    float history[HISTORY_ROWS];  // behind history token k, to the end of the history
    float window[WINDOW_ROWS];    // of window token w alone
    float prefix[WINDOW_ROWS];    // from the start of the window to behind token w
    float total;                  // over the whole history
};

// Lane k passes the log decay of history token k (0 beyond it), lane w that of window token w.
DEVICE void scan_decays(Decays& decays, float history, float window) {
    const int lane = threadIdx.x % 32;
    float suffix = history, prefix = window;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const float after = shuffle_down(suffix, delta), before = shuffle_up(prefix, delta);
        if (lane + delta < 32) suffix += after;
        if (lane >= delta) prefix += before;
    }
    const float behind = shuffle_down(suffix, 1);
    if (lane < HISTORY_ROWS) decays.history[lane] = lane < 31 ? behind : 0.f;
    if (lane < WINDOW_ROWS) decays.window[lane] = window, decays.prefix[lane] = prefix;
    if (lane == 0) decays.total = suffix;
}

// Log decay from behind window token `from` to behind window token `to`; the same sum for every MAX_WINDOW.
DEVICE float window_log_decay(const Decays& decays, int from, int to) {
    float sum = 0.f;
#pragma unroll
    for (int w = 1; w < MAX_WINDOW; w++) sum += w > from && w <= to ? decays.window[w] : 0.f;
    return sum;
}
