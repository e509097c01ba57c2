// The names of plugins/kernels/primitives.cuh on the host: one fiber per CUDA thread, warp and block operations as
// rendezvous. Asynchronous copies land only when they are waited for, shared memory starts as NaN, threads run in random
// order between rendezvous and blocks in random order, so that missing waits and barriers show as wrong results.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

typedef uint32_t u32;
typedef uint16_t u16;
typedef unsigned long long u64;
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL(threads, min_ctas) static void
#define DYNAMIC_SHARED(name) unsigned char* name = emulation::shared_memory

#define FORMAT_FP32 0
#define FORMAT_FP16 1
#define FORMAT_BF16 2

namespace emulation {
struct Index { int x, y, z; };
struct Rendezvous {
    int arrived = 0, generation = 0;
};
struct Warp {
    Rendezvous meeting;
    const char* operation = nullptr;
    u32 in[2][32][6];
};
struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool started, done;
    std::vector<char> stack;
    std::vector<std::function<void()>> copies;
    std::vector<size_t> groups;  // ends of the committed groups in `copies`
};
extern unsigned char* shared_memory;
unsigned char* shared_memory;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Rendezvous block_meeting, group_meetings[16];
jmp_buf scheduler;
int current, threads;
std::function<void()> body;
std::mt19937 random_engine;
struct BulkCopy { void* to; const void* from; u32 bytes; u64* barrier; };
std::vector<BulkCopy> bulk;

inline void yield() {
    if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}
inline void meet(Rendezvous& meeting, int expected) {
    const int generation = meeting.generation;
    if (++meeting.arrived == expected) {
        meeting.arrived = 0;
        meeting.generation++;
        return;
    }
    while (meeting.generation == generation) yield();
}
inline void entry() {
    body();
    fibers[current].done = true;
    _longjmp(scheduler, 1);
}
inline void run_block() {
    for (Fiber& fiber : fibers) fiber.started = fiber.done = false, fiber.groups.clear(), fiber.copies.clear();
    for (Warp& warp : warps) warp = Warp();
    block_meeting = Rendezvous();
    for (Rendezvous& meeting : group_meetings) meeting = Rendezvous();
    bulk.clear();
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    for (long round = 0;; round++) {
        if (round > 10000000) { std::fprintf(stderr, "emulation: deadlock\n"); std::abort(); }
        std::shuffle(order.begin(), order.end(), random_engine);
        bool any = false;
        for (int i : order) {
            Fiber& fiber = fibers[i];
            if (fiber.done) continue;
            any = true;
            current = i;
            if (_setjmp(scheduler)) continue;
            if (fiber.started) _longjmp(fiber.at, 1);
            fiber.started = true;
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = fiber.stack.data();
            fiber.start.uc_stack.ss_size = fiber.stack.size();
            fiber.start.uc_link = nullptr;
            makecontext(&fiber.start, (void (*)())entry, 0);
            setcontext(&fiber.start);
        }
        if (!any) break;
    }
}
}  // namespace emulation

struct ThreadIndex {
    struct X { operator int() const { return emulation::current; } } x;
};
static ThreadIndex threadIdx;
static emulation::Index blockIdx, gridDim;

namespace emulation {
inline void run_grid(int grid_x, int grid_y, int grid_z, int block, int shared_bytes, unsigned seed) {
    random_engine.seed(seed);
    threads = block;
    fibers.resize(block);
    for (Fiber& fiber : fibers) fiber.stack.resize(256 * 1024);
    warps.resize(block / 32);
    std::vector<u32> memory(shared_bytes / 4 + 64);
    shared_memory = (unsigned char*)(((uintptr_t)memory.data() + 127) / 128 * 128);
    std::vector<int> order(grid_x * grid_y * grid_z);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_engine);
    gridDim = {grid_x, grid_y, grid_z};
    for (int i : order) {
        std::fill(memory.begin(), memory.end(), 0x7fc07fc0u);  // NaN as fp32, bf16 and fp16
        blockIdx = {i % grid_x, i / grid_x % grid_y, i / grid_x / grid_y};
        run_block();
    }
}
// Every lane gives `words`; when all have, `use` may read all lanes' words.
template <class Use>
inline auto exchange(const char* operation, std::initializer_list<u32> words, Use use) {
    Warp& warp = warps[current / 32];
    const int slot = warp.meeting.generation % 2, lane = current % 32;
    if (warp.meeting.arrived == 0) warp.operation = operation;
    if (std::strcmp(warp.operation, operation)) {
        std::fprintf(stderr, "emulation: diverged warp: %s and %s\n", warp.operation, operation);
        std::abort();
    }
    int i = 0;
    for (u32 word : words) warp.in[slot][lane][i++] = word;
    meet(warp.meeting, 32);
    return use(warp.in[slot], lane);
}
}  // namespace emulation

