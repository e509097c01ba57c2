// RMS norm of rows, optionally of the sum of two tensors, which it also returns: the residual addition before a block
// and the norm in front of it in one pass. A block serves one row. See runtime/functional_ops.py.
//
// Stamped in: COLUMNS, THREADS, HAS_ADDEND, ZERO_CENTERED, ACTIVATION_FORMAT, SHARED_BYTES.
#include "elementwise.cuh"

constexpr int CHUNKS = COLUMNS / 8, ITEMS = (CHUNKS + THREADS - 1) / THREADS, WARPS = THREADS / 32;
static_assert(SHARED_BYTES >= WARPS * 4, "one partial sum per warp");

KERNEL(THREADS, 1)
rms_norm(
    // x, addend [T, COLUMNS], tokens *_stride elements apart; weight fp32 [COLUMNS]; out, sum [T, COLUMNS], dense
    const activation_t* x, const activation_t* addend, const float* weight, int eps_bits, int x_stride,
    int addend_stride, activation_t* out, activation_t* sum) {
    DYNAMIC_SHARED(memory);
    float* partial = (float*)memory;
    const int tid = threadIdx.x;
    const long long token = blockIdx.x;
    float values[ITEMS][8], weights[ITEMS][8];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = tid + i * THREADS;
        if (chunk >= CHUNKS) continue;
        load_chunk(x + token * x_stride + chunk * 8, values[i]);
        load_weights(weight + chunk * 8, weights[i]);  // here, so that it is not waited for after the sum
        if constexpr (HAS_ADDEND) {
            float other[8];
            load_chunk(addend + token * addend_stride + chunk * 8, other);
#pragma unroll
            for (int e = 0; e < 8; e++) values[i][e] = rounded(values[i][e] + other[e]);
            store_chunk(sum + token * COLUMNS + chunk * 8, values[i]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++) squares += values[i][e] * values[i][e];
    }
    squares = warp_sum(squares);
    if (tid % 32 == 0) partial[tid / 32] = squares;
    sync_threads();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += partial[w];
    const float scale = rsqrtf(total / COLUMNS + bits_to_float((u32)eps_bits));
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = tid + i * THREADS;
        if (chunk >= CHUNKS) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) values[i][e] *= scale * (ZERO_CENTERED ? 1.f + weights[i][e] : weights[i][e]);
        store_chunk(out + token * COLUMNS + chunk * 8, values[i]);
    }
}
