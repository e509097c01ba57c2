// How the readout kernels read and write rows of a state: checkpoint and readout from the same fp32 values
// (plugins/contract.py, "State formats").
#pragma once
#include "readout.cuh"

// A lane's columns of one row, four of each 16-column block: [pair of blocks][4 of the first, 4 of the second].
typedef float RowValues[PAIRS][8];

// --------------------------------------------------------------------------------------------- checkpoint rows

// The lane's 8 columns of a pair of blocks of one row, as they are stored.
struct RawState {
    u32 words[STATE_FORMAT == FORMAT_FP32 ? 8 : STATE_FORMAT == FORMAT_FP8 ? 2 : 4];
};

DEVICE void load_raw(RawState& raw, const state_t* row, int column) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const state_t* at = row + column + 16 * half;
        if constexpr (STATE_FORMAT == FORMAT_FP32) {
            const uint4 v = *(const uint4*)at;
            constexpr int F = STATE_FORMAT == FORMAT_FP32;  // keeps the indices in range where this is not compiled
            raw.words[4 * F * half] = v.x, raw.words[F * (4 * half + 1)] = v.y;
            raw.words[F * (4 * half + 2)] = v.z, raw.words[F * (4 * half + 3)] = v.w;
        } else if constexpr (STATE_FORMAT == FORMAT_FP8) {
            raw.words[half] = *(const u32*)at;
        } else {
            const uint2 v = *(const uint2*)at;
            constexpr int W = STATE_FORMAT != FORMAT_FP8;
            raw.words[2 * W * half] = v.x, raw.words[W * (2 * half + 1)] = v.y;
        }
    }
}

// scale: of the row, of fp8.
DEVICE void widen(const RawState& raw, float scale, float (&s)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if constexpr (STATE_FORMAT == FORMAT_FP32) s[i] = bits_to_float(raw.words[i * (STATE_FORMAT == FORMAT_FP32)]);
        else if constexpr (STATE_FORMAT == FORMAT_FP8) {
            if (i % 2) continue;
            widen_fp16(s[i], s[i + 1], e4m3_codes_to_fp16(raw.words[i / 4], i % 4 / 2));
            s[i] *= scale, s[i + 1] *= scale;
        } else s[i] = state_to_float((state_t)(raw.words[i / 2] >> i % 2 * 16 & 0xffffu));
    }
}

// Exponent field of the power of two that scales an e4m3 row whose largest magnitude has the bits `largest`; 255: NaN.
DEVICE int e4m3_row_field(u32 largest) {
    const int exponent = (int)(largest >> 23);
    return exponent == 255 ? 255 : exponent < 8 ? 1 : exponent - 7;
}

// Whether the warp's rows, of which a lane knows the largest magnitude of one, can be rounded stochastically in the fewest
// instructions. fp16: below 2^15 rounding up stays within the format. fp8: below 2^13 a row's scale and 2^120 can be
// divided by at once.
DEVICE bool are_plain(u32 largest) {
    constexpr u32 BEYOND = STATE_FORMAT == FORMAT_FP16 ? 142 : STATE_FORMAT == FORMAT_FP8 ? 140 : 0;
    return STOCHASTIC && BEYOND && ballot(largest >> 23 >= BEYOND) == 0;
}

