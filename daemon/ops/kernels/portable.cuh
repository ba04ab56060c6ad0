// The few things that differ between compilers and chips: integer names, tensor-core and copy instructions,
// programmatic launch. A port to another vendor rewrites this header.
#pragma once
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// NVRTC has no <math.h>.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define DEVICE __device__ __forceinline__

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

#define INF __int_as_float(0x7f800000)

// ----- programmatic dependent launch: the next kernel may start early; what it reads of this one it waits for

DEVICE void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ----- loads and copies

// 16 bytes that are read once: not kept in the first-level cache.
DEVICE uint4 load_stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

DEVICE uint2 load_stream8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

DEVICE u32 load_stream4(const void* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global));
}

// Copies 16 bytes, or fills them with zeros.
DEVICE void cp_async16_or_zero(void* shared, const void* global, bool copy) {
    int bytes = copy ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes));
}

// Copies the first `bytes` of 16 (0 .. 16) and fills the rest with zeros.
DEVICE void cp_async16_front(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes));
}

DEVICE void cp_async4_or_zero(void* shared, const void* global, bool copy) {
    int bytes = copy ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes));
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

// ----- tensor cores: d += a b, rows of a and columns of b are independent of each other (measured)

// a: 16 x 16 halves, b: 16 x 8 halves, d: 16 x 8 floats. Lane (g = lane / 4, t = lane % 4) holds rows g and g + 8
// of a and d, column g of b, and columns 2t, 2t + 1 of d.
DEVICE void mma_m16n8k16(float d[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d = a b: the first step of a sum.
DEVICE void mma_m16n8k16_first(float d[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// Floats with ten bits behind the point, k = 8: a[0], a[1] and b0 have k = t, a[2], a[3] and b1 k = t + 4. d += a b.
DEVICE void mma_tf32_m16n8k8(float d[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void ldmatrix_x4(u32 r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(shared)));
}

DEVICE void ldmatrix_x4_transposed(u32 r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(shared)));
}

// ----- bits

// (a & mask) | c in one instruction.
DEVICE u32 and_or(u32 a, u32 mask, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(c));
    return r;
}

DEVICE half2 as_half2(u32 v) { return *reinterpret_cast<half2*>(&v); }
DEVICE u32 as_u32(half2 v) { return *reinterpret_cast<u32*>(&v); }

// 2^e as a float, -126 <= e <= 127.
DEVICE float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// ----- arithmetic that decides bits is written out

// 2^x by the hardware; 0 instead of a subnormal result, which would cost three more instructions.
DEVICE float exp2_shared(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp as every kernel uses it: 2^(x log2 e), arguments of at most 0 in softmax.
DEVICE float exp_shared(float x) { return exp2_shared(__fmul_rn(x, 1.4426950408889634f)); }

// ----- reductions over a warp, always in the same order

DEVICE float warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = __fadd_rn(v, __shfl_xor_sync(ALL_LANES, v, step));
    return v;
}

// NaN wins, so that a row that is not finite shows.
DEVICE float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

DEVICE float warp_max(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = max_or_nan(v, __shfl_xor_sync(ALL_LANES, v, step));
    return v;
}
