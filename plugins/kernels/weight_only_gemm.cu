// out = activation(x W^T) with weights of 4, 8 or 16 bits that become 16-bit operands in registers, dense or by expert.
//
// A block computes 32 weight rows (output features) a warp for up to TILE_TOKENS tokens; the weights are the left
// operand of m16n8k16, or of Hopper's products by groups of four warps, so that a few tokens waste little. Each warp
// copies its own weights through STAGES tiles in shared memory; the activations travel through as many, which the warps
// share. A token's sums run over columns in an order that depends on the shape and the number of splits alone.
//
// Grid: row tiles, token tiles, splits. Stamped in: THREADS, MIN_CTAS, STAGES, TILE_TOKENS, MODE, ACTIVATION,
// OUTPUT_FP32 (the unrounded product, one [tokens, out_features] per split), USE_WGMMA (products by groups of four
// warps, for packed weights only), WEIGHT_FORMAT, ACTIVATION_FORMAT, SHARED_BYTES. See plugins/weight_only.py.
// FP8_OPERANDS (e4m3 activations and NVFP4 weights of experts, as plugins/fp8_experts.py has them), and with it
// OUTPUT_FP8 (results are such activations).
#include "weight_only.cuh"

// Which tokens a tile holds: consecutive ones; those of pairs (token, choice) sorted by expert; or the sorted pairs
// themselves, whose results go to the pairs' places.
#define MODE_DENSE 0
#define MODE_GATHER 1
#define MODE_SCATTER 2
#define ACTIVATION_NONE 0
#define ACTIVATION_SQUARED_RELU 1
#define ACTIVATION_SWIGLU 2  // of two weights: a warp's first 16 rows are the gate's
#ifndef OUTPUT_FP8
#define OUTPUT_FP8 0
#endif

constexpr int WARPS = THREADS / 32, PARTS = TILE_TOKENS / 8;
constexpr bool PAIRED = ACTIVATION == ACTIVATION_SWIGLU;
constexpr int WARP_FEATURES = PAIRED ? 16 : 32, TILE_FEATURES = WARPS * WARP_FEATURES;
constexpr int X_BYTES = TILE_TOKENS * X_ROW_BYTES, STAGE_BYTES = X_BYTES + WARPS * TILE_BYTES;
// Tiles that are on their way. Tensor cores that work by themselves may still read activations of the tile before.
constexpr int AHEAD = STAGES - 1, X_AHEAD = USE_WGMMA ? STAGES - 2 : STAGES - 1;
static_assert(X_AHEAD > 0, "see the waits");

// Results of 8 tokens at a time pass through shared memory, those of a group of warps together.
constexpr int GROUP_WARPS = OUTPUT_FP8 && PAIRED ? 8 : 4, GROUP_FEATURES = GROUP_WARPS * WARP_FEATURES;
constexpr int ELEMENT = OUTPUT_FP8 ? 1 : 2, OUT_PITCH = GROUP_FEATURES * ELEMENT + 16;  // in bytes, as the rest
constexpr int STAGES_BYTES = STAGES * STAGE_BYTES, BUFFER_BYTES = STAGES_BYTES + WARPS / GROUP_WARPS * 8 * OUT_PITCH;
static_assert(SHARED_BYTES >= BUFFER_BYTES + 4 * TILE_TOKENS, "stages, results, rows of out");
static_assert(WARPS % GROUP_WARPS == 0 && (!OUTPUT_FP8 || GROUP_FEATURES == 128), "see fp8_place");

// A thread copies the same chunk of every X_ROWS-th row: in eights, so that a row's chunks change places alike.
constexpr int X_ROWS = THREADS / X_CHUNKS, X_COPIES = (TILE_TOKENS + X_ROWS - 1) / X_ROWS;
static_assert(X_ROWS % 8 == 0, "see x_place");

