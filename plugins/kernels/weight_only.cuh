// Weights of 4, 8 and 16 bits as operands of a 16-bit matrix product: how they lie in memory and become pairs of activations
// in registers. The build stamps in WEIGHT_FORMAT, ACTIVATION_FORMAT and
// TILE_TOKENS.
//
// A tile is what a warp multiplies at a time: 32 rows of TILE_K columns, 2048 bytes, and 256 bytes of NVFP4 scales behind
// them. Bytes lie in the order in which the lanes load them (plugins/weight_only.py): 16 of each row for each of the four
// lanes that share it, which are the lane's operands of all steps of a product, 16 columns each, one step after the other.
#pragma once
#include "elementwise.cuh"

#define WEIGHTS_16BIT 0
#define WEIGHTS_FP8 1
#define WEIGHTS_NVFP4 2

constexpr int WEIGHT_BITS = WEIGHT_FORMAT == WEIGHTS_NVFP4 ? 4 : WEIGHT_FORMAT == WEIGHTS_FP8 ? 8 : 16;
constexpr bool HAS_BLOCK_SCALES = WEIGHT_FORMAT == WEIGHTS_NVFP4, IS_BF16 = ACTIVATION_FORMAT == FORMAT_BF16;
constexpr int TILE_K = 4 * 128 / WEIGHT_BITS, TILE_BYTES = 2048 + (HAS_BLOCK_SCALES ? 256 : 0);
constexpr int UNITS = TILE_K / 32;  // of 8 columns of a lane: two steps of a product
constexpr int X_CHUNKS = TILE_K / 8, X_ROW_BYTES = TILE_K * 2;  // of a row of activations

// What products of decoded weights must be multiplied by: weights are decoded into a range that the format holds.
constexpr float DECODED_UNIT = WEIGHT_FORMAT == WEIGHTS_NVFP4 ? (IS_BF16 ? 256.f : 128.f) : 1.f;

// Where a 16-byte chunk of a row of activations lies in a stage: in panels of 64 columns whose rows' chunks change places
// from row to row, so that eight rows find different banks; it is also the order in which the tensor cores take them.
DEVICE int x_place(int row, int chunk) {
    if constexpr (X_CHUNKS >= 8)
        return chunk / 8 * (TILE_TOKENS * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16;
    return row * 64 + (chunk ^ row / 2 % 4) * 16;
}

// Two block scales (e4m3, not negative) as the factors of `decode_nvfp4`, one in each half.
DEVICE u32 nvfp4_factors(u32 scales) {
    const u32 spread = permute_bytes(scales, 0u, 0x4140u);
    if constexpr (IS_BF16) {
        // The bits of e4m3 at the foot of bf16's exponent are the number times 2^-120. Two steps, because the factor
        // 2^238 that takes it to 2^118 is none; 2^126 would undo the codes' 2^-126, but overflow.
        return multiply_pairs<FORMAT_BF16>(multiply_pairs<FORMAT_BF16>(spread << 4, 0x7b807b80u), 0x7a807a80u);
    }
    return multiply_pairs<FORMAT_FP16>(spread << 7, 0x78007800u);  // times 2^-8, then 2^15
}
// The factor of block 0 or 1, in both halves.
DEVICE u32 nvfp4_factor(u32 factors, int block) { return both_halves(factors, block); }

// Eight e2m1 codes of a word in the order of plugins.weight_only.pack_words are four pairs; these are the two of `step`,
// times `factor`. Exact: code and scale have six significant bits together.
DEVICE void decode_nvfp4(u32 word, u32 factor, int step, u32& first, u32& second) {
    constexpr u32 SIGNS = 0x80008000u, MAGNITUDES = IS_BF16 ? 0x01c001c0u : 0x0e000e00u;
    u32 codes[2];
    if constexpr (IS_BF16) {
        codes[0] = step ? (word << 6 & MAGNITUDES) | (word << 2 & SIGNS) : word & (SIGNS | MAGNITUDES);
        codes[1] = step ? (word >> 3 & MAGNITUDES) | (word << 1 & SIGNS) : word << 3 & (SIGNS | MAGNITUDES);
    } else {
        codes[0] = step ? (word << 9 & MAGNITUDES) | (word << 2 & SIGNS) : (word << 3 & MAGNITUDES) | (word & SIGNS);
        codes[1] = step ? (word & MAGNITUDES) | (word << 1 & SIGNS) : (word << 6 & MAGNITUDES) | (word << 3 & SIGNS);
    }
    first = multiply_pairs<ACTIVATION_FORMAT>(codes[0], factor);
    second = multiply_pairs<ACTIVATION_FORMAT>(codes[1], factor);
}

// Four e4m3 numbers of a word as two pairs.
DEVICE void decode_fp8(u32 word, u32& first, u32& second) {
    constexpr u32 SIGNS = 0x80008000u, MAGNITUDES = IS_BF16 ? 0x07f007f0u : 0x3f803f80u;
    constexpr int SHIFT = IS_BF16 ? 4 : 1;
    constexpr u32 UNIT = IS_BF16 ? 0x7b807b80u : 0x5c005c00u;  // 2^120 and 2^8
    const u32 low = permute_bytes(word, 0u, 0x1404u), high = permute_bytes(word, 0u, 0x3424u);  // a byte atop each half
    first = multiply_pairs<ACTIVATION_FORMAT>((low & SIGNS) | (low >> SHIFT & MAGNITUDES), UNIT);
    second = multiply_pairs<ACTIVATION_FORMAT>((high & SIGNS) | (high >> SHIFT & MAGNITUDES), UNIT);
}

// Of 16 rows of a tile, a lane's columns of rows g and g + 8, and their scales, two bytes each.
struct WeightRows {
    uint4 codes[2];
    u32 scales;
};

// Part `m` of a tile, its rows 16 m and above: codes and, behind those of both parts, scales.
DEVICE WeightRows load_rows(const unsigned char* codes, const unsigned char* scales, int lane) {
    WeightRows rows;
#pragma unroll
    for (int half = 0; half < 2; half++) rows.codes[half] = ((const uint4*)codes)[half * 32 + lane];
    rows.scales = HAS_BLOCK_SCALES ? ((const u32*)scales)[lane] : 0u;
    return rows;
}
DEVICE const unsigned char* part_codes(const unsigned char* tile, int m) { return tile + m * 1024; }
DEVICE const unsigned char* part_scales(const unsigned char* tile, int m) { return tile + 2048 + m * 128; }

DEVICE u32 word_of(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

// A lane's operands of step 2 unit + `step`: two pairs. factors: of the NVFP4 blocks of the unit's steps.
DEVICE void decode_step(const uint4& codes, u32 factors, int unit, int step, u32& first, u32& second) {
    if constexpr (WEIGHT_FORMAT == WEIGHTS_NVFP4)
        decode_nvfp4(word_of(codes, unit), nvfp4_factor(factors, step), step, first, second);
    else if constexpr (WEIGHT_FORMAT == WEIGHTS_FP8)
        decode_fp8(word_of(codes, 2 * unit + step), first, second);
    else
        first = word_of(codes, 2 * step), second = word_of(codes, 2 * step + 1);
}
