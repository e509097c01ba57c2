// Building blocks shared by the prefill kernels. A row's history (in the ring) and window are walked in chunks of CHUNK
// tokens. One thread block owns CTA_ROWS rows of one head's state (see replay.cuh) for one row of the batch. Its first
// warps hold 16 state rows each, in registers from the first chunk to the last; its last warps, one per 16 tokens, work
// one chunk ahead and prepare what all rows of the head share: normalised tokens, decays and the products of tokens.
//
// Outputs are computed transposed, [state rows x tokens], so that everything a state warp computes (the state itself,
// its products with tokens, u) is laid out as the first operand of the next matrix step and never leaves its registers.
// Numbers that are no activations enter a matrix step as two bf16 halves (16 bits of mantissa), or as two tf32 halves
// where activations are fp16; activations enter exactly. All sums are fp32.
//
// The operator's source defines HEADS, GROUPS, ROWS and COLUMNS; the build stamps in what replay.cuh needs and CHUNK,
// STAGES (chunks of tokens in shared memory, 2 or 3) and SWIZZLE.
#pragma once
#include "replay.cuh"

constexpr int TOKEN_BLOCKS = CHUNK / 16;
constexpr int PREPARING_WARPS = TOKEN_BLOCKS, PREPARING_THREADS = PREPARING_WARPS * 32;
constexpr int BLOCK_THREADS = THREADS + PREPARING_THREADS;
constexpr int TOKEN_TILES = CHUNK / 8;
constexpr int COLUMN_TILES = COLUMNS / 8;
constexpr int PAIR_BLOCKS = TOKEN_BLOCKS * (TOKEN_BLOCKS + 1) / 2;  // 16 queries x 16 tokens, lower triangle
constexpr int FRAGMENTS = 2 * PAIR_BLOCKS;                          // 8 queries x 16 tokens
constexpr int LANE_TOKENS = CHUNK / 32;                             // of the warp that scans a chunk
// Either 16 bytes of padding or, where those do not fit, an exclusive-or of column and row spreads the rows of a matrix
// over all banks. Padding costs no address arithmetic.
constexpr int CHUNK_STRIDE = SWIZZLE ? COLUMNS : COLUMNS + 8;
// Decays of a chunk are powers of two. An exponent below the lowest is a decay of zero in fp32; the bound keeps sums of
// several finite.
constexpr float LOG2_E = 1.4426950408889634f, LOWEST_EXPONENT = -152.f;

static_assert(CHUNK % 32 == 0 && MAX_HISTORY <= CHUNK, "one warp scans a chunk; one chunk holds the history");
static_assert(!SWIZZLE || COLUMNS % 64 == 0, "eight copies of 16 bytes trade places");
static_assert(COLUMNS <= 128, "a lane holds 4 elements of every 8 columns in registers");

#define BARRIER_CHUNK 1      // all threads, after each chunk
#define BARRIER_PREPARING 2  // the preparing warps

// What all warps need to know of a chunk's decays.
struct Gates {
    alignas(16) float entering[CHUNK];  // decay from the chunk's beginning to and including a token
    alignas(16) float leaving[CHUNK];   // factor of a token in the state at the chunk's end
#if CHUNK_BETA
    alignas(16) float beta[CHUNK];
#endif
    alignas(16) float total;            // decay over the chunk
};
// Computed two chunks ahead of the state warps, beside the pairs of tokens of the chunk in between.
constexpr int GATE_STAGES = 3;

struct Chunk {
    int index, valid;  // -1 is the history
    DEVICE_MEMBER bool is_history() const { return index < 0; }
};

// Element `column` (a multiple of 8) of a token in shared memory; rows of one matrix load hit different banks.
DEVICE activation_t* token_at(activation_t* tokens, int row, int column) {
    if constexpr (SWIZZLE) return tokens + row * CHUNK_STRIDE + ((column / 8) ^ (row & 7)) * 8;
    return tokens + row * CHUNK_STRIDE + column;
}
DEVICE const activation_t* token_at(const activation_t* tokens, int row, int column) {
    return token_at((activation_t*)tokens, row, column);
}

// ------------------------------------------------------------------------------------------------ matrix operands

// The two bf16 halves of each of two numbers.
DEVICE void split_pair(float a, float b, u32& high, u32& low) {
    high = pack_bf16(a, b);
    low = pack_bf16(a - bf16_low(high), b - bf16_high(high));
}

// Two numbers rounded to the activation format, the first in the low half.
DEVICE u32 pack_activations(float low, float high) {
    if constexpr (ACTIVATION_FORMAT == FORMAT_BF16) return pack_bf16(low, high);
    return (u32)float_to_activation(low) | (u32)float_to_activation(high) << 16;
}

