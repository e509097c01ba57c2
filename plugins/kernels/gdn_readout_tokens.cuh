// Pieces of gdn_readout.cu for windows of two to eight tokens over an nvfp4 readout (gdn_readout_tiled.cuh): what a block makes
// of the window's tokens and of the history's before its warps go through their rows.
#pragma once
#include "gdn_readout_window.cuh"

// What undoes the power of two by which widen_codes leaves codes too small.
constexpr float READOUT_UPSCALE = 16384.f;

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

// ------------------------------------------------------------------------------------------------------- queries

// The window's queries on their way through the place where they stay: q of a token in the lower half of a warp, its k in the
// upper one.
struct PairedQueries {
    // The first warps have them, where the last ones have the gates.
    static constexpr int OWNERS = WARPS > GATE_WARPS ? WARPS - GATE_WARPS : WARPS;
    static constexpr int COUNT = (MAX_WINDOW + OWNERS - 1) / OWNERS, CHUNKS = (COLUMNS + 127) / 128;

    // body(token, place of the lane's 16 bytes, column) for all that the warp has.
    template <class Body>
    static DEVICE_MEMBER void for_all(activation_t* queries, const Body& body) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int w = i * OWNERS + warp;
            if (warp >= OWNERS || w >= MAX_WINDOW) break;  // all of the warp
            body(w, queries + ((lane < 16 ? 0 : MAX_WINDOW) + w) * TOKEN_STRIDE + lane % 16 * 8);
        }
    }
    static DEVICE_MEMBER bool exists(int chunk) {
        return COLUMNS % 128 == 0 || 128 * chunk + (int)threadIdx.x % 16 * 8 < COLUMNS;
    }
    static DEVICE_MEMBER void load(activation_t* queries, const activation_t* q, int q_stride, const activation_t* k, int k_stride,
                                   int start, int length) {
        const u32 warp = threadIdx.x / 32u, lane = threadIdx.x % 32u;
        const activation_t* from = (lane < 16 ? q : k) + lane % 16 * 8;
        const u32 row_bytes = (lane < 16 ? q_stride : k_stride) * 2u;
        activation_t* to = queries + ((lane < 16 ? 0 : MAX_WINDOW) + warp) * TOKEN_STRIDE + lane % 16 * 8;
        // No warp branches: behind a branch the compiler would wait for the checkpoint position before it copies.
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const u32 w = i * OWNERS + warp;
            const activation_t* row = advance(from, start + w, row_bytes);  // not read if it is none
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++)
                if ((COLUMNS % 128 == 0 || exists(chunk)) && (OWNERS == WARPS || warp < OWNERS) &&
                    (MAX_WINDOW % OWNERS == 0 || w < MAX_WINDOW))
                    copy_async_16(to + (i * OWNERS * TOKEN_STRIDE + 128 * chunk), row + 128 * chunk, (int)w < length);
        }
    }
    // half_queries: a lane's words of k and q of a token beside each other: k, k two columns further on, and both of q. What
    // fp16 does not hold of numbers below 2^-14 is 2^-25 at most, beside a length of 1.
    static DEVICE_MEMBER void normalize(activation_t* queries, u16* half_queries) {
        const int lane = threadIdx.x % 32;
        const bool is_k = lane >= 16;
        for_all(queries, [&](int w, activation_t* place) {
            float sum = 0.f, values[CHUNKS][8];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                const uint4 raw = exists(chunk) ? *(const uint4*)(place + 128 * chunk) : make_uint4(0, 0, 0, 0);
                const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    values[chunk][e] = e % 2 ? activation_high(words[e / 2]) : activation_low(words[e / 2]);
                    sum = multiply_add(values[chunk][e], values[chunk][e], sum);
                }
            }
#pragma unroll
            for (int mask = 8; mask; mask /= 2) sum += shuffle_xor(sum, mask);
            const float scale = rsqrtf(sum + L2_NORM_EPS);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                u32 words[4], half[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    words[e] = pack_activation(values[chunk][2 * e] * scale, values[chunk][2 * e + 1] * scale);
                    half[e] = pack_fp16(activation_low(words[e]), activation_high(words[e]));
                }
                if (!exists(chunk)) continue;
                *(uint4*)(place + 128 * chunk) = make_uint4(words[0], words[1], words[2], words[3]);
                u16* to = half_queries + w * (2 * KEY_STRIDE) + 2 * (128 * chunk + lane % 16 * 8) + (is_k ? 0 : 4);
                *(uint2*)to = make_uint2(half[0], half[1]);
                *(uint2*)(to + 8) = make_uint2(half[2], half[3]);
            }
        });
    }
};

// As build_fold_keys or build_column_keys, in the place of the tokens, TOKEN_STRIDE elements apart.
DEVICE void replace_by_fold_keys(uint4* tokens) {
    constexpr int COUNT = TOKEN_STEPS * PAIRS, OWN = (COUNT + WARPS - 1) / WARPS;
    static_assert(2 * TOKEN_ROWS * TOKEN_STRIDE >= FOLD_KEYS_SIZE, "keys take the place of tokens");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 own[OWN][2];
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (COUNT % WARPS == 0 || i * WARPS + warp < COUNT) {
            if constexpr (GDN_FOLDS_COLUMNS)
                column_keys_of<TOKEN_STRIDE>(own[i], (const activation_t*)tokens, i * WARPS + warp);
            else
                fold_keys_of<TOKEN_STRIDE>(own[i], (const activation_t*)tokens, i * WARPS + warp);
        }
    sync_threads();
#pragma unroll
    for (int i = 0; i < 2 * OWN; i++)
        if (COUNT % WARPS == 0 || i / 2 * WARPS + warp < COUNT)
            tokens[(2 * (i / 2 * WARPS + warp) + i % 2) * 32 + lane] = own[i / 2][i % 2];
}

