// Pieces of gdn_readout.cu: the window's queries and gates, and what outputs take from the history's and the window's own
// tokens. A warp has CTA_ROWS rows of a head; what its lanes share goes through shared memory.
#pragma once
#include "gdn_serial.cuh"
#include "readout_fold.cuh"
#include "readout_stage.cuh"

// Queries of the state: q of every window token (outputs), then k of every window token (what the state predicts). A
// window of one token has them alternate in a tile of eight.
constexpr int QUERIES = 2 * MAX_WINDOW;
constexpr bool ONE = MAX_WINDOW == 1;
constexpr int QUERY_TILES = (QUERIES + 7) / 8;
constexpr int SCORE_TILES = (QUERY_TILES + 1) / 2;
// Whether gdn_readout_tiled.cuh serves this kernel.
#define TILED_WINDOW \
    (READOUT_FORMAT == READOUT_NVFP4 && MAX_WINDOW > 1 && MAX_WINDOW <= 8 && !U_FROM_CHECKPOINT && CTA_ROWS % 16 == 0)
constexpr bool TILED = TILED_WINDOW;
// A lane solves for this many pairs of rows.
constexpr int SHARES = (M_TILES + 3) / 4;

// Heads that a block may have parts of.
constexpr int BLOCK_HEADS = WARPS % CTAS_PER_HEAD == 0 ? WARPS / CTAS_PER_HEAD
                            : CTAS_PER_HEAD % WARPS == 0 ? 1
                                                         : (WARPS + CTAS_PER_HEAD - 2) / CTAS_PER_HEAD + 1;

// Lanes of a warp that have a head's gates, and warps that have those of a block: the last ones.
constexpr int GATE_LANES =
    TILED && BLOCK_HEADS == 2 && WARPS % CTAS_PER_HEAD == 0 && WARPS > 1 && MAX_HISTORY <= 16 ? 16 : 32;
constexpr int GATE_WARPS = GATE_LANES == 16 ? 1 : BLOCK_HEADS;

// Whether there are rows 16 m + 8 half + g.
DEVICE constexpr bool rows_exist(int m, int half) { return 2 * m + half < ROW_GROUPS; }

// Query in column n of a tile; the last one where there is none.
DEVICE int query_of(int tile, int n) {
    const int query = tile * 8 + n;
    return ONE ? n % 2 : query < QUERIES ? query : QUERIES - 1;
}

// What an output is scaled by, and a prediction is not.
DEVICE float query_scale(int query) { return query < MAX_WINDOW ? QUERY_SCALE : 1.f; }

// ------------------------------------------------------------------------------------------------------- queries

// Queries are at most one long, so that 2^14 of them fits fp16 and keeps all bits that matter.
constexpr float QUERY_UPSCALE = PLAIN_QUERIES ? 1.f : 16384.f;

// A row of q or k as a warp holds it.
struct RawQuery : QueryWords {
    // L2-normalised and rounded to the activation format, and the same in fp16 times QUERY_UPSCALE (PLAIN_QUERIES: as it is).
    DEVICE_MEMBER void normalize(activation_t* to, u16* half) const {
        const int lane = threadIdx.x % 32;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            sum += activation_low(words[n]) * activation_low(words[n]) + activation_high(words[n]) * activation_high(words[n]);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
        const float scale = rsqrtf(sum + L2_NORM_EPS);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            if (n * 32 + lane >= WORDS) continue;
            const u32 word = pack_activation(activation_low(words[n]) * scale, activation_high(words[n]) * scale);
            ((u32*)to)[n * 32 + lane] = word;
            ((u32*)half)[n * 32 + lane] =
                PLAIN_QUERIES ? word : pack_fp16(activation_low(word) * QUERY_UPSCALE, activation_high(word) * QUERY_UPSCALE);
        }
    }
};

// Those of a window of `length` tokens, WARPS-th by WARPS-th: a warp asks for all of its own at once.
struct RawQueries {
    static constexpr int COUNT = (QUERIES + WARPS - 1) / WARPS;
    RawQuery own[COUNT];

