// y = x W^T for at most 64 rows of x: a block owns one tile of 16 outputs, its warps share the segments of k.
//
// The sum over k has one order for every shape of launch: inside a segment of 256 the tensor core folds
// the steps in their order (weight_tiles.cuh), segments are added left to right inside slabs of eight counted from k = 0,
// slab sums left to right. Rows of x are columns of the product and do not touch each other.
#include "linear.cuh"

constexpr int COLUMN_STRIDE = 20;  // floats of a column's 16 sums in shared memory: no bank twice

// The sums of one segment: of 16 outputs (h) and NT * 8 columns.
template <int NT>
DEVICE void store_sums(float* to, const float (&d)[NT][4], int g, int t) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        float* at = to + (8 * j + 2 * t) * COLUMN_STRIDE + g;
        at[0] = d[j][0];
        at[COLUMN_STRIDE] = d[j][1];
        at[8] = d[j][2];
        at[COLUMN_STRIDE + 8] = d[j][3];
    }
}

// The tile that a warp holds times the segment's x, and the next tile on its way. x: [w][room][4] from this lane's t on.
template <int FORMAT, int NT>
DEVICE void multiply_segment(float (&d)[NT][4], Lane<FORMAT>& held, const uint4* x, int room, const int (&column)[NT],
                             const u8* next, bool more, int lane) {
#pragma unroll
    for (int j = 0; j < NT; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
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
}

// The sums that a thread adds up, neighbouring outputs of a row: four where there are many, one where registers are few.
// Number `index` of a block is outputs WIDTH * (index % GROUPS) + 0 .. WIDTH - 1 of row index / GROUPS; at least 128 threads.
template <int NT>
struct Totals {
    static constexpr int WIDTH = NT == 1 ? 1 : 4, GROUPS = TILE_ROWS / WIDTH;
    static constexpr int OF_ONE = NT * 8 * COLUMN_STRIDE, COUNT = (NT * 8 * GROUPS + 127) / 128;
    float slab[COUNT][WIDTH], total[COUNT][WIDTH];

    DEVICE Totals() {
#pragma unroll
        for (int k = 0; k < COUNT; ++k)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) slab[k][e] = total[k][e] = 0.0f;
    }

    // Segments first .. first + count - 1, [segment][NT * 8][COLUMN_STRIDE].
    DEVICE void add(const float* sums, int first, int count, int n) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const int index = threadIdx.x + k * blockDim.x;
            if (index >= n * GROUPS) break;
            const float* from = sums + index / GROUPS * COLUMN_STRIDE + index % GROUPS * WIDTH;
            for (int i = 0; i < count; ++i) {
                float v[WIDTH];
                if constexpr (WIDTH == 4) {
                    const float4 four = *reinterpret_cast<const float4*>(from + i * OF_ONE);
                    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
                } else {
                    v[0] = from[i * OF_ONE];
                }
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) slab[k][e] = __fadd_rn(slab[k][e], v[e]);
                if ((first + i) % SLAB != SLAB - 1) continue;
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    total[k][e] = __fadd_rn(total[k][e], slab[k][e]);
                    slab[k][e] = 0.0f;
                }
            }
        }
    }

    DEVICE void store(const Part& part, int tile, const Rows& rows, const Output& out) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const int index = threadIdx.x + k * blockDim.x;
            if (index >= (rows.n * GROUPS + WARP - 1) / WARP * WARP) break;  // whole warps come to the exchange below
            const int row = min(index / GROUPS, rows.n - 1), first = tile * TILE_ROWS + index % GROUPS * WIDTH;
            float value[WIDTH];
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                // Both factors are powers of two: where the product stays in range, nothing is rounded.
                const float row_scale = first + e < part.n_rows ? part.row_scale[first + e] : 0.0f;
                value[e] = __fmul_rn(__fmul_rn(__fadd_rn(total[k][e], slab[k][e]), row_scale), rows.scale[row]);
                if (rows.paired) value[e] = __fadd_rn(value[e], __shfl_xor_sync(ALL_LANES, value[e], GROUPS));
            }
            if (index >= rows.n * GROUPS || (rows.paired && row % 2)) continue;
            float* y = out.y + static_cast<u64>(rows.paired ? row / 2 : row) * out.stride + part.first_output + first;
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                if (first + e >= part.n_rows) break;
                y[e] = out.add ? __fadd_rn(y[e], value[e]) : value[e];
            }
        }
    }
};

// Shared memory holds sums, [2][warps][NT * 8][COLUMN_STRIDE].
template <int FORMAT, int NT>
DEVICE void multiply(const Parts& parts, const Part& part, int tile, const Rows& rows, const Output& out) {
    extern __shared__ float4 memory[];
    float* sums = reinterpret_cast<float*>(memory);
    using L = Layout<FORMAT>;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const int g = lane / 4, t = lane % 4, room = rows.room, n_segments = parts.n_segments;
    const u8* tiles = part.tiles + static_cast<u64>(tile) * n_segments * L::BYTES;

    Lane<FORMAT> held;
    if (warp < n_segments) held.load(tiles + static_cast<u64>(warp) * L::BYTES, lane);
    pdl_wait();
    pdl_launch();

    int column[NT];
#pragma unroll
    for (int j = 0; j < NT; ++j) column[j] = min(8 * j + g, rows.n - 1);
    Totals<NT> totals;
    constexpr int OF_ONE = Totals<NT>::OF_ONE;
    for (int first = 0, half = 0; first < n_segments; first += n_warps, half ^= 1) {
        float* turn = sums + half * n_warps * OF_ONE;
        const int segment = first + warp;
        if (segment < n_segments) {
            float d[NT][4];
            multiply_segment<FORMAT, NT>(d, held, rows.halves + static_cast<u64>(segment) * 8 * room * 4 + t, room, column,
                                         tiles + static_cast<u64>(segment + n_warps) * L::BYTES,
                                         segment + n_warps < n_segments, lane);
            store_sums<NT>(turn + warp * OF_ONE, d, g, t);
        }
        __syncthreads();
        // Everybody adds some outputs up, segments in order. The other half of `sums` is free meanwhile.
        totals.add(turn, first, min(n_warps, n_segments - first), rows.n);
    }
    totals.store(part, tile, rows, out);
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
