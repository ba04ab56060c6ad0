// Weights and activations as plain matrices of halves, for a library's product (--math fast).
//
// The columns of a segment stand in the order of prepared rows (prepare.cu): k' = 32 w + 8 t + ..., the same for both
// factors, so neither has to be sorted. A library's product has one factor for all rows, so each row's power of two goes
// into its halves, relative to the largest: a row that is smaller by 2^11 and more than the largest loses its last bits.
#include "weight_tiles.cuh"

constexpr int SEGMENT_PIECES = TILE_COLUMNS / 8;  // of 16 bytes

// What both factors are scaled with: [0] the product's factor, [1] 1 / the rows' largest, [2] 1 / the weights'.
DEVICE float largest(const float* scales, int n) {
    __shared__ float found[WARP];
    float most = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) most = fmaxf(most, scales[i]);
    most = warp_max(most);
    __syncthreads();
    if (threadIdx.x % WARP == 0) found[threadIdx.x / WARP] = most;
    __syncthreads();
    return warp_max(threadIdx.x % WARP < blockDim.x / WARP ? found[threadIdx.x % WARP] : 0.0f);
}

// One block.
extern "C" __global__ void __launch_bounds__(1024)
    unpack_scales(const float* x_scale, int n, const float* row_scale, int n_rows, float* out) {
    pdl_wait();
    pdl_launch();
    const float x = largest(x_scale, n), w = largest(row_scale, n_rows);
    if (threadIdx.x == 0) {
        out[0] = __fmul_rn(x, w);  // all are powers of two
        out[1] = __fdiv_rn(1.0f, x);
        out[2] = __fdiv_rn(1.0f, w);
    }
}

DEVICE uint4 scaled(uint4 eight, half2 by) {
    eight.x = as_u32(__hmul2(as_half2(eight.x), by));
    eight.y = as_u32(__hmul2(as_half2(eight.y), by));
    eight.z = as_u32(__hmul2(as_half2(eight.z), by));
    eight.w = as_u32(__hmul2(as_half2(eight.w), by));
    return eight;
}

// Prepared rows [segment][w][room][t] to [n][segments * 256]; a thread moves 16 bytes. Grid (pieces of all rows / 256).
extern "C" __global__ void __launch_bounds__(256)
    unpack_rows(const uint4* halves, const float* x_scale, int n, int room, int n_segments, const float* scales, uint4* out) {
    pdl_wait();
    pdl_launch();
    const u64 at = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
    const int pieces = n_segments * SEGMENT_PIECES, piece = at % pieces, row = at / pieces;
    if (row >= n) return;
    const half2 by = __float2half2_rn(__fmul_rn(x_scale[row], scales[1]));
    out[at] = scaled(halves[(static_cast<u64>(piece / 4) * room + row) * 4 + piece % 4], by);
}

// Tiles to [rows of the tiles][segments * 256]; a warp takes a tile. Grid (segments / 4, row tiles), 4 warps.
template <int FORMAT>
DEVICE void unpack(const u8* tiles, const float* row_scale, int n_segments, const float* scales, uint4* out) {
    const int lane = threadIdx.x % WARP, segment = blockIdx.x * 4 + threadIdx.x / WARP;
    if (segment >= n_segments) return;
    Lane<FORMAT> held;
    held.load(tiles + (static_cast<u64>(blockIdx.y) * n_segments + segment) * Layout<FORMAT>::BYTES, lane);
    pdl_wait();
    pdl_launch();
    half2 by[2];
    uint4* to[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = blockIdx.y * TILE_ROWS + lane / 4 + 8 * h;
        by[h] = __float2half2_rn(__fmul_rn(row_scale[row], scales[2]));
        to[h] = out + (static_cast<u64>(row) * n_segments + segment) * SEGMENT_PIECES + lane % 4;
    }
    Scales of_codes;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        if (w % 4 == 0) of_codes = scales_of<FORMAT>(held, w / 4);
        u32 low[4], high[4];
        step_halves<FORMAT>(low, held, of_codes, w, 0);
        step_halves<FORMAT>(high, held, of_codes, w, 1);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            to[h][4 * w] = scaled(make_uint4(low[h], low[h + 2], high[h], high[h + 2]), by[h]);
    }
}

#define ENTRY(NAME, FORMAT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128)                                                             \
        unpack_##NAME(const u8* tiles, const float* row_scale, int n_segments, const float* scales, uint4* out) { \
        unpack<FORMAT>(tiles, row_scale, n_segments, scales, out);                                                \
    }

ENTRY(u4_h32, U4_H32)
ENTRY(u4_k32, U4_K32)
ENTRY(u5_h32, U5_H32)
ENTRY(u5_k32, U5_K32)
ENTRY(u6_s16, U6_S16)
ENTRY(u4_h16, U4_H16)
ENTRY(u8_h32, U8_H32)
ENTRY(f16, F16)
