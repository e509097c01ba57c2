// Building blocks of the operators whose outputs read a low-precision copy of the state, the readout (plugins/contract.py,
// "State formats"). Each of a block's CTA_WARPS warps owns CTA_ROWS rows of one head (whole row tiles) and works alone;
// the warps of a block share a group, so that its rows B or k are staged once. A lane 4 g + t owns, of rows g and g + 8 of
// each 16, the columns 16 i + 4 t .. 16 i + 4 t + 3: slots 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a 16-column matrix step.
//
// Stamped in beside what replay.cuh needs: CTA_WARPS, READOUT_FORMAT (READOUT_SAME: the checkpoint itself, which is fp8
// or rounded stochastically), STOCHASTIC.
#pragma once
#include "replay.cuh"
#include "serial.cuh"

#ifndef WARP_PARTS
#define WARP_PARTS 1
#endif

constexpr bool NVFP4 = READOUT_FORMAT == READOUT_NVFP4;
// A 16-bit checkpoint that is read itself: it comes here to be rounded stochastically.
constexpr bool WIDE = READOUT_FORMAT == READOUT_SAME && STATE_FORMAT != FORMAT_FP8;
constexpr int M_TILES = round_up(CTA_ROWS, 16) / 16;
constexpr int TILE_ROWS = ROWS / ROW_TILES;
constexpr int CTA_STATE_ROWS = WARPS * WARP_PARTS * CTA_ROWS;  // rows of a block, neighbours in memory
constexpr int STEPS = COLUMNS / 16;
constexpr int PAIRS = COLUMNS / 32;  // of 16-column blocks
constexpr int TOKEN_ROWS = round_up(MAX_HISTORY, 16);
constexpr int TOKEN_STEPS = TOKEN_ROWS / 16;
// Strides that spread the 8-byte reads of a quad's columns, and the rows of matrix loads, over all banks.
constexpr int KEY_STRIDE = COLUMNS + 16;
constexpr int OWN_STRIDE = M_TILES * 16 + 8;
// Rows of bytes and of 16-bit numbers are padded, nvfp4 rows need no padding.
constexpr int CODE_BYTES = NVFP4 ? COLUMNS / 2 : WIDE ? 2 * COLUMNS : COLUMNS;
constexpr int CODE_STRIDE = NVFP4 ? CODE_BYTES : CODE_BYTES + 16;
constexpr int SCALE_BYTES = NVFP4 ? COLUMNS / 16 : 1;
// The last warp's last matrix step may read 8 rows further than there are.
constexpr int CODES_SIZE = round_up((CTA_STATE_ROWS + 8) * CODE_STRIDE, 128);
constexpr int SCALES_SIZE = round_up((CTA_STATE_ROWS + 8) * SCALE_BYTES, 128);
constexpr int FOLD_KEYS_SIZE = TOKEN_STEPS * (COLUMNS / 8) * 32 * 16;
constexpr int STAGE_SIZE = TILE_ROWS * COLUMNS * 4;
constexpr int TILE_SIZE = larger(CODES_SIZE + SCALES_SIZE, larger(FOLD_KEYS_SIZE, STAGE_SIZE));
// Power of two by which codes and scales, as the products below take them, are too small.
constexpr int READOUT_EXPONENT = NVFP4 ? 14 + 8 : WIDE ? 0 : 8;
// bf16 rows are multiplied by queries as they are, all others by queries in fp16.
constexpr bool PLAIN_QUERIES = WIDE && STATE_FORMAT == FORMAT_BF16;

static_assert(COLUMNS % 32 == 0 && TILE_ROWS % 8 == 0, "words of 8 codes; eight rows belong to one tile");
static_assert(HEADS_PER_GROUP * CTAS_PER_HEAD % (WARPS * WARP_PARTS) == 0, "the warps of a block share a group");
static_assert(!WIDE || STATE_FORMAT == FORMAT_FP16 || ACTIVATION_FORMAT == FORMAT_BF16, "fp32 has the window kernels");

// The exact power of two of an fp32 exponent field 1 to 254; NaN for 255.
DEVICE float power_of_two(int field) { return field == 255 ? bits_to_float(0x7fffffffu) : bits_to_float((u32)field << 23); }