// First operand [16 x 16] of numbers that are no activations; element order as in mma_16bit.
struct Wide {
#if ACTIVATION_FORMAT == FORMAT_BF16
    u32 high[4], low[4];
#else
    float value[8];
#endif
};

DEVICE Wide make_wide(float a0, float a1, float a2, float a3, float a4, float a5, float a6, float a7) {
    Wide wide;
#if ACTIVATION_FORMAT == FORMAT_BF16
    split_pair(a0, a1, wide.high[0], wide.low[0]);
    split_pair(a2, a3, wide.high[1], wide.low[1]);
    split_pair(a4, a5, wide.high[2], wide.low[2]);
    split_pair(a6, a7, wide.high[3], wide.low[3]);
#else
    wide.value[0] = a0, wide.value[1] = a1, wide.value[2] = a2, wide.value[3] = a3;
    wide.value[4] = a4, wide.value[5] = a5, wide.value[6] = a6, wide.value[7] = a7;
#endif
    return wide;
}
// From two neighbouring accumulator tiles.
DEVICE Wide make_wide(const float (&left)[4], const float (&right)[4]) {
    return make_wide(left[0], left[1], left[2], left[3], right[0], right[1], right[2], right[3]);
}

// Second operand [16 tokens x 8 queries] of coefficients, as lanes hold it: for query g, tokens 2t, 2t+1, 2t+8, 2t+9.
DEVICE uint4 make_fragment(float a0, float a1, float a2, float a3) {
#if ACTIVATION_FORMAT == FORMAT_BF16
    uint4 fragment;
    split_pair(a0, a1, fragment.x, fragment.z);
    split_pair(a2, a3, fragment.y, fragment.w);
    return fragment;
#else
    return make_uint4(float_to_bits(a0), float_to_bits(a1), float_to_bits(a2), float_to_bits(a3));
#endif
}
constexpr int fragment_index(int tile, int block) {
    return ((tile / 2) * (tile / 2 + 1) / 2 + block) * 2 + tile % 2;
}

// d += a b over 16 values of k in two tf32 steps, in which slots t and t + 4 take the pair of lane t. EXACT_A: a holds
// activations.
DEVICE void accumulate_tf32(float (&d)[4], const float (&a)[8], const float (&b)[4], bool exact_a, bool exact_b) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
        const float* v = a + 4 * step;
        const float b0 = b[2 * step], b1 = b[2 * step + 1];
        const float h0 = tf32_high(v[0]), h1 = tf32_high(v[2]), h2 = tf32_high(v[1]), h3 = tf32_high(v[3]);
        const float c0 = tf32_high(b0), c1 = tf32_high(b1);
        mma_tf32(d, h0, h1, h2, h3, c0, c1);
        if (!exact_a) mma_tf32(d, v[0] - h0, v[2] - h1, v[1] - h2, v[3] - h3, c0, c1);
        if (!exact_b) mma_tf32(d, h0, h1, h2, h3, b0 - c0, b1 - c1);
    }
}

// d += a b for N independent products. HALF 0 and 1: the high and low halves of a, so that a caller can put other
// products between two that wait for each other.
template <int HALF>
DEVICE void accumulate(float (&d)[4], const Wide& a, u32 b0, u32 b1) {
#if ACTIVATION_FORMAT == FORMAT_BF16
    const u32(&half)[4] = HALF ? a.low : a.high;
    mma_16bit<FORMAT_BF16>(d, half[0], half[1], half[2], half[3], b0, b1);
#else
    if (HALF) return;
    const float b[4] = {activation_low(b0), activation_high(b0), activation_low(b1), activation_high(b1)};
    accumulate_tf32(d, a.value, b, false, true);
#endif
}
// a: activations; b: a fragment, of which PASS 0 takes the high and PASS 1 the low halves.
template <int PASS>
DEVICE void accumulate_exact(float (&d)[4], const u32 (&a)[4], const uint4& b) {
#if ACTIVATION_FORMAT == FORMAT_BF16
    mma_16bit<FORMAT_BF16>(d, a[0], a[1], a[2], a[3], PASS ? b.z : b.x, PASS ? b.w : b.y);
#else
    if (PASS) return;
    const float values[8] = {activation_low(a[0]), activation_high(a[0]), activation_low(a[1]), activation_high(a[1]),
                             activation_low(a[2]), activation_high(a[2]), activation_low(a[3]), activation_high(a[3])};
    const float fragment[4] = {bits_to_float(b.x), bits_to_float(b.y), bits_to_float(b.z), bits_to_float(b.w)};
    accumulate_tf32(d, values, fragment, true, false);
#endif
}
// Neither holds activations. Three passes; the product of both low halves is below what either keeps.
template <int PASS>
DEVICE void accumulate_wide(float (&d)[4], const Wide& a, const uint4& b) {
#if ACTIVATION_FORMAT == FORMAT_BF16
    const u32(&half)[4] = PASS == 1 ? a.low : a.high;
    mma_16bit<FORMAT_BF16>(d, half[0], half[1], half[2], half[3], PASS == 2 ? b.z : b.x, PASS == 2 ? b.w : b.y);
#else
    if (PASS) return;
    const float fragment[4] = {bits_to_float(b.x), bits_to_float(b.y), bits_to_float(b.z), bits_to_float(b.w)};
    accumulate_tf32(d, a.value, fragment, false, false);
#endif
}

