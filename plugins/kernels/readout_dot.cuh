// Products of the readout's rows with queries (C, or q and k).
#pragma once
#include "readout_store.cuh"

// The larger of `largest` and the magnitudes of a pair of activations, as the bits of fp32 numbers.
DEVICE u32 larger_bits(u32 largest, u32 pair) {
    const u32 low = float_to_bits(activation_low(pair)) & 0x7fffffffu;
    const u32 high = float_to_bits(activation_high(pair)) & 0x7fffffffu;
    const u32 both = low > high ? low : high;
    return both > largest ? both : largest;
}
// Exponent field of the power of two by which a row whose largest magnitude has the bits `largest` comes to [2^14, 2^15).
DEVICE int query_field(u32 largest) {
    constexpr int LOWEST = READOUT_EXPONENT > 1 ? READOUT_EXPONENT : 1;
    const int field = 268 - (int)(largest >> 23);
    return field > 254 - 14 ? 254 - 14 : field < LOWEST ? LOWEST : field;
}
DEVICE u32 halve_pair(u32 pair, float factor) {
    return pack_fp16(activation_low(pair) * factor, activation_high(pair) * factor);
}

// A query C on its way to fp16.
struct QueryRow : QueryWords {
    // Writes it in fp16, scaled so that its largest lies in [2^14, 2^15), and to `unit` what undoes that and
    // READOUT_EXPONENT; a copy if PLAIN_QUERIES.
    DEVICE_MEMBER void store(u16* half, float* unit) const {
        const int lane = threadIdx.x % 32;
        if constexpr (PLAIN_QUERIES) {
#pragma unroll
            for (int n = 0; n < COUNT; n++)
                if (n * 32 + lane < WORDS) ((u32*)half)[n * 32 + lane] = words[n];
            if (lane == 0) *unit = 1.f;
            return;
        }
        u32 largest = 0;
#pragma unroll
        for (int n = 0; n < COUNT; n++) largest = larger_bits(largest, words[n]);
        const int field = query_field(reduce_max(largest));
        const float factor = power_of_two(field);
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            if (n * 32 + lane < WORDS) ((u32*)half)[n * 32 + lane] = halve_pair(words[n], factor);
        if (lane == 0) *unit = power_of_two(254 + READOUT_EXPONENT - field);
    }
};

// The scales of a part's rows: lane 4 g + t holds those of rows 8 n + g where n % 4 is t.
struct RowScales {
    static constexpr int COUNT = WIDE ? 1 : (ROW_GROUPS + 3) / 4;
    u32 kept[COUNT];

    DEVICE_MEMBER void load(const StateRows& from) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int group = 4 * i + lane % 4;
            const bool exists = !WIDE && (ROW_GROUPS % 4 == 0 || group < ROW_GROUPS);
            kept[i] = exists ? from.row_scales[8 * group + lane / 4] : 127;
        }
    }
    // Of a state that is zero.
    DEVICE_MEMBER void clear() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) kept[i] = 0;
    }
    // Of the row of those that the lane keeps itself.
    DEVICE_MEMBER float own(int i) const { return power_of_two((int)kept[i % COUNT]); }
    // Of the lane's row of eight.
    DEVICE_MEMBER float of_group(int group) const {
        return WIDE ? 1.f : shuffle_from(own(group / 4), threadIdx.x % 32 / 4 * 4 + group % 4);
    }
};

// Eight codes as half2, times 2^-14: (0, 1), (2, 3) of the first block, then of the second.
DEVICE void widen_codes(u32 word, u32 (&pairs)[4]) {
    constexpr u32 MASK = 0x8e008e00u;
    pairs[0] = word & MASK;
    pairs[1] = rotate_right(word, 3) & MASK;
    pairs[2] = (word & 0x00390039u) * (1u << 6 | 1u << 15) & MASK;
    pairs[3] = (word & 0x01c201c2u) * (1u << 3 | 1u << 14) & MASK;
}

