// Pairs (token, choice) of a mixture of experts: walking over them, and cutting each expert's pairs into tiles.
//
// The build stamps in THREADS.
#pragma once
#include "primitives.cuh"

// Calls use(pair, expert) for the thread's share of pairs `begin` to `end` whose expert exists.
template <class Use>
DEVICE void for_pairs(const long long* ids, int begin, int end, int experts, Use use) {
    constexpr int AT_ONCE = 8;  // loads that are on their way together
    for (int first = begin + (int)threadIdx.x; first < end; first += AT_ONCE * THREADS) {
        long long id[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) id[i] = first + i * THREADS < end ? ids[first + i * THREADS] : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (id[i] >= 0 && id[i] < experts) use(first + i * THREADS, (int)id[i]);
    }
}

// pairs [experts], in shared memory: how many each expert has, then its first place in their order. sums [2, THREADS]:
// for this function. tiles [max_tiles, 3], or null: expert, first place, count, which is 0 behind the last tile.
// Returns how many pairs there are.
DEVICE int cut_into_tiles(int* pairs, int* sums, int experts, int tile_tokens, int max_tiles, int* tiles) {
    const int tid = (int)threadIdx.x, share = (experts + THREADS - 1) / THREADS, begin = tid * share;
    const int end = begin + share < experts ? begin + share : experts;
    int own_pairs = 0, own_tiles = 0;
    for (int e = begin; e < end; e++) own_pairs += pairs[e], own_tiles += (pairs[e] + tile_tokens - 1) / tile_tokens;
    sums[tid] = own_pairs, sums[THREADS + tid] = own_tiles;
    sync_threads();
    for (int distance = 1; distance < THREADS; distance *= 2) {
        const int more_pairs = tid >= distance ? sums[tid - distance] : 0;
        const int more_tiles = tid >= distance ? sums[THREADS + tid - distance] : 0;
        sync_threads();
        sums[tid] += more_pairs, sums[THREADS + tid] += more_tiles;
        sync_threads();
    }
    int first = sums[tid] - own_pairs, tile = sums[THREADS + tid] - own_tiles;
    for (int e = begin; e < end; e++) {
        const int count = pairs[e];
        for (int done = 0; tiles && done < count; done += tile_tokens, tile++) {
            tiles[3 * tile] = e, tiles[3 * tile + 1] = first + done;
            tiles[3 * tile + 2] = count - done < tile_tokens ? count - done : tile_tokens;
        }
        pairs[e] = first;
        first += count;
    }
    for (int i = sums[2 * THREADS - 1] + tid; tiles && i < max_tiles; i += THREADS) tiles[3 * i + 2] = 0;
    sync_threads();
    return sums[THREADS - 1];
}
