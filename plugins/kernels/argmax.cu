// The largest number of a row and where it stands: of equal ones the first, and a NaN before all others. A block serves
// one row. See runtime/sampling.py.
//
// Stamped in: COLUMNS, THREADS, ITEMS (chunks that a thread asks for before it looks at the first), SHARED_BYTES.
#include "primitives.cuh"

constexpr int CHUNKS = COLUMNS / 4, WARPS = THREADS / 32;
static_assert(COLUMNS % 4 == 0 && SHARED_BYTES >= WARPS * 8, "whole chunks; a number and a place per warp");

struct Largest {
    float value;
    int place;
};

// Whether `value`, which stands behind `than` or not, goes before it.
DEVICE bool goes_before(float value, int place, const Largest& than) {
    const bool nan = value != value, other = than.value != than.value;
    if (nan || other) return nan && (!other || place < than.place);
    return value > than.value || (value == than.value && place < than.place);
}

KERNEL(THREADS, 1)
argmax(
    // x fp32 [rows, COLUMNS], dense; values fp32 [rows]; places int64 [rows]
    const float* x, float* values, long long* places) {
    DYNAMIC_SHARED(memory);
    Largest* partial = (Largest*)memory;
    const int tid = threadIdx.x;
    const float4* row = (const float4*)(x + (long long)blockIdx.x * COLUMNS);
    Largest found = {-INFINITY, 0x7fffffff};
    // From the end on: what the product before this wrote last is still in the cache, and reading the row from its
    // beginning would drive it out.
    constexpr int ROUND = ITEMS * THREADS;
    for (int begin = (CHUNKS - 1) / ROUND * ROUND + tid; begin >= 0; begin -= ROUND) {
        float4 chunks[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (begin + i * THREADS < CHUNKS) chunks[i] = row[begin + i * THREADS];
#pragma unroll
        for (int i = ITEMS - 1; i >= 0; i--) {
            if (begin + i * THREADS >= CHUNKS) continue;
            const float parts[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
            const int place = 4 * (begin + i * THREADS);
#pragma unroll
            for (int e = 3; e >= 0; e--)  // earlier ones replace what is not larger, a NaN everything
                if (parts[e] >= found.value || parts[e] != parts[e]) found = {parts[e], place + e};
        }
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        const float value = shuffle_xor(found.value, mask);
        const int place = (int)float_to_bits(shuffle_xor(bits_to_float((u32)found.place), mask));
        if (goes_before(value, place, found)) found = {value, place};
    }
    if (tid % 32 == 0) partial[tid / 32] = found;
    sync_threads();
    if (tid > 0) return;
    for (int w = 1; w < WARPS; w++)
        if (goes_before(partial[w].value, partial[w].place, found)) found = partial[w];
    values[blockIdx.x] = found.value;
    places[blockIdx.x] = found.place == 0x7fffffff ? 0 : found.place;  // nothing above -infinity
}
