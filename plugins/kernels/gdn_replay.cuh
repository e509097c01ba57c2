// Building blocks of gdn_window.cu beside those of replay.cuh. A warp owns 16 rows of the state: lane 4 g + t of it works
// for rows g and g + 8, and in a tile of 8 queries for queries 2 t and 2 t + 1. Whatever a warp can compute faster than
// it could wait for another, it computes itself.
#pragma once
#include "gdn_window.cuh"

// Queries of the state: q of every window token (outputs), then k of every window token (what the state predicts). They
// come in tiles of 8: short windows in one, with four of each; otherwise tiles of q and as many of k.
constexpr int QUERIES = 2 * MAX_WINDOW;
constexpr bool ONE_TILE = MAX_WINDOW <= 4;
constexpr int TOKEN_TILES = WINDOW_ROWS / 8;
constexpr int QUERY_TILES = ONE_TILE ? 1 : 2 * TOKEN_TILES;
constexpr int TILE_TOKENS = ONE_TILE ? 4 : 8;
constexpr int HISTORY_TILES = (HISTORY_ROWS + 15) / 16;

// 16-bit states are multiplied as they are stored, by queries of the same format. bf16 queries become fp16 ones exactly
// enough: at most 1 in size, they are scaled up to where fp16 has more bits than bf16 down to 2^-32.
constexpr bool SCALED_QUERIES = STATE_FORMAT == FORMAT_FP16 && ACTIVATION_FORMAT == FORMAT_BF16;
constexpr bool DIRECT = STATE_FORMAT != FORMAT_FP32 && (STATE_FORMAT == ACTIVATION_FORMAT || SCALED_QUERIES);
constexpr float QUERY_UPSCALE = SCALED_QUERIES ? 32768.f : 1.f;

struct Gates {
    float history[16 * HISTORY_TILES];  // decay behind history token k, to the end of the history; 0 beyond it
    float prefix[WINDOW_ROWS];          // decay from the start of the window to behind token w
    float log_window[WINDOW_ROWS];      // log decay of window token w alone
    float beta[WINDOW_ROWS];
    float total;  // decay over the whole history
};

// Lane k passes the log decay of history token k (0 beyond it), lane w that of window token w. Every sum runs over its
// own terms: differences of one running sum would cancel.
DEVICE void write_gates(Gates& gates, int history_length, float history, float window, float beta) {
    const int lane = threadIdx.x % 32;
    float suffix = history, prefix = window;
#pragma unroll
    for (int delta = 1; delta < 16 * HISTORY_TILES; delta *= 2) {
        const float after = shuffle_down(suffix, delta);
        if (lane + delta < 32) suffix += after;
    }
#pragma unroll
    for (int delta = 1; delta < WINDOW_ROWS; delta *= 2) {
        const float before = shuffle_up(prefix, delta);
        if (lane >= delta) prefix += before;
    }
    const float behind = shuffle_down(suffix, 1);
    if (lane < 16 * HISTORY_TILES) gates.history[lane] = lane < history_length ? decay_of(lane < 31 ? behind : 0.f) : 0.f;
    if (lane < WINDOW_ROWS)
        gates.prefix[lane] = decay_of(prefix), gates.log_window[lane] = window, gates.beta[lane] = beta;
    if (lane == 0) gates.total = decay_of(suffix);
}

// Two numbers rounded to the activation format, the first in the low half.
DEVICE u32 pack_activations(float low, float high) {
    if constexpr (ACTIVATION_FORMAT == FORMAT_BF16) return pack_bf16(low, high);
    return (u32)float_to_activation(low) | (u32)float_to_activation(high) << 16;
}
// Takes the bf16 heads of two numbers off them.
DEVICE u32 split_bf16(float& low, float& high) {
    const u32 word = pack_bf16(low, high);
    low -= bf16_low(word), high -= bf16_high(word);
    return word;
}

// High half of a number for the matrix unit's tf32 products. One bit less than these keep: of a number cut where tf32 is
// cut anyway, the assembler would pass the whole one, and spend an instruction on moving it next to its neighbours.
DEVICE float high_half(float value) { return bits_to_float(float_to_bits(value) & 0xffffc000u); }