DEVICE float bits_to_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
DEVICE u32 float_to_bits(float value) { u32 b; std::memcpy(&b, &value, 4); return b; }
DEVICE float multiply(float a, float b) { return a * b; }
DEVICE float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE u16 float_to_bf16(float value) {
    const u32 bits = float_to_bits(value);
    if (value != value) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEVICE u32 pack_bf16(float low, float high) { return (u32)float_to_bf16(low) | (u32)float_to_bf16(high) << 16; }
DEVICE u16 float_to_fp16(float value) { const _Float16 h = (_Float16)value; u16 b; std::memcpy(&b, &h, 2); return b; }
DEVICE u32 pack_fp16(float low, float high) { return (u32)float_to_fp16(low) | (u32)float_to_fp16(high) << 16; }
DEVICE float fp16_to_float(u16 bits);
DEVICE u32 pack_fp16_cut(float low, float high) {
    auto cut = [](float value) -> u32 {
        const u16 nearest = float_to_fp16(value);
        return nearest - (std::fabs(fp16_to_float(nearest)) > std::fabs(value));
    };
    return cut(low) | cut(high) << 16;
}
DEVICE float fp16_to_float(u16 bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }

DEVICE u32 multiply_fp16(u32 a, u32 b) {
    const u16 low = float_to_fp16(fp16_to_float((u16)a) * fp16_to_float((u16)b));
    return low | (u32)float_to_fp16(fp16_to_float((u16)(a >> 16)) * fp16_to_float((u16)(b >> 16))) << 16;
}

DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
    if ((uintptr_t)shared % 16 || (valid && (uintptr_t)global % 16)) {
        std::fprintf(stderr, "emulation: misaligned 16-byte copy to %p from %p\n", shared, global);
        std::abort();
    }
    emulation::fibers[emulation::current].copies.push_back([=] {
        if (valid) std::memcpy(shared, global, 16); else std::memset(shared, 0, 16);
    });
}
DEVICE u32 shared_address(const void* pointer) { return (u32)((const unsigned char*)pointer - emulation::shared_memory); }
DEVICE u32 both_halves(u32 pair, bool high) { return (high ? pair >> 16 : pair & 0xffffu) * 0x10001u; }
DEVICE void copy_async_16_if(bool wanted, void* shared, const void* global, bool valid) {
    if (wanted) copy_async_16(shared, global, valid);
}
DEVICE void copy_async_16_to(u32 shared, const void* global, bool valid) {
    copy_async_16(emulation::shared_memory + shared, global, valid);
}
DEVICE void copy_async_commit() {
    auto& fiber = emulation::fibers[emulation::current];
    fiber.groups.push_back(fiber.copies.size());
}
template <int COUNT>
DEVICE void copy_async_wait_but() {
    auto& fiber = emulation::fibers[emulation::current];
    if (fiber.groups.size() <= COUNT) return;
    for (size_t i = 0; i < fiber.groups[fiber.groups.size() - 1 - COUNT]; i++) {
        if (fiber.copies[i]) fiber.copies[i]();
        fiber.copies[i] = nullptr;
    }
}
DEVICE void copy_async_wait_but_last() { copy_async_wait_but<1>(); }
DEVICE void copy_async_wait() {
    auto& fiber = emulation::fibers[emulation::current];
    for (auto& copy : fiber.copies)
        if (copy) copy();
    fiber.copies.clear();
    fiber.groups.clear();
}
// The whole range is read, so that an address outside of the tensors is found.
static volatile unsigned char prefetched;
DEVICE void prefetch(const void* global, u32 bytes) {
    if (bytes % 16 || (uintptr_t)global % 16) { std::fprintf(stderr, "emulation: bad prefetch\n"); std::abort(); }
    for (u32 i = 0; i < bytes; i++) prefetched = ((const unsigned char*)global)[i];
}
DEVICE void prefetch_sector(const void* global, bool wanted = true) {
    if (wanted) prefetched = *(const unsigned char*)global;
}
DEVICE void disturb() {}
DEVICE void hold_until_here(u32&) {}
DEVICE void store_if(bool wanted, void* global, uint4 value) {
    if (wanted) *(uint4*)global = value;
}
DEVICE void prefetch_line(const void* global) { prefetched = *(const unsigned char*)global; }
DEVICE void wait_for_previous_grid() {}
DEVICE void let_next_grid_start() {}
DEVICE long long offset_of(int index, int stride) { return (long long)index * stride; }
DEVICE void bulk_copy_start(void* shared, const void* global, u32 bytes, u64* barrier) {
    if (bytes % 16 || (uintptr_t)global % 16) { std::fprintf(stderr, "emulation: bad bulk copy\n"); std::abort(); }
    emulation::bulk.push_back({shared, global, bytes, barrier});
}
DEVICE void bulk_copies_start(void* first, const void* from, u32 bytes, void* second, const void* from_second,
                              u32 bytes_second, u64* barrier) {
    bulk_copy_start(first, from, bytes, barrier);
    bulk_copy_start(second, from_second, bytes_second, barrier);
}
DEVICE void bulk_copy_wait(u64* barrier) {
    for (emulation::BulkCopy& copy : emulation::bulk)
        if (copy.barrier == barrier && copy.to) {
            std::memcpy(copy.to, copy.from, copy.bytes);
            copy.to = nullptr;
        }
}