// The lane's 8 columns of a pair of blocks, to the row at `to`. random: of random_words, for elements `first` to first + 7.
// plain: are_plain. field: of the row's scale, of fp8.
DEVICE void store_checkpoint(state_t* to, const float (&s)[8], int column, const u32 (&random)[4], int first, bool plain,
                             int field) {
    u32 words[STATE_FORMAT == FORMAT_FP32 ? 8 : 4];
    if (STATE_FORMAT == FORMAT_FP16 && plain) {
        u32 bits[8];
#pragma unroll
        for (int i = 0; i < 8; i++) bits[i] = random_bits(random, first + i);
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = round_stochastic_fp16(s[2 * i], s[2 * i + 1], bits[2 * i], bits[2 * i + 1]);
    } else if (STATE_FORMAT == FORMAT_FP8 && plain) {
        const float down = bits_to_float((u32)(134 - field) << 23);
#pragma unroll
        for (int i = 0; i < 2; i++) words[i] = round_stochastic_e4m3(s + 4 * i, down, random, first / 4 + i);
    } else {
        const float inverse = STATE_FORMAT == FORMAT_FP8 && field != 255 ? power_of_two(254 - field) : 1.f;
        state_t rounded[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float value = STATE_FORMAT == FORMAT_FP8 ? s[i] * inverse : s[i];
            if constexpr (STOCHASTIC) value = round_stochastic(value, random_bits(random, first + i) >> 16);
            rounded[i] = float_to_state(value);
            if (STATE_FORMAT == FORMAT_FP8 && field == 255) rounded[i] = (state_t)0x7f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if constexpr (STATE_FORMAT == FORMAT_FP32) words[i * (STATE_FORMAT == FORMAT_FP32)] = float_to_bits(rounded[i]);
            else if constexpr (STATE_FORMAT == FORMAT_FP8)
                words[i / 4] = (i % 4 ? words[i / 4] : 0u) | (u32)rounded[i] << i % 4 * 8;
            else words[i / 2] = (i % 2 ? words[i / 2] : 0u) | (u32)rounded[i] << i % 2 * 16;
        }
        // Where it sees the four numbers that a u64 is put together from, ptxas 13.0 (sm_90) exchanges the first and the third.
#pragma unroll
        for (int i = 0; i < 4; i++)
            if constexpr (STATE_FORMAT == FORMAT_FP16 || STATE_FORMAT == FORMAT_BF16) hold_until_here(words[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state_t* at = to + column + 16 * half;
        if constexpr (STATE_FORMAT == FORMAT_FP32) {
            constexpr int F = STATE_FORMAT == FORMAT_FP32;
            *(uint4*)at = make_uint4(words[4 * F * half], words[F * (4 * half + 1)], words[F * (4 * half + 2)],
                                     words[F * (4 * half + 3)]);
        } else if constexpr (STATE_FORMAT == FORMAT_FP8) {
            *(u32*)at = words[half];
        } else {
            *(u64*)at = words[2 * half] | (u64)words[2 * half + 1] << 32;  // the compiler takes a uint2 apart
        }
    }
}

// ------------------------------------------------------------------------------------------------------ encoding

// Largest magnitude of four numbers; NaN if one is.
DEVICE float largest_of(float a, float b, float c, float d) {
    return larger_magnitude(larger_magnitude(a, b), larger_magnitude(c, d));
}
DEVICE u32 quad_max(u32 bits) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        const u32 other = float_to_bits(shuffle_xor(bits_to_float(bits), mask));
        bits = bits > other ? bits : other;
    }
    return bits;
}

// Four e4m3 codes of a row whose scale has the exponent field `field`.
DEVICE u32 encode_e4m3(const float* s, int field) {
    const float inverse = field == 255 ? 1.f : power_of_two(254 - field);
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= float_to_e4m3(s[i] * inverse) << 8 * i;
    return field == 255 ? 0x7f7f7f7fu : word;
}

// Blocks whose scales a lane computes for its quad: lane t those from BLOCK_SHARE t on.
constexpr int BLOCK_SHARE = (STEPS + 3) / 4;

// From the lane's largest of every block: those of the quad, of the blocks that are the lane's share.
DEVICE void share_block_maxima(const float (&largest)[4 * BLOCK_SHARE], float (&own)[BLOCK_SHARE]) {
    const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
    float half[2 * BLOCK_SHARE];
#pragma unroll
    for (int i = 0; i < 2 * BLOCK_SHARE; i++) {
        const float first = largest[i], second = largest[2 * BLOCK_SHARE + i];
        half[i] = larger_magnitude(high ? second : first, shuffle_xor(high ? first : second, 2));
    }
#pragma unroll
    for (int i = 0; i < BLOCK_SHARE; i++) {
        const float first = half[i], second = half[BLOCK_SHARE + i];
        own[i] = larger_magnitude(odd ? second : first, shuffle_xor(odd ? first : second, 1));
    }
}

// Two numbers times 2^-14, their block's scale divided out, as e2m1 numbers at the foot of fp16: what the mask 0x8e008e00
// leaves of it. `factor` does both.
DEVICE u32 e2m1_pair(float low, float high, float factor) {
    const u32 half = pack_fp16(multiply(low, factor), multiply(high, factor));
    return half + 0x00ff00ffu + (half >> 9 & 0x00010001u);
}

// A word of codes (plugins/contract.py): four masked pairs where widen_codes finds them again.
DEVICE u32 nvfp4_word(const float (&s)[8], float first, float second) {
    const u32 a = e2m1_pair(s[0], s[1], first), b = e2m1_pair(s[2], s[3], first);
    const u32 c = e2m1_pair(s[4], s[5], second), d = e2m1_pair(s[6], s[7], second);
    // Codes and signs to their places at once, by products that leave something beside them.
    const u32 e = multiply_high(c & 0x8e008e00u, 1u << 26 | 1u << 17), f = multiply_high(d & 0x8e008e00u, 1u << 29 | 1u << 18);
    return (a & 0x8e008e00u) | (rotate_right(b, 29) & 0x70047004u) | (e & 0x00390039u) | (f & 0x01c201c2u);
}

// The scale of an nvfp4 row whose largest magnitude has the bits `largest`, and what its blocks are encoded with.
struct Nvfp4Row {
    int field;
    bool broken;  // not finite
    float inverse, sixth;

