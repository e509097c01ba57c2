// RMS norm of groups along a row and a gate silu(z), before the norm (Nemotron-H) or after it (Qwen). A warp serves one
// group of one token. See runtime/functional_ops.py.
//
// Stamped in: COLUMNS, GROUP_COLUMNS, WEIGHT_COLUMNS, THREADS, GATE_FIRST, ACTIVATION_FORMAT.
#include "elementwise.cuh"

constexpr int GROUPS = COLUMNS / GROUP_COLUMNS, CHUNKS = GROUP_COLUMNS / 8, ITEMS = (CHUNKS + 31) / 32;

KERNEL(THREADS, 1)
gated_rms_norm(
    // x, z [T, COLUMNS], tokens *_stride elements apart; weight fp32 [WEIGHT_COLUMNS]; out [T, COLUMNS], dense
    const activation_t* x, const activation_t* z, const float* weight, int eps_bits, int x_stride, int z_stride,
    activation_t* out) {
    const int lane = threadIdx.x % 32, group = (int)blockIdx.y * (THREADS / 32) + (int)threadIdx.x / 32;
    const long long token = blockIdx.x;
    if (group >= GROUPS) return;
    const int first = group * GROUP_COLUMNS;
    float values[ITEMS][8], gates[ITEMS][8];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = lane + i * 32;
        if (chunk >= CHUNKS) continue;
        load_chunk(x + token * x_stride + first + chunk * 8, values[i]);
        load_chunk(z + token * z_stride + first + chunk * 8, gates[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            gates[i][e] *= sigmoid(gates[i][e]);
            if constexpr (GATE_FIRST) values[i][e] *= gates[i][e];
            squares += values[i][e] * values[i][e];
        }
    }
    const float scale = rsqrtf(warp_sum(squares) / GROUP_COLUMNS + bits_to_float((u32)eps_bits));
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = lane + i * 32;
        if (chunk >= CHUNKS) continue;
        float weights[8];
        load_weights(weight + first % WEIGHT_COLUMNS + chunk * 8, weights);
#pragma unroll
        for (int e = 0; e < 8; e++) values[i][e] *= scale * weights[e] * (GATE_FIRST ? 1.f : gates[i][e]);
        store_chunk(out + token * COLUMNS + first + chunk * 8, values[i]);
    }
}