// A barrier counts the copies that have landed. They land when they are waited for or, just as often, at once, so that
// copies over something still needed show too.
DEVICE void bulk_barriers_init(u64* barriers, int count) {
    for (int i = 0; i < count; i++) barriers[i] = 0;
}
DEVICE void bulk_copy_next(void* shared, const void* global, u32 bytes, u64* barrier) {
    if (emulation::random_engine() % 2) {
        std::memcpy(shared, global, bytes);
        ++*barrier;
    } else {
        bulk_copy_start(shared, global, bytes, barrier);
    }
}
DEVICE void bulk_copy_wait(u64* barrier, u32 parity) {
    while (*barrier % 2 == parity) {
        bool found = false;
        for (emulation::BulkCopy& copy : emulation::bulk)
            if (copy.barrier == barrier && copy.to && !found) {
                std::memcpy(copy.to, copy.from, copy.bytes);
                copy.to = nullptr;
                ++*barrier;
                found = true;
            }
        if (!found) emulation::yield();
    }
}

namespace emulation {
template <int COUNT, bool TRANSPOSED>
inline void load_matrix(u32* r, const void* row) {
    if ((uintptr_t)row % 16) { std::fprintf(stderr, "emulation: misaligned matrix row\n"); std::abort(); }
    const uintptr_t address = (uintptr_t)row;
    exchange("ldmatrix", {(u32)address, (u32)((u64)address >> 32)}, [&](u32 (*in)[6], int lane) {
        for (int m = 0; m < COUNT; m++) {
            auto element = [&](int i, int j) -> u32 {
                const u16* from = (const u16*)((u64)in[m * 8 + i][0] | (u64)in[m * 8 + i][1] << 32);
                return from[j];
            };
            const int g = lane / 4, t = lane % 4;
            r[m] = TRANSPOSED ? element(2 * t, g) | element(2 * t + 1, g) << 16
                              : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
        }
        return 0;
    });
    // The rows may be overwritten as soon as every lane has read them.
    exchange("ldmatrix end", {0}, [](u32 (*)[6], int) { return 0; });
}
}  // namespace emulation
DEVICE void load_matrix_x4(u32 (&r)[4], const void* row) { emulation::load_matrix<4, false>(r, row); }
DEVICE void load_matrix_x2(u32 (&r)[2], const void* row) { emulation::load_matrix<2, false>(r, row); }
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], const void* row) { emulation::load_matrix<4, true>(r, row); }
DEVICE void load_matrix_x2_transposed(u32 (&r)[2], const void* row) { emulation::load_matrix<2, true>(r, row); }

