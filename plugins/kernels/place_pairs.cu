// Second kernel behind count_experts.cu: a block places its share of the pairs, the first one writes the tiles.
//
// Stamped in: THREADS.
#include "expert_tiles.cuh"

KERNEL(THREADS, 1)
place_pairs(
    // as count_experts took and left them
    const long long* ids, const int* ranks, const int* counts, int pairs, int experts, int share, int tile_tokens,
    int max_tiles,
    // order [pairs]; tiles [max_tiles, 3]: see cut_into_tiles
    int* order, int* tiles) {
    DYNAMIC_SHARED(memory);
    int* places = (int*)memory;      // [experts]: of all blocks' pairs
    int* before = places + experts;  // [experts]: pairs of the blocks before this one
    int* sums = before + experts;    // [2, THREADS]
    const int block = (int)blockIdx.x, blocks = (int)gridDim.x, begin = block * share;
    for (int e = (int)threadIdx.x; e < experts; e += THREADS) {
        int own = 0, all = 0;
#pragma unroll 8
        for (int b = 0; b < blocks; b++) {
            const int count = counts[b * experts + e];
            all += count, own += b < block ? count : 0;
        }
        places[e] = all, before[e] = own;
    }
    sync_threads();
    cut_into_tiles(places, sums, experts, tile_tokens, max_tiles, block == 0 ? tiles : nullptr);
    for_pairs(ids, begin, begin + share < pairs ? begin + share : pairs, experts,
              [&](int pair, int expert) { order[places[expert] + before[expert] + ranks[pair]] = pair; });
}