// Rows of a state in memory, from the first that the caller owns: [rows, COLUMNS] and what belongs to them.
struct StateRows {
    state_t* checkpoint;
    unsigned char* checkpoint_scales;
    unsigned char* codes;
    unsigned char* scales;  // nvfp4: [rows, COLUMNS / 16], fp8: [rows]
    float* tile_scales;

    DEVICE_MEMBER StateRows from(int row) const {
        return {checkpoint + row * COLUMNS, checkpoint_scales + row, codes + row * CODE_BYTES,
                scales + row * SCALE_BYTES, tile_scales + row / TILE_ROWS};
    }
};

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
        else if constexpr (STATE_FORMAT == FORMAT_FP8)
            s[i] = e4m3_to_float(raw.words[i / 4] >> i % 4 * 8 & 255u) * scale;
        else s[i] = state_to_float((state_t)(raw.words[i / 2] >> i % 2 * 16 & 0xffffu));
    }
}

// Exponent field of the power of two that scales an e4m3 row whose largest magnitude has the bits `largest`; 255: NaN.
DEVICE int e4m3_row_field(u32 largest) {
    const int exponent = (int)(largest >> 23);
    return exponent == 255 ? 255 : exponent < 8 ? 1 : exponent - 7;
}

// `row` of the head, for the random bits; field: of the row's scale, of fp8.
DEVICE void store_checkpoint(state_t* to, const float (&s)[8], int row, int column, int field, const RoundingKey& key) {
    u32 random[4] = {};
    if constexpr (STOCHASTIC) random_words(random, key, row, column);
    const float inverse = STATE_FORMAT == FORMAT_FP8 && field != 255 ? power_of_two(254 - field) : 1.f;
    state_t rounded[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float value = STATE_FORMAT == FORMAT_FP8 ? s[i] * inverse : s[i];
        if constexpr (STOCHASTIC) value = round_stochastic(value, random_bits(random, i));
        rounded[i] = float_to_state(value);
        if (STATE_FORMAT == FORMAT_FP8 && field == 255) rounded[i] = (state_t)0x7f;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state_t* at = to + column + 16 * half;
        const state_t* r = rounded + 4 * half;
        if constexpr (STATE_FORMAT == FORMAT_FP32)
            *(float4*)at = make_float4(r[0], r[1], r[2], r[3]);
        else if constexpr (STATE_FORMAT == FORMAT_FP8)
            *(u32*)at = (u32)r[0] | (u32)r[1] << 8 | (u32)r[2] << 16 | (u32)r[3] << 24;
        else
            *(uint2*)at = make_uint2((u32)r[0] | (u32)r[1] << 16, (u32)r[2] | (u32)r[3] << 16);
    }
}

// ------------------------------------------------------------------------------------------------------ encoding

// Bits of code i of a word (plugins/contract.py): its sign, and the lowest of its magnitude.
constexpr int SIGN_BIT[8] = {15, 31, 18, 2, 0, 16, 1, 17};
constexpr int MAGNITUDE_BIT[8] = {9, 25, 12, 28, 3, 19, 6, 22};

// Nearest e2m1 magnitude, ties to even, clamped at 6, of 2 `half`, which is not negative: code 0 to 7, added to the bits of
// 1.5 2^23. Below 2 a code is a half, from 2 to 4 one, beyond two: three pieces, which an addition rounds in turn. No piece
// starts at an odd code, so ties go to the even one. All of it runs where multiplications do, which have room.
constexpr float E2M1_BIAS = 12582912.f;
constexpr u32 E2M1_BIAS_BITS = 0x4b400000u;
DEVICE u32 biased_e2m1(float half) {
    float sum = multiply_add(saturate(half), 4.f, E2M1_BIAS);
    sum = multiply_add(saturate(half - 1.f), 2.f, sum);
    return float_to_bits(sum + saturate(half - 2.f));
}

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

