// Building blocks of gdn_window.cu: what the queries of a window read from the state and from the history's k.
#pragma once
#include "gdn_replay.cuh"

// Queries of the state: q of every window token (outputs), then k of every window token (what the state predicts). They
// come in tiles of 8: short windows in one, with four of each; otherwise tiles of q and as many of k.
constexpr int QUERIES = 2 * MAX_WINDOW;
constexpr bool ONE_TILE = MAX_WINDOW <= 4;
constexpr int TOKEN_TILES = WINDOW_ROWS / 8;
constexpr int QUERY_TILES = ONE_TILE ? 1 : 2 * TOKEN_TILES;
constexpr int TILE_TOKENS = ONE_TILE ? 4 : 8;

// 16-bit states are multiplied as they are stored, by queries of the same format. bf16 queries become fp16 ones exactly
// enough: at most 1 in size, they are scaled up to where fp16 has more bits than bf16 down to 2^-32.
constexpr bool SCALED_QUERIES = STATE_FORMAT == FORMAT_FP16 && ACTIVATION_FORMAT == FORMAT_BF16;
constexpr bool DIRECT = STATE_FORMAT != FORMAT_FP32 && (STATE_FORMAT == ACTIVATION_FORMAT || SCALED_QUERIES);
constexpr float QUERY_UPSCALE = SCALED_QUERIES ? 32768.f : 1.f;

struct alignas(16) Gates {
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

// Row of shared memory that holds query `column` of tile n; columns without a token repeat the last.
DEVICE int query_row(int n, int column) {
    const bool is_k = ONE_TILE ? column >= 4 : n >= TOKEN_TILES;
    const int token = ONE_TILE ? column % 4 : n % TOKEN_TILES * 8 + column;
    return (is_k ? MAX_WINDOW : 0) + (token < MAX_WINDOW ? token : MAX_WINDOW - 1);
}

// Part `index` of the row's state: CTA_ROWS rows of a head.
DEVICE Block part_of_state(u32 index) {
    const int head = index / CTAS_PER_HEAD, part = index % CTAS_PER_HEAD, group = (u32)head / HEADS_PER_GROUP;
    return {head, group, part * CTA_ROWS, (int)index * CTA_TILES, part == 0, part == 0 && (u32)head % HEADS_PER_GROUP == 0};
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

DEVICE void load_piece(const state_t* from, Piece& piece) {
    if constexpr (DIRECT)
        load_words(from, piece.words);
    else
        load_lane_columns(from, piece.values);
}

// The lane's part of a tile of queries as the matrix unit takes it: LANE_COLUMNS numbers or, of 16-bit states, words.
struct QueryPiece {
    static constexpr int COUNT = DIRECT ? LANE_COLUMNS / 2 : LANE_COLUMNS;
    float parts[COUNT];

    DEVICE_MEMBER void load(const activation_t* from) {
        u32 words[LANE_COLUMNS / 2];
        load_words(from, words);
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++)
            if constexpr (DIRECT)
                parts[i] = bits_to_float(words[i]);
            else
                parts[2 * i] = activation_low(words[i]), parts[(2 * i + 1) % COUNT] = activation_high(words[i]);
    }
};

// Adds the part of the lane's columns of rows g and g + 8 for query tile n. A k-step of the matrix unit takes any
// pairing of columns to its slots, as long as both operands use the same one.
DEVICE void add_products(StateProducts& products, int n, const Piece& s0, const Piece& s1, const QueryPiece& query) {
    constexpr int CHAINS = StateProducts::CHAINS;
    if constexpr (DIRECT) {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 4; i++)
            mma_16bit<STATE_FORMAT>(products.sums[0][i % CHAINS][n], s0.words[2 * i], s1.words[2 * i], s0.words[2 * i + 1],
                                    s1.words[2 * i + 1], float_to_bits(query.parts[2 * i]),
                                    float_to_bits(query.parts[2 * i + 1]));
    } else {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++) {
            const float b0 = query.parts[2 * i], b1 = query.parts[(2 * i + 1) % QueryPiece::COUNT];
            const float a0 = s0.values[2 * i], a1 = s1.values[2 * i];
            const float a2 = s0.values[2 * i + 1], a3 = s1.values[2 * i + 1];
            if constexpr (STATE_FORMAT == FORMAT_FP32) {
                const float h0 = high_half(a0), h1 = high_half(a1), h2 = high_half(a2), h3 = high_half(a3);
                mma_tf32(products.sums[0][i % CHAINS][n], h0, h1, h2, h3, b0, b1);
                mma_tf32(products.sums[1 % StateProducts::HALVES][i % CHAINS][n], a0 - h0, a1 - h1, a2 - h2, a3 - h3, b0,
                         b1);
            } else {
                mma_tf32(products.sums[0][i % CHAINS][n], a0, a1, a2, a3, b0, b1);
            }
        }
    }
}

