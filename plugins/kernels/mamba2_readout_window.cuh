// What a window of the Mamba2 readout kernel is computed from: scores, coefficients, outputs. Every lane holds the scalars of
// one token of its part, and of matrix steps what primitives.cuh says.
#pragma once
#include "readout_dot.cuh"

constexpr int QUERY_TILES = WINDOW_ROWS / 8;
constexpr bool ONE = MAX_WINDOW == 1;
constexpr int EACH = ONE ? 1 : 2;  // queries of eight whose sums a lane has
constexpr bool SINGLE = NVFP4 && ONE;  // a query whose products with the state meet block scales once
constexpr int X_STRIDE = CTA_STATE_ROWS + 8;
static_assert(CTA_TILES <= 32, "a lane for every tile of a part");

// Coefficients of x in 16 tokens for 8 queries, split into halves of the activation format, as a second operand.
struct SplitPairs {
    u32 high[2], low[2];

    // Of tokens g + 8 i and queries 2 t and 2 t + 1, which the lane has: the operand wants the other way round.
    DEVICE_MEMBER void split(int i, float first, float second) {
        const u32 pair = pack_activation(first, second);
        high[i] = transpose_matrix(pair);
        low[i] = transpose_matrix(pack_activation(first - activation_low(pair), second - activation_high(pair)));
    }
};

// B . C: [query tile][16 tokens]: tokens g and g + 8, queries 2 t and 2 t + 1.
typedef float Scores[QUERY_TILES][TOKEN_STEPS][4];

DEVICE int query_of(int i) { return i < MAX_WINDOW ? i : MAX_WINDOW - 1; }

// score += rows of B, TOKEN_STRIDE elements apart, times rows of C alike.
DEVICE void add_scores(Scores& score, const activation_t* B, const activation_t* C) {
    const u32 thread = threadIdx.x;
    // Even and odd steps where there is but one sum, so that neither waits for the other.
    constexpr int CHAINS = QUERY_TILES * TOKEN_STEPS == 1 ? 2 : 1;
    float odd[4] = {};
    const activation_t* tokens = B + (thread % 16 * TOKEN_STRIDE + thread % 32 / 16 * 8);
    const activation_t* queries[QUERY_TILES];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
        queries[n] = C + ((u32)query_of(n * 8 + (int)(thread % 8)) * TOKEN_STRIDE + thread % 32 / 8 * 8);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        u32 q[QUERY_TILES][4];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) load_matrix_x4(q[n], queries[n] + 32 * pair);
#pragma unroll
        for (int i = 0; i < 2 * TOKEN_STEPS; i++) {
            const int k = i / 2, step = i % 2;
            u32 a[4];
            load_matrix_x4(a, tokens + (16 * k * TOKEN_STRIDE + 32 * pair + 16 * step));
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
                mma_16bit<ACTIVATION_FORMAT>(CHAINS == 2 && step ? odd : score[n][k], a[0], a[1], a[2], a[3],
                                             q[n][2 * step], q[n][2 * step + 1]);
        }
    }
    if constexpr (CHAINS == 2)
#pragma unroll
        for (int i = 0; i < 4; i++) score[0][0][i] += odd[i];
}

// Of the lane's token, of its part. weight: of a history token, dt and what follows it decayed; the rest of a window token:
// log decay and decay from the window's start, what turns products with the state into outputs. D: of the part.
struct TokenScalars {
    float weight, dt, prefix, decay, unit, D;
};

// What x of every token and the state are multiplied by, for queries 2 t and 2 t + 1 of every eight; a window of one token
// has it in every column.
struct Coefficients {
    SplitPairs pairs[QUERY_TILES][TOKEN_STEPS];
    float undo[QUERY_TILES][EACH];  // of fp16 pairs, whose range is small
    float unit[QUERY_TILES][EACH];

    static DEVICE_MEMBER int window_token(int n, int e) { return ONE ? 0 : n * 8 + 2 * (int)(threadIdx.x % 4) + e; }

    DEVICE_MEMBER void compute(const Scores& score, const TokenScalars& token, int history) {
        const int g = (int)(threadIdx.x % 32 / 4);
        float decay[QUERY_TILES][EACH], prefix[QUERY_TILES][EACH];
#pragma unroll
        for (int i = 0; i < QUERY_TILES * EACH; i++) {
            const int n = i / EACH, e = i % EACH, lane = window_token(n, e);
            decay[n][e] = shuffle_from(token.decay, lane);
            prefix[n][e] = ONE ? 0.f : shuffle_from(token.prefix, lane);
            unit[n][e] = shuffle_from(token.unit, lane);
        }
        // Decay, dt and B . C; D sits on the diagonal.
        float value[QUERY_TILES][2 * TOKEN_STEPS][EACH];
#pragma unroll
        for (int k8 = 0; k8 < 2 * TOKEN_STEPS; k8++) {
            const int k = 8 * k8 + g, j = k - history, from = ONE ? 0 : j & 31;
            const float past = shuffle_from(token.weight, k), fresh = shuffle_from(token.dt, from);
            const float from_prefix = ONE ? 0.f : shuffle_from(token.prefix, from);
#pragma unroll
            for (int i = 0; i < QUERY_TILES * EACH; i++) {
                const int n = i / EACH, e = i % EACH, w = window_token(n, e);
                float factor = past * decay[n][e];
                if (j >= 0) factor = ONE || j == w ? fresh : fresh * decay_of(prefix[n][e] - from_prefix);
                const float scaled = factor * score[n][k8 / 2][k8 % 2 * 2 + e];
                value[n][k8][e] = j > w ? 0.f : j == w ? scaled + token.D : scaled;
            }
        }
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) split(n, value[n]);
    }
    DEVICE_MEMBER void split(int n, const float (&value)[2 * TOKEN_STEPS][EACH]) {
        float factor[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            factor[e] = undo[n][e] = 1.f;
            if constexpr (ACTIVATION_FORMAT == FORMAT_FP16) {
                // The largest of a query becomes 2^14.
                float largest = 0.f;
#pragma unroll
                for (int k8 = 0; k8 < 2 * TOKEN_STEPS; k8++) largest = larger_magnitude(largest, value[k8][e]);
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) largest = larger_magnitude(largest, shuffle_xor(largest, mask));
                int field = 268 - (int)(float_to_bits(largest) >> 23);
                field = field > 240 ? 240 : field < 14 ? 14 : field;
                factor[e] = power_of_two(field), undo[n][e] = power_of_two(254 - field);
            }
        }
