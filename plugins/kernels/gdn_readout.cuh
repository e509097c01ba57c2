// Pieces of gdn_readout.cu: what a warp does with its CTA_ROWS rows of a head. The readout travels from memory straight into
// registers; what other lanes need too (u of the history, scales, the window) goes through shared memory.
#pragma once
#include "gdn_serial.cuh"
#include "readout_dot.cuh"

// Queries of the state: q of every window token (outputs), then k of every window token (what the state predicts). A
// window of one token has them alternate in a tile of eight.
constexpr int QUERIES = 2 * MAX_WINDOW;
constexpr bool ONE = MAX_WINDOW == 1;
constexpr int QUERY_TILES = (QUERIES + 7) / 8;
constexpr int SCORE_TILES = (QUERY_TILES + 1) / 2;
// Lane 4 g + t solves for rows 16 m + g and 16 m + 8 + g where m % 4 is t.
constexpr int SHARES = (M_TILES + 3) / 4;

// Whether there are rows 16 m + 8 half + g.
DEVICE constexpr bool rows_exist(int m, int half) { return 2 * m + half < ROW_GROUPS; }

// Query in column n of a tile; the last one where there is none.
DEVICE int query_of(int tile, int n) {
    const int query = tile * 8 + n;
    return ONE ? n % 2 : query < QUERIES ? query : QUERIES - 1;
}

// ------------------------------------------------------------------------------------------------------- queries

// Queries are at most one long, so that 2^14 of them fits fp16 and keeps all bits that matter.
constexpr float QUERY_UPSCALE = PLAIN_QUERIES ? 1.f : 16384.f;

// One row of q or k, L2-normalised and rounded to the activation format, and the same in fp16 times QUERY_UPSCALE
// (PLAIN_QUERIES: as it is); zeros where it does not exist. A warp works on it.
DEVICE void normalize_row(activation_t* to, u16* half, const activation_t* from, bool exists) {
    const int lane = threadIdx.x % 32;
    constexpr int WORDS = COLUMNS / 2, COUNT = (WORDS + 31) / 32;
    u32 words[COUNT];
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        words[n] = exists && n * 32 + lane < WORDS ? ((const u32*)from)[n * 32 + lane] : 0u;
        sum += activation_low(words[n]) * activation_low(words[n]) + activation_high(words[n]) * activation_high(words[n]);
    }
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

// ---------------------------------------------------------------------------------------------------------- gates

// Heads that a block may have parts of.
constexpr int BLOCK_HEADS = WARPS % CTAS_PER_HEAD == 0 ? WARPS / CTAS_PER_HEAD
                            : CTAS_PER_HEAD % WARPS == 0 ? 1
                                                         : (WARPS + CTAS_PER_HEAD - 2) / CTAS_PER_HEAD + 1;

// Of one head, in shared memory.
struct Gates {
    float past[TOKEN_ROWS];    // decay behind a history token, to the end of the history; zero beyond it
    float prefix[MAX_WINDOW];  // log decay of the window up to a token
    float window[MAX_WINDOW];  // its decay
    float all[MAX_WINDOW];     // decay of the history and of the window up to a token
    float beta[MAX_WINDOW];
    float history;  // decay of the history

    // Lane k passes the log decay g of history token k (zero beyond it), lane w that of window token w, and its raw beta.
    // Every sum runs over its own terms: differences of one running sum would cancel.
    DEVICE_MEMBER void scan(float g_past, float g_new, float raw_beta, int history) {
        const int lane = threadIdx.x % 32;
        float suffix = g_past, sum = g_new;
#pragma unroll
        for (int delta = 1; delta < MAX_HISTORY; delta *= 2) {
            const float after = shuffle_down(suffix, delta);
            if (lane + delta < 32) suffix += after;
        }
#pragma unroll
        for (int delta = 1; delta < MAX_WINDOW; delta *= 2) {
            const float before = shuffle_up(sum, delta);
            if (lane >= delta) sum += before;
        }
        const float behind = shuffle_down(suffix, 1);
        if (lane < TOKEN_ROWS) past[lane] = lane < history ? decay_of(lane < 31 ? behind : 0.f) : 0.f;
        const float total = shuffle_from(suffix, 0);
        if (lane < MAX_WINDOW) {
            prefix[lane] = sum, window[lane] = decay_of(sum), all[lane] = decay_of(total + sum);
            beta[lane] = sigmoid(raw_beta);
        }
        if (lane == 0) this->history = decay_of(total);
    }
};