    // q and k: of token `start` = 0, at the block's group.
    DEVICE_MEMBER void load(const activation_t* q, int q_stride, const activation_t* k, int k_stride, int start, int length) {
        const u32 warp = threadIdx.x / 32u;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int n = i * WARPS + warp, w = n % MAX_WINDOW;
            const bool is_q = n < MAX_WINDOW;
            own[i].load((is_q ? q : k) + offset_of(start + w, is_q ? q_stride : k_stride), n < QUERIES && w < length);
        }
    }
    DEVICE_MEMBER void normalize(activation_t* queries, u16* half_queries) const {
        const u32 warp = threadIdx.x / 32u;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int n = i * WARPS + warp;
            if (QUERIES % WARPS && n >= QUERIES) break;
            own[i].normalize(queries + n * TOKEN_STRIDE, half_queries + n * KEY_STRIDE);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------- gates

// Of one head, in shared memory.
struct Gates {
    float past[TOKEN_ROWS];    // decay behind a history token, to the end of the history; zero beyond it
    float window[MAX_WINDOW];  // decay of the window up to a token
    float all[MAX_WINDOW];     // decay of the history and of the window up to a token
    float beta[MAX_WINDOW];
    float history;  // decay of the history
    float own[ONE ? 1 : MAX_WINDOW * MAX_WINDOW];  // [w][j]: decay of window token j at token w >= j

    // Lane k of the head's passes the log decay g of history token k (zero beyond it), lane w that of window token w. Every
    // sum runs over its own terms: differences of one running sum would cancel. Leaves beta alone.
    DEVICE_MEMBER void scan(float g_past, float g_new, int history) {
        const int lane = threadIdx.x % GATE_LANES, first_lane = threadIdx.x % 32 - lane;
        float suffix = g_past, sum = g_new;
        add_later(suffix);
        add_earlier(sum);
        const float behind = shuffle_down(suffix, 1);
        if (lane < TOKEN_ROWS) past[lane] = lane < history ? decay_of(lane < GATE_LANES - 1 ? behind : 0.f) : 0.f;
        const float total = shuffle_from(suffix, first_lane);
        if (lane < MAX_WINDOW) window[lane] = decay_of(sum), all[lane] = decay_of(total + sum);
        if (lane == 0) this->history = decay_of(total);
        if constexpr (!ONE) store_own(sum);
    }
    // The same in two: first what needs no history, which returns the lane's sum for the second.
    DEVICE_MEMBER float scan_window(float g_new) {
        float sum = g_new;
        add_earlier(sum);
        if (threadIdx.x % GATE_LANES < MAX_WINDOW) window[threadIdx.x % GATE_LANES] = decay_of(sum);
        store_own(sum);
        return sum;
    }
    DEVICE_MEMBER void scan_past(float g_past, float sum, int history) {
        const int lane = threadIdx.x % GATE_LANES, first_lane = threadIdx.x % 32 - lane;
        float suffix = g_past;
        add_later(suffix);
        const float behind = shuffle_down(suffix, 1), total = shuffle_from(suffix, first_lane);
        if (lane < TOKEN_ROWS) past[lane] = lane < history ? decay_of(lane < GATE_LANES - 1 ? behind : 0.f) : 0.f;
        if (lane < MAX_WINDOW) all[lane] = decay_of(total + sum);
        if (lane == 0) this->history = decay_of(total);
    }

    static DEVICE_MEMBER void add_later(float& suffix) {
        const int lane = threadIdx.x % GATE_LANES;
#pragma unroll
        for (int delta = 1; delta < MAX_HISTORY; delta *= 2) {
            const float after = shuffle_down(suffix, delta);
            if (lane + delta < GATE_LANES) suffix += after;
        }
    }
    static DEVICE_MEMBER void add_earlier(float& sum) {
        const int lane = threadIdx.x % GATE_LANES;
#pragma unroll
        for (int delta = 1; delta < MAX_WINDOW; delta *= 2) {
            const float before = shuffle_up(sum, delta);
            if (lane >= delta) sum += before;
        }
    }
    DEVICE_MEMBER void store_own(float sum) {
        const int lane = threadIdx.x % GATE_LANES, first_lane = threadIdx.x % 32 - lane;
#pragma unroll
        for (int first = 0; first < MAX_WINDOW * MAX_WINDOW; first += GATE_LANES) {
            const int i = first + lane;
            const float later = shuffle_from(sum, first_lane + i / MAX_WINDOW % GATE_LANES);
            const float before = shuffle_from(sum, first_lane + i % MAX_WINDOW);
            if (i < MAX_WINDOW * MAX_WINDOW) own[i] = decay_of(later - before);
        }
    }
};

// --------------------------------------------------------------------------------------------------------- scores

// Products of tokens and queries: tokens 16 step + g and + 8, queries 8 n + 2 t and + 1.
struct Scores {
    float value[TOKEN_STEPS][QUERY_TILES][4];

    // keys: of the history, rows TOKEN_STRIDE apart, as the queries, which lie `to_queries` elements further on in shared memory. The
    // window's tokens follow the history; their k are among the queries.
    DEVICE_MEMBER void compute(const activation_t* keys, int to_queries, int history) {
        const int lane = threadIdx.x % 32;
        int key[TOKEN_STEPS];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            const int token = 16 * step + lane % 16, own = token - history;
            const int row = MAX_WINDOW + (own < MAX_WINDOW ? own : MAX_WINDOW - 1);
            key[step] = (own < 0 ? token * TOKEN_STRIDE : to_queries + row * TOKEN_STRIDE) + lane / 16 * 8;
        }
        constexpr int CHAINS = QUERY_TILES * TOKEN_STEPS == 1 ? 2 : 1;  // even and odd steps
        float sum[CHAINS][TOKEN_STEPS][QUERY_TILES][4] = {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            u32 queries[QUERY_TILES][4];
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
                load_matrix_x4(queries[n], keys + (to_queries + query_of(n, lane % 8) * TOKEN_STRIDE + lane / 8 * 8 + 32 * pair));
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int step = 0; step < TOKEN_STEPS; step++) {
                    u32 k[4];
                    load_matrix_x4(k, keys + (key[step] + 32 * pair + 16 * i));
#pragma unroll
                    for (int n = 0; n < QUERY_TILES; n++)
                        mma_16bit<ACTIVATION_FORMAT>(sum[i % CHAINS][step][n], k[0], k[1], k[2], k[3], queries[n][2 * i],
                                                     queries[n][2 * i + 1]);
                }
        }
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS * QUERY_TILES * 4; i++) {
            const int step = i / (4 * QUERY_TILES), n = i / 4 % QUERY_TILES;
            value[step][n][i % 4] =
                CHAINS == 2 ? sum[0][step][n][i % 4] + sum[CHAINS - 1][step][n][i % 4] : sum[0][step][n][i % 4];
        }
    }
};