namespace emulation {
template <int COUNT>
inline void store_matrix(void* row, const u32* r) {
    if ((uintptr_t)row % 16) { std::fprintf(stderr, "emulation: misaligned matrix row\n"); std::abort(); }
    // Nobody writes before all have done what they did before.
    exchange("stmatrix", {0}, [](u32 (*)[6], int) { return 0; });
    const uintptr_t address = (uintptr_t)row;
    exchange("stmatrix rows", {(u32)address, (u32)((u64)address >> 32)}, [&](u32 (*in)[6], int lane) {
        const int g = lane / 4, t = lane % 4;
        for (int m = 0; m < COUNT; m++)
            ((u32*)((u64)in[m * 8 + g][0] | (u64)in[m * 8 + g][1] << 32))[t] = r[m];
        return 0;
    });
}
}  // namespace emulation
DEVICE void store_matrix_x4(void* row, const u32 (&r)[4]) { emulation::store_matrix<4>(row, r); }
DEVICE void store_matrix_x2(void* row, u32 r0, u32 r1) {
    const u32 r[2] = {r0, r1};
    emulation::store_matrix<2>(row, r);
}
DEVICE u32 transpose_matrix(u32 word);
DEVICE void store_matrix_x4_transposed(void* row, const u32 (&r)[4]) {
    u32 plain[4];
    for (int m = 0; m < 4; m++) plain[m] = transpose_matrix(r[m]);
    store_matrix_x4(row, plain);
}
DEVICE void store_matrix_x2_transposed(void* row, u32 r0, u32 r1) {
    const u32 first = transpose_matrix(r0);
    store_matrix_x2(row, first, transpose_matrix(r1));
}
DEVICE u32 e4m3_pair_to_fp16(u32 word, bool high) {
    const u32 pair = high ? word >> 16 : word;
    return ((pair & 255u) | (pair >> 8 & 255u) << 16) * 128u + 0x20002000u;
}

DEVICE u32 transpose_matrix(u32 word) {
    return emulation::exchange("movmatrix", {word}, [](u32 (*in)[6], int lane) {
        const int g = lane / 4, t = lane % 4;
        auto element = [&](int i, int j) { return in[i * 4 + j / 2][0] >> 16 * (j % 2) & 0xffffu; };
        return element(2 * t, g) | element(2 * t + 1, g) << 16;
    });
}

