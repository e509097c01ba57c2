// The part of gdn_window.cu that the window's tokens have in each other: see WindowMatrices.
#pragma once
#include "gdn_queries.cuh"

// Matrices that turn what the state and the history say about a window, one row per query, into its u and outputs. With
// p the predictions, y the outputs without the window's own u, and T the unit lower triangle of the window's u,
// T_wj = beta_w decay (k_w . k_j):   u = M (v - p),   o = y + N (v - p),   M = T^-1 beta,   N_wj = sum_i P_wi M_ij with
// P_wi = decay (q_w . k_i). Entries of M are at most 1 in size: they are products of contractions.
// Column j belongs to token j, or with one tile to query j, where M is zero and N one for y.
struct WindowMatrices {
    static constexpr int SIZE = WINDOW_ROWS, COUNT = MAX_WINDOW == 1 ? 2 : MAX_WINDOW * SIZE;  // a single token needs none
    float u[COUNT], o[COUNT];  // first the scores of k and of q, then M and N
};

// One warp calls it. `queries` as in query_loads' shared memory.
DEVICE void write_window_matrices(WindowMatrices& matrices, const activation_t* queries, const Gates& gates) {
    constexpr int SIZE = WindowMatrices::SIZE;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto row_of = [&](int token) { return (token < MAX_WINDOW ? token : MAX_WINDOW - 1) * TOKEN_STRIDE; };
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
        for (int n = 0; n <= m; n++) {
            // Rows 0 to 7 are q, rows 8 to 15 k of the same tokens.
            const activation_t* a_row = queries + (lane / 8 % 2 ? MAX_WINDOW * TOKEN_STRIDE : 0) +
                                        row_of(m * 8 + lane % 8) + lane / 16 * 8;
            const activation_t* b_row = queries + MAX_WINDOW * TOKEN_STRIDE + row_of(n * 8 + lane % 8) + lane / 8 % 2 * 8;
            float score[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int column = 0; column < COLUMNS; column += 16) {
                u32 a[4], b[2];
                load_matrix_x4(a, a_row + column);
                load_matrix_x2(b, b_row + column);
                mma_16bit<ACTIVATION_FORMAT>(column / 16 % 2 ? odd : score, a[0], a[1], a[2], a[3], b[0], b[1]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) score[i] += odd[i];
            const int w = m * 8 + g;
            if (w >= MAX_WINDOW) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = n * 8 + 2 * t + i;
                float exponent = 0.f;
#pragma unroll
                for (int between = 1; between < MAX_WINDOW; between++)
                    exponent += between > j && between <= w ? gates.log_window[between] : 0.f;
                const float decay = decay_of(exponent);
                matrices.o[w * SIZE + j] = QUERY_SCALE * decay * score[i];
                matrices.u[w * SIZE + j] = decay * score[2 + i];
            }
        }
    sync_warp();
    // A lane solves for one column of M, from the top, and multiplies it by P.
    const int column = lane % SIZE, j = ONE_TILE ? column - 4 : column;
    float m[MAX_WINDOW], product[MAX_WINDOW];
#pragma unroll
    for (int w = 0; w < MAX_WINDOW; w++) {
        float sum = w == j ? 1.f : 0.f;
        product[w] = 0.f;
#pragma unroll
        for (int i = 0; i < w; i++) {
            sum -= matrices.u[w * SIZE + i] * m[i];
            product[w] += matrices.o[w * SIZE + i] * m[i];
        }
        m[w] = gates.beta[w] * sum;
        product[w] += matrices.o[w * SIZE + w] * m[w];
    }
    sync_warp();
#pragma unroll
    for (int w = 0; w < MAX_WINDOW; w++) {
        const bool is_output = ONE_TILE && column < 4;
        matrices.u[w * SIZE + column] = is_output ? 0.f : m[w];
        matrices.o[w * SIZE + column] = is_output ? (w == column ? 1.f : 0.f) : product[w];
    }
}