// ------------------------------------------------------------------------------------------------------- history

constexpr int U_SIZE = U_PLANES * TOKEN_ROWS * OWN_STRIDE;  // u of a warp's rows: [plane][token][row]

// Where a history is short if half of a step of the matrix unit holds it: it then is too short to be folded.
constexpr bool SHORT_HISTORIES = TILED && TOKEN_STEPS == 1 && BUFFER_LEN >= 8 + MAX_WINDOW;
DEVICE bool is_short_history(int history) { return SHORT_HISTORIES && history <= 8; }

// Copies u of the history for the warp's rows; zeros beyond it, a short one's to eight. ring: of the slot, at the warp's first
// row.
DEVICE void stage_u(u16* to, const u16* ring, int first_entry, int history) {
    constexpr u32 CHUNKS = CTA_ROWS / 8, ROW_CHUNKS = U_PLANES * CHUNKS, ENTRY_BYTES = HEADS * U_PLANES * ROWS * 2;
    const u32 lane = threadIdx.x % 32u;
    const auto copy = [&](u16* at, const u16* from, u32 token) {
        const u32 ahead = first_entry + token, around = ahead - RING_LEN;  // a huge number where it does not wrap
        // Where the token is not valid nothing is read, wherever that may be.
        copy_async_16(at, advance(from, ahead < around ? ahead : around, ENTRY_BYTES), (int)token < history);
    };
    if constexpr (32 % ROW_CHUNKS == 0) {
        const u32 plane = lane / CHUNKS % U_PLANES, offset = lane % CHUNKS * 8, first = lane / ROW_CHUNKS;
        u32 place = (plane * TOKEN_ROWS + first) * OWN_STRIDE + offset;
        hold_until_here(place);
        u16* at = to + place;
#pragma unroll
        for (u32 token = 0; token < TOKEN_ROWS; token += 32 / ROW_CHUNKS) {
            if (token == 8 && is_short_history(history)) break;
            copy(at + token * OWN_STRIDE, ring + (plane * ROWS + offset), token + first);
        }
    } else {
        for (u32 i = lane; i < TOKEN_ROWS * ROW_CHUNKS; i += 32) {
            const u32 token = i / ROW_CHUNKS, plane = i / CHUNKS % U_PLANES, offset = i % CHUNKS * 8;
            copy(to + ((plane * TOKEN_ROWS + token) * OWN_STRIDE + offset), ring + (plane * ROWS + offset), token);
        }
    }
}

// By columns where the state rounds to fp8. H200, qwen4b, fp8 stochastic, windows of five, every row flushing: by rows 285.5
// us, so 205; fp16 takes as long either way.
constexpr bool GDN_FOLDS_COLUMNS = FOLDS_COLUMNS && STATE_FORMAT == FORMAT_FP8;

