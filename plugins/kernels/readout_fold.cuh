// A fold of the readout kernels whose matrix steps have the state's columns as rows, so that both parts of a
// coefficient meet in one accumulator. Of eight rows a lane 4 g + t, g = 4 u + 2 q1 + q0, owns rows 2 t and 2 t + 1: of
// every other 64 columns, from 64 u on, columns 4 q .. 4 q + 3 of each block (q = 2 q1 + q0), which is what a word of
// codes and one draw of random bits take. A half of the warp reads and writes whole sectors of 32 bytes: H200,
// super120b, every row flushing: 505 us where q0 and u change places, 400. For whole 128 columns and checkpoints that
// round.
#pragma once
#include "readout_flush.cuh"

constexpr bool FOLDS_COLUMNS = NVFP4 && COLUMNS % 128 == 0 && COLUMNS <= 256 && STATE_FORMAT != FORMAT_FP32;
constexpr int OWN_PAIRS = PAIRS / 2;  // of blocks, of a lane's columns
typedef float TwoRows[2][OWN_PAIRS][8];

// The lane's pair number k.
DEVICE int own_pair(int k) { return 4 * (k / 2) + 2 * (int)(threadIdx.x / 16 % 2) + k % 2; }
DEVICE int own_quarter() { return (int)(threadIdx.x / 4 % 4); }

// Rows of the history as the fold's first operand: two words of 16 bytes for (step of 16 tokens, block of a lane,
// lane). STRIDE: elements between tokens. Those of step and block n / PAIRS and n % PAIRS:
template <int STRIDE>
DEVICE void column_keys_of(uint4 (&keys)[2], const activation_t* tokens, int n) {
    const int column = 32 * own_pair(n % PAIRS / 2) + 16 * (n % 2) + 4 * own_quarter();
    const activation_t* at = tokens + (n / PAIRS * 16 + threadIdx.x % 4u * 2) * STRIDE + column;
    uint2 token[4];  // 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
    for (int i = 0; i < 4; i++) token[i] = *(const uint2*)(at + (i / 2 * 8 + i % 2) * STRIDE);
    keys[0] = make_uint4(permute_bytes(token[0].x, token[1].x, 0x5410u), permute_bytes(token[0].x, token[1].x, 0x7632u),
                         permute_bytes(token[2].x, token[3].x, 0x5410u), permute_bytes(token[2].x, token[3].x, 0x7632u));
    keys[1] = make_uint4(permute_bytes(token[0].y, token[1].y, 0x5410u), permute_bytes(token[0].y, token[1].y, 0x7632u),
                         permute_bytes(token[2].y, token[3].y, 0x5410u), permute_bytes(token[2].y, token[3].y, 0x7632u));
}
// All of them, by the whole block.
template <int STRIDE>
DEVICE void build_column_keys(uint4* fold_keys, const activation_t* tokens) {
    for (int n = threadIdx.x / 32; n < TOKEN_STEPS * PAIRS; n += WARPS) {
        uint4 keys[2];
        column_keys_of<STRIDE>(keys, tokens, n);
        fold_keys[2 * n * 32 + threadIdx.x % 32] = keys[0], fold_keys[(2 * n + 1) * 32 + threadIdx.x % 32] = keys[1];
    }
}

