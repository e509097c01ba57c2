// Element formats and scalar functions. The build stamps in ACTIVATION_FORMAT.
#pragma once
#include "primitives.cuh"

// Beside the formats of primitives.cuh: e4m3 checkpoints, and copies of the state that only outputs read.
#define FORMAT_FP8 3
#define READOUT_SAME 0
#define READOUT_FP8 1
#define READOUT_NVFP4 2

typedef u16 activation_t;

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

DEVICE float activation_to_float(u32 bits) {
    if constexpr (ACTIVATION_FORMAT == FORMAT_BF16) return bits_to_float(bits << 16);
    return fp16_to_float((u16)bits);
}
DEVICE activation_t float_to_activation(float value) {
    if constexpr (ACTIVATION_FORMAT == FORMAT_BF16) return float_to_bf16(value);
    return float_to_fp16(value);
}
DEVICE u32 pack_activation(float low, float high) {
    if constexpr (ACTIVATION_FORMAT == FORMAT_BF16) return pack_bf16(low, high);
    return pack_fp16(low, high);
}
// The two elements of a 32-bit word.
DEVICE float activation_low(u32 word) {
    if constexpr (ACTIVATION_FORMAT == FORMAT_BF16) return bits_to_float(word << 16);
    return fp16_to_float((u16)word);
}
DEVICE float activation_high(u32 word) {
    if constexpr (ACTIVATION_FORMAT == FORMAT_BF16) return bits_to_float(word & 0xffff0000u);
    return fp16_to_float((u16)(word >> 16));
}
DEVICE float bf16_low(u32 word) { return bits_to_float(word << 16); }
DEVICE float bf16_high(u32 word) { return bits_to_float(word & 0xffff0000u); }

DEVICE float tf32_high(float value) { return bits_to_float(float_to_bits(value) & 0xffffe000u); }

DEVICE float softplus(float value) { return value > 20.f ? value : log1pf(expf(value)); }
DEVICE float sigmoid(float value) { return 1.f / (1.f + expf(-value)); }
// The same within two units in the last place, without the branch of a division, which keeps many of them from being
// computed side by side. No exponential is above 1, so that small results are right too, down to the least number there
// is.
DEVICE float sigmoid_side_by_side(float value) {
    const float e = expf(-fabsf(value)), r = short_reciprocal(1.f + e);
    return value >= 0.f ? r : e * r;
}
DEVICE float decay_of(float exponent) { return expf(fminf(exponent, 0.f)); }