// The lane's word of a pair of blocks of one row, and in `scales` the e4m3 scales of the two blocks (low byte first).
// tile_field: exponent field of the tile's scale, 255 if it is not finite.
DEVICE u32 encode_nvfp4(const float (&s)[8], int tile_field, u32& scales) {
    // What the codes' biases add up to, in 32 bits, is taken off at the end.
    u32 word = 0, biases = 0;
    scales = 0;
    const bool broken = tile_field == 255;
    const float inverse_tile = broken ? 0.f : power_of_two(254 - tile_field);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 largest = quad_max(
            float_to_bits(largest_of(s[4 * half], s[4 * half + 1], s[4 * half + 2], s[4 * half + 3])));
        const float filled = multiply(multiply(bits_to_float(largest), inverse_tile), 1.f / 6.f);
        const u32 code = broken ? 1u : float_to_e4m3(fmaxf(filled, 0x1p-9f));
        scales |= code << 8 * half;
        // The same as scaling by both factors in turn: the first is a power of two.
        const float factor = 0.5f * inverse_tile * short_reciprocal(e4m3_to_float(code));
#pragma unroll
        for (int i = 4 * half; i < 4 * half + 4; i++) {
            const u32 bits = float_to_bits(s[i]);
            word += biased_e2m1(multiply(bits_to_float(bits & 0x7fffffffu), factor)) * (1u << MAGNITUDE_BIT[i]);
            word += (bits >> 31) * (1u << SIGN_BIT[i]);
            biases += E2M1_BIAS_BITS << MAGNITUDE_BIT[i];
        }
    }
    return broken ? 0u : word - biases;
}

// Four e4m3 codes of a row whose scale has the exponent field `field`.
DEVICE u32 encode_e4m3(const float* s, int field) {
    const float inverse = field == 255 ? 1.f : power_of_two(254 - field);
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= float_to_e4m3(s[i] * inverse) << 8 * i;
    return field == 255 ? 0x7f7f7f7fu : word;
}

