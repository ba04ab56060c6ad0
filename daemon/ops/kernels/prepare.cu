// Rows of activations: norm, gate and preparation for the linear kernels. One block for each row; its threads depend on the
// width only, so a row's bits do not depend on the other rows.
//
// Prepared: every row times a power of two that puts its largest magnitude to 2^14 .. 2^15, as halves in the order that
// the linear kernels read: [segment][w][row][t] of 16 bytes, columns 256 segment + 64t + 32hi + 4w + {0, 2, 1, 3} for hi = 0, 1.
// The inverse power of two is kept in `scale`.
#include "portable.cuh"

constexpr int MOST_WARPS = 32;

template <typename Combine>
DEVICE float block_reduce(float v, Combine combine) {
    __shared__ float parts[MOST_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = combine(v, __shfl_xor_sync(ALL_LANES, v, step));
    __syncthreads();
    if (lane == 0) parts[warp] = v;
    __syncthreads();
    v = parts[0];
    for (int i = 1; i < n_warps; ++i) v = combine(v, parts[i]);
    return v;
}

// value[k], k < n_in, in shared memory -> halves and scale of row blockIdx.x; n_columns: rows that the buffer has room for.
DEVICE void prepare_value(const float* value, int n_in, int n_columns, uint4* halves, float* scale) {
    float peak = 0.0f;
    for (int k = threadIdx.x; k < n_in; k += blockDim.x) peak = max_or_nan(fabsf(value[k]), peak);
    peak = block_reduce(peak, [](float a, float b) { return max_or_nan(a, b); });
    int e = 0;  // also for zeros, and for what is not finite, which stays so
    if (peak > 0.0f && peak <= 3.4e38f) e = min(max(14 - ilogbf(peak), -126), 126);
    const float up = power_of_two(e);
    if (threadIdx.x == 0) scale[blockIdx.x] = power_of_two(-e);
    const int n_chunks = (n_in + 255) / 256 * 32;  // of 16 bytes: [segment][w][t]
    for (int chunk = threadIdx.x; chunk < n_chunks; chunk += blockDim.x) {
        const int t = chunk % 4, w = chunk / 4 % 8, segment = chunk / 32;
        const int first = 256 * segment + 64 * t + 4 * w;
        u32 words[4];
#pragma unroll
        for (int hi = 0; hi < 2; ++hi)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int k = first + 32 * hi + odd;
                const float low = k < n_in ? __fmul_rn(value[k], up) : 0.0f;
                const float high = k + 2 < n_in ? __fmul_rn(value[k + 2], up) : 0.0f;
                words[2 * hi + odd] = as_u32(__floats2half2_rn(low, high));
            }
        halves[(static_cast<u64>(segment * 8 + w) * n_columns + blockIdx.x) * 4 + t] =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// x as it is.
extern "C" __global__ void prepare_rows(const float* x, int stride, int n_in, int n_columns, uint4* halves, float* scale) {
    extern __shared__ float value[];
    pdl_wait();
    pdl_launch();
    const float* row = x + static_cast<u64>(blockIdx.x) * stride;
    for (int k = threadIdx.x; k < n_in; k += blockDim.x) value[k] = row[k];
    __syncthreads();
    prepare_value(value, n_in, n_columns, halves, scale);
}

// x / sqrt(mean(x^2) + eps) * weight. `source` picks the rows of x, or is null: row i of x is row i.
extern "C" __global__ void prepare_norm(const float* x, const int* source, int stride, const float* weight, float eps, int n_in,
                                     int n_columns, uint4* halves, float* scale) {
    extern __shared__ float value[];
    pdl_wait();
    pdl_launch();
    const int index = source ? source[blockIdx.x] : blockIdx.x;
    const float* row = x + static_cast<u64>(index) * stride;
    float sum = 0.0f;
    for (int k = threadIdx.x; k < n_in; k += blockDim.x) {
        const float v = row[k];
        value[k] = v;
        sum = fmaf(v, v, sum);
    }
    sum = block_reduce(sum, [](float a, float b) { return __fadd_rn(a, b); });
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(n_in)), eps)));
    for (int k = threadIdx.x; k < n_in; k += blockDim.x) value[k] = __fmul_rn(__fmul_rn(value[k], inverse), weight[k]);
    __syncthreads();
    prepare_value(value, n_in, n_columns, halves, scale);
}

// silu(gate) * up; a row holds the gates, then the ups.
extern "C" __global__ void prepare_swiglu(const float* gate_up, int n_ff, int n_columns, uint4* halves, float* scale) {
    extern __shared__ float value[];
    pdl_wait();
    pdl_launch();
    const float* gate = gate_up + static_cast<u64>(blockIdx.x) * 2 * n_ff;
    for (int k = threadIdx.x; k < n_ff; k += blockDim.x) {
        const float g = gate[k];
        const float silu = __fdiv_rn(g, __fadd_rn(1.0f, exp_shared(-g)));
        value[k] = __fmul_rn(silu, gate[n_ff + k]);
    }
    __syncthreads();
    prepare_value(value, n_ff, n_columns, halves, scale);
}
