// What replaces a state's rows in the readout kernels: a history that is folded into them, or a prefill row's last state.
#pragma once
#include "readout_store.cuh"

// What a fold asks for ahead: the first eight rows of a part when it is known to fold, then eight while the eight before
// them are loaded. All at once would be more than the second-level cache holds: H200, batch 256, every row flushing,
// decode of nano4b 454 us, so 391. Sixteen at first: windows of five of qwen4b 216 us, eight 212; qwen122b 416 and 410.
constexpr int FOLD_AHEAD = CTA_ROWS < 8 ? CTA_ROWS : 8;
constexpr int EIGHT_ROWS = 8 * COLUMNS * (int)sizeof(state_t);  // bytes

// Parts of 8 bits into which a coefficient of the fold is split. Two leave 2^-17 of a term, which is little beside the
// half step (2^-12 and more) of the formats that round; fp32 keeps what is computed.
constexpr int FOLD_PLANES = STATE_FORMAT == FORMAT_FP32 && ACTIVATION_FORMAT == FORMAT_BF16 ? 3 : 2;

// Rows of the history as the fold's second operand: 8 words of (step of 16 tokens, pair of blocks, lane), two for each of
// four matrix steps of 8 columns. Built by the whole block. Column g of a matrix step is the one whose accumulator the
// lane g / 2 owns. STRIDE: elements between tokens.
template <int STRIDE>
DEVICE void build_fold_keys(uint4* fold_keys, const activation_t* tokens) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 selector = g % 2 ? 0x7632u : 0x5410u;
    for (int n = threadIdx.x / 32; n < TOKEN_STEPS * PAIRS; n += WARPS) {
        const activation_t* at = tokens + (n / PAIRS * 16 + 2 * t) * STRIDE + n % PAIRS * 32 + g / 2 * 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint2 token[4];  // 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
            for (int i = 0; i < 4; i++) token[i] = *(const uint2*)(at + (i / 2 * 8 + i % 2) * STRIDE + 16 * half);
            fold_keys[(2 * n + half) * 32 + lane] = make_uint4(
                permute_bytes(token[0].x, token[1].x, selector), permute_bytes(token[2].x, token[3].x, selector),
                permute_bytes(token[0].y, token[1].y, selector), permute_bytes(token[2].y, token[3].y, selector));
        }
    }
}

// The same eight words of step and pair n / PAIRS and n % PAIRS alone.
template <int STRIDE>
DEVICE void fold_keys_of(uint4 (&keys)[2], const activation_t* tokens, int n) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 selector = g % 2 ? 0x7632u : 0x5410u;
    const activation_t* at = tokens + (n / PAIRS * 16 + 2 * t) * STRIDE + n % PAIRS * 32 + g / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint2 token[4];
#pragma unroll
        for (int i = 0; i < 4; i++) token[i] = *(const uint2*)(at + (i / 2 * 8 + i % 2) * STRIDE + 16 * half);
        keys[half] = make_uint4(permute_bytes(token[0].x, token[1].x, selector), permute_bytes(token[2].x, token[3].x, selector),
                                permute_bytes(token[0].y, token[1].y, selector), permute_bytes(token[2].y, token[3].y, selector));
    }
}

// Coefficients of eight rows in 16 tokens as a first operand whose rows g + 8 hold what the rows g leave over.
struct FoldCoefficients {
    u32 words[FOLD_PLANES][2];

    // v: of row g in tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9; it is used up.
    DEVICE_MEMBER void split(float (&v)[4]) {
#pragma unroll
        for (int plane = 0; plane < FOLD_PLANES; plane++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 word = pack_activation(v[2 * i], v[2 * i + 1]);
                words[plane][i] = word;
                v[2 * i] -= activation_low(word), v[2 * i + 1] -= activation_high(word);
            }
    }
    DEVICE_MEMBER void multiply_into(float (&sum)[4], u32 b0, u32 b1) const {
        mma_16bit<ACTIVATION_FORMAT>(sum, words[0][0], words[1][0], words[0][1], words[1][1], b0, b1);
        if constexpr (FOLD_PLANES == 3)
            mma_16bit<ACTIVATION_FORMAT>(sum, words[FOLD_PLANES - 1][0], 0u, words[FOLD_PLANES - 1][1], 0u, b0, b1);
    }
};

