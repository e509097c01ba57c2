// How a checkpoint's numbers are stored and rounded (plugins/contract.py, "State formats"). The operator's source
// defines COLUMNS; the build stamps in STATE_FORMAT and, where rounding is stochastic, STOCHASTIC.
#pragma once
#include "formats.cuh"

#ifndef STOCHASTIC
#define STOCHASTIC 0
#endif

#if STATE_FORMAT == FORMAT_FP32
typedef float state_t;
#elif STATE_FORMAT == FORMAT_FP8
typedef unsigned char state_t;
#else
typedef u16 state_t;
#endif

// An e4m3 number without the scale of its row.
DEVICE float e4m3_to_float(u32 code) {
    return bits_to_float((code & 0x7fu) << 20 | (code & 0x80u) << 24) * 0x1p120f;
}
// The power of two of a row of e4m3 numbers; NaN for 255.
DEVICE float e4m3_scale(unsigned char field) {
    return field == 255 ? bits_to_float(0x7fffffffu) : bits_to_float((u32)field << 23);
}
// Nearest e4m3 number, ties to even, of a value below 464; subnormals are multiples of 2^-9.
DEVICE u32 float_to_e4m3(float value) {
#if HARDWARE_E4M3
    return convert_e4m3(value);
#endif
    const u32 bits = float_to_bits(value), magnitude = bits & 0x7fffffffu;
    const u32 normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) - (120u << 23);
    const u32 subnormal = float_to_bits(bits_to_float(magnitude) + 16384.f) - float_to_bits(16384.f);
    return (magnitude < (121u << 23) ? subnormal : normal >> 20) | (bits >> 24 & 0x80u);
}

DEVICE float state_to_float(state_t value) {
    if constexpr (STATE_FORMAT == FORMAT_FP32) return (float)value;
    if constexpr (STATE_FORMAT == FORMAT_FP8) return e4m3_to_float((u32)value);
    if constexpr (STATE_FORMAT == FORMAT_BF16) return bits_to_float((u32)value << 16);
    return fp16_to_float((u16)value);
}
// Of fp8, a value that its row's scale divides already.
DEVICE state_t float_to_state(float value) {
    if constexpr (STATE_FORMAT == FORMAT_FP32) return (state_t)value;
    if constexpr (STATE_FORMAT == FORMAT_FP8) return (state_t)float_to_e4m3(value);
    if constexpr (STATE_FORMAT == FORMAT_BF16) return (state_t)float_to_bf16(value);
    return (state_t)float_to_fp16(value);
}
DEVICE float round_to_state(float value) { return state_to_float(float_to_state(value)); }

// ------------------------------------------------------------------------------------------ stochastic rounding

// What the random bits of a head's elements depend on besides their place. position: the new c.
struct RoundingKey {
    u32 seed, head, position, layer;
};

// Philox4x32-7 of the counter `words`, in place, with the key (seed, 0).
DEVICE void philox(u32 (&words)[4], u32 seed) {
    u32 key0 = seed, key1 = 0;
#pragma unroll
    for (int round = 0; round < 7; round++) {
        u32 low, high, low2, high2;
        multiply_wide(low, high, 0xd2511f53u, words[0]);
        multiply_wide(low2, high2, 0xcd9e8d57u, words[2]);
        words[0] = high2 ^ words[1] ^ key0;
        words[2] = high ^ words[3] ^ key1;
        words[1] = low2;
        words[3] = low;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

// Random bits of 16 elements of `row`: columns `column` + 0 to 3, + 16 to 19, + 32 to 35 and + 48 to 51, where column %
// 64 is 0, 4, 8 or 12.
DEVICE void random_words(u32 (&words)[4], const RoundingKey& key, int row, int column) {
    constexpr int GROUPS_PER_ROW = 4 * ((COLUMNS + 63) / 64);
    words[0] = (u32)(row * GROUPS_PER_ROW + 4 * (column / 64) + column % 16 / 4);
    words[1] = key.head, words[2] = key.position, words[3] = key.layer;
    philox(words, key.seed);
}
// Bytes i and i + 1 of them, in the upper half; the lower half is something else.
DEVICE u32 random_bits(const u32 (&words)[4], int i) {
    const u32 word = words[i / 4];
    if (i % 4 == 3) return permute_bytes(word, words[(i / 4 + 1) % 4], 0x4300u);
    return i % 4 == 2 ? word : shift_left(word, i % 4 ? 8 : 16);
}

// A number that float_to_state keeps: `value` rounded up or down with 16 random bits. Scaled so that fp32 has the
// format's exponents, its bits are a count of the format's finest steps, subnormal or not: adding to them and cutting
// them off is all there is to it. Of fp8, a value that its row's scale divides already.
DEVICE float round_stochastic(float value, u32 random) {
    if constexpr (STATE_FORMAT == FORMAT_FP32) return value;
    constexpr bool WIDE = STATE_FORMAT == FORMAT_BF16, BYTE = STATE_FORMAT == FORMAT_FP8;
    const float down = WIDE ? 1.f : BYTE ? 0x1p-120f : 0x1p-112f, up = WIDE ? 1.f : BYTE ? 0x1p120f : 0x1p112f;
    const u32 addend = WIDE ? random : BYTE ? random << 4 | 8u : random >> 3;
    const u32 cut = WIDE ? 0xffff0000u : BYTE ? 0xfff00000u : 0xffffe000u;
    // A NaN may have all bits set, to which nothing can be added.
    const int scaled = (int)float_to_bits(value * down), limit = (int)(cut & 0x7fffffffu);
    return bits_to_float(((u32)(scaled < limit ? scaled : limit) + addend) & cut) * up;
}

// The same of two numbers below 2^15, rounded to fp16, the first in the low half; random bits in the upper halves.
DEVICE u32 round_stochastic_fp16(float low, float high, u32 random_low, u32 random_high) {
    const float first = bits_to_float(float_to_bits(multiply(low, 0x1p-112f)) + (random_low >> 19));
    const float second = bits_to_float(float_to_bits(multiply(high, 0x1p-112f)) + (random_high >> 19));
    return pack_fp16_cut(multiply(first, 0x1p112f), multiply(second, 0x1p112f));
}

// Four finite numbers rounded to e4m3 codes, as round_stochastic and float_to_state would together. down: divides by their
// row's scale, and by 2^120. words: of random_words, for elements 4 i to 4 i + 3.
DEVICE u32 round_stochastic_e4m3(const float* s, float down, const u32 (&words)[4], int i) {
    u32 bits[4], sums[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        bits[e] = float_to_bits(multiply(s[e], down));
        // Four bits further up than round_stochastic adds them: a code without its sign is the upper byte of the sum.
        const u32 addend = e < 3 ? permute_bytes(words[i], 0x80u, 0x5104u + 0x110u * e)
                                 : (permute_bytes(words[i], words[(i + 1) % 4], 0x0430u) & 0x00ffff00u) | 0x80u;
        sums[e] = multiply_add_bits(bits[e], 16u, addend);
    }
    const auto upper_bytes = [](const u32(&of)[4]) {
        return permute_bytes(permute_bytes(of[0], of[1], 0x0073u), permute_bytes(of[2], of[3], 0x0073u), 0x5410u);
    };
    return upper_bytes(sums) | (upper_bytes(bits) & 0x80808080u);
}