// `index` times `stride` elements behind `base`; neither is negative.
template <class T>
DEVICE T* advance(T* base, int index, int stride) {
    return base + (unsigned long long)(u32)index * (u32)stride;
}

// Row of shared memory that holds query `column` of tile n; columns without a token repeat the last.
DEVICE int query_row(int n, int column) {
    const bool is_k = ONE_TILE ? column >= 4 : n >= TOKEN_TILES;
    const int token = ONE_TILE ? column % 4 : n % TOKEN_TILES * 8 + column;
    return (is_k ? MAX_WINDOW : 0) + (token < MAX_WINDOW ? token : MAX_WINDOW - 1);
}

// --------------------------------------------------------------------------------------------- products of the state

// Products of the warp's 16 rows and all queries. Several sums (high and low halves of fp32 states, even and odd steps
// of a single tile) keep the matrix unit's latency hidden; `value` adds them in one order.
struct StateProducts {
    static constexpr int CHAINS = QUERY_TILES == 1 ? 2 : 1, HALVES = DIRECT || STATE_FORMAT != FORMAT_FP32 ? 1 : 2;
    float sums[HALVES][CHAINS][QUERY_TILES][4];

    DEVICE_MEMBER void clear() {
#pragma unroll
        for (int i = 0; i < HALVES * CHAINS * QUERY_TILES * 4; i++) (&sums[0][0][0][0])[i] = 0.f;
    }
    DEVICE_MEMBER float value(int n, int i) const {
        float sum = 0.f;
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int chain = 0; chain < CHAINS; chain++)
                sum = half + chain ? sum + sums[half][chain][n][i] : sums[half][chain][n][i];
        return sum;
    }
};

// What a lane holds of a row: LANE_COLUMNS neighbouring columns, as numbers or, where that is multiplied, as stored.
struct Piece {
    float values[LANE_COLUMNS];
    u32 words[LANE_COLUMNS / 2];
};

DEVICE void load_words(const void* from, u32 (&words)[LANE_COLUMNS / 2]) {
    load_query_columns((const activation_t*)from, words);
}
DEVICE void load_piece(const state_t* from, Piece& piece) {
    if constexpr (DIRECT)
        load_words(from, piece.words);
    else
        load_lane_columns(from, piece.values);
}

// Adds the part of the lane's columns of rows g and g + 8. A k-step of the matrix unit takes any pairing of columns to its
// slots, as long as both operands use the same one. `query` are the lane's queries at these columns.
DEVICE void add_products(StateProducts& products, const Piece& s0, const Piece& s1,
                         const activation_t* const (&query)[QUERY_TILES], int column) {
    constexpr int CHAINS = StateProducts::CHAINS;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        u32 pairs[LANE_COLUMNS / 2];
        load_words(query[n] + column, pairs);
        if constexpr (DIRECT) {
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS / 4; i++)
                mma_16bit<STATE_FORMAT>(products.sums[0][i % CHAINS][n], s0.words[2 * i], s1.words[2 * i],
                                        s0.words[2 * i + 1], s1.words[2 * i + 1], pairs[2 * i], pairs[2 * i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS / 2; i++) {
                const float b0 = activation_low(pairs[i]), b1 = activation_high(pairs[i]);
                const float a0 = s0.values[2 * i], a1 = s1.values[2 * i];
                const float a2 = s0.values[2 * i + 1], a3 = s1.values[2 * i + 1];
                if constexpr (STATE_FORMAT == FORMAT_FP32) {
                    const float h0 = high_half(a0), h1 = high_half(a1), h2 = high_half(a2), h3 = high_half(a3);
                    mma_tf32(products.sums[0][i % CHAINS][n], h0, h1, h2, h3, b0, b1);
                    mma_tf32(products.sums[1 % StateProducts::HALVES][i % CHAINS][n], a0 - h0, a1 - h1, a2 - h2, a3 - h3,
                             b0, b1);
                } else {
                    mma_tf32(products.sums[0][i % CHAINS][n], a0, a1, a2, a3, b0, b1);
                }
            }
        }
    }
}

