// Pieces of gdn_readout.cu for windows of two to eight tokens over an nvfp4 readout. State rows are the rows of every product
// of the matrix unit and the window's tokens its columns, those of k in one, of q in another: what one product leaves in a
// lane is what the next takes as its first operand, down to the window's own triangular system. A warp goes through its state
// rows 16 by 16 and, but for its head's coefficients, needs no other after the history has arrived.
#pragma once
#include "gdn_readout_rows.cuh"

// Rows of v, and of the outputs that take their place; one more for what a matrix has beyond the window.
constexpr int V_ROWS = TILED && MAX_WINDOW < 8 ? MAX_WINDOW + 1 : MAX_WINDOW;
constexpr int V_STRIDE = TILED ? CTA_ROWS + 8 : CTA_ROWS;

// Token of row g of a matrix; the last one where there is none.
DEVICE int token_of(int g) { return g < MAX_WINDOW ? g : MAX_WINDOW - 1; }

// Two numbers rounded to bf16, and what that leaves over.
struct SplitPair {
    u32 high, low;

    DEVICE_MEMBER void split(float first, float second) {
        high = pack_bf16(first, second);
        low = pack_bf16(first - bf16_low(high), second - bf16_high(high));
    }
};

// The readout of 16 rows on its way: rows g and 8 + g, the lane's columns.
struct TiledRows {
    u32 words[2][PAIRS];
    BlockScales scales[2];

    // codes, blocks: the lane's, of the first of the warp's rows; m: these among the warp's.
    DEVICE_MEMBER void load(const unsigned char* codes, const unsigned char* blocks, int m) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            load_words(codes + (16 * m + 8 * n) * CODE_BYTES, words[n]);
            scales[n].load(blocks + (16 * m + 8 * n) * BLOCK_SCALE_BYTES);
        }
    }
    // Of pair i of blocks of tile n, as half2.
    DEVICE_MEMBER u32 scale_pair(int n, int i) const {
        constexpr int PER_WORD = BlockScales::PER_WORD;
        return e4m3_pair_to_fp16(scales[n].words[i / PER_WORD], PER_WORD == 2 && i % 2);
    }
};

// The lane's scales of blocks, of row g.
DEVICE const unsigned char* lane_blocks(const StateRows& rows) {
    return rows.block_scales + threadIdx.x % 32u / 4 * BLOCK_SCALE_BYTES;
}

// The same of a warp that begins, with the scales of all of its rows.
struct TiledReadout {
    static constexpr int COUNT = (CTA_ROWS + 31) / 32;
    TiledRows first;
    u32 row_scales[COUNT];

    DEVICE_MEMBER void load(const StateRows& from, unsigned char*) {
        const int lane = threadIdx.x % 32;
        first.load(lane_codes(from), lane_blocks(from), 0);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            row_scales[i] = CTA_ROWS % 32 == 0 || 32 * i + lane < CTA_ROWS ? from.row_scales[32 * i + lane] : 0u;
    }
    // Zeros of a state that is none.
    DEVICE_MEMBER void store_units(float* units, bool has_state) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (CTA_ROWS % 32 == 0 || 32 * i + lane < CTA_ROWS)
                units[32 * i + lane] = has_state ? power_of_two((int)row_scales[i]) : 0.f;
    }
};

// The window's queries of the state as the second operands of every step, in fp16: k and q of token g, columns 4 t and 4 t + 1,
// then both of the next two. They are read again for every 16 rows: kept, they would cost 32 registers.
struct TiledQueries {
    const uint4* at;

    DEVICE_MEMBER void set(const u16* half_queries) {
        const int lane = threadIdx.x % 32;
        at = (const uint4*)(half_queries + token_of(lane / 4) * (2 * KEY_STRIDE)) + lane % 4;
    }
    DEVICE_MEMBER uint4 operator()(int step) const { return at[4 * step]; }
};