// d[n] += a . fragments (n, BLOCK) for the tiles n from FIRST on, a few at a time, so that products which wait for each
// other have others between them. `fragments` points at the lane's own words.
template <int FIRST, int BLOCK>
DEVICE void accumulate_tiles(float (&d)[TOKEN_TILES][4], const Wide& a, const uint4* fragments) {
    constexpr int AT_ONCE = 4;
#pragma unroll
    for (int n = FIRST; n < TOKEN_TILES; n += AT_ONCE) {
        uint4 b[AT_ONCE];
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++)
            if (n + m < TOKEN_TILES) b[m] = fragments[fragment_index(n + m, BLOCK) * 32];
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++)
            if (n + m < TOKEN_TILES) accumulate_wide<0>(d[n + m], a, b[m]);
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++)
            if (n + m < TOKEN_TILES) accumulate_wide<1>(d[n + m], a, b[m]);
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++)
            if (n + m < TOKEN_TILES) accumulate_wide<2>(d[n + m], a, b[m]);
    }
}
template <int BLOCK>
DEVICE void accumulate_tiles(float (&d)[TOKEN_TILES][4], const u32 (&a)[4], const uint4* fragments) {
#pragma unroll
    for (int n = 2 * BLOCK; n < TOKEN_TILES; n += 4) {
        uint4 b[4];
#pragma unroll
        for (int m = 0; m < 4; m++)
            if (n + m < TOKEN_TILES) b[m] = fragments[fragment_index(n + m, BLOCK) * 32];
#pragma unroll
        for (int m = 0; m < 4; m++)
            if (n + m < TOKEN_TILES) accumulate_exact<0>(d[n + m], a, b[m]);
#pragma unroll
        for (int m = 0; m < 4; m++)
            if (n + m < TOKEN_TILES) accumulate_exact<1>(d[n + m], a, b[m]);
    }
}

// body(Index<0>()) .. body(Index<N - 1>()), for indices that must be template arguments.
template <int I>
struct Index {
    static constexpr int value = I;
};
template <int N, int I = 0, class Body>
DEVICE void for_each_index(const Body& body) {
    if constexpr (I < N) {
        body(Index<I>());
        for_each_index<N, I + 1>(body);
    }
}

// ------------------------------------------------------------------------------------------------------ the state

// Row of the warp's 16 that accumulator row g of a lane stands for; accumulator row g + 8 is two rows further.
// A lane then holds rows 4t .. 4t + 3 of a token once its tiles are transposed, which is 8 bytes of its output.
DEVICE int lane_row() {
    const int g = threadIdx.x % 32 / 4;
    return g / 2 * 4 + g % 2;
}

// `state` points at the warp's first row; `rows` of its 16 exist.
DEVICE void load_state(float (&s)[COLUMN_TILES][4], const state_t* state, int rows, bool has_state) {
    const int row = lane_row(), t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool valid = has_state && row + 2 * half < rows;
        const state_t* from = state + (row + 2 * half) * COLUMNS + 2 * t;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            float low = 0.f, high = 0.f;
            if (valid) {
                if constexpr (STATE_FORMAT == FORMAT_FP32) {
                    const float2 pair = *(const float2*)(from + n * 8);
                    low = pair.x, high = pair.y;
                } else {
                    const u32 pair = *(const u32*)(from + n * 8);
                    low = state_to_float((state_t)(pair & 0xffffu)), high = state_to_float((state_t)(pair >> 16));
                }
            }
            s[n][2 * half] = low, s[n][2 * half + 1] = high;
        }
    }
}
DEVICE void store_state(const float (&s)[COLUMN_TILES][4], state_t* state, int rows) {
    const int row = lane_row(), t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 2 * half >= rows) continue;
        state_t* to = state + (row + 2 * half) * COLUMNS + 2 * t;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            const float low = s[n][2 * half], high = s[n][2 * half + 1];
            if constexpr (STATE_FORMAT == FORMAT_FP32)
                *(float2*)(to + n * 8) = make_float2(low, high);
            else
                *(u32*)(to + n * 8) = (u32)float_to_state(low) | (u32)float_to_state(high) << 16;
        }
    }
}