// From the tile in shared memory.
DEVICE void multiply_tile(StateProducts& products, const state_t* tile,
                          const activation_t* const (&query)[QUERY_TILES]) {
    const u32 lane = threadIdx.x % 32u;
    const state_t* rows = tile + (threadIdx.x / 32u * 16 + lane / 4) * COLUMNS + lane % 4 * LANE_COLUMNS;
#pragma unroll 8
    for (int column = 0; column < COLUMNS; column += BLOCK_COLUMNS) {
        Piece s0, s1;
        load_piece(rows + column, s0);
        load_piece(rows + 8 * COLUMNS + column, s1);
        add_products(products, s0, s1, query, column);
    }
}

// ---------------------------------------------------------------------------------------------------- the history

// u of the history for the matrix unit, both halves of every pair added up where it matters: word i of tile m and plane p
// holds tokens 16 m + 8 (i / 2) + 2 t and the next of row g + 8 (i % 2).
DEVICE void load_u(u32 (&words)[4], const u16* plane, int m) {
    const int lane = threadIdx.x % 32, token = m * 16 + lane % 8 + lane / 16 * 8;
    load_matrix_x4_transposed(words, plane + (token < HISTORY_ROWS ? token : HISTORY_ROWS - 1) * VALUE_STRIDE +
                                         threadIdx.x / 32u * 16 + (lane / 8 & 1) * 8);
}