// As build_fold_keys, in the place of the tokens, TOKEN_STRIDE elements apart.
DEVICE void replace_by_fold_keys(uint4* tokens) {
    constexpr int COUNT = TOKEN_STEPS * PAIRS, OWN = (COUNT + WARPS - 1) / WARPS;
    static_assert(2 * TOKEN_ROWS * TOKEN_STRIDE >= FOLD_KEYS_SIZE, "keys take the place of tokens");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 own[OWN][2];
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (COUNT % WARPS == 0 || i * WARPS + warp < COUNT)
            fold_keys_of<TOKEN_STRIDE>(own[i], (const activation_t*)tokens, i * WARPS + warp);
    sync_threads();
#pragma unroll
    for (int i = 0; i < 2 * OWN; i++)
        if (COUNT % WARPS == 0 || i / 2 * WARPS + warp < COUNT)
            tokens[(2 * (i / 2 * WARPS + warp) + i % 2) * 32 + lane] = own[i / 2][i % 2];
}

// Where the warps of a head each compute a part of its coefficients for all of them.
constexpr bool SHARED_COEFFICIENTS = TILED && CTAS_PER_HEAD > 1 && WARPS % CTAS_PER_HEAD == 0;
// For all warps of head `head` of the block. Were a barrier's number computed, a block would claim all sixteen, and four blocks
// all that a multiprocessor has.
template <int HEAD>
DEVICE void sync_head(int head) {
    if constexpr (HEAD + 1 < BLOCK_HEADS)
        if (head != HEAD) return sync_head<HEAD + 1>(head);
    sync_fixed_group<1 + HEAD, 32 * CTAS_PER_HEAD>();
}
struct SharedCoefficients {
    uint4 past[TOKEN_STEPS][2][32], window[32];
};

// What a head's window is multiplied by besides its queries.
struct TiledCoefficients {
    // The lane's part of second operands, of window token g. Of u of the history's tokens: [for k of 2 t and 2 t + 1, for q of
    // these, for k of 2 t + 8 and 2 t + 9, for q of these].
    SplitPair past[TOKEN_STEPS][4];
    SplitPair u, output;  // of v less what the state and the history predict: for u less that, and for outputs
    float of_k[2], of_q[2];  // of the state, for tokens 2 t and 2 t + 1