#if FP8_OPERANDS
// As below.
template <int USED>
DEVICE void multiply_tile(float (&sums)[2][PARTS][4], const WeightRows (&rows)[2], u32 (&operands)[2][2][4],
                          const unsigned char* stage) {
    BlockNumbers numbers[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) block_numbers(rows[m].scales, numbers[m]);
#pragma unroll
    for (int step = 0; step < UNITS; step++) {
        u32(&a)[2][4] = operands[step % 2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                decode_nvfp4_as_fp8(word_of(rows[m].codes[half], step), numbers[m][2 * half + step / 2], a[m][half],
                                    a[m][2 + half]);
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < 2; m++)
            wgmma<FORMAT_FP8, USED>(*(float(*)[USED][4])sums[m], a[m][0], a[m][1], a[m][2], a[m][3], stage, step);
        wgmma_commit();
        wgmma_wait<1>();
    }
}
#else
// sums += a tile's products, for the tile's first 8 USED tokens. operands: of two steps, rows of two parts of 16 each
// as for m16n8k16, which may still be in use when this returns.
template <int USED>
DEVICE void multiply_tile(float (&sums)[2][PARTS][4], const WeightRows (&rows)[2], u32 (&operands)[2][2][4],
                          const unsigned char* stage) {
    [[maybe_unused]] const int lane = (int)threadIdx.x % 32;
    u32 factors[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            factors[m][half] = HAS_BLOCK_SCALES ? nvfp4_factors(rows[m].scales >> 16 * half) : 0u;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        u32 own[2][2];  // the lane with the number of the unit holds its factors
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                own[m][half] = HAS_BLOCK_SCALES ? shuffle_quad(factors[m][half], unit) : 0u;
#pragma unroll
        for (int step = 0; step < 2; step++) {
            u32(&a)[2][4] = operands[step];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    decode_step(rows[m].codes[half], own[m][half], unit, step, a[m][half], a[m][2 + half]);
#if USE_WGMMA
            wgmma_fence();
#pragma unroll
            for (int m = 0; m < 2; m++)
                wgmma<ACTIVATION_FORMAT, USED>(*(float(*)[USED][4])sums[m], a[m][0], a[m][1], a[m][2], a[m][3],
                                               stage + unit / 2 * (TILE_TOKENS * 128), unit % 2 * 2 + step);
            wgmma_commit();
            wgmma_wait<1>();
#endif
        }
#if !USE_WGMMA
#pragma unroll
        for (int n = 0; n < USED; n++) {
            u32 b[4];
            load_matrix_x4(b, stage + x_place(n * 8 + lane % 8, 4 * unit + lane / 8));
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const u32(&a)[4] = operands[step][m];
                    mma_16bit<ACTIVATION_FORMAT>(sums[m][n], a[0], a[1], a[2], a[3], b[2 * step], b[2 * step + 1]);
                }
        }
#endif
    }
}
#endif

// Sums of two tokens' values of one feature, times their units, as results: rounded by each operation, as PyTorch does.
DEVICE u32 rounded_results(float first, float second, float first_gate, float second_gate, float unit, float gate_unit) {
    const u32 pair = pack_activation(first * unit, second * unit);
    if constexpr (ACTIVATION == ACTIVATION_SQUARED_RELU) {
        const u32 positive = relu_pairs<ACTIVATION_FORMAT>(pair);
        return multiply_pairs<ACTIVATION_FORMAT>(positive, positive);
    }
    if constexpr (PAIRED) {
        const u32 gates = pack_activation(first_gate * gate_unit, second_gate * gate_unit);
        const float low = activation_low(gates), high = activation_high(gates);
        return multiply_pairs<ACTIVATION_FORMAT>(pack_activation(low * sigmoid(low), high * sigmoid(high)), pair);
    }
    return pair;
}
// The same of one token as a number that is rounded to e4m3 alone.
DEVICE float narrow_result(float sum, float gate_sum, float unit, float gate_unit, float scaling) {
    const float value = sum * unit;
    if constexpr (PAIRED) {
        const float gate = gate_sum * gate_unit;
        return gate * sigmoid(gate) * (value * scaling);
    }
    if constexpr (ACTIVATION == ACTIVATION_SQUARED_RELU) {
        const float positive = value > 0.f || value != value ? value : 0.f;
        return positive * (positive * scaling);
    }
    return value * scaling;
}

