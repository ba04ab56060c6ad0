// Rows of activations: norm, gate and preparation for the linear kernels. A block takes a row, its warps segments of 256
// numbers, so a row's bits do not depend on the other rows.
//
// Prepared: each row times a power of two that puts its largest magnitude to 2^14 .. 2^15, as halves in the order that the
// linear kernels read: [segment][w][row][t] of 16 bytes, columns 256 segment + 64t + 32hi + 4w + {0, 2, 1, 3} for hi = 0, 1.
// The inverse powers of two are kept in `scale`, [row]. Lane (w = lane / 4, t = lane % 4) of a warp makes the 16 bytes of
// (w, t). ROUNDS: segments of a warp, the first `n_warps` segments in the first round.
//
// Prepared as whole numbers: each 32 columns as signed bytes times a float, see Integers.
#include "portable.cuh"

constexpr int SEGMENT = 256;
constexpr int MOST_WARPS = 32;

// Where the prepared rows go; there is memory for `room` of them. Paired: row r of x goes to row 2r, and what its rounding
// left over, which is at most 2^-11 of it, to row 2r + 1.
struct Prepared {
    uint4* halves;
    float* scale;
    int room;
    int paired;
};

constexpr int REST_BITS = 11;

// Where rows of whole numbers go. Group 2t + hi of a segment are the columns 64t + 32hi + 0..31.
struct Integers {
    u32* codes;     // [segment][room][64]: four columns each
    float4* scale;  // [segment][room][t]: of group 2t the scale and scale * (sum of the codes), then of group 2t + 1
    int4* sums16;   // [segment][room][t]: sums of the codes of the columns 64t + 16j + 0..15, j = 0..3; or null
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

DEVICE int segments_of(int width) { return (width + SEGMENT - 1) / SEGMENT; }

// Halves and power of two of row blockIdx.x, whose numbers the block's warps hold.
template <int ROUNDS>
DEVICE void prepare(const Eight (&x)[ROUNDS], int n_segments, const Prepared& to) {
    __shared__ float peaks[MOST_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    float peak = 0.0f;  // what lies behind the row's end was read as zeros
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i) peak = max_or_nan(fabsf(x[r].v[i]), peak);
    peak = warp_max(peak);
    if (lane == 0) peaks[warp] = peak;
    __syncthreads();
    peak = warp_max(lane < n_warps ? peaks[lane] : 0.0f);
    int e = 0;  // also for zeros, and for what is not finite, which stays so
    if (peak > 0.0f && peak <= 3.4e38f) e = min(max(14 - ilogbf(peak), -126), 126);
    const float up = power_of_two(e);
    const int target = to.paired ? 2 * blockIdx.x : blockIdx.x;
    if (threadIdx.x == 0) {
        to.scale[target] = power_of_two(-e);
        if (to.paired) to.scale[target + 1] = __fmul_rn(power_of_two(-e), power_of_two(-REST_BITS));
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int segment = warp + r * n_warps;
        if (segment >= n_segments) break;
        u32 words[4], rest[4];
#pragma unroll
        for (int hi = 0; hi < 2; ++hi)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const float first = __fmul_rn(x[r].v[4 * hi + odd], up), second = __fmul_rn(x[r].v[4 * hi + odd + 2], up);
                const half2 both = __floats2half2_rn(first, second);
                const float more = power_of_two(REST_BITS);
                words[2 * hi + odd] = as_u32(both);
                rest[2 * hi + odd] = as_u32(__floats2half2_rn(__fmul_rn(__fsub_rn(first, __low2float(both)), more),
                                                              __fmul_rn(__fsub_rn(second, __high2float(both)), more)));
            }
        uint4* at = to.halves + (static_cast<u64>(segment * 8 + lane / 4) * to.room + target) * 4 + lane % 4;
        at[0] = make_uint4(words[0], words[1], words[2], words[3]);
        if (to.paired) at[4] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
}

// Whole numbers of row blockIdx.x: each group by its largest magnitude, which becomes 127. A group's numbers lie in the
// eight lanes of one t. A group with a number that is not finite has a scale that is not a number.
template <int ROUNDS>
DEVICE void prepare(const Eight (&x)[ROUNDS], int n_segments, const Integers& to) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const int w = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int segment = warp + r * n_warps;
        if (segment >= n_segments) break;
        const u64 row = static_cast<u64>(segment) * to.room + blockIdx.x;
        float4 scale;
        int sums[2];
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
            const float* v = x[r].v + 4 * hi;
            float peak = max_or_nan(max_or_nan(fabsf(v[0]), fabsf(v[1])), max_or_nan(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
            for (int step = 4; step < WARP; step *= 2) peak = max_or_nan(peak, __shfl_xor_sync(ALL_LANES, peak, step));
            float unit = __fdiv_rn(peak, 127.0f), inverse = 0.0f;
            if (!(peak <= 3.4e38f)) unit = __uint_as_float(0x7fffffffu);
            else if (peak >= 1e-36f) inverse = __fdiv_rn(127.0f, peak);
            int sum = 0;
            u32 codes = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int code = __float2int_rn(__fmul_rn(v[i], inverse));
                sum += code;
                codes |= (static_cast<u32>(code) & 255u) << (8 * i);
            }
            to.codes[row * 64 + 16 * t + 8 * hi + w] = codes;
            sum += __shfl_xor_sync(ALL_LANES, sum, 4);
            sum += __shfl_xor_sync(ALL_LANES, sum, 8);
            sums[hi] = sum;  // of the 16 columns that this lane is in
            sum += __shfl_xor_sync(ALL_LANES, sum, 16);
            (hi ? scale.z : scale.x) = unit;
            (hi ? scale.w : scale.y) = __fmul_rn(unit, static_cast<float>(sum));
        }
        const int second[2] = {__shfl_xor_sync(ALL_LANES, sums[0], 16), __shfl_xor_sync(ALL_LANES, sums[1], 16)};
        if (w == 0) {
            to.scale[row * 4 + t] = scale;
            if (to.sums16) to.sums16[row * 4 + t] = make_int4(sums[0], second[0], sums[1], second[1]);
        }
    }
}

