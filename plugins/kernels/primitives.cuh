// Thin names for the instructions the kernels use. Nothing else in this folder contains inline assembly, so that the
// rest can also be compiled for the host against an emulation of this file (tests/plugins/emulation).
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL(threads, min_ctas) extern "C" __global__ void __launch_bounds__(threads, min_ctas)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

// Element formats of activations and of the checkpoint, as stamped in by the build.
#define FORMAT_FP32 0
#define FORMAT_FP16 1
#define FORMAT_BF16 2

#define INFINITY __int_as_float(0x7f800000)

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 float_to_bits(float value) { return __float_as_uint(value); }

// What is computed from `value` cannot be computed before this point, where the compiler would wait for a load too early.
DEVICE void hold_until_here(u32& value) { asm volatile("" : "+r"(value)); }

// Offset of row `index` of rows `stride` elements apart, in one instruction.
DEVICE long long offset_of(int index, int stride) {
    long long result;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(result) : "r"(index), "r"(stride));
    return result;
}

// Never contracted by the compiler: results are the same wherever they are written.
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

DEVICE u16 float_to_bf16(float value) {
    u16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}
DEVICE u16 float_to_fp16(float value) {
    u16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}
// Two numbers rounded to bf16, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
// Two numbers rounded to fp16, the first in the low half.
DEVICE u32 pack_fp16(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
// The same, rounded towards zero.
DEVICE u32 pack_fp16_cut(float low, float high) {
    u32 result;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
// Products of two pairs of fp16 numbers.
DEVICE u32 multiply_fp16(u32 a, u32 b) {
    u32 result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
DEVICE float fp16_to_float(u16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
}

#if __CUDA_ARCH__ >= 890
#define HARDWARE_E4M3 1
// Nearest e4m3 number, ties to even.
DEVICE u32 convert_e4m3(float value) {
    u16 result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(0.f), "f"(value));
    return result;
}
// Two nearest e4m3 numbers, saturating.
DEVICE u16 convert_e4m3_pair(float low, float high) {
    u16 result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
    return result;
}
#endif
// The larger magnitude; NaN if one is.
DEVICE float larger_magnitude(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
    return result;
}
// The numbers of a pair of bf16 or fp16 that are positive, 0 in place of others; NaN stays.
template <int FORMAT>
DEVICE u32 relu_pairs(u32 pair) {
    u32 result;
    if constexpr (FORMAT == FORMAT_BF16)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0u));
    else
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0u));
    return result;
}
// Products of two pairs of bf16 or fp16 numbers, each rounded once; subnormal numbers count.
template <int FORMAT>
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    if constexpr (FORMAT == FORMAT_FP16) return multiply_fp16(a, b);
    u32 result;  // a sum with -0, because a product alone needs sm_90
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
    return result;
}
// Two e4m3 numbers, normal and positive, of the upper or lower half of a word, as fp16.
DEVICE u32 e4m3_pair_to_fp16(u32 word, bool high) {
    u32 result;
#if __CUDA_ARCH__ >= 890
    if (high)
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(result) : "r"(word));
    else
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(result) : "r"(word));
#else
    result = __byte_perm(word, 0, high ? 0x4342 : 0x4140) * 128u + 0x20002000u;
#endif
    return result;
}
// Two e4m3 numbers of the upper or lower half of a word, as fp16.
DEVICE u32 e4m3_codes_to_fp16(u32 word, bool high) {
#if __CUDA_ARCH__ >= 890
    return e4m3_pair_to_fp16(word, high);
#else
    const u32 pair = __byte_perm(word, 0, high ? 0x3424 : 0x1404);  // where fp16 has them, 2^-8 times
    return multiply_fp16((pair & 0x80008000u) | (pair & 0x7f007f00u) >> 1, 0x5c005c00u);
#endif
}
// The halves of a pair of fp16 numbers.
DEVICE void widen_fp16(float& low, float& high, u32 pair) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
}