    // queries: of the window; keys: of the history. decays: of the state up to a window token. shared: of the head.
    DEVICE_MEMBER void compute(const activation_t* queries, const activation_t* keys, const Gates& gates,
                               const float (&decays)[MAX_WINDOW], int history, SharedCoefficients* shared) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % CTAS_PER_HEAD;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float decay = decays[token_of(lane % 4 * 2 + e)];
            of_k[e] = -decay, of_q[e] = decay * QUERY_SCALE;
        }
        if (history && (!SHARED_COEFFICIENTS || part == 0)) of_past(queries, keys, gates);
        if (!SHARED_COEFFICIENTS || part == 1) of_window(queries, gates);
        if constexpr (!SHARED_COEFFICIENTS) return;
        if (history && part == 0)
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; step++) {
                const SplitPair(&c)[4] = past[step];
                shared->past[step][0][lane] = make_uint4(c[0].high, c[1].high, c[2].high, c[3].high);
                shared->past[step][1][lane] = make_uint4(c[0].low, c[1].low, c[2].low, c[3].low);
            }
        if (part == 1) shared->window[lane] = make_uint4(u.high, output.high, u.low, output.low);
        sync_head<0>(warp / CTAS_PER_HEAD);
        if (history)
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; step++) {
                const uint4 high = shared->past[step][0][lane], low = shared->past[step][1][lane];
                past[step][0] = {high.x, low.x}, past[step][1] = {high.y, low.y};
                past[step][2] = {high.z, low.z}, past[step][3] = {high.w, low.w};
            }
        const uint4 window = shared->window[lane];
        u = {window.x, window.z}, output = {window.y, window.w};
    }

    // The lane's row of queries as the first operand: k of tokens 0 to 7, then q.
    static DEVICE_MEMBER const activation_t* query_rows(const activation_t* queries) {
        const int lane = threadIdx.x % 32;
        return queries + ((lane & 8 ? 0 : MAX_WINDOW) + token_of(lane % 8)) * TOKEN_STRIDE + lane / 16 * 8;
    }
    DEVICE_MEMBER void of_past(const activation_t* queries, const activation_t* keys, const Gates& gates) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const activation_t* of_queries = query_rows(queries);
        const activation_t* of_keys = keys + (lane / 16 * 8 + lane % 8) * TOKEN_STRIDE + (lane & 8);
        float score[TOKEN_STEPS][2][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 a[4];
            load_matrix_x4(a, of_queries + 16 * i);
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; step++) {
                u32 k[4];
                load_matrix_x4(k, of_keys + 16 * step * TOKEN_STRIDE + 16 * i);
                mma_16bit<ACTIVATION_FORMAT>(score[step][0], a[0], a[1], a[2], a[3], k[0], k[1]);
                mma_16bit<ACTIVATION_FORMAT>(score[step][1], a[0], a[1], a[2], a[3], k[2], k[3]);
            }
        }
        const float decay = gates.window[token_of(g)];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float* past_decay = gates.past + 16 * step + 8 * n + 2 * t;
                const float first = past_decay[0] * decay, second = past_decay[1] * decay;
                past[step][2 * n].split(-score[step][n][0] * first, -score[step][n][1] * second);
                past[step][2 * n + 1].split(score[step][n][2] * (first * QUERY_SCALE),
                                            score[step][n][3] * (second * QUERY_SCALE));
            }
    }
    DEVICE_MEMBER void of_window(const activation_t* queries, const Gates& gates) {
        const int lane = threadIdx.x % 32;
        const activation_t* of_queries = query_rows(queries);
        const activation_t* of_keys = queries + (MAX_WINDOW + token_of(lane % 8)) * TOKEN_STRIDE + lane / 8 * 8;
        float own[2][4] = {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            u32 k[4];
            load_matrix_x4(k, of_keys + 32 * pair);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 a[4];
                load_matrix_x4(a, of_queries + 32 * pair + 16 * i);
                mma_16bit<ACTIVATION_FORMAT>(own[i], a[0], a[1], a[2], a[3], k[2 * i], k[2 * i + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) own[0][i] += own[1][i];
        solve(own[0], gates);
    }

    // (1 + N)^-1 diag(beta) and P (1 + N)^-1 diag(beta), row by row: N = beta k . k below the diagonal, P = q . k, both with
    // their decays. own: k of token g . k of tokens 2 t and 2 t + 1, then q of g . k of the same.
    DEVICE_MEMBER void solve(const float (&own)[4], const Gates& gates) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, token = token_of(g);
        const float beta = gates.beta[token];
        float n[2], p[2], of_u[2], of_output[2] = {};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int j = 2 * t + e;
            const float decay = gates.own[token * MAX_WINDOW + token_of(j)];
            n[e] = beta * decay * own[e], p[e] = QUERY_SCALE * decay * own[2 + e], of_u[e] = g == j ? beta : 0.f;
        }
#pragma unroll
        for (int j = 0; j < MAX_WINDOW; j++) {
            const int from = lane / 4 * 4 + j / 2;
            const float own_n = shuffle_from(n[j % 2], from), own_p = shuffle_from(p[j % 2], from);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float row = shuffle_from(of_u[e], 4 * j + t);
                if (g >= j) of_output[e] = multiply_add(own_p, row, of_output[e]);
                if (g > j) of_u[e] = multiply_add(-own_n, row, of_u[e]);
            }
        }
        u.split(of_u[0] - (g == 2 * t ? 1.f : 0.f), of_u[1] - (g == 2 * t + 1 ? 1.f : 0.f));
        output.split(of_output[0], of_output[1]);
    }
};

// What a lane has of 16 rows: rows g and g + 8, of tokens 2 t and 2 t + 1 each.
struct TiledSums {
    float of_k[4], of_q[4];
};

// products = 16 rows of the readout . queries, without the rows' scales.
DEVICE void multiply_tiles(TiledSums& products, const TiledRows& rows, const TiledQueries& queries) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        u32 codes[2][4], scales[2];
#pragma unroll
        for (int n = 0; n < 2; n++) widen_codes(rows.words[n][pair], codes[n]), scales[n] = rows.scale_pair(n, pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 q = queries(2 * pair + i);
            u32 a[4];
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = multiply_fp16(codes[j % 2][2 * i + j / 2], both_halves(scales[j % 2], i));
            mma_16bit<FORMAT_FP16>(products.of_k, a[0], a[1], a[2], a[3], q.x, q.z);
            mma_16bit<FORMAT_FP16>(products.of_q, a[0], a[1], a[2], a[3], q.y, q.w);
        }
    }
}

// Where a lane finds what belongs to 16 rows, in shared memory.
struct TiledPlaces {
    const activation_t* v;
    const u16* past_u;
    const float* units;
    // The outputs take the place of v, u that of the history's first tokens'.
    activation_t* outputs;
    u16* u;