template <int FORMAT>
DEVICE void mma_16bit(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emulation::exchange("mma 16", {a0, a1, a2, a3, b0, b1}, [&](u32 (*in)[6], int lane) {
        auto half = [](u32 word, int e) {
            const u16 bits = (u16)(word >> 16 * e);
            return FORMAT == FORMAT_BF16 ? bits_to_float((u32)bits << 16) : fp16_to_float(bits);
        };
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
            double sum = d[i];
            for (int k = 0; k < 16; k++) {
                const int owner = row % 8 * 4 + k % 8 / 2, a = row / 8 + 2 * (k / 8);
                sum += (double)half(in[owner][a], k % 2) * half(in[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
            }
            d[i] = (float)sum;
        }
        return 0;
    });
}
DEVICE void mma_bf16_half(float (&d)[4], u32 a0, u32 a1, u32 b0) { mma_16bit<FORMAT_BF16>(d, a0, a1, 0, 0, b0, 0); }
namespace emulation {
inline double e4m3_value(u32 code) {
    const int field = code >> 3 & 15, mantissa = code & 7;
    const double size = field ? std::ldexp(8 + mantissa, field - 10) : std::ldexp(mantissa, -9);
    return (code & 127) == 127 ? NAN : code & 128 ? -size : size;
}
inline u32 e4m3_of(float value) {
    const double size = std::fabs((double)value);
    if (value != value) return 127;
    u32 best = 0;
    for (u32 code = 1; code < 127; code++) {  // ties to even codes
        const double nearer = std::fabs(e4m3_value(code) - size) - std::fabs(e4m3_value(best) - size);
        if (nearer < 0 || (nearer == 0 && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(value) ? 128u : 0u);
}
}  // namespace emulation
DEVICE u16 convert_e4m3_pair(float low, float high) {
    return (u16)(emulation::e4m3_of(low) | emulation::e4m3_of(high) << 8);
}
DEVICE u32 e4m3_codes_to_fp16(u32 word, bool high) {
    const u32 pair = high ? word >> 16 : word;
    return pack_fp16((float)emulation::e4m3_value(pair & 255u), (float)emulation::e4m3_value(pair >> 8 & 255u));
}
// Products are there at once; the device's waits have no counterpart.
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int COUNT>
DEVICE void wgmma_wait() {}
DEVICE void fence_shared_for_wgmma() {}
template <int FORMAT, int PARTS>
DEVICE void wgmma(float (&d)[PARTS][4], u32 a0, u32 a1, u32 a2, u32 a3, const unsigned char* panel, int step) {
    if ((uintptr_t)panel % 128) { std::fprintf(stderr, "emulation: misaligned panel\n"); std::abort(); }
    emulation::exchange("wgmma", {a0, a1, a2, a3}, [&](u32 (*in)[6], int lane) {
        constexpr int BYTES = FORMAT == FORMAT_BF16 || FORMAT == FORMAT_FP16 ? 2 : 1, OF_WORD = 4 / BYTES;
        auto value = [](u32 bits) -> double {
            if (BYTES == 1) return emulation::e4m3_value(bits & 255);
            return FORMAT == FORMAT_BF16 ? bits_to_float(bits << 16) : fp16_to_float((u16)bits);
        };
        for (int n = 0; n < PARTS; n++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + 8 * (i / 2), column = 8 * n + 2 * (lane % 4) + i % 2;
                double sum = d[n][i];
                for (int k = 0; k < 32 / BYTES; k++) {
                    const int half = k / (4 * OF_WORD), place = k % (4 * OF_WORD);
                    const u32 word = in[row % 8 * 4 + place / OF_WORD][row / 8 + 2 * half];
                    const int chunk = (2 * step + half) ^ column % 8;
                    const u32 b = ((const u32*)(panel + column * 128 + chunk * 16))[place / OF_WORD];
                    const int shift = 8 * BYTES * (place % OF_WORD);
                    sum += value(word >> shift) * value(b >> shift);
                }
                d[n][i] = (float)sum;
            }
        return 0;
    });
    emulation::exchange("wgmma end", {0}, [](u32 (*)[6], int) { return 0; });
}
DEVICE void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    auto cut = [](float v) { return float_to_bits(v) & 0xffffe000u; };
    emulation::exchange("mma tf32", {cut(a0), cut(a1), cut(a2), cut(a3), cut(b0), cut(b1)}, [&](u32 (*in)[6], int lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
            double sum = d[i];
            for (int k = 0; k < 8; k++)
                sum += (double)bits_to_float(in[row % 8 * 4 + k % 4][row / 8 + 2 * (k / 4)]) *
                       bits_to_float(in[column * 4 + k % 4][4 + k / 4]);
            d[i] = (float)sum;
        }
        return 0;
    });
}

DEVICE float larger_magnitude(float a, float b) {
    a = std::fabs(a), b = std::fabs(b);
    return a != a ? a : b != b ? b : a > b ? a : b;
}
DEVICE void widen_fp16(float& low, float& high, u32 pair) {
    low = fp16_to_float((u16)pair), high = fp16_to_float((u16)(pair >> 16));
}
template <int FORMAT>
DEVICE u32 relu_pairs(u32 pair) {
    const u32 nan = FORMAT == FORMAT_BF16 ? 0x7f80u : 0x7c00u;
    u32 result = 0;
    for (int e = 0; e < 2; e++) {
        const u32 bits = pair >> 16 * e & 0xffffu;
        if (!(bits & 0x8000u) || (bits & 0x7fffu) > nan) result |= bits << 16 * e;
    }
    return result;
}
template <int FORMAT>
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    if (FORMAT == FORMAT_FP16) return multiply_fp16(a, b);
    return pack_bf16(bits_to_float(a << 16) * bits_to_float(b << 16),
                     bits_to_float(a & 0xffff0000u) * bits_to_float(b & 0xffff0000u));
}
DEVICE u32 multiply_add_bits(u32 a, u32 b, u32 c) { return a * b + c; }
DEVICE u32 multiply_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
DEVICE u32 shift_left(u32 value, int bits) { return value << bits; }
DEVICE void multiply_wide(u32& low, u32& high, u32 a, u32 b) {
    const u64 product = (u64)a * b;
    low = (u32)product, high = (u32)(product >> 32);
}
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u64 both = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
    if (selector & 0x8888u) { std::fprintf(stderr, "emulation: selector with sign bits\n"); std::abort(); }
    return permute_bytes(a, b, selector);
}
DEVICE u32 rotate_right(u32 value, int bits) { return value >> bits | value << (32 - bits); }
DEVICE float short_reciprocal(float value) { return 1.f / value; }
DEVICE u32 reduce_max(u32 value) {
    return emulation::exchange("redux", {value}, [](u32 (*in)[6], int) {
        u32 largest = 0;
        for (int i = 0; i < 32; i++) largest = std::max(largest, in[i][0]);
        return largest;
    });
}