// PAIRS words of a lane's row, from memory that is aligned to them.
DEVICE void load_words(const unsigned char* from, u32 (&words)[PAIRS]) {
    constexpr int WIDTH = PAIRS % 4 == 0 ? 4 : PAIRS % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < PAIRS; i += WIDTH) {
        if constexpr (WIDTH == 4) {
            const uint4 v = ((const uint4*)from)[i / 4];
            words[i] = v.x, words[i + WIDTH / 4] = v.y, words[i + WIDTH / 2] = v.z, words[i + WIDTH - 1] = v.w;
        } else if constexpr (WIDTH == 2) {
            const uint2 v = ((const uint2*)from)[i / 2];
            words[i] = v.x, words[i + WIDTH - 1] = v.y;
        } else {
            words[i] = ((const u32*)from)[i];
        }
    }
}

// The e4m3 scales of a row's blocks.
struct BlockScales {
    static constexpr int PER_WORD = PAIRS % 2 == 0 ? 2 : 1;  // pairs of blocks
    u32 words[PAIRS / PER_WORD];

    DEVICE_MEMBER void load(const unsigned char* from) {
        if constexpr (PAIRS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < PAIRS / 4; i++) {
                const uint2 v = ((const uint2*)from)[i];
                words[2 * i] = v.x, words[(2 * i + 1) % (PAIRS / PER_WORD)] = v.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < PAIRS / PER_WORD; i++)
                words[i] = PER_WORD == 2 ? ((const u32*)from)[i] : ((const u16*)from)[i];
        }
    }
    // Of one pair, as half2 times 2^-8.
    DEVICE_MEMBER u32 pair(int i) const {
        return permute_bytes(words[i / PER_WORD], 0, PER_WORD == 2 && i % 2 ? 0x4342u : 0x4140u) << 7;
    }
};

// The lane's columns of its query of every tile, in fp16, as the second operand of every step: in registers where there is
// one tile, otherwise read again for every 16 rows.
template <int TILES>
struct Queries {
    static constexpr bool KEPT = TILES == 1;
    uint2 kept[KEPT ? STEPS : 1];
    const u16* rows[TILES];

    DEVICE_MEMBER void set(int n, const u16* row) {
        rows[n] = row + threadIdx.x % 4 * 4;
        if constexpr (KEPT)
#pragma unroll
            for (int step = 0; step < STEPS; step++) kept[step] = *(const uint2*)(rows[n] + 16 * step);
    }
    DEVICE_MEMBER uint2 operator()(int n, int step) const {
        return KEPT ? kept[KEPT ? step : 0] : *(const uint2*)(rows[n] + 16 * step);
    }
};

// The only query of a window, straight from memory into every warp's registers: column i of the operand holds its
// 16-column block i of every eight, and zeros elsewhere, so that a lane needs the columns 16 g + 4 t .. of each 128.
struct SingleQuery {
    static constexpr int COUNT = (STEPS + 7) / 8;
    uint2 own[COUNT];
    float unit;  // what undoes the scale of the fp16 row and READOUT_EXPONENT

    DEVICE_MEMBER void load(const activation_t* from) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            own[i] = make_uint2(0u, 0u);
            if (STEPS % 8 == 0 || 8 * i + g < STEPS) own[i] = *(const uint2*)(from + 16 * (8 * i + g) + 4 * t);
        }
    }
    // To fp16, as QueryRow does it.
    DEVICE_MEMBER void halve() {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++) largest = larger_bits(largest, i % 2 ? own[i / 2].y : own[i / 2].x);
        const int field = query_field(reduce_max(largest));
        const float factor = power_of_two(field);
#pragma unroll
        for (int i = 0; i < COUNT; i++) own[i] = make_uint2(halve_pair(own[i].x, factor), halve_pair(own[i].y, factor));
        unit = power_of_two(254 + READOUT_EXPONENT - field);
    }
    DEVICE_MEMBER uint2 operator()(int step) const {
        return (int)(threadIdx.x % 32 / 4) == step % 8 ? own[step / 8 % COUNT] : make_uint2(0u, 0u);
    }
};