    DEVICE_MEMBER TiledPlaces(const float* own_units, activation_t* own_v, u16* own_u) {
        const int lane = threadIdx.x % 32;
        v = own_v + token_of(lane % 8) * V_STRIDE + (lane & 8);
        past_u = own_u + (lane % 8 + lane / 16 * 8) * OWN_STRIDE + (lane & 8);
        units = own_units + lane / 4;
        outputs = own_v + (lane % 8 < V_ROWS ? lane % 8 : V_ROWS - 1) * V_STRIDE + (lane & 8);
        u = own_u + ((U_PLANES == 2 ? lane / 16 * TOKEN_ROWS : 0) + lane % 8) * OWN_STRIDE + (lane & 8);
    }
    DEVICE_MEMBER void advance(int rows) { v += rows, past_u += rows, units += rows, outputs += rows, u += rows; }
};

// sums += u of the history . its coefficients; past_u: of the 16 rows.
DEVICE void add_past(TiledSums& sums, const u16* past_u, const TiledCoefficients& c, int history) {
    if (history == 0) return;
    if (is_short_history(history)) {
#pragma unroll
        for (int plane = 0; plane < U_PLANES; plane++) {
            u32 a[2];
            load_matrix_x2_transposed(a, past_u + plane * TOKEN_ROWS * OWN_STRIDE);
            mma_bf16_half(sums.of_k, a[0], a[1], c.past[0][0].high);
            mma_bf16_half(sums.of_q, a[0], a[1], c.past[0][1].high);
            if (plane) continue;  // the low halves' product is below fp32's rounding
            mma_bf16_half(sums.of_k, a[0], a[1], c.past[0][0].low);
            mma_bf16_half(sums.of_q, a[0], a[1], c.past[0][1].low);
        }
        return;
    }
#pragma unroll
    for (int plane = 0; plane < U_PLANES; plane++)
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            const SplitPair(&b)[4] = c.past[step];
            u32 a[4];
            load_matrix_x4_transposed(a, past_u + (plane * TOKEN_ROWS + 16 * step) * OWN_STRIDE);
            mma_16bit<FORMAT_BF16>(sums.of_k, a[0], a[1], a[2], a[3], b[0].high, b[2].high);
            mma_16bit<FORMAT_BF16>(sums.of_q, a[0], a[1], a[2], a[3], b[1].high, b[3].high);
            if (plane) continue;
            mma_16bit<FORMAT_BF16>(sums.of_k, a[0], a[1], a[2], a[3], b[0].low, b[2].low);
            mma_16bit<FORMAT_BF16>(sums.of_q, a[0], a[1], a[2], a[3], b[1].low, b[3].low);
        }
}

// u and outputs of 16 rows, `row` further on, from the state's products.
DEVICE void solve_tiles(TiledSums& sums, const TiledPlaces& at, int row, const TiledCoefficients& c, int history) {
    u32 values[2];
    load_matrix_x2_transposed(values, at.v + row);
    const float unit[2] = {at.units[row], at.units[row + 8]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float value = i % 2 ? activation_high(values[i / 2]) : activation_low(values[i / 2]);
        sums.of_k[i] = multiply_add(sums.of_k[i], unit[i / 2] * c.of_k[i % 2], value);
        sums.of_q[i] *= unit[i / 2] * c.of_q[i % 2];
    }
    add_past(sums, at.past_u + row, c, history);
    // What the state and the history leave of v, as a first operand: its high halves, then its low ones.
    SplitPair error[2], own[2];
#pragma unroll
    for (int i = 0; i < 2; i++) error[i].split(sums.of_k[2 * i], sums.of_k[2 * i + 1]);
    mma_bf16_half(sums.of_k, error[0].high, error[1].high, c.u.low);
    mma_bf16_half(sums.of_q, error[0].high, error[1].high, c.output.low);
    mma_16bit<FORMAT_BF16>(sums.of_k, error[0].high, error[1].high, error[0].low, error[1].low, c.u.high, c.u.high);
    mma_16bit<FORMAT_BF16>(sums.of_q, error[0].high, error[1].high, error[0].low, error[1].low, c.output.high, c.output.high);
#pragma unroll
    for (int i = 0; i < 2; i++) own[i].split(sums.of_k[2 * i], sums.of_k[2 * i + 1]);
    // All of the warp have read the history's u and v of these rows: matrix loads are the warp's together.
    if constexpr (U_PLANES == 2) {
        const u32 u[4] = {own[0].high, own[1].high, own[0].low, own[1].low};
        store_matrix_x4_transposed(at.u + row, u);
    } else {
        store_matrix_x2_transposed(at.u + row, own[0].high, own[1].high);
    }
    store_matrix_x2_transposed(at.outputs + row, pack_activation(sums.of_q[0], sums.of_q[1]),
                               pack_activation(sums.of_q[2], sums.of_q[3]));
}