#pragma unroll
        for (int k8 = 0; k8 < 2 * TOKEN_STEPS; k8++) {
            SplitPairs& both = pairs[n][k8 / 2];
            both.split(k8 % 2, value[k8][0] * factor[0], value[k8][EACH - 1] * factor[EACH - 1]);
            // A single query's high halves stand in the even columns, its low ones in the odd.
            if (ONE && threadIdx.x % 8 >= 4) both.high[k8 % 2] = both.low[k8 % 2];
        }
    }
};

// sum[n] += 16 rows of x, from `x_rows` on as matrix loads take them, times their tokens' coefficients.
DEVICE void add_tokens(float (&sum)[QUERY_TILES][4], const Coefficients& coefficients,
                       const activation_t* x_rows, int m) {
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        u32 a[4];
        // Of half a tile, the same rows again rather than a neighbour's.
        const int repeated = 16 * m + 8 < CTA_ROWS ? 0 : (int)threadIdx.x / 8 % 2 * 8;
        load_matrix_x4_transposed(a, x_rows + (16 * step * X_STRIDE + 16 * m - repeated));
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            const SplitPairs& b = coefficients.pairs[n][step];
            mma_16bit<ACTIVATION_FORMAT>(sum[n], a[0], a[1], a[2], a[3], b.high[0], b.high[1]);
            if constexpr (!ONE) mma_16bit<ACTIVATION_FORMAT>(sum[n], a[0], a[1], a[2], a[3], b.low[0], b.low[1]);
        }
    }
}

// Outputs of a part of a window of one token, from an nvfp4 readout: sums of a quad are shared out, so that each lane ends
// the rows 8 n + g whose scales it has. codes, scales: of the lane's row g.
DEVICE void write_single_outputs(activation_t* outputs, const Coefficients& coefficients, const activation_t* x_rows,
                                 bool has_state, const unsigned char* codes, const unsigned char* scales,
                                 const u16* half_C, const RowScales& row_scales) {
    const int g = (int)(threadIdx.x % 32 / 4), t = (int)(threadIdx.x % 4);
    Queries<QUERY_TILES> query;
    query.set(0, half_C);
    query.spread();
    constexpr int SHARE = RowScales::COUNT;
    float sums[4 * SHARE] = {}, parts[4 * SHARE] = {}, own[SHARE];
    if (has_state)
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float product[2];
            dot_readout_once(product, codes + 16 * m * CODE_STRIDE, scales + 16 * m * BLOCK_SCALE_BYTES, query);
            parts[2 * m] = product[0], parts[2 * m + 1] = product[1];
        }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float sum[QUERY_TILES][4] = {};
        add_tokens(sum, coefficients, x_rows, m);
        sums[2 * m] = sum[0][0] + sum[0][1], sums[2 * m + 1] = sum[0][2] + sum[0][3];
    }
    share_quad_sums(parts, own);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const float low = t % 2 ? sums[4 * i + 1] : sums[4 * i], high = t % 2 ? sums[4 * i + 3] : sums[4 * i + 2];
        const float state = has_state ? own[i] * coefficients.unit[0][0] * row_scales.own(i) : 0.f;
        if (ROW_GROUPS % 4 == 0 || 4 * i + t < ROW_GROUPS)
            outputs[8 * (4 * i + t) + g] = float_to_activation((t / 2 ? high : low) * coefficients.undo[0][0] + state);
    }
}

// Outputs of a part, to rows of tokens X_STRIDE elements apart.
DEVICE void write_outputs(activation_t* outputs, const Coefficients& coefficients, const activation_t* x_rows,
                          bool has_state, const unsigned char* codes, const unsigned char* scales, const u16* half_C,
                          const RowScales& row_scales, int length) {
    const int g = (int)(threadIdx.x % 32 / 4);
    Queries<QUERY_TILES> query;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) query.set(n, half_C + query_of(8 * n + g) * KEY_STRIDE);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float sum[QUERY_TILES][4] = {}, product[QUERY_TILES][4] = {};
        add_tokens(sum, coefficients, x_rows, m);
        if (has_state)
            dot_readout<QUERY_TILES>(product, codes + 16 * m * CODE_STRIDE, scales + 16 * m * BLOCK_SCALE_BYTES, query);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (16 * m + 8 * half >= CTA_ROWS) continue;
            const float row_scale = row_scales.of_group(2 * m + half);
#pragma unroll
            for (int i = 0; i < QUERY_TILES * EACH; i++) {
                const int n = i / EACH, e = i % EACH, w = Coefficients::window_token(n, e);
                const float tokens = ONE ? sum[n][2 * half] + sum[n][2 * half + 1] : sum[n][2 * half + e];
                const float state = has_state ? product[n][2 * half + e] * coefficients.unit[n][e] * row_scale : 0.f;
                if (ONE ? threadIdx.x % 4 == 0 : w < length)
                    outputs[w * X_STRIDE + (16 * m + 8 * half + g)] =
                        float_to_activation(tokens * coefficients.undo[n][e] + state);
            }
        }
    }
}
