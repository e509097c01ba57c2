// Pieces of gdn_readout.cu: products of a warp's rows of the readout, which travel from memory straight into registers,
// with the window's queries.
#pragma once
#include "gdn_readout_window.cuh"
#include "readout_dot.cuh"

// Blocks of 16 columns whose scales lane t of a quad applies for a window of one token: those from LANE_BLOCKS t on.
constexpr int LANE_BLOCKS = (STEPS + 3) / 4;
constexpr int LANE_CODES = CODE_BYTES / 16;  // words of a row
// What undoes QUERY_UPSCALE and the powers of two by which codes and scales are too small in the products below.
constexpr float READOUT_UNIT = (NVFP4 ? ONE ? 16384.f : 128.f : WIDE ? 1.f : 256.f) / QUERY_UPSCALE;

// A normal e4m3 number, which the scales of blocks are.
DEVICE float block_scale(u32 code) { return bits_to_float(multiply_add_bits(code, 1u << 20, 120u << 23)); }

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
                        const u32 scale = multiply_add_bits(code, 1u << 7, 0x3c003c00u);
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
                const u32 b = *(const u32*)(queries + query_of(n, g) * TOKEN_STRIDE + column + i / 2 * 16 + i % 2 * 2);
                mma_tf32(product[n], h[0], h[1], h[2], h[3], activation_low(b), activation_high(b));
                mma_tf32(product[n], a[0] - h[0], a[1] - h[1], a[2] - h[2], a[3] - h[3], activation_low(b),
                         activation_high(b));
            }
        }
    }
}

// Products of a row that lane 4 g + t passes on to the lane that solves for it: its own q and k, or all queries.
constexpr int STAGE_STRIDE = ONE ? 8 : QUERIES + 1;
// Of 16 rows' products. For a window of one token, four tiles' rows of one number share no bank: every second pair of tiles
// is moved by half of the banks, every second tile has the halves of its rows exchanged.
DEVICE constexpr int staged_tile(int m) { return m * 16 * STAGE_STRIDE + (ONE ? m / 2 * 16 : 0); }
DEVICE constexpr int staged_column(int m, int column) { return ONE ? column ^ m % 2 * 4 : column; }
constexpr int STAGED_SIZE = staged_tile(M_TILES);  // of a warp

// The readout of a warp's rows on its way: codes in registers where they are few, the scales of blocks in shared memory.
struct Readout {
    ReadoutRows rows[NVFP4 ? M_TILES : 1];
    // Of the rows that the lane solves for; or of rows 8 n + g where n % 4 is t, for all lanes of the quad.
    static constexpr int ROW_SCALES = ONE ? 2 * SHARES : (ROW_GROUPS + 3) / 4;
    u32 row_scales[ROW_SCALES];

    DEVICE_MEMBER void load(const StateRows& from, unsigned char* block_scales) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if constexpr (NVFP4) {
            const unsigned char* codes = lane_codes(from);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) rows[m].load(codes, m);
            for (int i = lane * 16; i < CTA_ROWS * BLOCK_SCALE_BYTES; i += 512)
                copy_async_16(block_scales + i, from.block_scales + i, true);
        }
#pragma unroll
        for (int i = 0; i < ROW_SCALES; i++) {
            const int row_group = ONE ? 2 * (t + i / 2 * 4) + i % 2 : 4 * i + t;
            row_scales[i] = !WIDE && row_group < ROW_GROUPS ? from.row_scales[8 * row_group + g] : 127u;
        }
    }
    // Of the i-th row that the lane solves for; or of its row of group i, for all lanes to call.
    DEVICE_MEMBER float scale(int i) const {
        const u32 bits = row_scales[(ONE ? i : i / 4) % ROW_SCALES];
        const float all = bits_to_float(bits);
        const u32 field = ONE ? bits : float_to_bits(shuffle_from(all, threadIdx.x % 32 / 4 * 4 + i % 4));
        return READOUT_UNIT * e4m3_scale((unsigned char)field);
    }

    // Products with all queries of rows 16 m + g and + 8.
    DEVICE_MEMBER void multiply(float (&product)[QUERY_TILES][4], const StateRows& from, const unsigned char* block_scales,
                                const StateQueries& queries, int m) {
        LaneScales scales;
        scales.load(block_scales, m);
        if constexpr (!NVFP4) rows[0].load(lane_codes(from), m);
        multiply_readout(product, rows[NVFP4 ? m : 0], scales, queries);
    }
};

// Products of the warp's rows of the state and all queries. For a window of one token they wait, without their rows' scales,
// in shared memory for the lanes that solve.
struct StateProducts {
    float value[ONE ? 1 : M_TILES][QUERY_TILES][4];

    // queries: as the ring has them, for products with the checkpoint.
    DEVICE_MEMBER void compute(float* stage, Readout& readout, const StateRows& from, const unsigned char* block_scales,
                               const StateQueries& state_queries, const activation_t* queries) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float product[QUERY_TILES][4], exact[QUERY_TILES][4];
            readout.multiply(product, from, block_scales, state_queries, m);
            if constexpr (U_FROM_CHECKPOINT) dot_checkpoint(exact, from, m, queries);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!rows_exist(m, half)) continue;
                if constexpr (ONE) {
                    if (U_FROM_CHECKPOINT) product[0][2 * half + 1] = t == 0 ? exact[0][2 * half + 1] : 0.f;
                    *(float2*)(stage + staged_tile(m) + (8 * half + g) * STAGE_STRIDE + staged_column(m, 2 * t)) =
                        make_float2(product[0][2 * half], product[0][2 * half + 1]);
                } else {
                    const float unit = readout.scale(ONE ? 0 : 2 * m + half);
#pragma unroll
                    for (int i = 0; i < 2 * QUERY_TILES; i++) {
                        const int n = i / 2, e = i % 2;
                        const bool from_checkpoint = U_FROM_CHECKPOINT && n * 8 + 2 * t + e >= MAX_WINDOW;
                        value[ONE ? 0 : m][n][2 * half + e] =
                            from_checkpoint ? exact[n][2 * half + e] : product[n][2 * half + e] * unit;
                    }
                }
            }
        }
    }
};
