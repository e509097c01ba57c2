// What a window of the Mamba2 readout kernel is computed from: scores, coefficients, outputs. Every lane holds the scalars of
// one token of its part, and of matrix steps what primitives.cuh says.
#pragma once
#include "readout_dot.cuh"
#include "readout_stage.cuh"

constexpr int QUERY_TILES = WINDOW_ROWS / 8;
constexpr bool ONE = MAX_WINDOW == 1;
constexpr int EACH = ONE ? 1 : 2;  // queries of eight whose sums a lane has
constexpr bool SINGLE = NVFP4 && ONE;  // a query whose products with the state meet block scales once
constexpr int QUERY_ROWS = SINGLE ? 0 : MAX_WINDOW;  // in shared memory
constexpr int X_STRIDE = CTA_STATE_ROWS + 8;
static_assert(CTA_TILES <= 32, "a lane for every tile of a part");
static_assert(TOKEN_ROWS >= MAX_WINDOW, "outputs take the place of x");
static_assert(CTA_ROWS <= 256, "a warp copies a token's x at once");

// In a flush the tile holds rows of B until their keys are built, and then an nvfp4 readout as it is folded.
constexpr int TILE_BYTES = larger(CODES_SIZE + SCALES_SIZE, larger(STAGE_SIZE, TOKEN_ROWS * TOKEN_STRIDE * 2));

// Of the warp's tokens, four weights from `token` on: where rows of x leave room.
DEVICE float* fold_weights(activation_t* x, int token) {
    static_assert(WARPS <= 4, "16 bytes of padding for every token");
    return (float*)(x + ((int)(threadIdx.x / 32) * (TOKEN_ROWS / 4) + token / 4) * X_STRIDE + CTA_STATE_ROWS) + token % 4;
}

DEVICE uint4 load_16(const u16* from, bool valid) { return valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0); }

// x of a part's history and window, on its way from memory to the warp's columns of shared memory, and to the ring.
struct PartX {
    static constexpr int CHUNKS = CTA_ROWS / 8, AT_ONCE = 32 / CHUNKS;  // tokens
    static constexpr int STEPS_PAST = (TOKEN_ROWS + AT_ONCE - 1) / AT_ONCE, STEPS_NEW = (MAX_WINDOW + AT_ONCE - 1) / AT_ONCE;
    uint4 past[STEPS_PAST], fresh[STEPS_NEW];

    // Of the lane. Lanes too many read what others do, and store nothing.
    static DEVICE_MEMBER u32 first_token() {
        const u32 token = threadIdx.x % 32u / CHUNKS;
        return stores() ? token : AT_ONCE - 1;
    }
    static DEVICE_MEMBER bool stores() { return 32 % CHUNKS == 0 || threadIdx.x % 32u < AT_ONCE * CHUNKS; }
    static DEVICE_MEMBER u32 offset() { return threadIdx.x % 32u % CHUNKS * 8; }

    // ring, window: at the part's first row, of the slot and of the window's first token. Rows beyond the history are its
    // last one's, or the window's first one's: read anyway, and of coefficients that are zero.
    DEVICE_MEMBER void load(const activation_t* ring, int first_entry, int history, const activation_t* window, int stride,
                            int length) {
        const int last = history ? history - 1 : 0, entry = history ? first_entry : 0;
        const u16 *from = computed((history ? ring : window) + offset()), *from_new = computed(window + offset());
#pragma unroll
        for (int n = 0; n < STEPS_PAST; n++) {
            const int k = n * AT_ONCE + (int)first_token();
            past[n] = *(const uint4*)computed(advance(from, wrapped_entry(entry + (k < last ? k : last)), 2 * HEADS * ROWS));
        }
#pragma unroll
        for (int n = 0; n < STEPS_NEW; n++) {
            const int w = n * AT_ONCE + (int)first_token();
            fresh[n] = load_16(ONE ? from_new : computed(advance(from_new, w, 2 * stride)), w < length);
        }
    }
    // x: at the part's first row.
    DEVICE_MEMBER void stage(activation_t* x, int history, int length) const {
        activation_t* to = x + (first_token() * X_STRIDE + offset());
#pragma unroll
        for (int n = 0; n < STEPS_PAST; n++)
            if (stores() && (TOKEN_ROWS % AT_ONCE == 0 || n * AT_ONCE + (int)first_token() < TOKEN_ROWS))
                *(uint4*)(to + n * AT_ONCE * X_STRIDE) = past[n];
        sync_warp();
        to += history * X_STRIDE;
#pragma unroll
        for (int n = 0; n < STEPS_NEW; n++)
            if (stores() && n * AT_ONCE + (int)first_token() < length) *(uint4*)(to + n * AT_ONCE * X_STRIDE) = fresh[n];
    }
    // Appends the window to the ring. These rows are no row's history yet, so nobody reads them during this launch.
    DEVICE_MEMBER void append(activation_t* ring, int first_new, int length) const {
#pragma unroll
        for (int n = 0; n < STEPS_NEW; n++) {
            const int w = n * AT_ONCE + (int)first_token();
            if (stores() && w < length) *(uint4*)(ring + (wrapped(first_new + w) * (HEADS * ROWS) + (int)offset())) = fresh[n];
        }
    }
};

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