// Copies 16 bytes to shared memory without a register; writes zeros where `valid` is false and then reads nothing.
DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// The same where `wanted`, without a branch.
DEVICE void copy_async_16_if(bool wanted, void* shared, const void* global, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(valid ? 16 : 0), "r"((int)wanted)
                 : "memory");
}
// The same to an address that shared_address gave.
DEVICE void copy_async_16_to(u32 shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for the thread's copies of all groups but the last committed one.
DEVICE void copy_async_wait_but_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Waits for the thread's copies of all groups but the last COUNT committed ones.
template <int COUNT>
DEVICE void copy_async_wait_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

#if BULK_COPY
// One thread asks the copy engine for a whole tile; a barrier in shared memory says when it has landed.
DEVICE void bulk_copy_start(void* shared, const void* global, u32 bytes, u64* barrier) {
    const u32 address = shared_address(barrier);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(address)
                 : "memory");
}
// The same for two tiles that one barrier answers for.
DEVICE void bulk_copies_start(void* first, const void* from, u32 bytes, void* second, const void* from_second,
                              u32 bytes_second, u64* barrier) {
    const u32 address = shared_address(barrier);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes + bytes_second) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(first)),
                 "l"(from), "r"(bytes), "r"(address)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(second)),
                 "l"(from_second), "r"(bytes_second), "r"(address)
                 : "memory");
}
// Every thread that reads the tile waits itself; the barrier must have been initialised before a __syncthreads.
DEVICE void bulk_copy_wait(u64* barrier) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], 0;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(shared_address(barrier))
        : "memory");
}
// The same for copies one after the other into the same place: the barriers are initialised once, by the thread that asks;
// copy number n (from 0) onto a barrier is waited for with parity n % 2.
DEVICE void bulk_barriers_init(u64* barriers, int count) {
    for (int i = 0; i < count; i++)
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void bulk_copy_next(void* shared, const void* global, u32 bytes, u64* barrier) {
    const u32 address = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(address)
                 : "memory");
}
DEVICE void bulk_copy_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
#endif

// Programmatic dependent launch (KernelConfig.overlaps): such a grid may start while the one before it in its stream ends,
// and must wait before it touches memory. Launched in any other way both calls do nothing.
DEVICE void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for `bytes` (a multiple of 16, aligned to 16) to be brought into the second-level cache.
DEVICE void prefetch(const void* global, u32 bytes) {
#if BULK_COPY
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#else
    for (u32 offset = 0; offset < bytes; offset += 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)global + offset) : "memory");
#endif
}

// The same for the 32 bytes around an address of any alignment.
DEVICE void prefetch_sector(const void* global, bool wanted = true) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p prefetch.global.L2 [%0];\n}" ::"l"(global), "r"((int)wanted)
                 : "memory");
}

// The same for the 128 bytes around an address, into the first-level cache too.
DEVICE void prefetch_line(const void* global) { asm volatile("prefetch.global.L1 [%0];" ::"l"(global) : "memory"); }

// Matrices of 8 x 8 16-bit elements; lane l names row l % 8 of matrix l / 8 (16-byte aligned). Lane 4 g + t receives
// elements (g, 2 t) and (g, 2 t + 1) of each matrix; the transposing form (2 t, g) and (2 t + 1, g).
DEVICE void load_matrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_matrix_x2(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_matrix_x2_transposed(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// The inverse: lane l names row l % 8 of matrix l / 8, lanes give the elements that a load would give them.
DEVICE void store_matrix_x4(void* row, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const u32 at = __shfl_sync(0xffffffffu, shared_address(row), m * 8 + lane / 4) + lane % 4 * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(r[m]) : "memory");
    }
#endif
}
DEVICE void store_matrix_x2(void* row, u32 r0, u32 r1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(shared_address(row)), "r"(r0), "r"(r1)
                 : "memory");
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const u32 at = __shfl_sync(0xffffffffu, shared_address(row), m * 8 + lane / 4) + lane % 4 * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(m ? r1 : r0) : "memory");
    }
