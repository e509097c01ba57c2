// Sum of the parts of a product whose columns were split, in their order, and rounded once. A thread owns 4 elements.
//
// Stamped in: THREADS, ACTIVATION_FORMAT.
#include "formats.cuh"

KERNEL(THREADS, 1)
sum_splits(
    // parts [splits, elements]
    const float* parts, int splits, int elements, activation_t* out) {
    const int element = ((int)blockIdx.x * THREADS + (int)threadIdx.x) * 4;
    if (element >= elements) return;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int i = 0; i < splits; i++) {
        const float4 part = *(const float4*)(parts + (long long)i * elements + element);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    *(uint2*)(out + element) = make_uint2((u32)float_to_activation(sum.x) | (u32)float_to_activation(sum.y) << 16,
                                          (u32)float_to_activation(sum.z) | (u32)float_to_activation(sum.w) << 16);
}
