// Sorts the pairs (token, choice) of a mixture of experts by expert and cuts each expert's pairs into tiles, in one block.
//
// The order within an expert is that of arrival, which changes from run to run and changes nothing: a pair is a column of
// a matrix product of its own. Pairs of an expert that does not exist are left out.
//
// One multiprocessor stores single words slowly to places all over memory, so the order is made in shared memory (staged)
// where it fits, which the host has made large enough then.
//
// Stamped in: THREADS.
#include "primitives.cuh"

// Calls use(pair, expert) for the thread's share of the pairs whose expert exists.
template <class Use>
DEVICE void for_pairs(const long long* ids, int pairs, int experts, Use use) {
    constexpr int AT_ONCE = 8;  // loads that are on their way together
    for (int first = (int)threadIdx.x; first < pairs; first += AT_ONCE * THREADS) {
        long long id[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) id[i] = first + i * THREADS < pairs ? ids[first + i * THREADS] : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (id[i] >= 0 && id[i] < experts) use(first + i * THREADS, (int)id[i]);
    }
}

KERNEL(THREADS, 1)
route_experts(
    // ids [pairs]
    const long long* ids, int pairs, int experts, int tile_tokens, int max_tiles, int staged,
    // order [pairs]; tiles [max_tiles, 3]: expert, first of `order`, count, which is 0 behind the last tile
    int* order, int* tiles) {
    DYNAMIC_SHARED(memory);
    int* next = (int*)memory;           // [experts]: counts, then the next free place of each expert
    int* sums = next + experts;         // [2, THREADS]: pairs and tiles of the experts up to a thread's
    const int tid = (int)threadIdx.x;
    for (int e = tid; e < experts; e += THREADS) next[e] = 0;
    sync_threads();
    for_pairs(ids, pairs, experts, [&](int, int expert) { atomic_add(next + expert, 1); });
    sync_threads();
    const int share = (experts + THREADS - 1) / THREADS, begin = tid * share;
    const int end = begin + share < experts ? begin + share : experts;
    int own_pairs = 0, own_tiles = 0;
    for (int e = begin; e < end; e++) own_pairs += next[e], own_tiles += (next[e] + tile_tokens - 1) / tile_tokens;
    sums[tid] = own_pairs, sums[THREADS + tid] = own_tiles;
    sync_threads();
    for (int distance = 1; distance < THREADS; distance *= 2) {
        const int more_pairs = tid >= distance ? sums[tid - distance] : 0;
        const int more_tiles = tid >= distance ? sums[THREADS + tid - distance] : 0;
        sync_threads();
        sums[tid] += more_pairs, sums[THREADS + tid] += more_tiles;
        sync_threads();
    }
    const int placed = sums[THREADS - 1];
    int first = sums[tid] - own_pairs, tile = sums[THREADS + tid] - own_tiles;
    for (int e = begin; e < end; e++) {
        const int count = next[e];
        for (int done = 0; done < count; done += tile_tokens, tile++) {
            tiles[3 * tile] = e, tiles[3 * tile + 1] = first + done;
            tiles[3 * tile + 2] = count - done < tile_tokens ? count - done : tile_tokens;
        }
        next[e] = first;
        first += count;
    }
    for (int i = sums[2 * THREADS - 1] + tid; i < max_tiles; i += THREADS) tiles[3 * i + 2] = 0;
    sync_threads();
    int* made = staged ? sums + 2 * THREADS : order;
    for_pairs(ids, pairs, experts, [&](int pair, int expert) { made[atomic_add(next + expert, 1)] = pair; });
    if (!staged) return;
    sync_threads();
    for (int i = tid; i < placed; i += THREADS) order[i] = made[i];
}