// Products of 16 tokens, whose row of the lane is `token`, and all queries: (g, 2 t), (g, 2 t + 1), then token g + 8.
// `queries` is the lane's row of the matrix loads, see query_loads.
DEVICE void token_scores(float (&score)[QUERY_TILES][4], const activation_t* token,
                         const activation_t* const (&queries)[(QUERY_TILES + 1) / 2]) {
    constexpr bool TWO_STEPS = QUERY_TILES == 1 && COLUMNS % 32 == 0;  // of k, by one load of the queries
#pragma unroll
    for (int column = 0; column < COLUMNS; column += TWO_STEPS ? 32 : 16) {
        u32 a[4], b[4];
        load_matrix_x4(a, token + column);
        if constexpr (QUERY_TILES == 1) {
            load_matrix_x4(b, queries[0] + column);
            mma_16bit<ACTIVATION_FORMAT>(score[0], a[0], a[1], a[2], a[3], b[0], b[1]);
            if constexpr (TWO_STEPS) {
                load_matrix_x4(a, token + column + 16);
                mma_16bit<ACTIVATION_FORMAT>(score[0], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        } else {
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n += 2) {
                load_matrix_x4(b, queries[n / 2] + column);
                mma_16bit<ACTIVATION_FORMAT>(score[n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_16bit<ACTIVATION_FORMAT>(score[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
}
// The lane's rows: 8 x 8 matrices of two tiles, columns 0 and 8 of each, or of one tile, columns 0, 8, 16 and 24.
DEVICE void query_loads(const activation_t* (&rows)[(QUERY_TILES + 1) / 2], const activation_t* queries) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n += 2)
        rows[n / 2] = queries + query_row(QUERY_TILES == 1 ? 0 : n + lane / 16, lane % 8) * TOKEN_STRIDE +
                      (QUERY_TILES == 1 && COLUMNS % 32 == 0 ? lane / 8 : lane / 8 % 2) * 8;
}

// sum += u of 16 tokens . their coefficients `value`, laid out like scores (AS_SCORES) or like the matrix unit's second
// operand. u is exact; the coefficients keep 24 bits with its high half, and 16 with its low one.
template <bool AS_SCORES>
DEVICE void add_history(float (&sum)[QUERY_TILES][4], float (&value)[QUERY_TILES][4], const u16* const (&planes)[U_PLANES],
                        int m) {
    u32 a[U_PLANES][4];
#pragma unroll
    for (int plane = 0; plane < U_PLANES; plane++) load_u(a[plane], planes[plane], m);
#pragma unroll
    for (int part = 0; part < 3; part++)
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            u32 b0 = split_bf16(value[n][0], value[n][1]), b1 = split_bf16(value[n][2], value[n][3]);
            if constexpr (AS_SCORES) b0 = transpose_matrix(b0), b1 = transpose_matrix(b1);
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++)
                if (part + plane < 3)
                    mma_16bit<FORMAT_BF16>(sum[n], a[plane][0], a[plane][1], a[plane][2], a[plane][3], b0, b1);
        }
}

// Folds the history into the warp's 16 rows, stores them, and passes what is stored on: consume(column, s0, s1) gets the
// lane's LANE_COLUMNS values of rows g and g + 8 in the block of columns that starts at `column`. `tokens` are the rows k
// of the history, zero beyond it; weights[m][i] is the decay behind its token 16 m + 8 (i / 2) + 2 t + i % 2.
// UNROLL blocks are worked on at a time.
template <int UNROLL, class Consume>
DEVICE void fold_tile(const state_t* tile, state_t* global, bool has_state, float decay,
                      const float (&weights)[HISTORY_TILES][4], const u16* const (&planes)[U_PLANES],
                      const activation_t* tokens, const Consume& consume) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = threadIdx.x / 32 * 16;
    // Decayed u. Words of three bf16 parts, or for fp16 tokens numbers.
    constexpr bool SPLIT = ACTIVATION_FORMAT == FORMAT_BF16;
    u32 parts[HISTORY_TILES][SPLIT ? 3 : 1][4];
    float numbers[HISTORY_TILES][SPLIT ? 1 : 8];
#pragma unroll
    for (int m = 0; m < HISTORY_TILES; m++) {
        u32 high[4], low[4] = {0, 0, 0, 0};
        load_u(high, planes[0], m);
        if (U_PLANES == 2) load_u(low, planes[U_PLANES - 1], m);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float even = weights[m][i / 2 * 2] * (bf16_low(high[i]) + bf16_low(low[i]));
            float odd = weights[m][i / 2 * 2 + 1] * (bf16_high(high[i]) + bf16_high(low[i]));
            if constexpr (SPLIT) {
#pragma unroll
                for (int part = 0; part < 3; part++) parts[m][part][i] = split_bf16(even, odd);
            } else {
                numbers[m][2 * i] = even, numbers[m][2 * i + 1] = odd;
            }
        }
    }
    const state_t* rows = tile + (first + g) * COLUMNS + t * LANE_COLUMNS;
    state_t* stored = global + (first + g) * COLUMNS + t * LANE_COLUMNS;
#pragma unroll UNROLL
    for (int column = 0; column < COLUMNS; column += BLOCK_COLUMNS) {
        float s0[LANE_COLUMNS], s1[LANE_COLUMNS];
        if (has_state) {
            load_lane_columns(rows + column, s0);
            load_lane_columns(rows + 8 * COLUMNS + column, s1);
        }
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
            s0[i] = has_state ? decay * s0[i] : 0.f, s1[i] = has_state ? decay * s1[i] : 0.f;
#pragma unroll
        for (int m = 0; m < HISTORY_TILES; m++) {
            // Accumulator columns 2 t and 2 t + 1 must be the lane's own state columns, so column g of the second operand
            // is one of those that lane g / 2 owns.
            u32 words[4][LANE_COLUMNS / 2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = m * 16 + i / 2 * 8 + 2 * t + i % 2;
                load_words(tokens + (token < HISTORY_ROWS ? token : HISTORY_ROWS - 1) * TOKEN_STRIDE + column +
                               g / 2 * LANE_COLUMNS,
                           words[i]);
            }
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS / 2; i++) {
                float d[4] = {s0[2 * i], s0[2 * i + 1], s1[2 * i], s1[2 * i + 1]};
                if constexpr (SPLIT) {
                    const u32 selector = g & 1 ? 0x7632 : 0x5410;
                    const u32 b0 = permute_bytes(words[0][i], words[1][i], selector);
                    const u32 b1 = permute_bytes(words[2][i], words[3][i], selector);
#pragma unroll
                    for (int part = 0; part < 3; part++)
                        mma_16bit<FORMAT_BF16>(d, parts[m][part][0], parts[m][part][1], parts[m][part][2],
                                               parts[m][part][3], b0, b1);
                } else {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const u32 even = words[2 * half][i], odd = words[2 * half + 1][i];
                        const float b0 = g & 1 ? activation_high(even) : activation_low(even);
                        const float b1 = g & 1 ? activation_high(odd) : activation_low(odd);
                        const float* a = numbers[m] + 4 * half;  // even and odd token of row g, then of row g + 8
                        const float h0 = tf32_high(a[0]), h1 = tf32_high(a[2]), h2 = tf32_high(a[1]);
                        const float h3 = tf32_high(a[3]);
                        mma_tf32(d, h0, h1, h2, h3, b0, b1);
                        mma_tf32(d, a[0] - h0, a[2] - h1, a[1] - h2, a[3] - h3, b0, b1);
                    }
                }
                s0[2 * i] = d[0], s0[2 * i + 1] = d[1], s1[2 * i] = d[2], s1[2 * i + 1] = d[3];
            }
        }
        store_lane_columns(stored + column, s0, first + g < CTA_ROWS);
        store_lane_columns(stored + 8 * COLUMNS + column, s1, first + 8 + g < CTA_ROWS);
        consume(column, s0, s1);
    }
}