// --------------------------------------------------------------------------------------------------------- scores

// Products of tokens and queries: tokens 16 step + g and + 8, queries 8 n + 2 t and + 1.
struct Scores {
    float value[TOKEN_STEPS][QUERY_TILES][4];

    // keys: of the history, rows KEY_STRIDE apart; the queries lie `to_queries` elements further on in shared memory. The
    // window's tokens follow the history; their k are among the queries.
    DEVICE_MEMBER void compute(const activation_t* keys, int to_queries, int history) {
        const int lane = threadIdx.x % 32;
        int key[TOKEN_STEPS];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            const int token = 16 * step + lane % 16, own = token - history;
            const int row = MAX_WINDOW + (own < MAX_WINDOW ? own : MAX_WINDOW - 1);
            key[step] = (own < 0 ? token * KEY_STRIDE : to_queries + row * KEY_STRIDE) + lane / 16 * 8;
        }
        constexpr int CHAINS = QUERY_TILES * TOKEN_STEPS == 1 ? 2 : 1;  // even and odd steps
        float sum[CHAINS][TOKEN_STEPS][QUERY_TILES][4] = {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            u32 queries[QUERY_TILES][4];
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
                load_matrix_x4(queries[n], keys + (to_queries + query_of(n, lane % 8) * KEY_STRIDE + lane / 8 * 8 + 32 * pair));
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

// Copies u of the history for the warp's rows; zeros beyond it. ring: of the slot, at the warp's first row.
DEVICE void stage_u(u16* to, const u16* ring, int first_entry, int history) {
    constexpr u32 CHUNKS = CTA_ROWS / 8, ROW_CHUNKS = U_PLANES * CHUNKS, ENTRY_BYTES = HEADS * U_PLANES * ROWS * 2;
    const u32 lane = threadIdx.x % 32u;
    const auto copy = [&](u32 token, u32 plane, u32 offset) {
        u32 entry = first_entry + token;
        if (entry >= RING_LEN) entry -= RING_LEN;
        // Where it is not valid nothing is read, wherever that may be.
        copy_async_16(to + ((plane * TOKEN_ROWS + token) * OWN_STRIDE + offset),
                      (const char*)(ring + (plane * ROWS + offset)) + (u64)entry * ENTRY_BYTES, (int)token < history);
    };
    if constexpr (32 % ROW_CHUNKS == 0) {
        const u32 plane = lane / CHUNKS % U_PLANES, offset = lane % CHUNKS * 8;
#pragma unroll
        for (u32 token = 0; token < TOKEN_ROWS; token += 32 / ROW_CHUNKS) copy(token + lane / ROW_CHUNKS, plane, offset);
    } else {
        for (u32 i = lane; i < TOKEN_ROWS * ROW_CHUNKS; i += 32)
            copy(i / ROW_CHUNKS, i / CHUNKS % U_PLANES, i % CHUNKS * 8);
    }
}

// Asks for the sectors of a later row's history that the warp (u) and the block (k) that do the same part of it will copy.
// Rings: of its slot, at the warp's first row and at the block's group.
DEVICE void prefetch_history(int history, int first_entry, const u16* ring_u, const activation_t* ring_k, bool with_k) {
    constexpr u32 SECTORS = (CTA_ROWS + 15) / 16, K_SECTORS = COLUMNS / 16;  // of 32 bytes
    const u32 lane = threadIdx.x % 32u;
#pragma unroll
    for (u32 n = 0; n < (MAX_HISTORY * U_PLANES * SECTORS + 31) / 32; n++) {
        const u32 i = n * 32 + lane, token = i / (U_PLANES * SECTORS);
        if ((int)token < history)
            prefetch_sector(ring_u + ((u32)(wrapped(first_entry + token) * U_PLANES * HEADS + i / SECTORS % U_PLANES) * ROWS +
                                      i % SECTORS * 16));
    }
    if (with_k)
#pragma unroll
        for (u32 n = 0; n < (MAX_HISTORY * K_SECTORS + THREADS - 1) / THREADS; n++) {
            const u32 i = n * THREADS + threadIdx.x, token = i / K_SECTORS;
            if ((int)token < history)
                prefetch_sector(ring_k + (u32)(wrapped(first_entry + token) * (GROUPS * COLUMNS)) + i % K_SECTORS * 16);
        }
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
    // Nothing where `kept` is false.
    DEVICE_MEMBER SplitPairs masked(bool kept) const {
        SplitPairs all = *this;
#pragma unroll
        for (int i = 0; i < 2; i++) all.high[i] = kept ? high[i] : 0u, all.low[i] = kept ? low[i] : 0u;
        return all;
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

// ------------------------------------------------------------------------------------------------------- readout

// Blocks of 16 columns whose scales lane t of a quad applies for a window of one token: those from LANE_BLOCKS t on.
constexpr int LANE_BLOCKS = (STEPS + 3) / 4;
constexpr int LANE_CODES = CODE_BYTES / 16;  // words of a row
// What undoes QUERY_UPSCALE and the powers of two by which codes and scales are too small in the products below.
constexpr float READOUT_UNIT = (NVFP4 ? ONE ? 16384.f : 128.f : WIDE ? 1.f : 256.f) / QUERY_UPSCALE;

DEVICE float block_scale(u32 code) { return bits_to_float((code << 20) + (120u << 23)); }

// Where the lane's part of the readout of row g begins; rows: of the warp.
DEVICE const unsigned char* lane_codes(const StateRows& rows) {
    const u32 lane = threadIdx.x % 32u;
    // Opaque, or else the compiler adds up the address of every row anew.
    u32 offset = lane / 4 * CODE_BYTES + lane % 4 * (NVFP4 ? 4 * PAIRS : WIDE ? 8 : 4);
    hold_until_here(offset);
    return rows.codes + offset;
}

// The lane's part of rows 16 m + g and + 8 of the readout, as it is stored.
struct ReadoutRows {
    u32 codes[2][LANE_CODES];

    // codes_of_lane: of row g, at the lane's columns.
    DEVICE_MEMBER void load(const unsigned char* codes_of_lane, int m) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!rows_exist(m, half)) continue;
            const unsigned char* at = codes_of_lane + (2 * m + half) * (8 * CODE_BYTES);
            if constexpr (NVFP4) {
                u32 words[PAIRS];
                load_words(at, words);
#pragma unroll
                for (int i = 0; i < PAIRS; i++) codes[half][i % LANE_CODES] = words[i];
            } else {
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    if constexpr (WIDE) {
                        const uint2 v = *(const uint2*)(at + 32 * step);
                        codes[half][2 * step] = v.x, codes[half][(2 * step + 1) % LANE_CODES] = v.y;
                    } else {
                        codes[half][step] = *(const u32*)(at + 16 * step);
                    }
                }
            }
        }
    }
};

