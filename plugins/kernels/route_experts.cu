// Sorts the pairs (token, choice) of a mixture of experts by expert and cuts each expert's pairs into tiles, in one
// block: for few pairs. See count_experts.cu for many.
//
// The order within an expert is that of arrival, which changes from run to run and changes nothing: a pair is a column
// of a matrix product of its own. Pairs of an expert that does not exist are left out.
//
// One multiprocessor stores single words slowly to places all over memory, so the order is made in shared memory.
//
// Stamped in: THREADS.
#include "expert_tiles.cuh"

KERNEL(THREADS, 1)
route_experts(
    // ids [pairs]
    const long long* ids, int pairs, int experts, int tile_tokens, int max_tiles,
    // order [pairs]; tiles [max_tiles, 3]: see cut_into_tiles
    int* order, int* tiles) {
    DYNAMIC_SHARED(memory);
    int* next = (int*)memory;               // [experts]: counts, then the next free place of each expert
    int* sums = next + experts;             // [2, THREADS]
    int* made = sums + 2 * THREADS;         // [pairs]
    const int tid = (int)threadIdx.x;
    for (int e = tid; e < experts; e += THREADS) next[e] = 0;
    sync_threads();
    for_pairs(ids, 0, pairs, experts, [&](int, int expert) { atomic_add(next + expert, 1); });
    sync_threads();
    const int placed = cut_into_tiles(next, sums, experts, tile_tokens, max_tiles, tiles);
    for_pairs(ids, 0, pairs, experts, [&](int pair, int expert) { made[atomic_add(next + expert, 1)] = pair; });
    sync_threads();
    for (int i = tid; i < placed; i += THREADS) order[i] = made[i];
}