// Results of the tile to memory, a token's features together. staged: the group's shared memory. e4m3: as multiples of
// 1 / scaling.
DEVICE void store_results(float (&sums)[2][PARTS][4], unsigned char* staged, const int* out_rows, int count,
                          float unit, float gate_unit, float scaling, int out_features, int first_feature,
                          unsigned char* out) {
    constexpr int THREADS_OF_GROUP = GROUP_WARPS * 32, CHUNKS = GROUP_FEATURES * ELEMENT / 16;
    const int group = (int)threadIdx.x / THREADS_OF_GROUP, member = (int)threadIdx.x % THREADS_OF_GROUP;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    first_feature += group * GROUP_FEATURES;
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
        if (n * 8 >= count) break;
        sync_group(1 + group, THREADS_OF_GROUP);
#pragma unroll
        for (int m = 0; m < (PAIRED ? 1 : 2); m++) {
            const float(&own)[4] = sums[PAIRED ? 1 : m][n], (&gate)[4] = sums[0][n];
            const int feature = member / 32 * WARP_FEATURES + m * 16 + 2 * t;
#if OUTPUT_FP8
            // Of features g and g + 8, for two tokens; behind the transposition of features 2 t, 2 t + 1 and 8 more, of
            // one.
            u32 pairs[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                pairs[e] = convert_e4m3_pair(narrow_result(own[e], gate[e], unit, gate_unit, scaling),
                                             narrow_result(own[2 + e], gate[2 + e], unit, gate_unit, scaling));
            const u32 features = transpose_matrix(pairs[0] | pairs[1] << 16);
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(u16*)(staged + g * OUT_PITCH + fp8_place(feature + half * 8)) =
                    (u16)permute_bytes(features, 0u, half ? 0x0031u : 0x0020u);
#else
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 pair = rounded_results(own[2 * half], own[2 * half + 1], gate[2 * half], gate[2 * half + 1],
                                                 unit, gate_unit);
                *(u32*)(staged + g * OUT_PITCH + (feature + half * 8) * 2) = transpose_matrix(pair);
            }
#endif
        }
        sync_group(1 + group, THREADS_OF_GROUP);
        const int row = member / CHUNKS, chunk = member % CHUNKS, feature = first_feature + chunk * (16 / ELEMENT);
        if (row < 8 && n * 8 + row < count && feature < out_features)
            *(uint4*)(out + (offset_of(out_rows[n * 8 + row], out_features) + feature) * ELEMENT) =
                *(const uint4*)(staged + row * OUT_PITCH + chunk * 16);
    }
}

DEVICE void store_sums(float (&sums)[2][PARTS][4], const int* out_rows, int count, float unit, int out_features,
                       int first_feature, float* out) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < PARTS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int token = n * 8 + 2 * t + e;
            if (token >= count) continue;
            float* row = out + offset_of(out_rows[token], out_features);
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int feature = first_feature + warp * 32 + m * 16 + half * 8 + g;
                    if (feature < out_features) row[feature] = sums[m][n][2 * half + e] * unit;
                }
        }
}

// What a warp multiplies: `steps` tiles of weights, two parts of 16 rows each, and of activations.
struct Work {
    // Weights of both parts and x. Offsets in chunks: of the lane's codes of the first part; of the thread's chunk of
    // its rows of x.
    const uint4 *weights[2], *x;
    int codes, x_offsets[X_COPIES];
    unsigned char* stages;
    int columns, steps;  // columns of x from the thread's chunk on

