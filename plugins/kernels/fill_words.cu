// Words set to one value: what a memset node of a CUDA graph does, as a kernel (runtime/graph_memsets.py).
//
// Stamped in: THREADS.
#include "primitives.cuh"

KERNEL(THREADS, 1)
fill_words(int value, int count, unsigned* out) {
    const int stride = (int)gridDim.x * THREADS;
    for (int i = (int)blockIdx.x * THREADS + (int)threadIdx.x; i < count; i += stride) out[i] = (unsigned)value;
}
