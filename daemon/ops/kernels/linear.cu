// y = x W^T for at most 64 rows of x: a block owns one tile of 16 outputs, its warps share the segments of k.
//
// The sum over k has one order for every shape of launch: inside a segment of 256 the tensor core folds
// the steps in their order (weight_tiles.cuh), segments are added left to right inside slabs of eight counted from k = 0,
// slab sums left to right. Rows of x are columns of the product and do not touch each other.
#include "linear.cuh"

constexpr int COLUMN_STRIDE = 20;  // floats of a column's 16 sums in shared memory: no bank twice

// Shared memory holds sums, [2][warps][NT * 8][COLUMN_STRIDE].
template <int FORMAT, int NT>
DEVICE void multiply(const Parts& parts, const Part& part, int tile, const Rows& rows, const Output& out) {
    extern __shared__ float sums[];
    using L = Layout<FORMAT>;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const int g = lane / 4, t = lane % 4, n = rows.n, room = rows.room, n_segments = parts.n_segments;
    const u8* tiles = part.tiles + static_cast<u64>(tile) * n_segments * L::BYTES;

    Lane<FORMAT> held;
    if (warp < n_segments) held.load(tiles + static_cast<u64>(warp) * L::BYTES, lane);
    pdl_wait();
    pdl_launch();

    int column[NT];
#pragma unroll
    for (int j = 0; j < NT; ++j) column[j] = min(8 * j + g, n - 1);
    float slab[NT], total[NT];  // of the sums that this thread adds up: a block has at least 128 threads
#pragma unroll
    for (int j = 0; j < NT; ++j) slab[j] = total[j] = 0.0f;

    constexpr int OF_ONE = NT * 8 * COLUMN_STRIDE;
    for (int first = 0, half = 0; first < n_segments; first += n_warps, half ^= 1) {
        float* turn = sums + half * n_warps * OF_ONE;
        const int segment = first + warp;
        if (segment < n_segments) {
            float d[NT][4];
#pragma unroll
            for (int j = 0; j < NT; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
            const uint4* x = rows.halves + static_cast<u64>(segment) * 8 * room * 4 + t;
            const u8* next = tiles + static_cast<u64>(segment + n_warps) * L::BYTES;
            const bool more = segment + n_warps < n_segments;
            Scales scales;
#pragma unroll
            for (int w = 0; w < 8; ++w) {
                if (w % 4 == 0) scales = scales_of<FORMAT>(held, w / 4);
                uint4 b[NT];
#pragma unroll
                for (int j = 0; j < NT; ++j) b[j] = x[(w * room + column[j]) * 4];
                u32 a[4];
                step_halves<FORMAT>(a, held, scales, w, 0);
#pragma unroll
                for (int j = 0; j < NT; ++j) mma_m16n8k16(d[j], a, &b[j].x);
                step_halves<FORMAT>(a, held, scales, w, 1);
#pragma unroll
                for (int j = 0; j < NT; ++j) mma_m16n8k16(d[j], a, &b[j].z);
                // The last use of these registers: the next tile's bytes are under way while this one is finished.
                if (w == 3 && more) {
                    held.load_chunks(next, lane, 0, FORMAT == F16 ? 4 : 2);
                    if constexpr (FORMAT == F16) held.load_chunks(next, lane, 1, 4);
                }
                if (w == 7 && more) {
                    held.load_chunks(next, lane, FORMAT == F16 ? 2 : 1, FORMAT == F16 ? 4 : 2);
                    if constexpr (FORMAT == F16) held.load_chunks(next, lane, 3, 4);
                    held.load_scales(next, lane);
                }
            }
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                float* to = turn + warp * OF_ONE + (8 * j + 2 * t) * COLUMN_STRIDE + g;
                to[0] = d[j][0];
                to[COLUMN_STRIDE] = d[j][1];
                to[8] = d[j][2];
                to[COLUMN_STRIDE + 8] = d[j][3];
            }
        }
        __syncthreads();
        // Everybody adds some outputs up, segments in order. The other half of `sums` is free meanwhile.
        const int count = min(n_warps, n_segments - first);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const int index = threadIdx.x + j * blockDim.x;
            if (index >= n * TILE_ROWS) break;
            const float* from = turn + (index / TILE_ROWS) * COLUMN_STRIDE + index % TILE_ROWS;
            for (int i = 0; i < count; ++i) {
                slab[j] = __fadd_rn(slab[j], from[i * OF_ONE]);
                if ((first + i) % SLAB == SLAB - 1) {
                    total[j] = __fadd_rn(total[j], slab[j]);
                    slab[j] = 0.0f;
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        const int index = threadIdx.x + j * blockDim.x;
        if (index >= n * TILE_ROWS) break;
        int row = index / TILE_ROWS;
        const int output = tile * TILE_ROWS + index % TILE_ROWS;
        // Both factors are powers of two: where the product stays in range, nothing is rounded.
        const float sum = __fadd_rn(total[j], slab[j]);
        float value = __fmul_rn(__fmul_rn(sum, part.row_scale[output]), rows.scale[row]);
        if (rows.paired) {  // n is even: whole warps come here
            value = __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, TILE_ROWS));
            if (row % 2) continue;
            row /= 2;
        }
        if (output >= part.n_rows) continue;
        float* y = out.y + static_cast<u64>(row) * out.stride + part.first_output + output;
        *y = out.add ? __fadd_rn(*y, value) : value;
    }
}

// One entry for each format and number of 8-row groups of x. A block has at least 4 warps, the parts
// of a launch have one format.
#define ENTRY(NAME, FORMAT, N, THREADS, BLOCKS)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                             \
        linear_##NAME##_##N(const __grid_constant__ Parts parts, const Rows rows, const Output out) {         \
        int tile = blockIdx.x, p = 0;                                                                         \
        while (p + 1 < parts.n_parts && tile >= parts.part[p].n_tiles) tile -= parts.part[p++].n_tiles;       \
        multiply<FORMAT, N / 8>(parts, parts.part[p], tile, rows, out);                                       \
    }

#define ENTRIES(NAME, FORMAT, THREADS_8, BLOCKS_8, BLOCKS_16, BLOCKS_24)  \
    ENTRY(NAME, FORMAT, 8, THREADS_8, BLOCKS_8)                          \
    ENTRY(NAME, FORMAT, 16, 256, BLOCKS_16)                              \
    ENTRY(NAME, FORMAT, 24, 256, BLOCKS_24)                              \
    ENTRY(NAME, FORMAT, 32, 256, BLOCKS_24)                              \
    ENTRY(NAME, FORMAT, 64, 256, 1)

ENTRIES(u4_h32, U4_H32, 320, 3, 3, 2)
ENTRIES(u4_k32, U4_K32, 320, 3, 3, 2)
ENTRIES(u5_h32, U5_H32, 320, 3, 3, 2)
ENTRIES(u5_k32, U5_K32, 256, 3, 3, 2)
ENTRIES(u6_s16, U6_S16, 256, 3, 2, 2)
ENTRIES(u4_h16, U4_H16, 320, 3, 3, 2)
ENTRIES(u8_h32, U8_H32, 320, 2, 2, 2)
ENTRIES(f16, F16, 320, 2, 2, 1)