    // Of two weights, the half of a row tile that is the warp's.
    DEVICE_MEMBER static int part_of_pair() { return (int)threadIdx.x / 32 % 2; }
    DEVICE_MEMBER unsigned char* stage(int tile) const { return stages + tile % STAGES * STAGE_BYTES; }
    // Where the warp's weights of a tile are in shared memory: two parts' codes, then their scales.
    DEVICE_MEMBER unsigned char* staged(int tile) const {
        return stage(tile) + X_BYTES + (int)threadIdx.x / 32 * TILE_BYTES;
    }
    DEVICE_MEMBER void start_weights(int tile) const {
        const int lane = (int)threadIdx.x % 32;
        const bool wanted = tile < steps;
        unsigned char* to = staged(tile) + lane * 16;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint4* from = weights[m] + (codes + (PAIRED ? 0 : m * 64) + tile * (TILE_BYTES / 16));
            copy_async_16_if(wanted, to + m * 1024, from, true);
            copy_async_16_if(wanted, to + m * 1024 + 512, from + 32, true);
        }
        // Lanes 0 to 7 copy scales of the first part, 8 to 15 of the second, or of two weights the same part of each.
        const int scales = codes + 128 + tile * (TILE_BYTES / 16) - (PAIRED ? (lane & 8) + 56 * part_of_pair() : 0);
        if (HAS_BLOCK_SCALES) copy_async_16_if(wanted && lane < (PAIRED ? 8 : 16), to + 2048, weights[0] + scales, true);
        if (HAS_BLOCK_SCALES && PAIRED)
            copy_async_16_if(wanted && lane / 8 == 1, to + 2048, weights[1] + scales, true);
    }
    // The block's first 8 USED tokens.
    template <int USED>
    DEVICE_MEMBER void start_x(int tile) const {
        if (tile < steps) {
            const int first = (int)threadIdx.x / X_CHUNKS, chunk = (int)threadIdx.x % X_CHUNKS;
            const bool in_row = tile * TILE_K < columns;
            unsigned char* to = stage(tile) + x_place(first, chunk);
#pragma unroll
            for (int i = 0; i * X_ROWS < 8 * USED; i++)
                copy_async_16_if(i * X_ROWS + X_ROWS <= 8 * USED || first + i * X_ROWS < 8 * USED,
                                 to + i * X_ROWS * (X_CHUNKS >= 8 ? 128 : 64), x + (x_offsets[i] + tile * X_CHUNKS), in_row);
        }
    }
    // For the block's first 8 USED tokens, behind start_weights for the first AHEAD tiles.
    template <int USED>
    DEVICE_MEMBER void multiply(float (&sums)[2][PARTS][4]) const {
        u32 operands[2][2][4];
        for (int tile = 0; tile < X_AHEAD; tile++) {
            start_x<USED>(tile);
            copy_async_commit();
            if (USE_WGMMA) copy_async_commit();  // weights, which are in the first group
        }
#pragma unroll 1
        for (int tile = 0; tile < steps; tile++) {
#if USE_WGMMA
            // Of each tile there are a group of activations and one of weights, which start a tile earlier.
            copy_async_wait_but<2 * X_AHEAD - 1>();
            fence_shared_for_wgmma();
#else
            copy_async_wait_but<X_AHEAD - 1>();
#endif
            sync_threads();
            start_x<USED>(tile + X_AHEAD);
            if (USE_WGMMA) copy_async_commit();
            start_weights(tile + AHEAD);
            copy_async_commit();
            const unsigned char* from = staged(tile);
            WeightRows rows[2];
#pragma unroll
            for (int m = 0; m < 2; m++)
                rows[m] = load_rows(part_codes(from, m), part_scales(from, m), (int)threadIdx.x % 32);
            multiply_tile<USED>(sums, rows, operands, stage(tile));
        }
#if USE_WGMMA
        wgmma_wait<0>();
#endif
        copy_async_wait();
    }
    // For as few of the block's tokens as hold the first `count`.
    template <int USED = PARTS>
    DEVICE_MEMBER void multiply_first(int count, float (&sums)[2][PARTS][4]) const {
        // As many forms as pay: each is a loop of its own to compile.
        constexpr int FEWER = USED - (PARTS <= 4 ? 1 : PARTS <= 8 || USED > 12 ? 2 : 4);
        if constexpr (FEWER > 0) {
            if (count <= 8 * FEWER) {
                multiply_first<FEWER>(count, sums);
                return;
            }
        }
        multiply<USED>(sums);
    }
};

