// Outputs that FP8 products read: e4m3 numbers in units of a scale, saturating, beside 16-bit ones or in their place.
#pragma once
#include "elementwise.cuh"

#define STATE_FORMAT FORMAT_FP8  // for what it says of e4m3
#include "state_formats.cuh"

typedef unsigned char u8;

// `values` must be what the activation format holds.
DEVICE void store_narrow_chunk(u8* to, const float (&values)[8], float unit) {
    u32 words[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float value = values[e] / unit, clamped = value > 448.f ? 448.f : value < -448.f ? -448.f : value;
        words[e / 4] |= (value != value ? 0x7fu : float_to_e4m3(clamped)) << 8 * (e % 4);
    }
    *(uint2*)to = make_uint2(words[0], words[1]);
}

#ifdef STORES_NARROW
// Stamped in: STORES_WIDE (the 16-bit numbers are stored), STORES_NARROW (what an FP8 product makes of them is).
DEVICE void store_outputs(activation_t* out, u8* narrow, const float* narrow_scale, long long at, float (&values)[8]) {
    if constexpr (STORES_WIDE) store_chunk(out + at, values);
    if constexpr (STORES_NARROW) {
#pragma unroll
        for (int e = 0; e < 8; e++) values[e] = rounded(values[e]);
        store_narrow_chunk(narrow + at, values, *narrow_scale);
    }
}
#endif
