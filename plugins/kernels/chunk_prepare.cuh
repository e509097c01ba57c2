// What the preparing warps of the prefill kernels share: copies of tokens, decays of a chunk, products of pairs of
// tokens.
#pragma once
#include "chunk.cuh"

// Copies the tokens of a chunk to shared memory, zeros behind the last; each preparing warp its share of them. `from`
// is the first token, tokens are `stride` elements apart.
DEVICE void tokens_copy_start(activation_t* shared, const activation_t* from, long long stride, int valid) {
    constexpr int COPIES = COLUMNS / 8, WARP_TOKENS = 16;
    const int lane = threadIdx.x % 32, first = ((int)threadIdx.x / 32 - WARPS) * WARP_TOKENS;
    if constexpr (32 % COPIES == 0) {
        constexpr int ROWS_AT_ONCE = 32 / COPIES;
        const int column = lane % COPIES * 8;
        int row = first + lane / COPIES;
        const activation_t* at = from + row * stride + column;
#pragma unroll
        for (int i = 0; i < WARP_TOKENS; i += ROWS_AT_ONCE) {
            copy_async_16(token_at(shared, row, column), at, row < valid);
            row += ROWS_AT_ONCE, at += ROWS_AT_ONCE * stride;
        }
    } else {
        for (int i = lane; i < WARP_TOKENS * COPIES; i += 32) {
            const int row = first + i / COPIES, column = i % COPIES * 8;
            copy_async_16(token_at(shared, row, column), from + row * stride + column, row < valid);
        }
    }
}
// The same from the ring's entries of the history; `ring` points at entry 0.
DEVICE void history_copy_start(activation_t* shared, const activation_t* ring, int first_entry, int history) {
    constexpr int COPIES = COLUMNS / 8, WARP_TOKENS = 16;
    const int lane = threadIdx.x % 32, first = ((int)threadIdx.x / 32 - WARPS) * WARP_TOKENS;
    for (int i = lane; i < WARP_TOKENS * COPIES; i += 32) {
        const int row = first + i / COPIES, column = i % COPIES * 8;
        const bool exists = row < history;
        const long long entry = wrapped(first_entry + (exists ? row : 0));
        copy_async_16(token_at(shared, row, column), ring + entry * (GROUPS * COLUMNS) + column, exists);
    }
}

// A running sum of exponents in two parts, so that differences of two of them are as exact as short sums.
struct alignas(8) Sum {
    float high, low;
};
DEVICE Sum add(const Sum& a, const Sum& b) {
    const float high = a.high + b.high, part = high - a.high;
    const float low = (a.high - (high - part)) + (b.high - part) + a.low + b.low;
    return {high, low};
}
DEVICE float power_of_two(float exponent) { return exp2f(fminf(exponent, 0.f)); }
DEVICE float difference(const Sum& a, const Sum& b) { return (a.high - b.high) + (a.low - b.low); }

// Decays of a chunk; one warp calls it, lane l with the log decays of tokens l * LANE_TOKENS and the next. Tokens that
// do not exist have 0. `scale` are the factors of the tokens in `leaving` besides their decay.
DEVICE void scan_chunk(Gates& gates, Sum* prefix, const float (&log_decay)[LANE_TOKENS],
                       const float (&scale)[LANE_TOKENS]) {
    const int lane = threadIdx.x % 32;
    Sum sums[LANE_TOKENS];
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        // Written so that NaN stays NaN.
        const float exponent = log_decay[i] * LOG2_E;
        sums[i] = {exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent, 0.f};
        if (i) sums[i] = add(sums[i - 1], sums[i]);
    }
    Sum scanned = sums[LANE_TOKENS - 1];
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const Sum before = {shuffle_up(scanned.high, delta), shuffle_up(scanned.low, delta)};
        if (lane >= delta) scanned = add(before, scanned);
    }
    const Sum total = {shuffle_from(scanned.high, 31), shuffle_from(scanned.low, 31)};
    Sum before = {shuffle_up(scanned.high, 1), shuffle_up(scanned.low, 1)};
    if (lane == 0) before = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
        const int token = lane * LANE_TOKENS + i;
        const Sum sum = add(before, sums[i]);
        prefix[token] = sum;
        gates.entering[token] = power_of_two(sum.high + sum.low);
        gates.leaving[token] = scale[i] * power_of_two(difference(total, sum));
    }
    if (lane == 0) gates.total = power_of_two(total.high + total.low);
}

// 16 queries and 16 tokens of a chunk. Preparing warp w computes all pairs of query block w.
struct PairBlock {
    int queries, tokens;
};

// decay[half][i] of the lane's accumulators of a block: query g + 8 half, token 8 (i / 2) + 2 t + i % 2.
DEVICE void pair_decays(float (&decay)[2][4], const Sum* prefix, const PairBlock& block) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float4 tokens[2];
#pragma unroll
    for (int m = 0; m < 2; m++) tokens[m] = *(const float4*)(prefix + block.tokens * 16 + 8 * m + 2 * t);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Sum until = prefix[block.queries * 16 + g + 8 * half];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            decay[half][2 * m] = power_of_two(difference(until, {tokens[m].x, tokens[m].y}));
            decay[half][2 * m + 1] = power_of_two(difference(until, {tokens[m].z, tokens[m].w}));
        }
    }
}

// Lane addresses of a first operand (16 rows of tokens) and of the second operands of two tiles (16 rows of tokens).
DEVICE const activation_t* first_operand(const activation_t* tokens, int block, int column) {
    const int lane = threadIdx.x % 32;
    return token_at(tokens, block * 16 + lane % 16, column + lane / 16 * 8);
}
DEVICE const activation_t* second_operand(const activation_t* tokens, int block, int column) {
    const int lane = threadIdx.x % 32;
    return token_at(tokens, block * 16 + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8);
}

// Stores the fragments of one block of pairs: `values[m][i]` is accumulator i of token tile m.
DEVICE void store_fragments(uint4* fragments, const PairBlock& block, const float (&values)[2][4]) {
    const int lane = threadIdx.x % 32;
    uint4* at = fragments + ((block.queries * (block.queries + 1) / 2 + block.tokens) * 2) * 32 + lane;
    at[0] = make_fragment(values[0][0], values[0][1], values[1][0], values[1][1]);
    at[32] = make_fragment(values[0][2], values[0][3], values[1][2], values[1][3]);
}