KERNEL(THREADS, MIN_CTAS)
weight_only_gemm(
    // x [tokens, in_features], rows x_stride elements apart; weight [experts, row tiles, column tiles, TILE_BYTES] and,
    // for SwiGLU, its gate; their fp32 scales [experts], null for 16-bit weights
    const void* x, const unsigned char* weight, const float* scale, const unsigned char* gate,
    const float* gate_scale,
    // tiles [token tiles, 3]: expert, first of `order`, count; order [pairs]: pairs sorted by expert; null where dense
    const int* tiles, const int* order, int tokens, int x_stride, int in_features, int out_features, int top_k,
    // units of e4m3 activations, null where there are none: fp32 of x, [1] where tokens are gathered, else [experts];
    // of out [experts]
    const float* x_unit, const float* out_unit,
    // [tokens or pairs, out_features], dense
    void* out) {
    DYNAMIC_SHARED(memory);
    int* out_rows = (int*)(memory + BUFFER_BYTES);
    int expert = 0, first = (int)blockIdx.y * TILE_TOKENS, count = tokens - first;
    if constexpr (MODE != MODE_DENSE) {
        const int* tile = tiles + 3 * (int)blockIdx.y;
        expert = tile[0], first = tile[1], count = tile[2];
        if (count == 0) return;
    }
    count = count < TILE_TOKENS ? count : TILE_TOKENS;

    const int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int first_feature = (int)blockIdx.x * TILE_FEATURES, feature = first_feature + warp * WARP_FEATURES;
    const int row_tiles = (out_features + 31) / 32, all_steps = (in_features + TILE_K - 1) / TILE_K;
    const int splits = (int)gridDim.z, split_steps = (all_steps + splits - 1) / splits;
    const int first_step = (int)blockIdx.z * split_steps;
    const int row_tile = feature / 32 < row_tiles ? feature / 32 : row_tiles - 1;  // rows behind the last are not stored
    const int begin = ((expert * row_tiles + row_tile) * all_steps + first_step) * (TILE_BYTES / 16);
    Work work;
    work.weights[0] = (const uint4*)(PAIRED ? gate : weight), work.weights[1] = (const uint4*)weight;
    work.x = (const uint4*)x;
    work.stages = memory;
    work.steps = all_steps - first_step < split_steps ? all_steps - first_step : split_steps;
    work.codes = begin + (PAIRED ? 64 * Work::part_of_pair() : 0) + lane;
    for (int tile = 0; tile < AHEAD; tile++) work.start_weights(tile);

    // Rows of x behind the last used are copies of it; what they give is not stored.
    const int first_column = first_step * TILE_K + tid % X_CHUNKS * CHUNK_COLUMNS;
    work.columns = in_features - first_column;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
        const int row = tid / X_CHUNKS + i * X_ROWS, at = first + (row < count ? row : count - 1);
        const int source = MODE == MODE_GATHER ? order[at] / top_k : at;
        work.x_offsets[i] = (int)((offset_of(source, x_stride) + first_column) / CHUNK_COLUMNS);
    }
    for (int i = tid; i < count; i += THREADS) out_rows[i] = MODE == MODE_SCATTER ? order[first + i] : first + i;

    float sums[2][PARTS][4] = {};
    work.multiply_first(count, sums);

    float x_scale = 1.f;
    if constexpr (FP8_OPERANDS) x_scale = x_unit[MODE == MODE_GATHER ? 0 : expert];
    const float decoded = DECODED_UNIT * x_scale, unit = decoded * (WEIGHT_FORMAT == WEIGHTS_16BIT ? 1.f : scale[expert]);
    const float gate_unit = !PAIRED || WEIGHT_FORMAT == WEIGHTS_16BIT ? unit : decoded * gate_scale[expert];
    float scaling = 1.f;
    if constexpr (OUTPUT_FP8) scaling = 1.f / out_unit[expert];
    if constexpr (OUTPUT_FP32)
        store_sums(sums, out_rows, count, unit, out_features, first_feature,
                   (float*)out + (long long)blockIdx.z * tokens * out_features);
    else
        store_results(sums, memory + STAGES_BYTES + warp / GROUP_WARPS * (8 * OUT_PITCH), out_rows, count, unit, gate_unit,
                      scaling, out_features, first_feature, (unsigned char*)out);
}