// sum[i] = the lane's part of the product of row g + 8 i of 16 of an nvfp4 readout and a window's only query, without the
// scales of rows and of queries. codes, scales: of the lane's row g. Every 16-column block has its own column of the
// accumulators, which its scales meet once.
DEVICE void dot_readout_once(float (&sum)[2], const unsigned char* codes, const unsigned char* scales,
                             const SingleQuery& query) {
    const int t = threadIdx.x % 4;
    u32 words[2][PAIRS];
#pragma unroll
    for (int half = 0; half < 2; half++) load_words(codes + 4 * PAIRS * t + half * 8 * CODE_STRIDE, words[half]);
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int first = 0; first < PAIRS; first += 4) {
        float block[4] = {};
#pragma unroll
        for (int pair = first; pair < first + 4 && pair < PAIRS; pair++) {
            u32 a[4], b[4];
            widen_codes(words[0][pair], a);
            widen_codes(words[1][pair], b);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint2 q = query(2 * pair + i);
                mma_16bit<FORMAT_FP16>(block, a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1], q.x, q.y);
            }
        }
        // The lane's accumulators are of these two blocks.
        const int own = 2 * first + 2 * t;
        const bool exists = STEPS % 8 == 0 || own < STEPS;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 both = exists ? *(const u16*)(scales + half * 8 * BLOCK_SCALE_BYTES + own) : 0u;
            float scale[2];
            widen_fp16(scale[0], scale[1], permute_bytes(both, 0, 0x4140u) << 7);
#pragma unroll
            for (int e = 0; e < 2; e++) sum[half] = multiply_add(block[2 * half + e], scale[e], sum[half]);
        }
    }
}

// Sums over the quad of N values (whole fours) of each lane: lane t gets those of values 4 i + t.
template <int N>
DEVICE void share_quad_sums(const float (&values)[N], float (&own)[N / 4]) {
    const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float half[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float first = values[4 * i + e], second = values[4 * i + 2 + e];
            half[e] = (high ? second : first) + shuffle_xor(high ? first : second, 2);
        }
        own[i] = (odd ? half[1] : half[0]) + shuffle_xor(odd ? half[0] : half[1], 1);
    }
}

// product[n] = 16 rows of the readout times 8 queries, without the scales of tiles, of fp8 rows and of queries.
// codes, scales: of the lane's row g. Every step runs alone and is added with its rows' scales, in the same order for any
// number of queries.
template <int TILES>
DEVICE void dot_readout(float (&product)[TILES][4], const unsigned char* codes, const unsigned char* scales,
                        const Queries<TILES>& query) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) product[n][i] = 0.f;
    if constexpr (NVFP4) {
        u32 words[2][PAIRS];
        BlockScales block_scales[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            load_words(codes + 4 * PAIRS * t + half * 8 * CODE_STRIDE, words[half]);
            block_scales[half].load(scales + half * 8 * BLOCK_SCALE_BYTES);
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            u32 a[4], b[4];
            widen_codes(words[0][pair], a);
            widen_codes(words[1][pair], b);
            float first[2], second[2];
            widen_fp16(first[0], first[1], block_scales[0].pair(pair));
            widen_fp16(second[0], second[1], block_scales[1].pair(pair));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float scale0 = first[i], scale1 = second[i];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    float d[4] = {0.f, 0.f, 0.f, 0.f};
                    const uint2 q = query(n, 2 * pair + i);
                    mma_16bit<FORMAT_FP16>(d, a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1], q.x, q.y);
                    product[n][0] = multiply_add(d[0], scale0, product[n][0]);
                    product[n][2] = multiply_add(d[2], scale1, product[n][2]);
                    product[n][1] = multiply_add(d[1], scale0, product[n][1]);
                    product[n][3] = multiply_add(d[3], scale1, product[n][3]);
                }
            }
        }
    } else if constexpr (WIDE) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const uint2 first = *(const uint2*)(codes + 32 * step + 8 * t);
            const uint2 second = *(const uint2*)(codes + 8 * CODE_STRIDE + 32 * step + 8 * t);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const uint2 q = query(n, step);
                mma_16bit<PLAIN_QUERIES ? FORMAT_BF16 : FORMAT_FP16>(product[n], first.x, second.x, first.y, second.y,
                                                                     q.x, q.y);
            }
        }
    } else {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 a[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 word = *(const u32*)(codes + half * 8 * CODE_STRIDE + 16 * step + 4 * t);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 pair = permute_bytes(word, 0, i ? 0x3424u : 0x1404u);
                    a[half + 2 * i] = (pair & 0x80008000u) | (pair & 0x7f007f00u) >> 1;
                }
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const uint2 q = query(n, step);
                mma_16bit<FORMAT_FP16>(product[n], a[0], a[1], a[2], a[3], q.x, q.y);
            }
        }
    }
}