template <int ROUNDS>
DEVICE void load_row(Eight (&x)[ROUNDS], const float* row, int width) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) x[r] = load_eight(row, first_column(warp + r * n_warps, lane), width);
}

// x as it is.
template <int ROUNDS, typename Target>
DEVICE void prepare_as_is(const float* x, int stride, int width, const Target& to) {
    pdl_wait();
    pdl_launch();
    Eight values[ROUNDS];
    load_row(values, x + static_cast<u64>(blockIdx.x) * stride, width);
    prepare(values, segments_of(width), to);
}

// silu(gate) * up; a row holds the gates, then the ups.
template <int ROUNDS, typename Target>
DEVICE void prepare_gated(const float* gate_up, int width, const Target& to) {
    pdl_wait();
    pdl_launch();
    const float* row = gate_up + static_cast<u64>(blockIdx.x) * 2 * width;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    Eight gate[ROUNDS], up[ROUNDS];
    load_row(gate, row, width);
    if (ROUNDS < 4) load_row(up, row + width, width);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        // Of the widest rows not all fits the registers at once.
        if (ROUNDS >= 4) up[r] = load_eight(row + width, first_column(warp + r * n_warps, lane), width);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float g = gate[r].v[i];
            gate[r].v[i] = __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, exp_shared(-g))), up[r].v[i]);
        }
    }
    prepare(gate, segments_of(width), to);
}