// Stores `rows` rows (whole tiles) from `to` on: checkpoint and readout, from the same values. `source` gives them: after
// begin(m), load(raw, m, pair) starts the reads of the lane's columns of rows 16 m + g and + 8, and
// values(raw, m, pair, s0, s1) ends them.
// A warp does every m_step-th m from first_m on; row_max holds the bits of the largest magnitude of every row.
// first_row: of the head. Only one of the warps that share the rows stores the tiles' scales.
template <class Source>
DEVICE void encode_rows(Source& source, const StateRows& to, const u32* row_max, int rows, int first_row,
                        int first_m, int m_step, const RoundingKey& key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int m = first_m; 16 * m < rows; m += m_step) {
        source.begin(m);
        sync_warp();  // the scales that it has read may be those that are replaced now
        int tile_field[2] = {127, 127}, field[2] = {127, 127};
        bool valid[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * m + 8 * half + g, tile = (16 * m + 8 * half) / TILE_ROWS;
            valid[half] = 16 * m + 8 * half < rows;
            if (!valid[half]) continue;
            field[half] = e4m3_row_field(row_max[row]);
            if constexpr (NVFP4) {
                u32 largest = 0;
                for (int r = lane; r < TILE_ROWS; r += 32) {
                    const u32 other = row_max[tile * TILE_ROWS + r];
                    largest = other > largest ? other : largest;
                }
                const int exponent = (int)(reduce_max(largest) >> 23);
                tile_field[half] = exponent == 255 ? 255 : exponent < 37 ? 27 : exponent > 237 ? 227 : exponent - 10;
                if ((16 * m + 8 * half) % TILE_ROWS == 0 && lane == 0)
                    to.tile_scales[tile] = power_of_two(tile_field[half]);
            } else if (t == 0 && READOUT_FORMAT == READOUT_FP8) {
                to.scales[row] = (unsigned char)field[half];
            }
            if (STATE_FORMAT == FORMAT_FP8 && t == 0) to.checkpoint_scales[row] = (unsigned char)field[half];
        }
#pragma unroll 1
        for (int pair = 0; pair < PAIRS; pair++) {
            float s[2][8];
            RawState raw[2];
            source.load(raw, m, pair);
            source.values(raw, m, pair, s[0], s[1]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 16 * m + 8 * half + g, column = 32 * pair + 4 * t;
                if constexpr (NVFP4) {
                    u32 scales;
                    const u32 word = encode_nvfp4(s[half], tile_field[half], scales);
                    if (valid[half]) {
                        *(u32*)(to.codes + row * CODE_BYTES + 4 * (PAIRS * t + pair)) = word;
                        if (t == 0) *(u16*)(to.scales + row * SCALE_BYTES + 2 * pair) = (u16)scales;
                    }
                } else if (READOUT_FORMAT == READOUT_FP8 && valid[half]) {
                    *(u32*)(to.codes + row * CODE_BYTES + column) = encode_e4m3(s[half], field[half]);
                    *(u32*)(to.codes + row * CODE_BYTES + column + 16) = encode_e4m3(s[half] + 4, field[half]);
                }
                if (valid[half])
                    store_checkpoint(to.checkpoint + row * COLUMNS, s[half], first_row + row, column, field[half], key);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------- folding

// Rows of the history as the fold's second operand: element (step, block of 8 columns, lane), built by the whole block.
DEVICE void build_fold_keys(float4* fold_keys, const activation_t* tokens) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int n = threadIdx.x / 32; n < TOKEN_STEPS * (COLUMNS / 8); n += WARPS) {
        // Column g of the matrix step is the one whose accumulator the lane g / 2 owns.
        const int step = n / (COLUMNS / 8), block = n % (COLUMNS / 8);
        const int column = 16 * (block / 2) + 4 * (g / 2) + 2 * (block % 2) + g % 2;
        const activation_t* token = tokens + (16 * step + 2 * t) * KEY_STRIDE + column;
        fold_keys[n * 32 + lane] =
            make_float4(activation_to_float(token[0]), activation_to_float(token[KEY_STRIDE]),
                        activation_to_float(token[8 * KEY_STRIDE]), activation_to_float(token[9 * KEY_STRIDE]));
    }
}

// The warp's state at the end of the history: decay S + sum of values keys^T. `own_values(m, step, a)` gives the
// coefficients of 16 rows and 16 tokens in the layout of two tf32 steps: rows g, g + 8 of token 2 t, then of 2 t + 1; then
// of tokens 2 t + 8 and 2 t + 9.
template <class Values>
struct FoldedState {
    const Values& own_values;
    const float4* fold_keys;
    StateRows from;
    bool has_state;
    float decay;
    float own[TOKEN_STEPS][8];  // coefficients of 16 rows
    float scale[2];             // of the lane's rows, of fp8

    DEVICE_MEMBER void begin(int m) {
        if constexpr (STATE_FORMAT == FORMAT_FP8) {
            const int g = threadIdx.x % 32 / 4;
            scale[0] = has_state ? e4m3_scale(from.checkpoint_scales[16 * m + g]) : 1.f;
            scale[1] = has_state && 16 * m + 8 < CTA_ROWS ? e4m3_scale(from.checkpoint_scales[16 * m + 8 + g]) : 1.f;
        }
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) own_values(m, step, own[step]);
    }
    DEVICE_MEMBER void load(RawState (&raw)[2], int m, int pair) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if (!has_state) return;
        load_raw(raw[0], from.checkpoint + (16 * m + g) * COLUMNS, 32 * pair + 4 * t);
        if (16 * m + 8 < CTA_ROWS) load_raw(raw[1], from.checkpoint + (16 * m + 8 + g) * COLUMNS, 32 * pair + 4 * t);
    }
    DEVICE_MEMBER void values(const RawState (&raw)[2], int m, int pair, float (&s0)[8], float (&s1)[8]) const {
        const int lane = threadIdx.x % 32;
        float update[4][4] = {};
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            // The matrix unit takes the high halves of what it is given. The low halves are computed every time: kept
            // they would cost registers.
            const float(&h)[8] = own[step];
            float l[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                u32 bits = float_to_bits(h[i]);
                hold_until_here(bits);
                l[i] = h[i] - tf32_high(bits_to_float(bits));
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float4 b = fold_keys[(step * (COLUMNS / 8) + 4 * pair + n) * 32 + lane];
                mma_tf32(update[n], h[0], h[1], h[2], h[3], b.x, b.y);
                mma_tf32(update[n], l[0], l[1], l[2], l[3], b.x, b.y);
                mma_tf32(update[n], h[4], h[5], h[6], h[7], b.z, b.w);
                mma_tf32(update[n], l[4], l[5], l[6], l[7], b.z, b.w);
            }
        }
        const bool both = 16 * m + 8 < CTA_ROWS;
        if (has_state) {
            widen(raw[0], scale[0], s0);
            widen(raw[both], scale[1], s1);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int n = i / 2, e = i % 2;
            s0[i] = has_state ? multiply_add(decay, s0[i], update[n][e]) : update[n][e];
            s1[i] = has_state ? multiply_add(decay, s1[i], update[n][2 + e]) : update[n][2 + e];
        }
    }
};