#endif
}

// The same of elements that a transposing load would give.
DEVICE void store_matrix_x4_transposed(void* row, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    u32 plain[4];
#pragma unroll
    for (int m = 0; m < 4; m++)
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(plain[m]) : "r"(r[m]));
    store_matrix_x4(row, plain);
#endif
}
DEVICE void store_matrix_x2_transposed(void* row, u32 r0, u32 r1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(shared_address(row)), "r"(r0), "r"(r1)
                 : "memory");
#else
    u32 plain[2];
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(plain[0]) : "r"(r0));
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(plain[1]) : "r"(r1));
    store_matrix_x2(row, plain[0], plain[1]);
#endif
}

// Transposes a matrix of 8 x 8 16-bit elements that the warp holds as the loads above give it.
DEVICE u32 transpose_matrix(u32 word) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// d[16 x 8] += a[16 x 16] b[16 x 8] with 16-bit operands. With g = lane / 4, t = lane % 4: d holds (g, 2t), (g, 2t+1),
// (g+8, 2t), (g+8, 2t+1); a holds the pairs (g, 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..); b (2t.., g), (2t+8.., g).
template <int FORMAT>
DEVICE void mma_16bit(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (FORMAT == FORMAT_BF16)
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d[16 x 8] += a[16 x 8] b[8 x 8]: the first half of the columns of a and rows of b above.
DEVICE void mma_bf16_half(float (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

#if USE_WGMMA
// Products of 64 x 16 by 16 x N 16-bit operands, or of 64 x 32 by 32 x N in e4m3, by a group of four warps, which the tensor
// cores work on by themselves: `wgmma_wait` says when registers and shared memory may change. Lanes hold d and a of their
// warp's 16 rows as for m16n8k16, in e4m3 four numbers for every two.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// For all but the last COUNT committed groups.
template <int COUNT>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}
// What the thread wrote to shared memory becomes visible to the tensor cores, behind a barrier.
DEVICE void fence_shared_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Parts of 4 registers of d, and the operands' numbers behind those of PARTS of them.
#define WGMMA_PART(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_PARTS_2(i) WGMMA_PART(i), WGMMA_PART(i + 1)
#define WGMMA_PARTS_4(i) WGMMA_PARTS_2(i), WGMMA_PARTS_2(i + 2)
#define WGMMA_PARTS_8(i) WGMMA_PARTS_4(i), WGMMA_PARTS_4(i + 4)
#define WGMMA_OUT_1 "%0,%1,%2,%3"
#define WGMMA_OUT_2 WGMMA_OUT_1 ",%4,%5,%6,%7"
#define WGMMA_OUT_3 WGMMA_OUT_2 ",%8,%9,%10,%11"
#define WGMMA_OUT_4 WGMMA_OUT_3 ",%12,%13,%14,%15"
#define WGMMA_OUT_6 WGMMA_OUT_4 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_OUT_8 WGMMA_OUT_6 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_OUT_10 WGMMA_OUT_8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_OUT_12 WGMMA_OUT_10 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_OUT_14 WGMMA_OUT_12 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_OUT_16 WGMMA_OUT_14 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_AS(WIDTH, KIND, END, OUT, IN, ...)                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" WIDTH KIND " {" OUT "}, " \
                 IN ", p, 1, 1" END ";\n}"                                                                          \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))
#define WGMMA(WIDTH, OUT, IN, ...)                                                                                     \
    do {                                                                                                               \
        if constexpr (FORMAT == FORMAT_BF16) WGMMA_AS(WIDTH, "k16.f32.bf16.bf16", ", 0", OUT, IN, __VA_ARGS__);        \
        else if constexpr (FORMAT == FORMAT_FP16) WGMMA_AS(WIDTH, "k16.f32.f16.f16", ", 0", OUT, IN, __VA_ARGS__);     \
        else WGMMA_AS(WIDTH, "k32.f32.e4m3.e4m3", "", OUT, IN, __VA_ARGS__);                                           \
    } while (0)