// The e4m3 scales of the blocks of rows 16 m + g and + 8 that the lane applies.
struct LaneScales {
    u32 words[2][NVFP4 ? ONE ? (LANE_BLOCKS + 3) / 4 : (STEPS + 3) / 4 : 1];

    // scales: of the warp's rows, in shared memory.
    DEVICE_MEMBER void load(const unsigned char* scales, int m) {
        if constexpr (!NVFP4) return;
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!rows_exist(m, half)) continue;
            const unsigned char* from = scales + ((2 * m + half) * 8 + lane / 4) * BLOCK_SCALE_BYTES;
            if constexpr (ONE && LANE_BLOCKS == 2) {
                words[half][0] = LANE_BLOCKS * t < STEPS ? *(const u16*)(from + LANE_BLOCKS * t) : 0u;
            } else {
                const int first = ONE ? LANE_BLOCKS * t : 0;
#pragma unroll
                for (int i = 0; i < (ONE ? LANE_BLOCKS : STEPS); i += 2) {
                    u32 code = 0;
                    if (first + i < STEPS) code = ONE && LANE_BLOCKS % 2 ? from[first + i] : *(const u16*)(from + first + i);
                    words[half][i / 4] = i % 4 ? words[half][i / 4] | code << 16 : code;
                }
            }
        }
    }
};

// The queries as a second operand of every step. A window of one token: column 2 b + e is query e (q, then k) in the
// blocks whose scales lane b of a quad applies, and nothing in others, so that no sum runs over blocks of two scales.
struct StateQueries {
    static constexpr bool KEPT = ONE;
    uint2 kept[KEPT ? STEPS : 1];
    const u16* rows[QUERY_TILES];

    DEVICE_MEMBER void set(const u16* queries) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) rows[n] = queries + query_of(n, g) * KEY_STRIDE + 4 * t;
        if constexpr (KEPT)
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                kept[step] = make_uint2(0, 0);
                if (!NVFP4 || step / LANE_BLOCKS == g / 2) kept[step] = *(const uint2*)(rows[0] + 16 * step);
            }
    }
    DEVICE_MEMBER uint2 operator()(int n, int step) const {
        return KEPT ? kept[KEPT ? step : 0] : *(const uint2*)(rows[n] + 16 * step);
    }
};

