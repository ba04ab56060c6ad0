// y = x W^T for the rows of a prompt piece: a block owns 128 outputs and 128 rows of x. The same sums in the same
// order as linear.cu, so a row has the same bits in both.
//
// Eight warps, 4 x 2; each holds two tiles of 16 outputs and 64 rows of x, unpacks its weights in registers and reads x
// from a ring in shared memory. The third set of sums (over slabs) lives in shared memory too: registers hold the
// segment's and the slab's.
#include "linear.cuh"

constexpr int BLOCK_COLUMNS = 128;  // rows of x
constexpr int BLOCK_TILES = 8;      // of 16 outputs
constexpr int MT = 2, NT = 8;
constexpr int STAGES = 4;
constexpr int STAGE_STEPS = 2;  // values of w in a stage
constexpr int STAGE_BYTES = STAGE_STEPS * BLOCK_COLUMNS * 64;

// The ring is filled with x of steps first, first + 1 (counted through all segments).
DEVICE void fill_stage(uint4* stage, const Rows& rows, int first, int n_steps, int column) {
#pragma unroll
    for (int i = 0; i < STAGE_BYTES / 16 / 256; ++i) {
        const int at = threadIdx.x + i * 256;  // [step][column][t]
        const int step = first + at / (BLOCK_COLUMNS * 4);
        if (step < n_steps)
            cp_async16(stage + at, rows.halves + (static_cast<u64>(step) * rows.room + column) * 4 + at % (BLOCK_COLUMNS * 4));
    }
    cp_async_commit();
}

template <int FORMAT>
DEVICE void multiply(const Parts& parts, const Part& part, int first_tile, const Rows& rows, const Output& out) {
    extern __shared__ uint4 ring[];  // [STAGES][STAGE_STEPS][BLOCK_COLUMNS][4], then the totals [MT * NT * 4][256]
    using L = Layout<FORMAT>;
    float* totals = reinterpret_cast<float*>(ring + STAGES * STAGE_BYTES / 16) + threadIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int n_segments = parts.n_segments, n_steps = n_segments * 8;
    const int column = blockIdx.x * BLOCK_COLUMNS;

    const u8* tiles[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i)  // a tile behind the last one is computed from the last one and not stored
        tiles[i] = part.tiles + static_cast<u64>(min(first_tile + (warp / 2) * MT + i, part.n_tiles - 1)) * n_segments * L::BYTES;

    Lane<FORMAT> held[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) held[i].load(tiles[i], lane);
    pdl_wait();
    pdl_launch();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) 
        fill_stage(ring + i * STAGE_BYTES / 16, rows, i * STAGE_STEPS, n_steps, column);

    float d[MT][NT][4], slab[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                slab[i][j][e] = 0.0f;
                totals[((i * NT + j) * 4 + e) * 256] = 0.0f;
            }

    for (int segment = 0; segment < n_segments; ++segment) {
        const bool more = segment + 1 < n_segments;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j) d[i][j][0] = d[i][j][1] = d[i][j][2] = d[i][j][3] = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const int stage = segment * 4 + w / STAGE_STEPS;
            if (w % STAGE_STEPS == 0) {
                cp_async_wait<STAGES - 2>();
                __syncthreads();
                // The stage read before the barrier is free now.
                fill_stage(ring + (stage + STAGES - 1) % STAGES * (STAGE_BYTES / 16), rows,
                           (stage + STAGES - 1) * STAGE_STEPS, n_steps, column);
            }
            const uint4* x = ring + (stage % STAGES) * (STAGE_BYTES / 16) + (w % STAGE_STEPS) * BLOCK_COLUMNS * 4 +
                             ((warp % 2) * (BLOCK_COLUMNS / 2) + g) * 4 + t;
            uint4 b[NT];
#pragma unroll
            for (int j = 0; j < NT; ++j) b[j] = x[j * 8 * 4];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const Scales scales = scales_of<FORMAT>(held[i], w / 4);
                u32 a[4];
                step_halves<FORMAT>(a, held[i], scales, w, 0);
#pragma unroll
                for (int j = 0; j < NT; ++j) mma_m16n8k16(d[i][j], a, &b[j].x);
                step_halves<FORMAT>(a, held[i], scales, w, 1);
#pragma unroll
                for (int j = 0; j < NT; ++j) mma_m16n8k16(d[i][j], a, &b[j].z);
                if (w == 3 && more) {
                    const u8* next = tiles[i] + static_cast<u64>(segment + 1) * L::BYTES;
                    held[i].load_chunks(next, lane, 0, FORMAT == F16 ? 4 : 2);
                    if constexpr (FORMAT == F16) held[i].load_chunks(next, lane, 1, 4);
                }
                if (w == 7 && more) {
                    const u8* next = tiles[i] + static_cast<u64>(segment + 1) * L::BYTES;
                    held[i].load_chunks(next, lane, FORMAT == F16 ? 2 : 1, FORMAT == F16 ? 4 : 2);
                    if constexpr (FORMAT == F16) held[i].load_chunks(next, lane, 3, 4);
                    held[i].load_scales(next, lane);
                }
            }
        }
        const bool slab_ends = segment % SLAB == SLAB - 1;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) slab[i][j][e] = __fadd_rn(slab[i][j][e], d[i][j][e]);
        if (slab_ends) {
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int j = 0; j < NT; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float* total = totals + ((i * NT + j) * 4 + e) * 256;
                        *total = __fadd_rn(*total, slab[i][j][e]);
                        slab[i][j][e] = 0.0f;
                    }
        }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        const int tile = first_tile + (warp / 2) * MT + i;
        if (tile >= part.n_tiles) continue;
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int output = tile * TILE_ROWS + g + 8 * h;
                const int row = column + (warp % 2) * (BLOCK_COLUMNS / 2) + 8 * j + 2 * t;
                if (row >= rows.n || output >= part.n_rows) continue;
                float value[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int e = 2 * h + c;
                    const float sum = __fadd_rn(totals[((i * NT + j) * 4 + e) * 256], slab[i][j][e]);
                    value[c] = __fmul_rn(__fmul_rn(sum, part.row_scale[output]), rows.scale[row + c]);
                }
                float* y = out.y + static_cast<u64>(rows.paired ? row / 2 : row) * out.stride + part.first_output + output;
                if (rows.paired) value[0] = __fadd_rn(value[0], value[1]);
                *y = out.add ? __fadd_rn(*y, value[0]) : value[0];
                if (rows.paired || row + 1 >= rows.n) continue;
                y += out.stride;
                *y = out.add ? __fadd_rn(*y, value[1]) : value[1];
            }
    }
}

// One launch for each part: grid (rows of x / 128, tiles / 8).
#define ENTRY(NAME, FORMAT)                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 1)                                               \
        linear_prompt_##NAME(const __grid_constant__ Parts parts, const Rows rows, const Output out) { \
        multiply<FORMAT>(parts, parts.part[0], blockIdx.y * BLOCK_TILES, rows, out);                   \
    }

ENTRY(u4_h32, U4_H32)
ENTRY(u4_k32, U4_K32)
ENTRY(u5_h32, U5_H32)
ENTRY(u5_k32, U5_K32)
ENTRY(u6_s16, U6_S16)
ENTRY(u4_h16, U4_H16)
ENTRY(u8_h32, U8_H32)
ENTRY(f16, F16)