// s = decay raw + coefficients times keys.
DEVICE void fold_two_rows(TwoRows& s, const RawState (&raw)[2][OWN_PAIRS], const float (&scale)[2], float decay,
                          const FoldCoefficients (&coefficients)[TOKEN_STEPS], float undo, const uint4* fold_keys) {
    const int lane = threadIdx.x % 32;
    float undo_row[2], factor[2];  // factor: the decay and the row's scale
#pragma unroll
    for (int r = 0; r < 2; r++) {
        undo_row[r] = ACTIVATION_FORMAT == FORMAT_FP16 ? shuffle_from(undo, lane % 4 * 8 + 4 * r) : 1.f;
        factor[r] = STATE_FORMAT == FORMAT_FP8 ? decay * scale[r] : decay;
#pragma unroll
        for (int k = 0; k < OWN_PAIRS; k++) widen(raw[r][k], 1.f, s[r][k]);
    }
#pragma unroll
    for (int n = 0; n < 2 * PAIRS; n++) {
        float sum[4] = {};  // columns 2 (n % 2) and + 1 of block n / 2
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            const uint4 a = fold_keys[(2 * PAIRS * step + n) * 32 + lane];
#pragma unroll
            for (int plane = 0; plane < FOLD_PLANES; plane++)
                mma_16bit<ACTIVATION_FORMAT>(sum, a.x, a.y, a.z, a.w, coefficients[step].words[plane][0],
                                             coefficients[step].words[plane][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& value = s[i % 2][n / 4][n % 4 * 2 + i / 2];
            value = multiply_add(factor[i % 2], value, ACTIVATION_FORMAT == FORMAT_FP16 ? sum[i] * undo_row[i % 2] : sum[i]);
        }
    }
}

// Of the lane's partial maxima, [row][block], those of the blocks that are its share: of row 2 t + q1.
DEVICE void share_two_maxima(const TwoRows& s, float (&own)[OWN_PAIRS]) {
    const bool upper = threadIdx.x & 8, odd = threadIdx.x & 4;
    float half[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        float of_row[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float* v = s[r][j / 2] + j % 2 * 4;
            of_row[r] = largest_of(v[0], v[1], v[2], v[3]);
        }
        half[j] = larger_magnitude(upper ? of_row[1] : of_row[0], shuffle_xor(upper ? of_row[0] : of_row[1], 8));
    }
#pragma unroll
    for (int i = 0; i < OWN_PAIRS; i++) {
        const float first = half[i], second = half[OWN_PAIRS + i];
        own[i] = larger_magnitude(odd ? second : first, shuffle_xor(odd ? first : second, 4));
    }
}

// Stores the readout of the lane's columns; returns the largest magnitude, as bits, of row 2 t + q1. to: the eight
// rows.
DEVICE u32 store_two_codes(const TwoRows& s, const StateRows& to) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = 2 * t + g / 2 % 2;
    float own[OWN_PAIRS], factors[OWN_PAIRS];
    share_two_maxima(s, own);
    float all = own[0];
#pragma unroll
    for (int i = 1; i < OWN_PAIRS; i++) all = larger_magnitude(all, own[i]);
    u32 largest = float_to_bits(all);
#pragma unroll
    for (int mask = 4; mask <= 16; mask *= 4) {
        const u32 other = float_to_bits(shuffle_xor(bits_to_float(largest), mask));
        largest = largest > other ? largest : other;
    }
    const Nvfp4Row scale(largest);
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < OWN_PAIRS; i++) codes |= scale.block(own[i], factors[i]) << 8 * i;
    sync_warp();  // the scales that other lanes have read may be those that are replaced now
    unsigned char* scales = to.block_scales + (row * BLOCK_SCALE_BYTES + 2 * own_pair(g % 2 * (OWN_PAIRS / 2)));
    if constexpr (OWN_PAIRS == 2) *(u16*)scales = (u16)codes;
    else *(u32*)scales = codes;
    if ((g & 5) == 0) to.row_scales[row] = scale.stored();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 words[OWN_PAIRS];
#pragma unroll
        for (int k = 0; k < OWN_PAIRS; k++) {
            float factor[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = 2 * k + i;
                factor[i] = shuffle_from(factors[j % OWN_PAIRS], (lane & 16) + 8 * r + 4 * (j / OWN_PAIRS) + t);
            }
            const u32 word = nvfp4_word(s[r][k], factor[0], factor[1]);
            words[k] = factor[0] == 0.f ? 0u : word;  // of a row that is not finite
        }
        u32* at = (u32*)(to.codes + (2 * t + r) * CODE_BYTES) + PAIRS * own_quarter();
#pragma unroll
        for (int k = 0; k < OWN_PAIRS; k += 2) *(uint2*)(at + own_pair(k)) = make_uint2(words[k], words[k + 1]);
    }
    return largest;
}