// -------------------------------------------------------------------------------------------------- coefficients

// Where a block has whole heads, whose first warps compute what the window's own tokens take for all of their warps.
constexpr bool WHOLE_HEADS = WARPS % CTAS_PER_HEAD == 0;
constexpr int WINDOW_SHARES = TILED ? WHOLE_HEADS ? WARPS / CTAS_PER_HEAD : WARPS : 1;
DEVICE int window_share() { return threadIdx.x / 32 / (WHOLE_HEADS ? CTAS_PER_HEAD : 1); }
DEVICE bool computes_window() { return !WHOLE_HEADS || threadIdx.x / 32 % CTAS_PER_HEAD == 0; }

// What a head's window is multiplied by besides its queries.
struct TiledCoefficients {
    // The lane's part of second operands, of window token g. Of u of the history's tokens: [for k of 2 t and 2 t + 1, for q of
    // these, for k of 2 t + 8 and 2 t + 9, for q of these].
    SplitPair past[TOKEN_STEPS][4];
    SplitPair u, output;  // of v less what the state and the history predict: for u less that, and for outputs
    float of_k[2], of_q[2];  // of the state, for tokens 2 t and 2 t + 1

    // queries: of the window; keys: of the history. decays: of the state up to a window token. window: what of_window left.
    DEVICE_MEMBER void compute(const activation_t* queries, const activation_t* keys, const Gates& gates,
                               const float (&decays)[MAX_WINDOW], int history, const uint4* window) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float decay = decays[token_of(lane % 4 * 2 + e)];
            of_k[e] = decay * -READOUT_UPSCALE, of_q[e] = decay * (READOUT_UPSCALE * QUERY_SCALE);
        }
        const uint4 of_window = window[lane];
        u = {of_window.x, of_window.z}, output = {of_window.y, of_window.w};
        if (history)
            of_past(queries, keys, gates, history);
        else
#pragma unroll
            for (int i = 0; i < 4 * TOKEN_STEPS; i++) past[i / 4][i % 4] = {0u, 0u};
    }

    // The lane's row of queries as the first operand: k of tokens 0 to 7, then q.
    static DEVICE_MEMBER const activation_t* query_rows(const activation_t* queries) {
        const int lane = threadIdx.x % 32;
        return queries + ((lane & 8 ? 0 : MAX_WINDOW) + token_of(lane % 8)) * TOKEN_STRIDE + lane / 16 * 8;
    }
    DEVICE_MEMBER void of_past(const activation_t* queries, const activation_t* keys, const Gates& gates, int history) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const activation_t* of_queries = query_rows(queries);
        const activation_t* of_keys = keys + (lane / 16 * 8 + lane % 8) * TOKEN_STRIDE + (lane & 8);
        float score[TOKEN_STEPS][2][4] = {};
        const bool short_history = is_short_history(history);
        if (short_history) {
            const activation_t* of_eight = keys + lane % 8 * TOKEN_STRIDE + lane / 8 * 8;
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                u32 k[4];
                load_matrix_x4(k, of_eight + 32 * pair);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 a[4];
                    load_matrix_x4(a, of_queries + 32 * pair + 16 * i);
                    mma_16bit<ACTIVATION_FORMAT>(score[0][0], a[0], a[1], a[2], a[3], k[2 * i], k[2 * i + 1]);
                }
            }
        } else {
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
        }
        const float decay = gates.window[token_of(g)];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (n == 1 && short_history) break;
                const float* past_decay = gates.past + 16 * step + 8 * n + 2 * t;
                const float first = past_decay[0] * decay, second = past_decay[1] * decay;
                past[step][2 * n].split(-score[step][n][0] * first, -score[step][n][1] * second);
                past[step][2 * n + 1].split(score[step][n][2] * (first * QUERY_SCALE),
                                            score[step][n][3] * (second * QUERY_SCALE));
            }
    }
    // u and output for all lanes, [high halves of both, low halves of both].
    static DEVICE_MEMBER void of_window(const activation_t* queries, const Gates& gates, uint4* window) {
        const activation_t* of_queries = query_rows(queries);
        float own[2][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 a[4];
            load_matrix_x4(a, of_queries + 16 * i);
            // A lane's part of the rows k of the first operand is that of the columns k of the second.
            mma_16bit<ACTIVATION_FORMAT>(own[i % 2], a[0], a[1], a[2], a[3], a[0], a[2]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) own[0][i] += own[1][i];
        window[threadIdx.x % 32] = solve(own[0], gates);
    }

    // (1 + N)^-1 diag(beta) and P (1 + N)^-1 diag(beta), row by row: N = beta k . k below the diagonal, P = q . k, both with
    // their decays. own: k of token g . k of tokens 2 t and 2 t + 1, then q of g . k of the same.
    static DEVICE_MEMBER uint4 solve(const float (&own)[4], const Gates& gates) {
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
        SplitPair u, output;
        u.split(of_u[0] - (g == 2 * t ? 1.f : 0.f), of_u[1] - (g == 2 * t + 1 ? 1.f : 0.f));
        output.split(of_output[0], of_output[1]);
        return make_uint4(u.high, output.high, u.low, output.low);
    }
};