// B . C: [query tile][16 tokens]: tokens g and g + 8, queries 2 t and 2 t + 1 (of a window of one token: that one alone).
typedef float Scores[QUERY_TILES][2 * TOKEN_STEPS][EACH];

// The block's warps share the columns: warp w takes those from 32 w, 32 (w + WARPS), ... on, of which a lane has 8. Nothing
// is staged for it: rows of B and C go straight into registers.
constexpr int SCORE_STEPS = (PAIRS + WARPS - 1) / WARPS;
constexpr int PARTIALS = PAIRS < WARPS ? PAIRS : WARPS;  // warps that have some
constexpr int PARTIAL_QUERIES = ONE ? 1 : 8 * QUERY_TILES;
constexpr int PARTIAL_SCORES = PARTIALS * TOKEN_ROWS * PARTIAL_QUERIES;

// The query that column i of a product stands for: beyond the window's end its last, whose product nobody uses.
DEVICE int query_of(int i, int length) { return i < length ? i : length - 1; }

struct ScoreInputs {
    uint4 B[SCORE_STEPS][2 * TOKEN_STEPS], C[SCORE_STEPS][QUERY_TILES];

    // ring_B: of the slot and group; window_B, window_C: of the window's first token and the group.
    DEVICE_MEMBER void load_queries(const activation_t* window_C, int C_stride, int length) {
        const u32 lane = threadIdx.x % 32u;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            const activation_t* row = window_C + (offset_of(query_of(n * 8 + (int)(lane / 4), length), C_stride) + column(0));
#pragma unroll
            for (int s = 0; s < SCORE_STEPS; s++) C[s][n] = load_16(row + s * (WARPS * 32), exists(s));
        }
    }
    DEVICE_MEMBER void load_tokens(const activation_t* ring_B, int first_entry, int history, const activation_t* window_B,
                                   int B_stride, int length) {
#pragma unroll
        for (int r = 0; r < 2 * TOKEN_STEPS; r++) {
            // Beyond the window its last token's again: nobody uses those products.
            const int k = 8 * r + (int)(threadIdx.x % 32u / 4), w = query_of(k - history, length);
            const activation_t* past = advance(ring_B + column(0), wrapped_entry(first_entry + k), 2 * GROUPS * COLUMNS);
            const activation_t* fresh = window_B + column(0);
            if (!ONE) fresh = advance(fresh, w, 2 * B_stride);
            const activation_t* row = computed(w < 0 ? past : fresh);
#pragma unroll
            for (int s = 0; s < SCORE_STEPS; s++) B[s][r] = load_16(row + s * (WARPS * 32), exists(s));
        }
    }
    // The warp's part of the scores, to shared memory.
    DEVICE_MEMBER void multiply(float* partial) const {
        const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4, t = lane % 4;
        if (PARTIALS < WARPS && warp >= PARTIALS) return;
#pragma unroll
        for (int i = 0; i < QUERY_TILES * TOKEN_STEPS; i++) {
            const int n = i % QUERY_TILES, step = i / QUERY_TILES;
            float sum[4] = {};
#pragma unroll
            for (int s = 0; s < SCORE_STEPS; s++) {
                const uint4 a = B[s][2 * step], b = B[s][2 * step + 1], c = C[s][n];
                mma_16bit<ACTIVATION_FORMAT>(sum, a.x, b.x, a.y, b.y, c.x, c.y);
                mma_16bit<ACTIVATION_FORMAT>(sum, a.z, b.z, a.w, b.w, c.z, c.w);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int token = 16 * step + 8 * half + (int)g;
                if constexpr (ONE) {
                    if (t == 0) partial[token * PARTIALS + warp] = sum[2 * half];
                } else {
                    float2* to = (float2*)(partial + (warp * TOKEN_ROWS + token) * PARTIAL_QUERIES + 8 * n) + t;
                    *to = make_float2(sum[2 * half], sum[2 * half + 1]);
                }
            }
        }
    }

  private:
    static DEVICE_MEMBER int column(int s) { return (int)((threadIdx.x / 32u + s * WARPS) * 32 + threadIdx.x % 4u * 8); }
    static DEVICE_MEMBER bool exists(int s) { return PAIRS % WARPS == 0 || column(s) < COLUMNS; }
};

