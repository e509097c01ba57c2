// Activations as e4m3 numbers in units of a scale, saturating, in the order in which products of experts in FP8 read
// them. A thread owns 8 columns of a token.
//
// Stamped in: THREADS, ACTIVATION_FORMAT.
#define TILE_TOKENS 8
#define FP8_OPERANDS 1
#define WEIGHT_FORMAT 2
#include "weight_only.cuh"

KERNEL(THREADS, 1)
quantize_expert_inputs(
    // x [T, columns], tokens x_stride elements apart; unit fp32 [1]; out e4m3 [T, columns], dense
    const activation_t* x, const float* unit, int columns, int x_stride, unsigned char* out) {
    const int column = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * 8;
    const long long token = blockIdx.x;
    if (column >= columns) return;
    float values[8];
    load_chunk(x + token * x_stride + column, values);
    const float scaling = 1.f / *unit;
    unsigned char* to = out + token * columns;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        u32 word = 0;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float *pair = values + 4 * part + 2 * e;
            word |= (u32)convert_e4m3_pair(pair[0] * scaling, pair[1] * scaling) << 16 * e;
        }
        *(u32*)(to + fp8_place(column + 4 * part)) = word;
    }
}
