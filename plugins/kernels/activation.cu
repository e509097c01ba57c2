// Activations of an MLP or an attention output, with the product that follows. A thread owns 8 columns of one head.
//
// Stamped in: HEADS, COLUMNS (of a head), THREADS, ACTIVATION (0: silu(x) * y, 1: x * sigmoid(y), 2: relu(x)^2),
// STORES_WIDE and STORES_NARROW (see narrow.cuh), ACTIVATION_FORMAT.
#include "narrow.cuh"

constexpr int CHUNKS = COLUMNS / 8;

KERNEL(THREADS, 1)
activation(
    // x, y [T, HEADS, COLUMNS], tokens and heads *_stride elements apart, y null for relu(x)^2; out dense
    const activation_t* x, const activation_t* y, int x_stride, int x_head_stride, int y_stride, int y_head_stride,
    activation_t* out, const float* narrow_scale, u8* narrow) {
    const int index = (int)blockIdx.y * THREADS + (int)threadIdx.x;
    const long long token = blockIdx.x;
    if (index >= HEADS * CHUNKS) return;
    const int head = index / CHUNKS, column = index % CHUNKS * 8;
    float values[8], others[8];
    load_chunk(x + token * x_stride + head * x_head_stride + column, values);
    if constexpr (ACTIVATION != 2) load_chunk(y + token * y_stride + head * y_head_stride + column, others);
#pragma unroll
    for (int e = 0; e < 8; e++) {
        if constexpr (ACTIVATION == 0) values[e] = rounded(values[e] * sigmoid_side_by_side(values[e])) * others[e];
        if constexpr (ACTIVATION == 1) values[e] *= rounded(sigmoid_side_by_side(others[e]));
        if constexpr (ACTIVATION == 2) {
            const float positive = values[e] > 0.f || values[e] != values[e] ? values[e] : 0.f;
            values[e] = positive * positive;
        }
    }
    store_outputs(out, narrow, narrow_scale, (token * HEADS + head) * COLUMNS + column, values);
}
