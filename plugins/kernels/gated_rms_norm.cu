// RMS norm of groups along a row and a gate silu(z), before the norm (Nemotron-H) or after it (Qwen). LANES threads
// share a group of one token: part of a warp, a warp, or a block of several. See runtime/functional_ops.py.
//
// Stamped in: COLUMNS, GROUP_COLUMNS, WEIGHT_COLUMNS, THREADS, LANES, GATE_FIRST, STORES_WIDE and STORES_NARROW (see
// narrow.cuh), ACTIVATION_FORMAT, SHARED_BYTES.
#include "narrow.cuh"

constexpr int GROUPS = COLUMNS / GROUP_COLUMNS, CHUNKS = GROUP_COLUMNS / 8;
constexpr int ITEMS = (CHUNKS + LANES - 1) / LANES;
static_assert(LANES <= 32 || THREADS == LANES, "a block of its own where several warps share a group");
static_assert(SHARED_BYTES >= LANES / 32 * 4, "one partial sum per warp");

KERNEL(THREADS, 1)
gated_rms_norm(
    // x, z [T, COLUMNS], tokens *_stride elements apart; weight fp32 [WEIGHT_COLUMNS]; out [T, COLUMNS], dense
    const activation_t* x, const activation_t* z, const float* weight, int eps_bits, int x_stride, int z_stride,
    activation_t* out, const float* narrow_scale, u8* narrow) {
    DYNAMIC_SHARED(memory);
    float* partial = (float*)memory;
    const int lane = threadIdx.x % LANES, group = (int)blockIdx.y * (THREADS / LANES) + (int)threadIdx.x / LANES;
    const long long token = blockIdx.x;
    const bool exists = group < GROUPS;  // none may leave: lanes of a warp add up together
    const int first = group * GROUP_COLUMNS;
    float values[ITEMS][8], gates[ITEMS][8], weights[ITEMS][8];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = lane + i * LANES;
        if (!exists || chunk >= CHUNKS) continue;
        load_chunk(x + token * x_stride + first + chunk * 8, values[i]);
        load_chunk(z + token * z_stride + first + chunk * 8, gates[i]);
        load_weights(weight + first % WEIGHT_COLUMNS + chunk * 8, weights[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            gates[i][e] *= sigmoid_side_by_side(gates[i][e]);
            if constexpr (GATE_FIRST) values[i][e] *= gates[i][e];
            squares += values[i][e] * values[i][e];
        }
    }
#pragma unroll
    for (int mask = LANES < 32 ? LANES / 2 : 16; mask; mask /= 2) squares += shuffle_xor(squares, mask);
    if constexpr (LANES > 32) {
        if (lane % 32 == 0) partial[lane / 32] = squares;
        sync_threads();
        squares = 0.f;
#pragma unroll
        for (int w = 0; w < LANES / 32; w++) squares += partial[w];
    }
    const float scale = rsqrtf(squares / GROUP_COLUMNS + bits_to_float((u32)eps_bits));
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int chunk = lane + i * LANES;
        if (!exists || chunk >= CHUNKS) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) values[i][e] *= scale * weights[i][e] * (GATE_FIRST ? 1.f : gates[i][e]);
        store_outputs(out, narrow, narrow_scale, token * COLUMNS + first + chunk * 8, values[i]);
    }
}