    DEVICE_MEMBER explicit Nvfp4Row(u32 largest) {
        const int exponent = (int)(largest >> 23), least = exponent - 10 < 27 ? 27 : exponent - 10;
        broken = exponent == 255;
        field = least < 227 ? least : 227;
        inverse = broken ? 0.f : bits_to_float((u32)(254 - field) << 23), sixth = multiply(inverse, 1.f / 6.f);
    }
    DEVICE_MEMBER unsigned char stored() const { return (unsigned char)(broken ? 255 : field); }
    // Of a block with this largest magnitude: the code of its scale, and what divides by both scales and takes 2^-14.
    DEVICE_MEMBER u32 block(float block_largest, float& factor) const {
        const u32 code = float_to_e4m3(fmaxf(multiply(block_largest, sixth), 0x1p-6f));
        factor = multiply(inverse * 0x1p-14f, short_reciprocal(bits_to_float((code << 20) + (120u << 23))));
        return code;
    }
};

// The nvfp4 readout of the lane's columns of row `row` of `to`, whose largest magnitudes by block and altogether are given.
DEVICE void store_nvfp4(const RowValues& s, const float (&own_largest)[BLOCK_SHARE], u32 largest, const StateRows& to,
                        int row) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const Nvfp4Row scale(largest);
    float factors[BLOCK_SHARE];
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_SHARE; i++) codes |= scale.block(own_largest[i], factors[i]) << 8 * i;
    unsigned char* scales = to.block_scales + row * BLOCK_SCALE_BYTES + BLOCK_SHARE * t;
    if constexpr (STEPS % 4 == 0 && BLOCK_SHARE == 2) {
        *(u16*)scales = (u16)codes;
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK_SHARE; i++)
            if (BLOCK_SHARE * t + i < STEPS) scales[i] = (unsigned char)(codes >> 8 * i);
    }
    if (t == 0) to.row_scales[row] = scale.stored();
    u32 words[PAIRS];
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int block = 2 * pair + half;
            factor[half] = shuffle_from(factors[block % BLOCK_SHARE], lane - t + block / BLOCK_SHARE);
        }
        const u32 word = nvfp4_word(s[pair], factor[0], factor[1]);
        words[pair] = scale.broken ? 0u : word;
    }
    u32* at = (u32*)(to.codes + row * CODE_BYTES) + PAIRS * t;
    if constexpr (PAIRS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < PAIRS; i += 4)
            *(uint4*)(at + i) = make_uint4(words[i], words[(i + 1) % PAIRS], words[(i + 2) % PAIRS], words[(i + 3) % PAIRS]);
    } else {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) at[i] = words[i];
    }
}

// Stores the lane's columns of row `row` of `to`, checkpoint and readout, from the same values; every lane of the warp has
// those of one of eight rows. head_row: the row within the head, for the random bits. between(): called when the readout
// is stored, from where on values need fewer and fewer registers.
template <class Between>
DEVICE void store_row(const RowValues& s, const StateRows& to, int row, int head_row, const RoundingKey& key,
                      const Between& between) {
    const int t = threadIdx.x % 4;
    float block_largest[4 * BLOCK_SHARE] = {}, own_largest[BLOCK_SHARE];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const float* v = s[i / 2] + i % 2 * 4;
        block_largest[i] = largest_of(v[0], v[1], v[2], v[3]);
    }
    share_block_maxima(block_largest, own_largest);
    float all = own_largest[0];
#pragma unroll
    for (int i = 1; i < BLOCK_SHARE; i++) all = larger_magnitude(all, own_largest[i]);
    const u32 largest = quad_max(float_to_bits(all));
    const int field = e4m3_row_field(largest);
    sync_warp();  // the scales that other lanes have read may be those that are replaced now
    if constexpr (NVFP4) store_nvfp4(s, own_largest, largest, to, row);
    if (t == 0 && READOUT_FORMAT == READOUT_FP8) to.row_scales[row] = (unsigned char)field;
    if (t == 0 && STATE_FORMAT == FORMAT_FP8) to.checkpoint_scales[row] = (unsigned char)field;
    between();
    u32 words[4] = {};
    const auto store_all = [&](bool fast) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int column = 32 * pair + 4 * t;
            if (STOCHASTIC && pair % 2 == 0) random_words(words, key, head_row, column);
            if constexpr (READOUT_FORMAT == READOUT_FP8) {
                *(u32*)(to.codes + row * CODE_BYTES + column) = encode_e4m3(s[pair], field);
                *(u32*)(to.codes + row * CODE_BYTES + column + 16) = encode_e4m3(s[pair] + 4, field);
            }
            store_checkpoint(to.checkpoint + row * COLUMNS, s[pair], column, words, pair % 2 * 8, fast, field);
        }
    };
    if (are_plain(largest)) store_all(true);
    else store_all(false);
}
