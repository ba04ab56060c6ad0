// y = x W^T for at most 64 rows of whole numbers: a block owns one tile of 16 outputs, its warps share the segments of k.
//
// As in linear.cu, segments are added left to right inside slabs of eight counted from k = 0, slab sums left to right: the sum
// over k has one order for every shape of launch. A warp copies its tiles ahead into a ring of its own in shared memory.
#include "integer_tiles.cuh"

constexpr int COLUMN_STRIDE = 20;  // floats of a column's 16 sums in shared memory: no bank twice
constexpr int STAGES = 3;

// What multiply_segment reads of x, straight from memory. Rows behind the last one are read as the last.
template <int NT>
struct FewRows {
    const IntegerRows& rows;
    int t, column[NT], pair[NT];
    u32 row[NT], pair_row[NT];  // of the segment

    DEVICE FewRows(const IntegerRows& rows, int lane) : rows(rows), t(lane % 4) {
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            column[i] = min(8 * i + lane / 4, rows.n - 1);
            pair[i] = min(4 * i + lane % 4, (rows.n - 1) / 2);
        }
    }
    DEVICE void go_to(int segment) {
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            row[i] = segment * rows.room + column[i];
            pair_row[i] = segment * (rows.room / 2) + pair[i];
        }
    }
    DEVICE uint4 codes(int j, int i) const { return rows.codes[static_cast<u64>(row[i]) * 16 + t + j * 4]; }
    DEVICE float4 scale(int j, int i) const { return rows.scale[static_cast<u64>(pair_row[i]) * 4 + j]; }
    DEVICE uint4 sums(int i) const { return rows.sums[static_cast<u64>(row[i]) * 4 + t]; }
    DEVICE uint4 sums16(int part, int i) const { return rows.sums16[static_cast<u64>(row[i]) * 8 + t + part * 4]; }
};

// Shared memory: rings [warps][STAGES][STRIDE], then sums [2][warps][columns][COLUMN_STRIDE].
template <int FORMAT, int N>
DEVICE void multiply(const Parts& parts, const Part& part, int tile, const IntegerRows& rows, const Output& out) {
    extern __shared__ uint4 memory[];
    using T = IntegerTile<FORMAT>;
    constexpr int NT = (N + 7) / 8, OF_ONE = N * COLUMN_STRIDE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const int g = lane / 4, t = lane % 4, n = rows.n, n_segments = parts.n_segments;
    const u8* tiles = part.tiles + static_cast<u64>(tile) * n_segments * T::L::BYTES;
    u8* ring = reinterpret_cast<u8*>(memory) + warp * STAGES * T::STRIDE;
    float* sums = reinterpret_cast<float*>(reinterpret_cast<u8*>(memory) + n_warps * STAGES * T::STRIDE);

#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        const int segment = warp + i * n_warps;
        if (segment < n_segments) T::copy(ring + i * T::STRIDE, tiles + static_cast<u64>(segment) * T::L::BYTES, lane);
        cp_async_commit();
    }
    pdl_wait();
    pdl_launch();

    FewRows<NT> x(rows, lane);
    float slab[NT], total[NT];  // of the sums that this thread adds up: a block has at least 128 threads
#pragma unroll
    for (int j = 0; j < NT; ++j) slab[j] = total[j] = 0.0f;

    int stage = 0;
    for (int first = 0, half = 0; first < n_segments; first += n_warps, half ^= 1) {
        float* turn = sums + half * n_warps * OF_ONE;
        const int segment = first + warp;
        if (segment < n_segments) {
            cp_async_wait<STAGES - 2>();
            __syncwarp();  // all lanes' copies are there, and all have read the stage that is filled next
            const int ahead = segment + (STAGES - 1) * n_warps, to = stage == 0 ? STAGES - 1 : stage - 1;
            if (ahead < n_segments) T::copy(ring + to * T::STRIDE, tiles + static_cast<u64>(ahead) * T::L::BYTES, lane);
            cp_async_commit();
            x.go_to(segment);
            float d[1][NT][4];
            const u8* const here[1] = {ring + stage * T::STRIDE};
            multiply_segment<FORMAT, 1, NT, N != 1>(d, here, lane, x);
            stage = stage == STAGES - 1 ? 0 : stage + 1;
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                float* to_sums = turn + warp * OF_ONE + (8 * j + 2 * t) * COLUMN_STRIDE + g;
                if (N != 1 || t == 0) {
                    to_sums[0] = d[0][j][0];
                    to_sums[8] = d[0][j][2];
                }
                if (N != 1) {
                    to_sums[COLUMN_STRIDE] = d[0][j][1];
                    to_sums[COLUMN_STRIDE + 8] = d[0][j][3];
                }
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
        const int row = index / TILE_ROWS, output = tile * TILE_ROWS + index % TILE_ROWS;
        if (output >= part.n_rows) continue;
        const float value = __fmul_rn(__fadd_rn(total[j], slab[j]), part.row_scale[output]);
        float* y = out.y + static_cast<u64>(row) * out.stride + part.first_output + output;
        *y = out.add ? __fadd_rn(*y, value) : value;
    }
}

// One entry for each format and number of rows. A block has at least 4 warps, the parts of a launch have one format.
#define ENTRY(NAME, FORMAT, N, THREADS, BLOCKS)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                             \
        linear_q8_##NAME##_##N(const __grid_constant__ Parts parts, const IntegerRows rows, const Output out) { \
        int tile = blockIdx.x, p = 0;                                                                         \
        while (p + 1 < parts.n_parts && tile >= parts.part[p].n_tiles) tile -= parts.part[p++].n_tiles;       \
        multiply<FORMAT, N>(parts, parts.part[p], tile, rows, out);                                           \
    }

#define ENTRIES(NAME, FORMAT)       \
    ENTRY(NAME, FORMAT, 1, 256, 3)  \
    ENTRY(NAME, FORMAT, 8, 256, 3)  \
    ENTRY(NAME, FORMAT, 16, 256, 2) \
    ENTRY(NAME, FORMAT, 24, 256, 2) \
    ENTRY(NAME, FORMAT, 64, 256, 1)

ENTRIES(u4_h32, U4_H32)
ENTRIES(u4_k32, U4_K32)
ENTRIES(u5_h32, U5_H32)
ENTRIES(u5_k32, U5_K32)
ENTRIES(u6_s16, U6_S16)
ENTRIES(u4_h16, U4_H16)
ENTRIES(u8_h32, U8_H32)
