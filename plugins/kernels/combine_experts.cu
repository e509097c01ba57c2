// Weighted sum of the experts' results of each token, in the order of its choices. A thread owns 8 columns of a token.
//
// Stamped in: THREADS, ACTIVATION_FORMAT.
#include "elementwise.cuh"

KERNEL(THREADS, 1)
combine_experts(
    // results [tokens, top_k, columns]; weights fp32 [tokens, top_k]; out [tokens, columns]; all dense
    const activation_t* results, const float* weights, int top_k, int columns, activation_t* out) {
    const long long token = blockIdx.x;
    const int column = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * 8;
    if (column >= columns) return;
    float sums[8] = {};
#pragma unroll 4
    for (int i = 0; i < top_k; i++) {
        float values[8];
        load_chunk(results + (token * top_k + i) * columns + column, values);
        const float weight = weights[token * top_k + i];
#pragma unroll
        for (int e = 0; e < 8; e++) sums[e] += values[e] * weight;
    }
    store_chunk(out + token * columns + column, sums);
}
