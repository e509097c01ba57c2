// Rows of one table copied to rows of another: snapshots that stand, to the checkpoints of their slots.
//
// Stamped in: THREADS, CHUNKS (16-byte chunks of a row).
#include "primitives.cuh"

KERNEL(THREADS, 1)
copy_rows(
    // tables of rows of CHUNKS chunks; row sources[i] of the first becomes row targets[i] of the second
    const uint4* source, const int* sources, const int* targets, uint4* target) {
    const uint4* from = source + (long long)sources[blockIdx.y] * CHUNKS;
    uint4* to = target + (long long)targets[blockIdx.y] * CHUNKS;
    const int stride = (int)gridDim.x * THREADS;
#pragma unroll 4
    for (int i = (int)blockIdx.x * THREADS + (int)threadIdx.x; i < CHUNKS; i += stride) to[i] = from[i];
}