// Coefficients of a part's eight rows `group`, by own_values(group, step, v) as fold_rows has it; returns what undoes the
// scale of the lane's.
template <class Values>
DEVICE float fold_coefficients(FoldCoefficients (&coefficients)[TOKEN_STEPS], const Values& own_values, int group) {
    float undo = 1.f, v[TOKEN_STEPS][4], factor = 1.f;
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) own_values(group, step, v[step]);
    if constexpr (ACTIVATION_FORMAT == FORMAT_FP16) {
        // Their range is small: a row's largest becomes 2^14.
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * TOKEN_STEPS; i++) {
            const u32 bits = float_to_bits(v[i / 4][i % 4]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        int field = 268 - (int)(quad_max(largest) >> 23);
        field = field > 240 ? 240 : field < 14 ? 14 : field;
        factor = power_of_two(field), undo = power_of_two(254 - field);
    }
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[step][i] *= factor;
        coefficients[step].split(v[step]);
    }
    return undo;
}

// Folds the history into the part's rows and stores them: s = decay s + sum of coefficient * key.
// own_values(group, step, v) gives the coefficients of row 8 group + g in tokens 16 step + 2 t, + 1, + 8, + 9.
// first_row: of the part in its head. rows_now(): the part's rows, asked for again and again, so that their addresses need
// not be kept.
template <class Values, class Rows>
DEVICE void fold_rows(const Values& own_values, const uint4* fold_keys, const Rows& rows_now, bool has_state, float decay,
                      int first_row, const RoundingKey& key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    RawState raw[PAIRS] = {};  // zeros where there is no state yet
    float scale = 1.f;
    const auto load = [&](int group) {
        const int row = 8 * group + g;
        if (!has_state || group >= ROW_GROUPS) return;
        const StateRows rows = rows_now();
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) load_raw(raw[pair], rows.checkpoint + row * COLUMNS, 32 * pair + 4 * t);
        if constexpr (STATE_FORMAT == FORMAT_FP8) scale = e4m3_scale(rows.checkpoint_scales[row]);
        if (group + 1 >= ROW_GROUPS) return;
        const char* next = (const char*)(rows.checkpoint + 8 * (group + 1) * COLUMNS);
#pragma unroll
        for (int n = 0; n < EIGHT_ROWS; n += 1024) prefetch_sector(next + (n + 32 * lane), n + 32 * lane < EIGHT_ROWS);
    };
    load(0);
#pragma unroll 1
    for (int group = 0; group < ROW_GROUPS; group++) {
        FoldCoefficients coefficients[TOKEN_STEPS];
        const float undo = fold_coefficients(coefficients, own_values, group);
        RowValues s;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            float update[4][4] = {};
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; step++) {
                const uint4* keys = fold_keys + (2 * (step * PAIRS + pair)) * 32 + lane;
                const uint4 first = keys[0], second = keys[32];
                coefficients[step].multiply_into(update[0], first.x, first.y);
                coefficients[step].multiply_into(update[1], first.z, first.w);
                coefficients[step].multiply_into(update[2], second.x, second.y);
                coefficients[step].multiply_into(update[3], second.z, second.w);
            }
            widen(raw[pair], scale, s[pair]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float high = update[i / 2][i % 2], low = update[i / 2][2 + i % 2];
                const float sum = ACTIVATION_FORMAT == FORMAT_FP16 ? (high + low) * undo : high + low;
                s[pair][i] = multiply_add(decay, s[pair][i], sum);
            }
        }
        store_row(s, rows_now(), 8 * group + g, first_row + 8 * group + g, key, [&] { load(group + 1); });
    }
}

// Stores a tile that the block has staged in shared memory in fp32, `first_row` rows into its head.
DEVICE void store_staged_tile(const float* stage, const StateRows& to, int first_row, const RoundingKey& key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int group = threadIdx.x / 32; group < TILE_ROWS / 8; group += WARPS) {
        const int row = 8 * group + g;
        RowValues s;
#pragma unroll
        for (int i = 0; i < 8 * PAIRS; i++) s[i / 8][i % 8] = stage[row * COLUMNS + i / 4 * 16 + 4 * t + i % 4];
        store_row(s, to, row, first_row + row, key, [] {});
    }
}
