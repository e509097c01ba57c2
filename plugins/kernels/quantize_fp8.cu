// Activations as e4m3 numbers in units of a scale, saturating. A thread owns 8 columns of a token.
//
// Stamped in: THREADS, COLUMNS, ACTIVATION_FORMAT.
#include "narrow.cuh"

KERNEL(THREADS, 1)
quantize_fp8(
    // x [T, COLUMNS], tokens x_stride elements apart; scale fp32 [1]; out e4m3 [T, COLUMNS], dense
    const activation_t* x, const float* scale, int x_stride, u8* out) {
    const int column = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * 8;
    const long long token = blockIdx.x;
    if (column >= COLUMNS) return;
    float values[8];
    load_chunk(x + token * x_stride + column, values);
    store_narrow_chunk(out + token * COLUMNS + column, values, *scale);
}