// Folds the history into the warp's rows and stores them. The values are computed twice: for the largest of every row and
// tile, and to be stored.
template <class Values>
DEVICE void fold_rows(FoldedState<Values>& folded, u32* row_max, const StateRows& to, int first_row,
                      const RoundingKey& key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int m = 0; m < M_TILES; m++) {
        float largest[2] = {0.f, 0.f};
        folded.begin(m);
        RawState raw[2];
        folded.load(raw, m, 0);
#pragma unroll 1
        for (int pair = 0; pair < PAIRS; pair++) {
            float s[2][8];
            folded.values(raw, m, pair, s[0], s[1]);
            if (pair + 1 < PAIRS) folded.load(raw, m, pair + 1);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float(&v)[8] = s[half];
                const float low = largest_of(v[0], v[1], v[2], v[3]), high = largest_of(v[4], v[5], v[6], v[7]);
                largest[half] = larger_magnitude(largest[half], larger_magnitude(low, high));
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 all = quad_max(float_to_bits(largest[half]));
            if (t == 0) row_max[16 * m + 8 * half + g] = all;
        }
    }
    sync_warp();
    encode_rows(folded, to, row_max, CTA_ROWS, first_row, 0, 1, key);
}

// Rows of a tile that lie in shared memory in fp32.
struct StagedState {
    const float* stage;

    DEVICE_MEMBER void begin(int) const {}
    DEVICE_MEMBER void load(RawState (&)[2], int, int) const {}
    DEVICE_MEMBER void values(const RawState (&)[2], int m, int pair, float (&s0)[8], float (&s1)[8]) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const float* row = stage + (16 * m + g) * COLUMNS + 32 * pair + 4 * t;
        const bool both = 16 * m + 8 < TILE_ROWS;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            s0[i] = row[i % 4 + i / 4 * 16];
            s1[i] = both ? row[8 * COLUMNS + i % 4 + i / 4 * 16] : 0.f;
        }
    }
};