// x / sqrt(mean(x^2) + eps) * weight. `source` picks the rows of x, or is null: row i of x is row i.
template <int ROUNDS, typename Target>
DEVICE void prepare_normed(const float* x, const int* source, int stride, const float* weight, float eps, int width,
                           const Target& to) {
    __shared__ float parts[MOST_WARPS * ROUNDS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const int n_segments = segments_of(width);
    Eight weights[ROUNDS], values[ROUNDS];
    load_row(weights, weight, width);  // older than the kernel before this one
    pdl_wait();
    pdl_launch();
    load_row(values, x + static_cast<u64>(source ? source[blockIdx.x] : blockIdx.x) * stride, width);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(values[r].v[i], values[r].v[i], sum);
        sum = warp_sum(sum);
        if (lane == 0) parts[warp + r * n_warps] = sum;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < n_segments; ++i) sum = __fadd_rn(sum, parts[i]);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(width)), eps)));
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i) values[r].v[i] = __fmul_rn(__fmul_rn(values[r].v[i], inverse), weights[r].v[i]);
    prepare(values, n_segments, to);
}

// For each kind of prepared rows and number of rounds. Feed-forward layers are the widest.
#define GATED_ENTRY(ROUNDS, NAME, TARGET)                                                                       \
    extern "C" __global__ void __launch_bounds__(1024)                                                          \
        prepare_swiglu_##NAME(const float* gate_up, int width, TARGET to) {                                     \
        prepare_gated<ROUNDS>(gate_up, width, to);                                                              \
    }

#define ENTRIES(ROUNDS, NAME, TARGET)                                                                           \
    GATED_ENTRY(ROUNDS, NAME, TARGET)                                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                                          \
        prepare_rows_##NAME(const float* x, int stride, int width, TARGET to) {                                 \
        prepare_as_is<ROUNDS>(x, stride, width, to);                                                            \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                                          \
        prepare_norm_##NAME(const float* x, const int* source, int stride, const float* weight, float eps,      \
                            int width, TARGET to) {                                                             \
        prepare_normed<ROUNDS>(x, source, stride, weight, eps, width, to);                                      \
    }

ENTRIES(1, 1, Prepared)
ENTRIES(2, 2, Prepared)
ENTRIES(3, 3, Prepared)
GATED_ENTRY(4, 4, Prepared)
ENTRIES(1, q8_1, Integers)
ENTRIES(2, q8_2, Integers)
ENTRIES(3, q8_3, Integers)
GATED_ENTRY(4, q8_4, Integers)

// ----- rows of halves, picked

// The eight numbers of a lane, of a row of halves that starts at a multiple of 8 bytes and is `width`, a multiple of four, long.
DEVICE Eight load_halves(const half* row, int first, int width) {
    Eight out;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
        const int k = first + 32 * hi;
        const uint2 four = k < width ? *reinterpret_cast<const uint2*>(row + k) : make_uint2(0, 0);
        const half2 low = as_half2(four.x), high = as_half2(four.y);
        out.v[4 * hi] = __low2float(low), out.v[4 * hi + 1] = __high2float(low);
        out.v[4 * hi + 2] = __low2float(high), out.v[4 * hi + 3] = __high2float(high);
    }
    return out;
}

// Row source[i] of x as row i.
template <int ROUNDS>
DEVICE void prepare_taken(const half* x, const int* source, int stride, int width, const Prepared& to) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    pdl_wait();
    pdl_launch();
    const half* row = x + static_cast<u64>(source[blockIdx.x]) * stride;
    Eight values[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) values[r] = load_halves(row, first_column(warp + r * n_warps, lane), width);
    prepare(values, segments_of(width), to);
}

#define TAKEN_ENTRY(ROUNDS)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                   \
        prepare_taken_##ROUNDS(const half* x, const int* source, int stride, int width, Prepared to) {   \
        prepare_taken<ROUNDS>(x, source, stride, width, to);                                             \
    }

TAKEN_ENTRY(1)
TAKEN_ENTRY(2)
TAKEN_ENTRY(3)
TAKEN_ENTRY(4)

// ----- what attention gives, gated

