// First of two kernels that do for many pairs what route_experts.cu does for few: a block counts its share of the pairs
// by expert. A multiprocessor adds to shared memory one word at a time, so the blocks share the work.
//
// Stamped in: THREADS.
#include "expert_tiles.cuh"

KERNEL(THREADS, 1)
count_experts(
    // ids [pairs]; pairs of a block
    const long long* ids, int pairs, int experts, int share,
    // ranks [pairs]: of a pair among those of its expert in its block; counts [blocks, experts]
    int* ranks, int* counts) {
    DYNAMIC_SHARED(memory);
    int* count = (int*)memory;  // [experts]
    const int tid = (int)threadIdx.x, begin = (int)blockIdx.x * share, end = begin + share < pairs ? begin + share : pairs;
    for (int e = tid; e < experts; e += THREADS) count[e] = 0;
    sync_threads();
    for_pairs(ids, begin, end, experts, [&](int pair, int expert) { ranks[pair] = atomic_add(count + expert, 1); });
    sync_threads();
    for (int e = tid; e < experts; e += THREADS) counts[(int)blockIdx.x * experts + e] = count[e];
}