DEVICE u32 ballot(bool value) {
    return emulation::exchange("ballot", {value}, [](u32 (*in)[6], int) {
        u32 word = 0;
        for (int i = 0; i < 32; i++) word |= in[i][0] << i;
        return word;
    });
}
DEVICE int count_bits(u32 word) { return __builtin_popcount(word); }
DEVICE float shuffle_up(float value, int delta) {
    return emulation::exchange("shfl", {float_to_bits(value)}, [=](u32 (*in)[6], int lane) {
        return bits_to_float(in[lane >= delta ? lane - delta : lane][0]);
    });
}
DEVICE float shuffle_down(float value, int delta) {
    return emulation::exchange("shfl", {float_to_bits(value)}, [=](u32 (*in)[6], int lane) {
        return bits_to_float(in[lane + delta < 32 ? lane + delta : lane][0]);
    });
}
DEVICE float shuffle_xor(float value, int mask) {
    return emulation::exchange("shfl", {float_to_bits(value)},
                               [=](u32 (*in)[6], int lane) { return bits_to_float(in[lane ^ mask][0]); });
}
DEVICE u32 shuffle_quad(u32 value, int index) {
    return emulation::exchange("shfl", {value}, [=](u32 (*in)[6], int lane) { return in[lane / 4 * 4 + index][0]; });
}
DEVICE float shuffle_from(float value, int from) {
    return emulation::exchange("shfl", {float_to_bits(value)},
                               [=](u32 (*in)[6], int) { return bits_to_float(in[from][0]); });
}
template <class T>
DEVICE const T* computed(const T* pointer) { return pointer; }
template <class T>
DEVICE const T* advance(const T* pointer, u32 index, u32 bytes) {
    return (const T*)((const char*)pointer + (u64)index * bytes);
}
DEVICE void sync_threads() { emulation::meet(emulation::block_meeting, emulation::threads); }
DEVICE void sync_group(int barrier, int expected) { emulation::meet(emulation::group_meetings[barrier], expected); }
DEVICE void sync_warp() { emulation::exchange("syncwarp", {0}, [](u32 (*)[6], int) { return 0; }); }
DEVICE void atomic_or(int* address, int value) { *address |= value; }
DEVICE int atomic_add(int* address, int value) { return std::exchange(*address, *address + value); }