// The same, multiplying the stored values by all queries.
DEVICE void fold_and_multiply_tile(StateProducts& products, const state_t* tile, state_t* global, bool has_state,
                                   const Gates& gates, const u16* const (&planes)[U_PLANES], const activation_t* tokens,
                                   const activation_t* const (&query)[QUERY_TILES]) {
    float weights[HISTORY_TILES][4];
#pragma unroll
    for (int m = 0; m < HISTORY_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            weights[m][i] = gates.history[m * 16 + i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2];
    fold_tile<1>(tile, global, has_state, gates.total, weights, planes, tokens,
              [&](int column, const float(&s0)[LANE_COLUMNS], const float(&s1)[LANE_COLUMNS]) {
                  Piece p0, p1;
#pragma unroll
                  for (int i = 0; i < LANE_COLUMNS; i++) {
                      if constexpr (DIRECT) {
                          if (i % 2) continue;
                          p0.words[i / 2] = (u32)float_to_state(s0[i]) | (u32)float_to_state(s0[i + 1]) << 16;
                          p1.words[i / 2] = (u32)float_to_state(s1[i]) | (u32)float_to_state(s1[i + 1]) << 16;
                      } else {
                          p0.values[i] = s0[i], p1.values[i] = s1[i];
                      }
                  }
                  add_products(products, p0, p1, query, column);
              });
}

// ----------------------------------------------------------------------------------------------------- the window

// Matrices that turn what the state and the history say about a window, one row per query, into its u and outputs. With
// p the predictions, y the outputs without the window's own u, and T the unit lower triangle of the window's u,
// T_wj = beta_w decay (k_w . k_j):   u = M (v - p),   o = y + N (v - p),   M = T^-1 beta,   N_wj = sum_i P_wi M_ij with
// P_wi = decay (q_w . k_i). Entries of M are at most 1 in size: they are products of contractions.
// Column j belongs to token j, or with one tile to query j, where M is zero and N one for y.
struct WindowMatrices {
    static constexpr int SIZE = WINDOW_ROWS, COUNT = MAX_WINDOW == 1 ? 2 : SIZE * SIZE;  // a single token needs none
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
            float score[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int column = 0; column < COLUMNS; column += 16) {
                u32 a[4], b[2];
                load_matrix_x4(a, a_row + column);
                load_matrix_x2(b, b_row + column);
                mma_16bit<ACTIVATION_FORMAT>(score, a[0], a[1], a[2], a[3], b[0], b[1]);
            }
            const int w = m * 8 + g;
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

// d += a . rows of `matrix` (a tile of 8 at `first`), both as high and low tf32 halves. a[i] belongs to row g + 8 (i % 2)
// and query 2 t + i / 2.
DEVICE void mix(float (&d)[4], const float (&a)[4], const float* matrix) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float2 b = *(const float2*)(matrix + g * WindowMatrices::SIZE + 2 * t);
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
