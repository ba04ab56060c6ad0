// What the attention kernels share: queries as halves, softmax weights, how partial results are joined.
//
// Scores are kept in units of log2: score = factor * (q k), with factor = scale log2 e / 2^e of the row and head
// (2^e brings its largest query number to 2^14 .. 2^15, so that halves lose no small ones).
#pragma once
#include "kv_tiles.cuh"

// What does not change inside a call of a layer.
struct Heads {
    const float* q;  // row r, head h at q + r q_stride + h q_head, rotated
    float* out;      // [rows][n_head][D]
    const u64* page_k;  // addresses of layer 0, head 0, place 0
    const u64* page_v;
    u64 k_layer;  // bytes to this layer
    u64 v_layer;
    int q_stride;
    int q_head;
    int n_head;
    int n_head_kv;
    int k_type;
    int v_type;
    float factor;  // scale log2 e

    DEVICE int per_group() const { return n_head / n_head_kv; }
};

// N = 2, 4 or 8 neighbouring numbers in one load, or zeros.
template <int N>
DEVICE void load_floats(float x[N], const float* source, bool there) {
    if constexpr (N == 8) {
        load_floats<4>(x, source, there);
        load_floats<4>(x + 4, source + 4, there);
    } else if constexpr (N == 4) {
        float4 v = there ? *reinterpret_cast<const float4*>(source) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        float2 v = there ? *reinterpret_cast<const float2*>(source) : make_float2(0.0f, 0.0f);
        x[0] = v.x, x[1] = v.y;
    }
}

// One head's queries of `count` rows (row m of the tile is head first_head + m % per_row of row first_row + m / per_row)
// as halves [count][D] swizzled and their factors, by whole warps; rows up to `padded` become zeros. paired_for: of 256
// numbers, in the order that pair_up names for keys of this type.
template <int D>
DEVICE void load_queries(u8* tile, float* factors, const Heads& heads, int first_row, int first_head, int per_row, int count, int padded, int paired_for = KV_F16) {
    constexpr int N = D / WARP;  // numbers a lane
    const int lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;
#pragma unroll 4
    for (int m = threadIdx.x / WARP; m < padded; m += n_warps) {
        float x[N];
        const float* source = heads.q + static_cast<u64>(first_row + m / per_row) * heads.q_stride + (first_head + m % per_row) * heads.q_head + lane * N;
        float largest = 0.0f;
        load_floats<N>(x, source, m < count);
#pragma unroll
        for (int i = 0; i < N; ++i) largest = max_or_nan(largest, fabsf(x[i]));
        largest = warp_max(largest);
        int exponent = (__float_as_int(largest) >> 23 & 255) - 127;
        int e = max(-100, min(100, 14 - exponent));
        half y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = __float2half_rn(__fmul_rn(x[i], power_of_two(e)));
        if (D == 256 && paired_for == KV_TQ3_0) {  // the lane has a quarter of 32 numbers
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = i / 2 * 4 + i % 2;
                u8* target = tile + chunk_byte<D>(m, lane / 4 * 4 + lane % 2 * 2 + i / 2) + (lane % 4 / 2 * 2 + i % 2) * 4;
                *reinterpret_cast<half2*>(target) = __halves2half2(y[j], y[j + 2]);
            }
        } else if (D == 256 && !is_16_bit(paired_for)) {  // the lane has half of 16 numbers
#pragma unroll
            for (int i = 0; i < N; i += 2)
                *reinterpret_cast<half2*>(tile + chunk_byte<D>(m, lane / 2 * 2 + i / 2 % 2) + lane % 2 * 8 + i / 4 * 4) = __halves2half2(y[i], y[i + 1]);
        } else {
            u8* target = tile + chunk_byte<D>(m, lane * N / 8) + lane * N % 8 * 2;
#pragma unroll
            for (int i = 0; i < N; i += 2) *reinterpret_cast<half2*>(target + 2 * i) = __halves2half2(y[i], y[i + 1]);
        }
        if (lane == 0) factors[m] = __fmul_rn(heads.factor, power_of_two(-e));
    }
}

// d = a b for the first step of a sum, else d += a b. `first` is known when this is compiled.
DEVICE void multiply(float d[4], const u32 a[4], const u32 b[2], bool first) {
    if (first) mma_m16n8k16_first(d, a, b);
    else mma_m16n8k16(d, a, b);
}

// exp of a score against its tile's or row's peak.
DEVICE float softmax_weight(float product, float factor, float peak) { return exp2_shared(__fmaf_rn(product, factor, -peak)); }

// x of a part with one peak joined to y of the next part, each with the weight of its peak against the common one.
DEVICE float joined(float x, float weight_x, float y, float weight_y) { return __fmaf_rn(x, weight_x, __fmul_rn(y, weight_y)); }

// The largest of the four lanes that share a row of an mma result. A NaN among the scores may be passed over here:
// its own weight is NaN all the same.
DEVICE float row_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
    return fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
}

// Sums times 1 / the sum of weights; never a negative zero.
DEVICE float normalised(float sum, float inverse) { return __fadd_rn(__fmul_rn(sum, inverse), 0.0f); }
