// RMS norm of rows, optionally of the sum of two tensors, which it also returns: the residual addition before a block
// and the norm in front of it in one pass. The second tensor may come as fp32 parts of a matrix product whose depth was
// divided, to be added up and rounded first. A block serves one row. See runtime/functional_ops.py.
//
// Stamped in: COLUMNS, THREADS, HAS_ADDEND, ADDEND_PARTS (0 if the addend is one tensor), ZERO_CENTERED,
// STORES_WIDE and STORES_NARROW (see narrow.cuh), ACTIVATION_FORMAT, SHARED_BYTES.
#include "narrow.cuh"

constexpr int CHUNKS = COLUMNS / 8, ITEMS = (CHUNKS + THREADS - 1) / THREADS, WARPS = THREADS / 32;
static_assert(SHARED_BYTES >= WARPS * 4, "one partial sum per warp");

KERNEL(THREADS, 1)
rms_norm(
    // x, addend [T, COLUMNS], tokens *_stride elements apart; weight fp32 [COLUMNS]; out, sum [T, COLUMNS], dense. With
    // ADDEND_PARTS, addend is fp32 [ADDEND_PARTS, T, COLUMNS], parts addend_stride elements apart.
    const activation_t* x, const activation_t* addend, const float* weight, int eps_bits, int x_stride,
    int addend_stride, activation_t* out, activation_t* sum, const float* narrow_scale, u8* narrow) {
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
            float other[8] = {};
            if constexpr (ADDEND_PARTS == 0) load_chunk(addend + token * addend_stride + chunk * 8, other);
#pragma unroll
            for (int p = 0; p < ADDEND_PARTS; p++) {
                float part[8];
                load_weights((const float*)addend + (long long)p * addend_stride + token * COLUMNS + chunk * 8, part);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    other[e] += part[e];
                    if (p == ADDEND_PARTS - 1) other[e] = rounded(other[e]);
                }
            }
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
        store_outputs(out, narrow, narrow_scale, token * COLUMNS + chunk * 8, values[i]);
    }
}