// The sums of the warps' parts.
DEVICE void add_scores(Scores& score, const float* partial) {
    const u32 lane = threadIdx.x % 32u, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < QUERY_TILES * 2 * TOKEN_STEPS; i++) {
        const int n = i % QUERY_TILES, k8 = i / QUERY_TILES, token = 8 * k8 + (int)g;
        if constexpr (ONE && PARTIALS == 4) {
            const float4 all = ((const float4*)partial)[token];
            score[n][k8][0] = ((all.x + all.y) + all.z) + all.w;
        } else {
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const float* at = ONE ? partial + token * PARTIALS
                                      : partial + token * PARTIAL_QUERIES + 8 * n + 2 * (int)t + e;
                float sum = at[0];
#pragma unroll
                for (int p = 1; p < PARTIALS; p++) sum += at[p * (ONE ? 1 : TOKEN_ROWS * PARTIAL_QUERIES)];
                score[n][k8][e] = sum;
            }
        }
    }
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
                const float scaled = factor * score[n][k8][e];
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
// the rows 8 n + g whose scales it has, 32 neighbours at a time. codes, scales: of the lane's row g.
DEVICE void write_single_outputs(activation_t* outputs, const Coefficients& coefficients, const activation_t* x_rows,
                                 bool has_state, const unsigned char* codes, const unsigned char* scales,
                                 const SingleQuery& query, const RowScales& row_scales) {
    const int g = (int)(threadIdx.x % 32 / 4), t = (int)(threadIdx.x % 4);
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
        const float state = own[i] * coefficients.unit[0][0] * row_scales.own(i);
        if (ROW_GROUPS % 4 == 0 || 4 * i + t < ROW_GROUPS)
            outputs[8 * (4 * i + t) + g] = float_to_activation((t / 2 ? high : low) * coefficients.undo[0][0] + state);
    }
}

// Outputs of a part, to rows of tokens X_STRIDE elements apart: in the place of x, column by column, when it has been used.
DEVICE void write_outputs(activation_t* outputs, const Coefficients& coefficients, const activation_t* x_rows,
                          bool has_state, const unsigned char* codes, const unsigned char* scales, const u16* half_C,
                          const RowScales& row_scales, int length) {
    const int g = (int)(threadIdx.x % 32 / 4);
    Queries<QUERY_TILES> query;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) query.set(n, half_C + query_of(8 * n + g, MAX_WINDOW) * KEY_STRIDE);
    activation_t* to[QUERY_TILES * EACH];
#pragma unroll
    for (int i = 0; i < QUERY_TILES * EACH; i++)
        to[i] = outputs + (Coefficients::window_token(i / EACH, i % EACH) * X_STRIDE + g);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float sum[QUERY_TILES][4] = {}, product[QUERY_TILES][4] = {};
        add_tokens(sum, coefficients, x_rows, m);
        if (has_state)
            dot_readout<QUERY_TILES>(product, codes + 16 * m * CODE_STRIDE, scales + 16 * m * BLOCK_SCALE_BYTES, query);
        sync_warp();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (16 * m + 8 * half >= CTA_ROWS) continue;
            const float row_scale = row_scales.of_group(2 * m + half);
#pragma unroll
            for (int i = 0; i < QUERY_TILES * EACH; i++) {
                const int n = i / EACH, e = i % EACH, w = Coefficients::window_token(n, e);
                const float tokens = ONE ? sum[n][2 * half] + sum[n][2 * half + 1] : sum[n][2 * half + e];
                const float state = product[n][2 * half + e] * coefficients.unit[n][e] * row_scale;
                // Rows beyond the window are nobody's any more.
                if (!ONE || threadIdx.x % 4 == 0)
                    to[i][16 * m + 8 * half] = float_to_activation(tokens * coefficients.undo[n][e] + state);
            }
        }
    }
}
