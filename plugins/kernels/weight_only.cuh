// Weights of 4, 8 and 16 bits as operands of a 16-bit matrix product: how they lie in memory and become pairs of
// activations in registers. The build stamps in WEIGHT_FORMAT, ACTIVATION_FORMAT, TILE_TOKENS and, for NVFP4 weights
// that are multiplied in FP8, FP8_OPERANDS.
//
// A tile is what a warp multiplies at a time: 32 rows of TILE_K columns, 2048 bytes, and 256 bytes of NVFP4 scales
// behind them. Bytes lie in the order in which the lanes load them (plugins/packed_weights.py): 16 of each row for each
// of the four lanes that share it, which are the lane's operands of all steps of a product, 16 columns each, one step
// after the other. With FP8_OPERANDS a lane has 32 columns in a row instead (plugins/fp8_experts.py).
#pragma once
#include "elementwise.cuh"

#define WEIGHTS_16BIT 0
#define WEIGHTS_FP8 1
#define WEIGHTS_NVFP4 2

#ifndef FP8_OPERANDS
#define FP8_OPERANDS 0
#endif

constexpr int WEIGHT_BITS = WEIGHT_FORMAT == WEIGHTS_NVFP4 ? 4 : WEIGHT_FORMAT == WEIGHTS_FP8 ? 8 : 16;
constexpr bool HAS_BLOCK_SCALES = WEIGHT_FORMAT == WEIGHTS_NVFP4, IS_BF16 = ACTIVATION_FORMAT == FORMAT_BF16;
constexpr int TILE_K = 4 * 128 / WEIGHT_BITS, TILE_BYTES = 2048 + (HAS_BLOCK_SCALES ? 256 : 0);
constexpr int UNITS = TILE_K / 32;  // of 8 columns of a lane: two steps of a product
// Of a row of activations: bytes, and chunks of 16 bytes.
constexpr int X_ROW_BYTES = TILE_K * (FP8_OPERANDS ? 1 : 2), X_CHUNKS = X_ROW_BYTES / 16, CHUNK_COLUMNS = TILE_K / X_CHUNKS;

// What products of decoded weights must be multiplied by: weights are decoded into a range that the format holds.
constexpr float DECODED_UNIT = FP8_OPERANDS ? 8.f : WEIGHT_FORMAT == WEIGHTS_NVFP4 ? (IS_BF16 ? 256.f : 128.f) : 1.f;

// Where a 16-byte chunk of a row of activations lies in a stage: in panels of 64 columns whose rows' chunks change
// places from row to row, so that eight rows find different banks; it is also the order in which the tensor cores take
// them.
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

// Eight e2m1 codes of a word in the order of plugins.packed_weights.pack_words are four pairs; these are the two of
// `step`, times `factor`. Exact: code and scale have six significant bits together.
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

// The e4m3 numbers that the magnitudes of e2m1 become in a block: of 0, 1/2, 1, 3/2 and of 2, 3, 4, 6.
struct BlockNumbers {
    u32 low, high;
};

// Of a lane's four blocks: two of one row, two of the row 8 further on. scales: a byte each, an eighth of the block's
// scale in e4m3, at least 2^-5, and a bit that says whether 3/2 of it are 5 codes above it, and not 4.
DEVICE void block_numbers(u32 scales, BlockNumbers (&numbers)[4]) {
    const u32 one = scales & 0x7f7f7f7fu, more = one + 0x04040404u + (scales >> 7 & 0x01010101u);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // A factor of 2 is 8 codes.
        numbers[i].low = multiply_add_bits(permute_bytes(one, more, 0x0400u + 0x0111u * i), 256u, 0u - 0x0800u);
        numbers[i].high = permute_bytes(one, more, 0x4040u + 0x1111u * i) + 0x10100808u;
    }
}

// Eight codes of a word in the order of plugins.fp8_experts.pack, four and four.
DEVICE void decode_nvfp4_as_fp8(u32 word, BlockNumbers numbers, u32& first, u32& second) {
    const u32 magnitudes = word & 0x77777777u;
    first = select_bytes(numbers.low, numbers.high, magnitudes) | (word & 0x80808080u);
    second = select_bytes(numbers.low, numbers.high, magnitudes >> 16) | (word << 4 & 0x80808080u);
}

// Where a column of a group of 128 is among the e4m3 activations that such a product reads: lane t's 32 columns are
// four of each half of its steps.
DEVICE int fp8_place(int column) {
    return (column & ~127) + (column / 8 % 4 * 32 + column / 4 % 2 * 16 + column / 32 % 4 * 4 + column % 4);
}