// y * sigmoid(gate): D numbers of gates behind the D of each query in a row of qkv.
template <int ROUNDS, typename Target>
DEVICE void prepare_attended(const float* y, const float* qkv, int stride, int head_dim, int width, const Target& to) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    pdl_wait();
    pdl_launch();
    const float* row = qkv + static_cast<u64>(blockIdx.x) * stride;
    Eight values[ROUNDS];
    load_row(values, y + static_cast<u64>(blockIdx.x) * width, width);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
            const int k = first_column(warp + r * n_warps, lane) + 32 * hi;
            if (k >= width) continue;  // four columns are of one head
            const float4 four = *reinterpret_cast<const float4*>(row + k / head_dim * 2 * head_dim + head_dim + k % head_dim);
            const float gate[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[r].v[4 * hi + i] = __fdiv_rn(values[r].v[4 * hi + i], __fadd_rn(1.0f, exp_shared(-gate[i])));
        }
    prepare(values, segments_of(width), to);
}

#define GATE_ENTRIES(ROUNDS, NAME, TARGET)                                                                            \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        prepare_gate_##NAME(const float* y, const float* qkv, int stride, int head_dim, int width, TARGET to) {       \
        prepare_attended<ROUNDS>(y, qkv, stride, head_dim, width, to);                                                \
    }

GATE_ENTRIES(1, 1, Prepared)
GATE_ENTRIES(2, 2, Prepared)
GATE_ENTRIES(3, 3, Prepared)
GATE_ENTRIES(1, q8_1, Integers)
GATE_ENTRIES(2, q8_2, Integers)
GATE_ENTRIES(3, q8_3, Integers)

// ----- what the delta rule gives: normed by heads, gated

// o / sqrt(mean(o^2) + eps) * weight * silu(z), the mean over each head of `size` numbers; z in rows of `stride`. Four columns
// are of one head; its squares are added in the lanes first, then over w, hi, t as far as it reaches.
template <int ROUNDS, typename Target>
DEVICE void prepare_head_normed(const float* o, const float* z, int stride, const float* weight, float eps, int size,
                                int width, const Target& to) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    pdl_wait();
    pdl_launch();
    Eight values[ROUNDS], gates[ROUNDS];
    load_row(values, o + static_cast<u64>(blockIdx.x) * width, width);
    load_row(gates, z + static_cast<u64>(blockIdx.x) * stride, width);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        float sums[2];
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
            const float* v = values[r].v + 4 * hi;
            float sum = fmaf(v[3], v[3], fmaf(v[2], v[2], fmaf(v[1], v[1], __fmul_rn(v[0], v[0]))));
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 4));
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 8));
            if (size >= 32) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 16));
            sums[hi] = sum;
        }
        if (size >= 64) sums[0] = sums[1] = __fadd_rn(sums[0], sums[1]);
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
            if (size >= 128) sums[hi] = __fadd_rn(sums[hi], __shfl_xor_sync(ALL_LANES, sums[hi], 1));
            const float mean = __fdiv_rn(sums[hi], static_cast<float>(size));
            const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
            const float* w = weight + (first_column(warp + r * n_warps, lane) + 32 * hi) % size;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float g = gates[r].v[4 * hi + i], gate = __fdiv_rn(g, __fadd_rn(1.0f, exp_shared(-g)));
                float& v = values[r].v[4 * hi + i];
                v = __fmul_rn(__fmul_rn(__fmul_rn(v, inverse), w[i]), gate);
            }
        }
    }
    prepare(values, segments_of(width), to);
}

#define DELTA_ENTRIES(ROUNDS, NAME, TARGET)                                                                            \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        prepare_delta_##NAME(const float* o, const float* z, int stride, const float* weight, float eps, int size,     \
                             int width, TARGET to) {                                                                   \
        prepare_head_normed<ROUNDS>(o, z, stride, weight, eps, size, width, to);                                       \
    }

DELTA_ENTRIES(1, 1, Prepared)
DELTA_ENTRIES(2, 2, Prepared)
DELTA_ENTRIES(3, 3, Prepared)
DELTA_ENTRIES(1, q8_1, Integers)
DELTA_ENTRIES(2, q8_2, Integers)
DELTA_ENTRIES(3, q8_3, Integers)
