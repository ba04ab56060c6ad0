// The rotation of tq3_0, as ops/rotation.py has it: signs, Walsh-Hadamard transform, signs, over groups of 128 numbers.
//
// A warp has a group: lane i its numbers i, i + 32, i + 64, i + 96. Sums are added in the order of ops/rotation.py.
#pragma once
#include "portable.cuh"

constexpr int GROUP_BLOCKS = 4;  // of 32 numbers

// Bit i of word b is set where number 32 b + i changes its sign: first digits of pi.
DEVICE u32 signs_1(int b) { return b == 0 ? 0x03707344u : b == 1 ? 0x13198a2eu : b == 2 ? 0x85a308d3u : 0x243f6a88u; }
DEVICE u32 signs_2(int b) { return b == 0 ? 0xec4e6c89u : b == 1 ? 0x082efa98u : b == 2 ? 0x299f31d0u : 0xa4093822u; }

DEVICE float with_sign(float x, u32 signs) {
    const int lane = threadIdx.x % WARP;
    return __uint_as_float(__float_as_uint(x) ^ (signs >> lane & 1) << 31);
}

// Walsh-Hadamard transform / sqrt(128) of a group between two changes of signs. BACK: the inverse.
template <bool BACK>
DEVICE void rotate_group(float x[GROUP_BLOCKS]) {
    constexpr float SCALE = 0.08838834764831845f;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b) x[b] = with_sign(x[b], BACK ? signs_2(b) : signs_1(b));
#pragma unroll
    for (int width = 1; width < WARP; width *= 2)
#pragma unroll
        for (int b = 0; b < GROUP_BLOCKS; ++b) {
            const float other = __shfl_xor_sync(ALL_LANES, x[b], width);
            x[b] = lane & width ? __fsub_rn(other, x[b]) : __fadd_rn(x[b], other);
        }
#pragma unroll
    for (int width = 1; width < GROUP_BLOCKS; width *= 2)
#pragma unroll
        for (int b = 0; b < GROUP_BLOCKS; ++b)
            if (!(b & width)) {
                const float low = x[b], high = x[b + width];
                x[b] = __fadd_rn(low, high);
                x[b + width] = __fsub_rn(low, high);
            }
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b) x[b] = with_sign(__fmul_rn(x[b], SCALE), BACK ? signs_1(b) : signs_2(b));
}