// u and outputs of all of the warp's rows, which take the places of the history's first u and of v. first: of the rows 0 to 15.
DEVICE void solve_tiled(const TiledRows& first, const StateRows& rows, TiledPlaces at, const TiledQueries& queries,
                        const TiledCoefficients& c, int history, bool has_state) {
    const unsigned char *codes = lane_codes(rows), *blocks = lane_blocks(rows);
    TiledRows even = first, odd;
    const auto solve_16 = [&](const TiledRows& own, int row) {
        TiledSums sums = {};
        if (has_state) multiply_tiles(sums, own, queries);
        solve_tiles(sums, at, row, c, history);
    };
#pragma unroll 1
    for (int m = 0; m < M_TILES; m += 2) {
        const bool is_pair = M_TILES % 2 == 0 || m + 1 < M_TILES;
        if (is_pair) odd.load(codes, blocks, 1);
        solve_16(even, 0);
        codes += 32 * CODE_BYTES, blocks += 32 * BLOCK_SCALE_BYTES;
        if (m + 2 < M_TILES) even.load(codes, blocks, 0);
        if (is_pair) solve_16(odd, 16);
        at.advance(32);
    }
}

// Stores what solve_tiled leaves: u of the window's tokens from entry `first` of the ring on, `ring` at the warp's first row of
// a slot, and outputs, `to` at the warp's first row of the window's first token.
DEVICE void store_tiled(const u16* u, const activation_t* outputs, int length, u16* ring, int first, activation_t* to) {
    constexpr u32 CHUNKS = CTA_ROWS / 8, U_CHUNKS = U_PLANES * CHUNKS, ENTRY_BYTES = HEADS * U_PLANES * ROWS * 2;
    const u32 lane = threadIdx.x % 32u;
    if constexpr (32 % U_CHUNKS == 0) {
        constexpr u32 TOKENS = 32 / CHUNKS, U_TOKENS = 32 / U_CHUNKS;
        const int w = lane / CHUNKS, u_w = lane / U_CHUNKS, offset = lane % CHUNKS * 8, plane = lane % U_CHUNKS / CHUNKS;
        const activation_t* from = outputs + w * V_STRIDE + offset;
        activation_t* output = to + (w * (HEADS * ROWS) + offset);
#pragma unroll
        for (int i = 0; i < MAX_WINDOW; i += TOKENS)
            if (i + w < length) *(uint4*)(output + i * (HEADS * ROWS)) = *(const uint4*)(from + i * V_STRIDE);
        const u16* from_u = u + (plane * TOKEN_ROWS + u_w) * OWN_STRIDE + offset;
        u16* ring_u = ring + plane * ROWS + offset;
#pragma unroll
        for (int i = 0; i < MAX_WINDOW; i += U_TOKENS)
            if (i + u_w < length)
                *(uint4*)((char*)ring_u + (u64)wrapped_entry(first + i + u_w) * ENTRY_BYTES) =
                    *(const uint4*)(from_u + i * OWN_STRIDE);
    } else {
        for_window_chunks<CTA_ROWS, 32>(length, lane, [&](int w, int offset) {
            *(uint4*)(to + (w * (HEADS * ROWS) + offset)) = *(const uint4*)(outputs + w * V_STRIDE + offset);
        });
        for_window_chunks<U_PLANES * CTA_ROWS, 32>(length, lane, [&](int w, int at) {
            const int plane = at / CTA_ROWS, offset = at % CTA_ROWS;
            *(uint4*)((char*)(ring + plane * ROWS + offset) + (u64)wrapped_entry(first + w) * ENTRY_BYTES) =
                *(const uint4*)(u + (plane * TOKEN_ROWS + w) * OWN_STRIDE + offset);
        });
    }
}