// Stores a tile that the block has staged, `first_row` rows into its head. row_max: TILE_ROWS numbers for the block.
DEVICE void store_staged_tile(const float* stage, u32* row_max, const StateRows& to, int first_row,
                              const RoundingKey& key) {
    for (int r = threadIdx.x / 32; r < TILE_ROWS; r += WARPS) {
        u32 largest = 0;
        for (int i = threadIdx.x % 32; i < COLUMNS; i += 32) {
            const u32 bits = float_to_bits(stage[r * COLUMNS + i]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        largest = reduce_max(largest);
        if (threadIdx.x % 32 == 0) row_max[r] = largest;
    }
    sync_threads();
    StagedState source = {stage};
    encode_rows(source, to, row_max, TILE_ROWS, first_row, threadIdx.x / 32, WARPS, key);
}

// -------------------------------------------------------------------------------------------------- readout tile

// Copies of the block's readout rows to shared memory. `from`: of the block's first row.
DEVICE void readout_copy_start(unsigned char* tile, const StateRows& from, u64* barrier) {
#if BULK_COPY
    if constexpr (NVFP4) {
        if (threadIdx.x != THREADS - 32) return;
        bulk_copies_start(tile, from.codes, CTA_STATE_ROWS * CODE_BYTES, tile + CODES_SIZE, from.scales,
                          CTA_STATE_ROWS * SCALE_BYTES, barrier);
        return;
    }
#endif
    constexpr int CHUNKS = CODE_BYTES / 16;
    for (int i = threadIdx.x; i < CTA_STATE_ROWS * CHUNKS; i += THREADS)
        copy_async_16(tile + i / CHUNKS * CODE_STRIDE + i % CHUNKS * 16, from.codes + i * 16, true);
    if constexpr (NVFP4)
        for (int i = threadIdx.x; i < CTA_STATE_ROWS * SCALE_BYTES / 16; i += THREADS)
            copy_async_16(tile + CODES_SIZE + i * 16, from.scales + i * 16, true);
}
// Call after a __syncthreads that follows readout_copy_start and copy_async_wait.
DEVICE void readout_copy_wait(u64* barrier) {
#if BULK_COPY
    if constexpr (NVFP4) bulk_copy_wait(barrier);
#endif
}
// A warp's own rows again, after it has written them; `tile` is the block's, `row` the warp's first row in it.
DEVICE void readout_copy_again(unsigned char* tile, int row, const StateRows& from) {
    constexpr int CHUNKS = CODE_BYTES / 16;
    for (int i = threadIdx.x % 32; i < WARP_PARTS * CTA_ROWS * CHUNKS; i += 32)
        copy_async_16(tile + (row + i / CHUNKS) * CODE_STRIDE + i % CHUNKS * 16, from.codes + i * 16, true);
    if constexpr (NVFP4)
        for (int i = threadIdx.x % 32; i < WARP_PARTS * CTA_ROWS * SCALE_BYTES / 16; i += 32)
            copy_async_16(tile + CODES_SIZE + row * SCALE_BYTES + i * 16, from.scales + i * 16, true);
}

// --------------------------------------------------------------------------------------------- products with it

// Looking ahead, as in replay.cuh: the last warp asks for the later row's ring rows of the whole block, sector by sector,
// each lane for some. `width` elements from `ring` on, `stride` apart for neighbouring tokens.
template <int WIDTH>
DEVICE void prefetch_rows(const LaterRow& later, int checkpoint_position, const u16* ring, int stride) {
    constexpr int SECTORS = (WIDTH + 15) / 16;  // of 32 bytes
    const int history = later.seq_len - checkpoint_position;
    if (checkpoint_position < 0 || history > MAX_HISTORY) return;
    const int first_entry = checkpoint_position % RING_LEN;
#pragma unroll
    for (int n = 0; n < (MAX_HISTORY * SECTORS + 31) / 32; n++) {
        const u32 i = n * 32 + threadIdx.x % 32, token = i / SECTORS;
        if ((int)token < history) prefetch_sector(ring + (wrapped(first_entry + token) * stride + i % SECTORS * 16));
    }
}

// Copies `width` elements of a history's tokens to rows of shared memory, KEY_STRIDE or OWN_STRIDE elements apart, and
// zeros the rows from `zeros` on; rows between the history and `zeros` are left alone. `count` threads share the work.
// ring: of the slot, at its first element to be copied.
template <int WIDTH, int TO_STRIDE, int FROM_STRIDE, int COUNT>
DEVICE void stage_history(u16* to, const u16* ring, int first_entry, int history, int zeros, u32 thread) {
    constexpr u32 CHUNKS = WIDTH / 8;
    if constexpr (COUNT % CHUNKS == 0) {
        constexpr u32 STEP = COUNT / CHUNKS;
        const u32 k0 = thread / CHUNKS, offset = thread % CHUNKS * 8;
        u16* at = to + (k0 * TO_STRIDE + offset);
        const u16* from = computed(ring + offset);
#pragma unroll
        for (u32 n = 0; n < (TOKEN_ROWS + STEP - 1) / STEP; n++) {
            const int k = (int)(k0 + n * STEP);
            if (TOKEN_ROWS % STEP && k >= TOKEN_ROWS) break;
            const bool valid = k < history;
            const int entry = wrapped(first_entry + (valid ? k : 0));
            if (valid || k >= zeros) copy_async_16(at + n * STEP * TO_STRIDE, from + entry * FROM_STRIDE, valid);
        }
    } else {
#pragma unroll
        for (u32 n = 0; n < (TOKEN_ROWS * CHUNKS + COUNT - 1) / COUNT; n++) {
            const u32 i = n * COUNT + thread, k = i / CHUNKS, offset = i % CHUNKS * 8;
            if (TOKEN_ROWS * CHUNKS % COUNT && k >= TOKEN_ROWS) break;
            const bool valid = (int)k < history;
            const int entry = wrapped(first_entry + (valid ? (int)k : 0));
            if (valid || (int)k >= zeros)
                copy_async_16(to + (k * TO_STRIDE + offset), ring + (entry * FROM_STRIDE + (int)offset), valid);
        }
    }
}

// body(row, offset) for chunks of 8 of `length` rows of WIDTH elements, at most MAX_WINDOW rows.
template <int WIDTH, int COUNT, class Body>
DEVICE void for_window_chunks(int length, u32 thread, const Body& body) {
    constexpr u32 CHUNKS = WIDTH / 8;
#pragma unroll
    for (u32 n = 0; n < (MAX_WINDOW * CHUNKS + COUNT - 1) / COUNT; n++) {
        const u32 i = n * COUNT + thread, w = i / CHUNKS;
        if ((int)w < length) body((int)w, (int)(i % CHUNKS * 8));
    }
}

// Rows of queries (C, or q and k) in fp16, scaled so that the largest of a row lies in [2^14, 2^15), and in `unit` what
// undoes that and READOUT_EXPONENT. A warp converts a row of COLUMNS activations (PLAIN_QUERIES: copies it)
// and, if KEEP, leaves them in `kept` too.
template <bool KEEP>
DEVICE void halve_row(u16* half, float* unit, const activation_t* from, activation_t* kept = nullptr) {
    const int lane = threadIdx.x % 32;
    constexpr int WORDS = COLUMNS / 2, COUNT = (WORDS + 31) / 32;
    u32 words[COUNT], largest = 0;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        words[n] = n * 32 + lane < WORDS ? ((const u32*)from)[n * 32 + lane] : 0u;
        const u32 low = float_to_bits(activation_low(words[n])) & 0x7fffffffu;
        const u32 high = float_to_bits(activation_high(words[n])) & 0x7fffffffu;
        const u32 both = low > high ? low : high;
        largest = both > largest ? both : largest;
        if (KEEP && n * 32 + lane < WORDS) ((u32*)kept)[n * 32 + lane] = words[n];
    }
    if constexpr (PLAIN_QUERIES) {
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            if (n * 32 + lane < WORDS) ((u32*)half)[n * 32 + lane] = words[n];
        if (lane == 0) *unit = 1.f;
        return;
    }
    constexpr int LOWEST = READOUT_EXPONENT > 1 ? READOUT_EXPONENT : 1;
    int field = 268 - (int)(reduce_max(largest) >> 23);
    field = field > 254 - 14 ? 254 - 14 : field < LOWEST ? LOWEST : field;
    const float factor = power_of_two(field);
#pragma unroll
    for (int n = 0; n < COUNT; n++)
        if (n * 32 + lane < WORDS)
            ((u32*)half)[n * 32 + lane] = (u32)float_to_fp16(activation_low(words[n]) * factor) |
                                          (u32)float_to_fp16(activation_high(words[n]) * factor) << 16;
    if (lane == 0) *unit = power_of_two(254 + READOUT_EXPONENT - field);
}

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

// product[n] = 16 rows of the readout times 8 queries, without the scales of tiles, of fp8 rows and of queries.
// codes, scales: of the lane's row g. Every step runs alone and is added with its rows' scales, in the same order for any
// number of queries; a window of one token has it in every column and keeps the even ones.
template <int TILES, bool ONE>
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
            block_scales[half].load(scales + half * 8 * SCALE_BYTES);
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
                    if constexpr (!ONE) {
                        product[n][1] = multiply_add(d[1], scale0, product[n][1]);
                        product[n][3] = multiply_add(d[3], scale1, product[n][3]);
                    }
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