// d += a . the transposed tile of 8 tokens (rows) and queries `from` of `matrix`, both as high and low tf32 halves.
// a[i] belongs to row g + 8 (i % 2) and query 2 t + i / 2. Rows behind the matrix repeat its last.
DEVICE void mix(float (&d)[4], const float (&a)[4], const float* matrix, int tokens, int from) {
    const int lane = threadIdx.x % 32, token = tokens * 8 + lane / 4, t = lane % 4;
    const float2 b = *(const float2*)(matrix + (token < MAX_WINDOW ? token : MAX_WINDOW - 1) * WindowMatrices::SIZE +
                                      from * 8 + 2 * t);
    const float b0 = high_half(b.x), b1 = high_half(b.y);
    const float h0 = high_half(a[0]), h1 = high_half(a[1]), h2 = high_half(a[2]), h3 = high_half(a[3]);
    mma_tf32(d, h0, h1, h2, h3, b0, b1);
    mma_tf32(d, a[0] - h0, a[1] - h1, a[2] - h2, a[3] - h3, b0, b1);
    mma_tf32(d, h0, h1, h2, h3, b.x - b0, b.y - b1);
}

// Turns words of rows g and g + 8 (queries 2 t and 2 t + 1 of each) round: lane 4 g + t receives 4 neighbouring rows of
// query g, the first of which is the warp's row (t % 2) * 8 + t / 2 * 4.
DEVICE uint2 rows_of_query(u32 word0, u32 word1) {
    const u32 low = transpose_matrix(word0), high = transpose_matrix(word1);
    const bool odd = threadIdx.x & 1;
    const u32 other = float_to_bits(shuffle_xor(bits_to_float(odd ? low : high), 1));
    return odd ? make_uint2(other, high) : make_uint2(low, other);
}

// Where a lane's 4 rows of a part go: of window tokens g, g + 8 ..., or of a single token.
struct Results {
    activation_t* o;  // of the first; others lie 8 tokens apart
    u16* u[TOKEN_TILES];
    int length;  // of the window
    bool rows_exist;
};

// u and output of a single token. `sum` is what q (lanes 0 and 1 of four) and k (2 and 3) read, values are v, and
// `score` is k . q.
DEVICE void finish_token(const float (&sum)[QUERY_TILES][4], const float (&values)[4], float beta, float score,
                         const Results& to) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 words[2];  // query 0 becomes the output, 1 and 2 are u
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const float mine = sum[0][2 * e], other = shuffle_xor(mine, 2);
        const float u = beta * (values[e] - (t < 2 ? other : mine));
        const float out = (t < 2 ? mine : other) + QUERY_SCALE * score * u;
        const u32 high = float_to_bf16(u);
        words[e] = t == 0   ? (u32)float_to_activation(out) | high << 16
                   : t == 1 ? (u32)float_to_bf16(u - bf16_low(high))
                            : 0;
    }
    const uint2 packed = rows_of_query(words[0], words[1]);
    u16* at = g == 0 ? (u16*)to.o : to.u[0] + (g - 1) * ROWS;
    if (g <= U_PLANES && to.rows_exist) *(uint2*)at = packed;
}

// The same of a window, by its matrices. values[m][e]: v of token 8 m + 2 t + e / 2 (of four with one tile).
DEVICE void finish_window(const float (&sum)[QUERY_TILES][4], const float (&values)[TOKEN_TILES][4],
                          const WindowMatrices& matrices, const Results& to) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++) {
        float out[4] = {0.f, 0.f, 0.f, 0.f}, u[4] = {0.f, 0.f, 0.f, 0.f};
        if (!ONE_TILE)
#pragma unroll
            for (int e = 0; e < 4; e++) out[e] = sum[m][e];
#pragma unroll
        for (int n = 0; n <= m; n++) {
            float known[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float predicted = sum[ONE_TILE ? 0 : TOKEN_TILES + n][e % 2 * 2 + e / 2];
                known[e] = ONE_TILE && t < 2 ? predicted : values[n][e] - predicted;
            }
            mix(out, known, matrices.o, m, n);
            mix(u, known, matrices.u, m, n);
        }
        const int w = m * 8 + g;
        const bool stored = w < to.length && to.rows_exist;
        const uint2 packed = rows_of_query(pack_activations(out[0], out[1]), pack_activations(out[2], out[3]));
        if (stored) *(uint2*)(to.o + m * (8 * HEADS * ROWS)) = packed;
#pragma unroll
        for (int plane = 0; plane < U_PLANES; plane++) {
            const u32 low = split_bf16(u[0], u[1]), high = split_bf16(u[2], u[3]);
            const uint2 half = rows_of_query(low, high);
            if (stored) *(uint2*)(to.u[m] + plane * ROWS) = half;
        }
    }
}
