// RMS norm of every head and the rotation of its first ROPE_DIM entries by the token's position, of one tensor or of
// queries and keys together. A warp serves one head of one token. See runtime/functional_ops.py.
//
// Stamped in: HEADS, SECOND_HEADS (0 for one tensor), HEAD_DIM, ROPE_DIM, THREADS, ZERO_CENTERED, ACTIVATION_FORMAT,
// SHARED_BYTES.
#include "elementwise.cuh"

constexpr int CHUNKS = HEAD_DIM / 8, ITEMS = (CHUNKS + 31) / 32, WARPS = THREADS / 32;
static_assert(SHARED_BYTES >= WARPS * HEAD_DIM * 4, "a head per warp");

KERNEL(THREADS, 1)
norm_rope(
    // x [T, HEADS, HEAD_DIM], tokens and heads *_stride elements apart; weight fp32 [HEAD_DIM]; second_* likewise;
    // frequencies fp32 [ROPE_DIM / 2]; positions [T]; out [T, HEADS, HEAD_DIM], dense
    const activation_t* x, const activation_t* second_x, const float* weight, const float* second_weight,
    const float* frequencies, const int* positions, int eps_bits, int x_stride, int head_stride, int second_stride,
    int second_head_stride, activation_t* out, activation_t* second_out) {
    DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, any_head = (int)blockIdx.y * WARPS + warp;
    const long long token = blockIdx.x;
    float* normed = (float*)memory + warp * HEAD_DIM;
    if (any_head >= HEADS + SECOND_HEADS) return;
    const bool second = any_head >= HEADS;
    const int head = second ? any_head - HEADS : any_head;
    const activation_t* from = second ? second_x + token * second_stride + head * second_head_stride
                                      : x + token * x_stride + head * head_stride;
    activation_t* to = second ? second_out + (token * SECOND_HEADS + head) * HEAD_DIM
                              : out + (token * HEADS + head) * HEAD_DIM;
    const float* scales = second ? second_weight : weight;
    float values[ITEMS][8];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = lane + i * 32;
        if (chunk >= CHUNKS) continue;
        load_chunk(from + chunk * 8, values[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) squares += values[i][e] * values[i][e];
    }
    const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + bits_to_float((u32)eps_bits));
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = lane + i * 32;
        if (chunk >= CHUNKS) continue;
        float weights[8];
        load_weights(scales + chunk * 8, weights);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            // Rounded here because the norm's output is an activation of its own.
            values[i][e] = rounded(values[i][e] * scale * (ZERO_CENTERED ? 1.f + weights[e] : weights[e]));
            normed[chunk * 8 + e] = values[i][e];
        }
    }
    sync_warp();
    const float position = (float)positions[token];
    for (int i = lane; i < ROPE_DIM / 2; i += 32) {
        const float angle = position * frequencies[i], c = cosf(angle), s = sinf(angle);
        const float first = normed[i], second = normed[i + ROPE_DIM / 2];
        normed[i] = first * c - second * s;
        normed[i + ROPE_DIM / 2] = second * c + first * s;
    }
    sync_warp();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = lane + i * 32;
        if (chunk >= CHUNKS) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) values[i][e] = normed[chunk * 8 + e];
        store_chunk(to + chunk * 8, values[i]);
    }
}