// d += a b for b [8 PARTS, 128 bytes] at `panel`, whose rows have chunk c at c ^ row % 8; `step` is the 32 bytes of a row.
// FORMAT: of a and b, e4m3 if it is none of 16 bits.
template <int FORMAT, int PARTS>
DEVICE void wgmma(float (&d)[PARTS][4], u32 a0, u32 a1, u32 a2, u32 a3, const unsigned char* panel, int step) {
    // Address, of which shared memory has less than 18 bits; distance of groups of 8 rows, 1024 bytes; swizzle of 128 bytes.
    const u64 b = (u64)((shared_address(panel) >> 4) + 2 * step + (1u << 16)) | 64ull << 32 | 1ull << 62;
    if constexpr (PARTS == 1) WGMMA("8", WGMMA_OUT_1, "{%4,%5,%6,%7}, %8", WGMMA_PART(0));
    if constexpr (PARTS == 2) WGMMA("16", WGMMA_OUT_2, "{%8,%9,%10,%11}, %12", WGMMA_PARTS_2(0));
    if constexpr (PARTS == 3) WGMMA("24", WGMMA_OUT_3, "{%12,%13,%14,%15}, %16", WGMMA_PARTS_2(0), WGMMA_PART(2));
    if constexpr (PARTS == 4) WGMMA("32", WGMMA_OUT_4, "{%16,%17,%18,%19}, %20", WGMMA_PARTS_4(0));
    if constexpr (PARTS == 6) WGMMA("48", WGMMA_OUT_6, "{%24,%25,%26,%27}, %28", WGMMA_PARTS_4(0), WGMMA_PARTS_2(4));
    if constexpr (PARTS == 8) WGMMA("64", WGMMA_OUT_8, "{%32,%33,%34,%35}, %36", WGMMA_PARTS_8(0));
    if constexpr (PARTS == 10) WGMMA("80", WGMMA_OUT_10, "{%40,%41,%42,%43}, %44",
                                    WGMMA_PARTS_8(0), WGMMA_PARTS_2(8));
    if constexpr (PARTS == 12) WGMMA("96", WGMMA_OUT_12, "{%48,%49,%50,%51}, %52",
                                    WGMMA_PARTS_8(0), WGMMA_PARTS_4(8));
    if constexpr (PARTS == 14) WGMMA("112", WGMMA_OUT_14, "{%56,%57,%58,%59}, %60",
                                    WGMMA_PARTS_8(0), WGMMA_PARTS_4(8), WGMMA_PARTS_2(12));
    if constexpr (PARTS == 16) WGMMA("128", WGMMA_OUT_16, "{%64,%65,%66,%67}, %68",
                                    WGMMA_PARTS_8(0), WGMMA_PARTS_8(8));
    static_assert(PARTS <= 4 || (PARTS <= 16 && PARTS % 2 == 0), "widths of the product");
}
#endif

// d[16 x 8] += a[16 x 8] b[8 x 8]; operands keep 10 bits of mantissa, the rest is ignored. a holds (g, t), (g+8, t),
// (g, t+4), (g+8, t+4); b holds (t, g), (t+4, g).
DEVICE void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(float_to_bits(a0)), "r"(float_to_bits(a1)), "r"(float_to_bits(a2)), "r"(float_to_bits(a3)),
          "r"(float_to_bits(b0)), "r"(float_to_bits(b1)));
}