// Stores the checkpoint of the lane's columns. to: the first of them in row 2 t; head_row: that row within the head.
DEVICE void store_two_rows(const TwoRows& s, state_t* to, int head_row, const RoundingKey& key, const int (&field)[2],
                           bool plain) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int k = 0; k < OWN_PAIRS; k += 2) {
            u32 words[4] = {};
            if constexpr (STOCHASTIC) random_words(words, key, head_row + r, 32 * own_pair(k) + 4 * own_quarter());
#pragma unroll
            for (int i = 0; i < 2; i++)
                store_checkpoint(to + r * COLUMNS, s[r][k + i], 32 * (2 * k + i), words, 8 * i, plain, field[r]);
        }
}

// fold_rows of readout_flush.cuh. part: the part's rows; fold_keys: of build_column_keys. IN_MEMORY: all of the rows are,
// their readout is not in shared memory.
template <bool IN_MEMORY, class Values>
DEVICE void fold_columns(const Values& own_values, const uint4* fold_keys, const StateRows& part, bool has_state,
                         float decay, int first_row, const RoundingKey& key) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    RawState raw[2][OWN_PAIRS] = {};  // zeros where there is no state yet
    float scale[2] = {1.f, 1.f};
    StateRows rows = part;
    rows.checkpoint += 2 * t * COLUMNS + 32 * own_pair(0) + 4 * own_quarter();
    const auto load = [&](int group, const state_t* from, const unsigned char* scales) {
        if (!has_state || group >= ROW_GROUPS) return;
#pragma unroll
        for (int i = 0; i < 2 * OWN_PAIRS; i++) {
            const int r = i / OWN_PAIRS, k = i % OWN_PAIRS;
            load_raw(raw[r][k], from + r * COLUMNS, 32 * (4 * (k / 2) + k % 2));
        }
        if constexpr (STATE_FORMAT == FORMAT_FP8)
#pragma unroll
            for (int r = 0; r < 2; r++) scale[r] = e4m3_scale(scales[2 * t + r]);
        if (group + 1 >= ROW_GROUPS) return;
        const char* next = (const char*)(part.checkpoint + 8 * (group + 1) * COLUMNS) + 32 * lane;
#pragma unroll
        for (int n = 0; n < EIGHT_ROWS; n += 1024) prefetch_sector(next + n);
    };
    load(0, rows.checkpoint, rows.checkpoint_scales);
#pragma unroll 1
    for (int group = 0; group < ROW_GROUPS; group++) {
        FoldCoefficients coefficients[TOKEN_STEPS];
        const float undo = fold_coefficients(coefficients, own_values, group);
        TwoRows s;
        fold_two_rows(s, raw, scale, decay, coefficients, undo, fold_keys);
        const u32 largest = store_two_codes(s, rows);
        const bool plain = are_plain(largest);
        int field[2] = {};
        if constexpr (STATE_FORMAT == FORMAT_FP8) {
            const int own = e4m3_row_field(largest);
#pragma unroll
            for (int r = 0; r < 2; r++)
                field[r] = (int)float_to_bits(shuffle_from(bits_to_float((u32)own), (lane & ~8) + 8 * r));
            if ((lane & 20) == 0) rows.checkpoint_scales[2 * t + lane / 8] = (unsigned char)own;
        }
        rows.checkpoint = (state_t*)computed(rows.checkpoint);
        load(group + 1, rows.checkpoint + 8 * COLUMNS, rows.checkpoint_scales + 8);
        if (plain) store_two_rows(s, rows.checkpoint, first_row + 8 * group + 2 * t, key, field, true);
        else store_two_rows(s, rows.checkpoint, first_row + 8 * group + 2 * t, key, field, false);
        rows = rows.from(8);
        if constexpr (IN_MEMORY) {  // or else the compiler adds up each address anew
            rows.codes = (unsigned char*)computed(rows.codes);
            rows.block_scales = (unsigned char*)computed(rows.block_scales);
            rows.row_scales = (unsigned char*)computed(rows.row_scales);
        }
    }
}