// The lane's part of all queries, kept in registers where that is cheap, or else read when it is needed.
struct Queries {
    static constexpr int BLOCKS = COLUMNS / BLOCK_COLUMNS;
    static constexpr bool KEPT = STAGES > 1 && QUERY_TILES * BLOCKS * QueryPiece::COUNT <= 64;
    const activation_t* rows[QUERY_TILES];
    QueryPiece kept[KEPT ? QUERY_TILES : 1][KEPT ? BLOCKS : 1];

    DEVICE_MEMBER void load(const activation_t* queries) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            rows[n] = queries + query_row(n, lane / 4) * TOKEN_STRIDE + lane % 4 * LANE_COLUMNS;
            if constexpr (KEPT)
#pragma unroll
                for (int block = 0; block < BLOCKS; block++) {
                    kept[n][block].load(rows[n] + block * BLOCK_COLUMNS);
                    // The compiler would keep the 16-bit words, and convert them again and again.
#pragma unroll
                    for (int i = 0; i < QueryPiece::COUNT; i++) {
                        u32 bits = float_to_bits(kept[n][block].parts[i]);
                        hold_until_here(bits);
                        kept[n][block].parts[i] = bits_to_float(bits);
                    }
                }
        }
    }
    DEVICE_MEMBER QueryPiece read(int n, int block) const {
        QueryPiece piece;
        piece.load(rows[n] + block * BLOCK_COLUMNS);
        return piece;
    }
    DEVICE_MEMBER QueryPiece get(int n, int block) const {
        if constexpr (KEPT)
            return kept[n][block];
        else
            return read(n, block);
    }
};

static_assert(!U_REPLACES_QUERIES || Queries::KEPT, "queries that are read again keep their place");

// From the warp's rows in shared memory.
DEVICE void multiply_rows(StateProducts& products, const state_t* tile, const Queries& queries) {
    const u32 lane = threadIdx.x % 32u;
    const state_t* rows = tile + lane / 4 * COLUMNS + lane % 4 * LANE_COLUMNS;
#pragma unroll
    for (int block = 0; block < Queries::BLOCKS; block++) {
        Piece s0, s1;
        load_piece(rows + block * BLOCK_COLUMNS, s0);
        load_piece(rows + 8 * COLUMNS + block * BLOCK_COLUMNS, s1);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
            add_products(products, n, s0, s1, queries.get(n, block));
    }
}

// The same with the history folded first; see fold_rows.
DEVICE void fold_and_multiply_rows(StateProducts& products, const state_t* tile, state_t* global, bool has_state, float decay,
                                   const FoldedU& u, const activation_t* tokens, const Queries& queries) {
    const auto multiply = [&](int block, const float(&s0)[LANE_COLUMNS], const float(&s1)[LANE_COLUMNS]) {
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
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
            add_products(products, n, p0, p1, U_REPLACES_QUERIES ? queries.get(n, block) : queries.read(n, block));
    };
    fold_rows<U_REPLACES_QUERIES ? Queries::BLOCKS : 1>(tile, global, has_state, decay, u, tokens, multiply);
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

// What a head's u of the history are multiplied by, from `scores` of its k: for every lane, of tile m and query tile n,
// the coefficients of query g and tokens 16 m + 2 t, the next, and 8 further on. One warp calls it.
DEVICE void write_coefficients(float* coefficients, const float (&scores)[HISTORY_TILES][QUERY_TILES][4], const Gates& gates) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        // Decay of the window behind the query, with the scale of q.
        const bool is_q = ONE_TILE ? t < 2 : n < TOKEN_TILES;
        const float2 prefix = *(const float2*)(gates.prefix + (ONE_TILE ? 2 * t % 4 : n % TOKEN_TILES * 8 + 2 * t));
        const float factor[2] = {is_q ? QUERY_SCALE * prefix.x : prefix.x, is_q ? QUERY_SCALE * prefix.y : prefix.y};
#pragma unroll
        for (int m = 0; m < HISTORY_TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                coefficients[(m * QUERY_TILES + n) * 128 + (2 * t + i % 2) * 16 + g / 2 * 4 + i / 2 * 2 + g % 2] =
                    scores[m][n][i] * (factor[i % 2] * gates.history[m * 16 + i / 2 * 8 + g]);
    }
}

// The lane's decays of a head's history for FoldedU.
DEVICE void load_weights(float (&weights)[HISTORY_TILES][4], const Gates& gates) {
#pragma unroll
    for (int m = 0; m < HISTORY_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            weights[m][i] = gates.history[m * 16 + i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2];
}