// The state times all tokens of a chunk, of SETS kinds at once: d[i][n] += s . tokens[i] of tile n.
template <int SETS>
DEVICE void multiply_state(float (&d)[SETS][TOKEN_TILES][4], const float (&s)[COLUMN_TILES][4],
                           const activation_t* const (&tokens)[SETS]) {
    constexpr int BLOCKS = 2 / SETS;  // of 16 tokens at once
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
        const Wide a = make_wide(s[2 * k], s[2 * k + 1]);
#pragma unroll
        for (int block = 0; block < TOKEN_BLOCKS; block += BLOCKS) {
            u32 b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrix_x4(b[j], token_at(tokens[j % SETS], (block + j / SETS) * 16 + row, k * 16 + column));
#pragma unroll
            for (int m = 0; m < 4; m++)
                accumulate<0>(d[m / 2 % SETS][2 * (block + m / 2 / SETS) + m % 2], a, b[m / 2][m % 2 * 2],
                              b[m / 2][m % 2 * 2 + 1]);
#pragma unroll
            for (int m = 0; m < 4; m++)
                accumulate<1>(d[m / 2 % SETS][2 * (block + m / 2 / SETS) + m % 2], a, b[m / 2][m % 2 * 2],
                              b[m / 2][m % 2 * 2 + 1]);
        }
    }
}

// s += values of 16 tokens (rows x tokens) . those tokens (`block` of the chunk).
DEVICE void add_outer(float (&s)[COLUMN_TILES][4], const Wide& values, const activation_t* tokens, int block) {
    const int lane = threadIdx.x % 32, row = block * 16 + lane % 16, column = lane / 16 * 8;
    constexpr int SETS = COLUMNS % 32 == 0 ? 2 : 1;
#pragma unroll
    for (int c = 0; c < COLUMNS / 16; c += SETS) {
        u32 b[SETS][4];
#pragma unroll
        for (int j = 0; j < SETS; j++) load_matrix_x4_transposed(b[j], token_at(tokens, row, (c + j) * 16 + column));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < SETS; j++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    if (half)
                        accumulate<1>(s[2 * (c + j) + m], values, b[j][2 * m], b[j][2 * m + 1]);
                    else
                        accumulate<0>(s[2 * (c + j) + m], values, b[j][2 * m], b[j][2 * m + 1]);
    }
}

DEVICE void decay_state(float (&s)[COLUMN_TILES][4], float decay) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] *= decay;
}

// -------------------------------------------------------------------------------------------- values and outputs

// The warp's 16 values of every token of a chunk: [token][row] in shared memory, tokens beyond the row's end are zero.
// `values` points at (first token of the chunk, first row of the warp).
DEVICE void values_copy_start(activation_t* shared, const activation_t* values, long long stride, int valid, int rows) {
    for (int i = threadIdx.x % 32; i < 2 * CHUNK; i += 32) {
        const int token = i / 2, row = i % 2 * 8;
        copy_async_16(shared + token * 16 + row, values + token * stride + row, token < valid && row < rows);
    }
}
// Words of a tile: tokens 2t, 2t+1 of accumulator rows g and g + 8.
DEVICE void transposed_values(u32 (&words)[2], const activation_t* shared, int tile) {
    const int lane = threadIdx.x % 32;
    const uint2 pair = *(const uint2*)(shared + (tile * 8 + lane / 4) * 16 + lane % 4 * 4);
    words[0] = transpose_matrix(pair.x), words[1] = transpose_matrix(pair.y);
}
// The same from the ring. `ring` points at the warp's first row of entry 0.
DEVICE void transposed_history(u32 (&words)[2], const u16* ring, int first_entry, int entry_stride, int tile,
                               int history, int rows) {
    const int token = tile * 8 + threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 4;
    uint2 pair = make_uint2(0, 0);
    if (token < history && row < rows)
        pair = *(const uint2*)(ring + (long long)wrapped(first_entry + token) * entry_stride + row);
    words[0] = transpose_matrix(pair.x), words[1] = transpose_matrix(pair.y);
}

// Stores outputs [rows x tokens] of a chunk. `output` points at (first token of the chunk, first row of the warp).
DEVICE void store_outputs(const float (&d)[TOKEN_TILES][4], activation_t* output, int valid, int rows) {
    const int lane = threadIdx.x % 32, row = lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        const u32 upper = transpose_matrix(pack_activations(d[n][0], d[n][1]));
        const u32 lower = transpose_matrix(pack_activations(d[n][2], d[n][3]));
        const int token = n * 8 + lane / 4;
        if (token < valid && row < rows)
            *(uint2*)(output + (long long)token * (HEADS * ROWS) + row) = make_uint2(upper, lower);
    }
}
