// Rows of activations: norm, gate and preparation for the linear kernels. A warp takes a segment of 256 numbers of one
// row, so a row's bits do not depend on the other rows.
//
// Prepared: each segment of a row times a power of two that puts its largest magnitude to 2^14 .. 2^15, as halves in the
// order that the linear kernels read: [segment][w][row][t] of 16 bytes, columns 256 segment + 64t + 32hi + 4w + {0, 2, 1, 3}
// for hi = 0, 1. The inverse powers of two are kept in `scale`, [segment][row]. Lane (w = lane / 4, t = lane % 4) of a warp
// makes the 16 bytes of (w, t).
#include "portable.cuh"

constexpr int SEGMENT = 256;
constexpr int MOST_WARPS = 32;

// Where the prepared rows go; there is memory for `room` of them.
struct Prepared {
    uint4* halves;
    float* scale;
    int room;
};

// The eight numbers of a lane: columns first + 0..3 (hi = 0) and first + 32 + 0..3 (hi = 1).
struct Eight {
    float v[8];
};

DEVICE int first_column(int segment, int lane) { return segment * SEGMENT + 64 * (lane % 4) + 4 * (lane / 4); }

DEVICE Eight load_eight(const float* row, int first, int width) {
    Eight out;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
        const int k = first + 32 * hi;
        if (k + 4 <= width && reinterpret_cast<u64>(row + k) % 16 == 0) {
            const float4 four = *reinterpret_cast<const float4*>(row + k);
            out.v[4 * hi] = four.x, out.v[4 * hi + 1] = four.y, out.v[4 * hi + 2] = four.z, out.v[4 * hi + 3] = four.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) out.v[4 * hi + i] = k + i < width ? row[k + i] : 0.0f;
        }
    }
    return out;
}

// Halves and power of two of one segment; the whole warp takes part.
DEVICE void prepare_segment(const Eight& x, int row, int segment, const Prepared& to) {
    const int lane = threadIdx.x % WARP;
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) peak = max_or_nan(fabsf(x.v[i]), peak);
    peak = warp_max(peak);
    int e = 0;  // also for zeros, and for what is not finite, which stays so
    if (peak > 0.0f && peak <= 3.4e38f) e = min(max(14 - ilogbf(peak), -126), 126);
    const float up = power_of_two(e);
    if (lane == 0) to.scale[segment * to.room + row] = power_of_two(-e);
    u32 words[4];
#pragma unroll
    for (int hi = 0; hi < 2; ++hi)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
            words[2 * hi + odd] = as_u32(
                __floats2half2_rn(__fmul_rn(x.v[4 * hi + odd], up), __fmul_rn(x.v[4 * hi + odd + 2], up)));
    to.halves[(static_cast<u64>(segment * 8 + lane / 4) * to.room + row) * 4 + lane % 4] =
        make_uint4(words[0], words[1], words[2], words[3]);
}

// x as it is: a warp for each segment, grid (segments / warps of a block, rows).
extern "C" __global__ void prepare_rows(const float* x, int stride, int width, Prepared to) {
    const int segment = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    pdl_wait();
    pdl_launch();
    if (segment * SEGMENT >= width) return;
    const float* row = x + static_cast<u64>(blockIdx.y) * stride;
    prepare_segment(load_eight(row, first_column(segment, threadIdx.x % WARP), width), blockIdx.y, segment, to);
}

// silu(gate) * up, likewise; a row holds the gates, then the ups.
extern "C" __global__ void prepare_swiglu(const float* gate_up, int width, Prepared to) {
    const int segment = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    pdl_wait();
    pdl_launch();
    if (segment * SEGMENT >= width) return;
    const float* row = gate_up + static_cast<u64>(blockIdx.y) * 2 * width;
    const int first = first_column(segment, threadIdx.x % WARP);
    Eight gate = load_eight(row, first, width);
    const Eight up = load_eight(row + width, first, width);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float silu = __fdiv_rn(gate.v[i], __fadd_rn(1.0f, exp_shared(-gate.v[i])));
        gate.v[i] = __fmul_rn(silu, up.v[i]);
    }
    prepare_segment(gate, blockIdx.y, segment, to);
}

// x / sqrt(mean(x^2) + eps) * weight: a block for each row, a warp for each segment or several. `source` picks the rows of
// x, or is null: row i of x is row i.
template <int MOST_SEGMENTS>
DEVICE void norm(const float* x, const int* source, int stride, const float* weight, float eps, int width, const Prepared& to) {
    __shared__ float parts[MOST_WARPS * MOST_SEGMENTS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const int n_segments = (width + SEGMENT - 1) / SEGMENT;
    Eight weights[MOST_SEGMENTS], values[MOST_SEGMENTS];
#pragma unroll
    for (int i = 0; i < MOST_SEGMENTS; ++i) weights[i] = load_eight(weight, first_column(warp + i * n_warps, lane), width);
    pdl_wait();
    pdl_launch();
    const float* row = x + static_cast<u64>(source ? source[blockIdx.x] : blockIdx.x) * stride;
#pragma unroll
    for (int i = 0; i < MOST_SEGMENTS; ++i) values[i] = load_eight(row, first_column(warp + i * n_warps, lane), width);
#pragma unroll
    for (int i = 0; i < MOST_SEGMENTS; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(values[i].v[j], values[i].v[j], sum);
        sum = warp_sum(sum);
        if (lane == 0) parts[warp + i * n_warps] = sum;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < n_segments; ++i) sum = __fadd_rn(sum, parts[i]);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(width)), eps)));
#pragma unroll
    for (int i = 0; i < MOST_SEGMENTS; ++i) {
        if (warp + i * n_warps >= n_segments) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) values[i].v[j] = __fmul_rn(__fmul_rn(values[i].v[j], inverse), weights[i].v[j]);
        prepare_segment(values[i], blockIdx.x, warp + i * n_warps, to);
    }
}

// Up to 32 segments, and up to 64.
extern "C" __global__ void prepare_norm(const float* x, const int* source, int stride, const float* weight, float eps,
                                        int width, Prepared to) {
    norm<1>(x, source, stride, weight, eps, width, to);
}

extern "C" __global__ void prepare_norm_wide(const float* x, const int* source, int stride, const float* weight, float eps,
                                             int width, Prepared to) {
    norm<2>(x, source, stride, weight, eps, width, to);
}
