// Building blocks of the Gated DeltaNet decode and window kernels beside those of replay.cuh. A warp owns 16 rows of
// the state: lane 4 g + t of it works for rows g and g + 8, and in a tile of 8 queries for queries 2 t and 2 t + 1.
// Whatever a warp can compute faster than it could wait for another, it computes itself.
#pragma once
#include "gdn_window.cuh"

constexpr int HISTORY_TILES = (HISTORY_ROWS + 15) / 16;

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

// High half of a number for the matrix unit's tf32 products. One bit less than these keep: of a number cut where tf32
// is cut anyway, the assembler would pass the whole one, and spend an instruction on moving it next to its neighbours.
DEVICE float high_half(float value) { return bits_to_float(float_to_bits(value) & 0xffffc000u); }

// `index` times `stride` elements behind `base`; neither is negative.
template <class T>
DEVICE T* advance(T* base, int index, int stride) {
    return base + (unsigned long long)(u32)index * (u32)stride;
}

DEVICE void load_words(const void* from, u32 (&words)[LANE_COLUMNS / 2]) {
    load_query_columns((const activation_t*)from, words);
}

// ---------------------------------------------------------------------------------------------------- the history

// The warp's 16 values of u of every history token and plane lie in two chunks of 8, which swap places in every other
// four
// tokens: so eight tokens' chunks are in different banks.
constexpr int U_ROWS = U_PLANES * HISTORY_ROWS;
DEVICE int u_offset(int token, int plane, int chunk) {
    return (plane * HISTORY_ROWS + token) * 16 + (chunk ^ (token >> 2 & 1)) * 8;
}
// The lane's place in the warp's u for load_u.
DEVICE u32 u_of_lane() {
    const int lane = threadIdx.x % 32;
    return HISTORY_ROWS % 16 ? 0 : u_offset(lane % 8 + lane / 16 * 8, 0, lane / 8 & 1);
}
// Word i of tile m and plane p holds tokens 16 m + 8 (i / 2) + 2 t and the next of row g + 8 (i % 2).
DEVICE void load_u(u32 (&words)[4], const u16* u, u32 of_lane, int plane, int m) {
    const int lane = threadIdx.x % 32, token = m * 16 + lane % 8 + lane / 16 * 8;
    if constexpr (HISTORY_ROWS % 16 == 0)
        load_matrix_x4_transposed(words, u + of_lane + (plane * HISTORY_ROWS + m * 16) * 16);
    else
        load_matrix_x4_transposed(words,
                                  u + u_offset(token < HISTORY_ROWS ? token : HISTORY_ROWS - 1, plane, lane / 8 & 1));
}

// sum += u of 16 tokens . their coefficients: value[n] are those of query g of tile n and tokens 2 t, the next, and 8
// further on. u is exact; the coefficients keep 24 bits with its high half, and 16 with its low one.
template <int TILES>
DEVICE void add_history(float (&sum)[TILES][4], float (&value)[TILES][4], const u16* u, u32 u_lane, int m) {
    u32 a[U_PLANES][4];
#pragma unroll
    for (int plane = 0; plane < U_PLANES; plane++) load_u(a[plane], u, u_lane, plane, m);
#pragma unroll
    for (int part = 0; part < 3; part++)
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const u32 b0 = split_bf16(value[n][0], value[n][1]), b1 = split_bf16(value[n][2], value[n][3]);
#pragma unroll
            for (int plane = 0; plane < U_PLANES; plane++)
                if (part + plane < 3)
                    mma_16bit<FORMAT_BF16>(sum[n], a[plane][0], a[plane][1], a[plane][2], a[plane][3], b0, b1);
        }
}

// Decayed u of a history that is folded, as the matrix unit takes it: words of three bf16 parts, or for fp16 tokens
// numbers. weights[m][i] is the decay behind token 16 m + 8 (i / 2) + 2 t + i % 2.
struct FoldedU {
    static constexpr bool SPLIT = ACTIVATION_FORMAT == FORMAT_BF16;
    u32 parts[HISTORY_TILES][SPLIT ? 3 : 1][4];
    float numbers[HISTORY_TILES][SPLIT ? 1 : 8];

    DEVICE_MEMBER void load(const u16* u, const float (&weights)[HISTORY_TILES][4]) {
#pragma unroll
        for (int m = 0; m < HISTORY_TILES; m++) {
            u32 high[4], low[4] = {0, 0, 0, 0};
            load_u(high, u, u_of_lane(), 0, m);
            if (U_PLANES == 2) load_u(low, u, u_of_lane(), U_PLANES - 1, m);
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
    }
};

// Folds the history into the warp's 16 rows, stores them, and passes what is stored on: consume(block, s0, s1) gets the
// lane's LANE_COLUMNS values of rows g and g + 8 in a block of BLOCK_COLUMNS. `tokens` are the rows k of the history,
// zero beyond it. UNROLL blocks are worked on at a time.
template <int UNROLL, class Consume>
DEVICE void fold_rows(const state_t* tile, state_t* global, bool has_state, float decay, const FoldedU& u,
                      const activation_t* tokens, const Consume& consume) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = threadIdx.x / 32 * 16;
    constexpr bool SPLIT = FoldedU::SPLIT;
    const state_t* rows = tile + g * COLUMNS + t * LANE_COLUMNS;
    state_t* stored = global + g * COLUMNS + t * LANE_COLUMNS;
#pragma unroll UNROLL
    for (int block = 0; block < COLUMNS / BLOCK_COLUMNS; block++) {
        const int column = block * BLOCK_COLUMNS;
        if (UNROLL > 2) sync_warp();  // keeps the loads of all blocks from being moved to the front
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
            // Accumulator columns 2 t and 2 t + 1 must be the lane's own state columns, so column g of the second
            // operand is one of those that lane g / 2 owns.
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
                        mma_16bit<FORMAT_BF16>(d, u.parts[m][part][0], u.parts[m][part][1], u.parts[m][part][2],
                                               u.parts[m][part][3], b0, b1);
                } else {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const u32 even = words[2 * half][i], odd = words[2 * half + 1][i];
                        const float b0 = g & 1 ? activation_high(even) : activation_low(even);
                        const float b1 = g & 1 ? activation_high(odd) : activation_low(odd);
                        const float* a = u.numbers[m] + 4 * half;  // even and odd token of row g, then of row g + 8
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
        consume(block, s0, s1);
    }
}