// Folds the history, whose keys lie in `fold_keys` already, into the warp's rows and stores them.
// rows(): the warp's, asked for again and again.
template <class Rows>
DEVICE void fold_history(const uint4* fold_keys, const u16* u, const Gates& gates, const Rows& rows, bool has_state,
                         int first_row, const RoundingKey& key) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    float past[TOKEN_STEPS][4];
#pragma unroll
    for (int i = 0; i < 4 * TOKEN_STEPS; i++) past[i / 4][i % 4] = gates.past[i / 4 * 16 + i / 2 % 2 * 8 + 2 * t + i % 2];
    const auto own_values = [&](int group, int step, float(&values)[4]) {
        u32 words[U_PLANES][2];
#pragma unroll
        for (int plane = 0; plane < U_PLANES; plane++)
            load_matrix_x2_transposed(words[plane],
                                      u + (plane * TOKEN_ROWS + 16 * step + lane % 16) * OWN_STRIDE + 8 * group);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[i] = i % 2 ? bf16_high(words[0][i / 2]) : bf16_low(words[0][i / 2]);
            if (U_PLANES == 2)
                values[i] += i % 2 ? bf16_high(words[U_PLANES - 1][i / 2]) : bf16_low(words[U_PLANES - 1][i / 2]);
            // Kept, the decays cost registers that the six blocks of TILED windows do not have.
            values[i] *= TILED ? gates.past[16 * step + i / 2 * 8 + 2 * t + i % 2] : past[step][i];
        }
    };
    if constexpr (GDN_FOLDS_COLUMNS)
        fold_columns<true>(own_values, fold_keys, rows(), has_state, gates.history, first_row, key);
    else
        fold_rows(own_values, fold_keys, rows, has_state, gates.history, first_row, key);
}

// Coefficients of u in 16 tokens for 8 queries, split into bf16 halves, as a second operand.
struct SplitPairs {
    u32 high[2], low[2];

    // c: of tokens g and g + 8 for queries 2 t and 2 t + 1 each.
    DEVICE_MEMBER void split(const float (&c)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 word = pack_bf16(c[2 * i], c[2 * i + 1]);
            high[i] = transpose_matrix(word);
            low[i] = transpose_matrix(pack_bf16(c[2 * i] - bf16_low(word), c[2 * i + 1] - bf16_high(word)));
        }
    }
};

// Coefficients of u for all queries: of the history's tokens for the matrix unit, of the window's own for the lanes that
// solve, in `pairs` [query][WINDOW_ROWS]; `pair` is the one of a window of one token.
struct Coefficients {
    SplitPairs past[QUERY_TILES][TOKEN_STEPS];
    float pair;

    DEVICE_MEMBER void compute(const Scores& scores, const Gates& gates, float* pairs, int history) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        pair = 0.f;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            int query[2];
            float scale[2];
#pragma unroll
            for (int e = 0; e < 2; e++) query[e] = query_of(n, 2 * t + e), scale[e] = query_scale(query[e]);
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; step++) {
                float c[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = 16 * step + i / 2 * 8 + g, j = token - history, e = i % 2;
                    const float score = scores.value[step][n][i] * scale[e];
                    c[i] = j < 0 ? gates.past[token] * gates.window[query[e] % MAX_WINDOW] * score : 0.f;
                    // q . k: the only token of the window is the one behind the history.
                    if (ONE && e == 0) pair += j == 0 ? score : 0.f;
                    // What a query does not see yet is never read.
                    if (!ONE && n * 8 + 2 * t + e < QUERIES && j >= 0 && j < MAX_WINDOW)
                        pairs[query[e] * WINDOW_ROWS + j] = gates.own[query[e] % MAX_WINDOW * MAX_WINDOW + j] * score;
                }
                past[n][step].split(c);
            }
        }
        if constexpr (ONE) pair = shuffle_from(pair, history % 8 * 4);  // lane 4 g has query 0 of token g
    }
};

// sum += u of rows 16 m to 16 m + 15 in 16 tokens . coefficients; the low halves' product is below fp32's rounding.
DEVICE void add_history(float (&sum)[4], const u16* u, const SplitPairs& c, int step, int m) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int plane = 0; plane < U_PLANES; plane++) {
        u32 a[4];
        load_matrix_x4_transposed(a, u + (plane * TOKEN_ROWS + 16 * step + lane % 8 + lane / 16 * 8) * OWN_STRIDE + 16 * m +
                                         lane / 8 % 2 * 8);
        mma_16bit<FORMAT_BF16>(sum, a[0], a[1], a[2], a[3], c.high[0], c.high[1]);
        if (plane == 0) mma_16bit<FORMAT_BF16>(sum, a[0], a[1], a[2], a[3], c.low[0], c.low[1]);
    }
}