// a b + c in one instruction, where the compiler would shift, mask and add.
DEVICE u32 multiply_add_bits(u32 a, u32 b, u32 c) {
    u32 result;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
// The upper half of a product.
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
// A shift that the compiler does not combine with a later one: apart they share the work between two units.
DEVICE u32 shift_left(u32 value, int bits) {
    u32 result;
    asm("shl.b32 %0, %1, %2;" : "=r"(result) : "r"(value), "r"(bits));
    return result;
}
// Both halves of a product, in one instruction.
DEVICE void multiply_wide(u32& low, u32& high, u32 a, u32 b) {
    asm("{\n.reg .b64 p;\nmul.wide.u32 p, %2, %3;\nmov.b64 {%0, %1}, p;\n}" : "=r"(low), "=r"(high) : "r"(a), "r"(b));
}
// Bytes of the pair (a, b) that the selector's four nibbles name, 0 to 3 in a and 4 to 7 in b.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
// The same for selectors without other bits, in a form that the compiler does not look into: it would mask one again.
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}
// The low or high half of a pair in both, in a form that a product of pairs takes as it is.
DEVICE u32 both_halves(u32 pair, bool high) {
    u32 result;
    if (high)
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(result) : "r"(pair));
    else
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(result) : "r"(pair));
    return result;
}
DEVICE u32 rotate_right(u32 value, int bits) { return __funnelshift_r(value, value, bits); }
// 1 / value to the last bit for a normal value whose mantissa has few bits: Markstein's correction of an approximation
// within one ulp, which only a mantissa of all ones defeats.
DEVICE float short_reciprocal(float value) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(value));
    return __fmaf_rn(r, __fmaf_rn(-value, r, 1.f), r);
}
// Largest of the lanes' values, in every lane.
DEVICE u32 reduce_max(u32 value) { return __reduce_max_sync(0xffffffffu, value); }

// A bit of every lane, in every lane; bits of a word that are set.
DEVICE u32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
DEVICE int count_bits(u32 word) { return __popc(word); }

DEVICE float shuffle_up(float value, int delta) { return __shfl_up_sync(0xffffffffu, value, delta); }
DEVICE float shuffle_down(float value, int delta) { return __shfl_down_sync(0xffffffffu, value, delta); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// What lane `index` of the lane's four has.
DEVICE u32 shuffle_quad(u32 value, int index) { return __shfl_sync(0xffffffffu, value, index, 4); }
DEVICE float shuffle_from(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// Computes the pointer into global memory here and now: the compiler would otherwise branch to compute one of several that it selects from.
template <class T>
DEVICE const T* computed(const T* pointer) {
    asm volatile("" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}
// `pointer` and index * bytes further on, in one instruction.
template <class T>
DEVICE const T* advance(const T* pointer, u32 index, u32 bytes) {
    const T* result;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(index), "r"(bytes), "l"(pointer));
    return result;
}
// Stores 16 bytes of global memory if `wanted`, without a branch.
DEVICE void store_if(bool wanted, void* global, uint4 value) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1,%2,%3,%4};\n}" ::"l"(global),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"((int)wanted)
                 : "memory");
}
DEVICE void sync_threads() { __syncthreads(); }
// The same for the `threads` threads that name `barrier` (1 to 15).
DEVICE void sync_group(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void atomic_or(int* address, int value) { atomicOr(address, value); }
// Returns what was there before.
DEVICE int atomic_add(int* address, int value) { return atomicAdd(address, value); }

#ifdef DISTURB
// For tests of memory order: blocks take each other's places and start after different delays.
struct Place {
    u32 x, y, z;
};
DEVICE Place disturbed_place() {
    const u64 place = ((u64)(blockIdx.y * gridDim.x + blockIdx.x) * 1000003u + DISTURB) % (gridDim.x * gridDim.y);
    return {(u32)(place % gridDim.x), (u32)(place / gridDim.x), blockIdx.z};
}
DEVICE void disturb() {
    for (u32 wait = (blockIdx.y * gridDim.x + blockIdx.x + DISTURB) * 2654435761u >> 28; wait; wait--) __nanosleep(2000);
}
#define blockIdx disturbed_place()
#else
DEVICE void disturb() {}
#endif
