// Chunks of 8 activations, which one thread loads and stores at once.
#pragma once
#include "formats.cuh"

DEVICE void load_chunk(const activation_t* from, float (&values)[8]) {
    const uint4 v = *(const uint4*)from;
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; e++) values[e] = e % 2 ? activation_high(words[e / 2]) : activation_low(words[e / 2]);
}

DEVICE void store_chunk(activation_t* to, const float (&values)[8]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = (u32)float_to_activation(values[2 * i]) | (u32)float_to_activation(values[2 * i + 1]) << 16;
    *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE void load_weights(const float* from, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 v = ((const float4*)from)[i];
        values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
}

// As the activation format holds it.
DEVICE float rounded(float value) { return activation_to_float(float_to_activation(value)); }

// Sum over the lanes of a warp, in every lane.
DEVICE float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}
