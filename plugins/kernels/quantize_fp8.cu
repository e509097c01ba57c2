// Activations as e4m3 numbers in units of a scale, saturating. A thread owns 8 columns of a token.
//
// Stamped in: THREADS, COLUMNS, ACTIVATION_FORMAT.
#include "elementwise.cuh"

#define STATE_FORMAT FORMAT_FP8  // for what it says of e4m3
#include "state_formats.cuh"

KERNEL(THREADS, 1)
quantize_fp8(
    // x [T, COLUMNS], tokens x_stride elements apart; scale fp32 [1]; out e4m3 [T, COLUMNS], dense
    const activation_t* x, const float* scale, int x_stride, unsigned char* out) {
    const int column = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * 8;
    const long long token = blockIdx.x;
    if (column >= COLUMNS) return;
    const float unit = scale[0];
    float values[8];
    u32 words[2] = {0, 0};
    load_chunk(x + token * x_stride + column, values);
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float value = values[e] / unit, clamped = value > 448.f ? 448.f : value < -448.f ? -448.f : value;
        words[e / 4] |= (value != value ? 0x7fu : float_to_e4m3(clamped)) << 8 * (e % 4);
    }
    *(uint2*)(out + token * COLUMNS + column) = make_uint2(words[0], words[1]);
}