// product[n] = 16 rows of the readout . 8 queries, times the row's scale and READOUT_UNIT too small: rows g and g + 8 of
// a matrix step, columns 2 t and 2 t + 1. A window of one token: of q and of k, and all four lanes of a quad together.
DEVICE void multiply_readout(float (&product)[QUERY_TILES][4], const ReadoutRows& rows, const LaneScales& scales,
                             const StateQueries& query) {
    constexpr int SUMS = NVFP4 && ONE ? LANE_BLOCKS : 2;
    float sum[SUMS][QUERY_TILES][4] = {};
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        u32 a[2][4];  // [row][two of the first step, two of the second]
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if constexpr (NVFP4) {
                widen_codes(rows.codes[half][pair], a[half]);
                if constexpr (!ONE)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        // e4m3 as fp16 has exponents 8 too small; 15 more lead to 2^7.
                        const u32 code = permute_bytes(scales.words[half][pair / 2], 0, (pair % 2 * 2 + i) * 0x101u | 0x4040u);
                        const u32 scale = (code << 7) + 0x3c003c00u;
                        a[half][2 * i] = multiply_fp16(a[half][2 * i], scale);
                        a[half][2 * i + 1] = multiply_fp16(a[half][2 * i + 1], scale);
                    }
            } else if constexpr (WIDE) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[half][i] = rows.codes[half][(4 * pair + i) % LANE_CODES];
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 word = permute_bytes(rows.codes[half][(2 * pair + i / 2) % LANE_CODES], 0, i % 2 ? 0x3424u : 0x1404u);
                    a[half][i] = (word & 0x80008000u) | (word & 0x7f007f00u) >> 1;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) {
                const uint2 q = query(n, 2 * pair + i);
                mma_16bit<PLAIN_QUERIES ? FORMAT_BF16 : FORMAT_FP16>(sum[(2 * pair + i) % SUMS][n], a[0][2 * i], a[1][2 * i],
                                                                     a[0][2 * i + 1], a[1][2 * i + 1], q.x, q.y);
            }
    }
    const bool counts = !ONE || NVFP4 || threadIdx.x % 4 == 0;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float all = 0.f;
#pragma unroll
            for (int s = 0; s < SUMS; s++) {
                if constexpr (NVFP4 && ONE)
                    all = multiply_add(sum[s][n][i], block_scale(scales.words[i / 2][s / 4] >> s % 4 * 8 & 0xffu), all);
                else
                    all += sum[s][n][i];
            }
            product[n][i] = counts ? all : 0.f;
        }
}

// Products of the checkpoint's rows 16 m to 16 m + 15 and all queries, exact to fp32's rounding. rows: of the warp.
DEVICE void dot_checkpoint(float (&product)[QUERY_TILES][4], const StateRows& rows, int m, const activation_t* queries) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const StateRows first = rows.from(16 * m + g);
    const bool both = rows_exist(m, 1);
    const float scale0 = STATE_FORMAT == FORMAT_FP8 ? e4m3_scale(first.checkpoint_scales[0]) : 1.f;
    const float scale1 = STATE_FORMAT == FORMAT_FP8 && both ? e4m3_scale(first.checkpoint_scales[8]) : 1.f;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) product[n][i] = 0.f;
#pragma unroll 1
    for (int pair = 0; pair < PAIRS; pair++) {
        const int column = 32 * pair + 4 * t;
        RawState raw[2] = {};
        load_raw(raw[0], first.checkpoint, column);
        if (both) load_raw(raw[1], first.checkpoint + 8 * COLUMNS, column);
        float s0[8], s1[8];
        widen(raw[0], scale0, s0);
        widen(raw[1], scale1, s1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a[4] = {s0[2 * i], s1[2 * i], s0[2 * i + 1], s1[2 * i + 1]};
            float h[4];
#pragma unroll
            for (int e = 0; e < 4; e++) h[e] = tf32_high(a[e]);
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) {
                const u32 b = *(const u32*)(queries + query_of(n, g) * KEY_STRIDE + column + i / 2 * 16 + i % 2 * 2);
                mma_tf32(product[n], h[0], h[1], h[2], h[3], activation_low(b), activation_high(b));
                mma_tf32(product[n], a[0] - h[0], a[1] - h[1], a[2] - h[2], a[3] - h[3], activation_low(b),
                         activation_high(b));
            }
        }
    }
}
