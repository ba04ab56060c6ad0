// Attention of prompt rows, on tensor cores: 128 rows of a chain and one head in a block, PRODUCTS times 16 rows a warp:
// two with four warps, one with the eight that heads of 256 numbers have.
//
// A row folds the tiles 0 .. position / 64 in ascending order in one run: peak, sums and l are rescaled at every
// tile. A tile that a row does not see changes nothing (weight 1, p = 0), so a row's bits do not depend on which
// rows are beside it. Places behind the last row of the block are read as zeros.
#pragma once
#include "attention.cuh"

namespace prompts {

constexpr int BLOCK_ROWS = 128;
template <int D>
constexpr int PRODUCTS = BLOCK_ROWS / 16 / (TILE_THREADS<D> / WARP);

// As packed by ops/cuda_batch.py: consecutive rows of a chain.
struct alignas(16) Block {
    int first_row;
    int n_rows;
    int first_page;  // page of the sequence's first tile
    int position;    // of the first row
};

struct Prompt {
    Heads heads;
    const Block* blocks;
};

template <int D>
DEVICE void request(const Heads& heads, const Block& block, int group, u8* stage, int tile, int k_row_bytes, int v_row_bytes) {
    const int n_rows = min(TILE, block.position + block.n_rows - tile * TILE);
    const u64 k = heads.page_k[block.first_page + tile] + heads.k_layer + static_cast<u64>(group) * TILE * k_row_bytes;
    const u64 v = heads.page_v[block.first_page + tile] + heads.v_layer + static_cast<u64>(group) * TILE * v_row_bytes;
    load_tile<D>(stage, reinterpret_cast<const u8*>(k), heads.k_type, k_row_bytes, n_rows);
    load_tile<D>(stage + TILE * k_row_bytes, reinterpret_cast<const u8*>(v), heads.v_type, v_row_bytes, n_rows);
}

template <int D>
struct State {
    static constexpr int M = PRODUCTS<D>;
    float o[M][D / 8][4];
    float peak[M][2], l[M][2];  // peak of the products, not scaled; l: of this lane's columns

    // limit: last column that the warp's row 0 sees; row r sees r more. MASKED: some row does not see them all.
    template <bool MASKED>
    DEVICE void fold(const u8* queries, const float factor[M][2], const u8* k, const u8* v, int limit) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        float s[M][TILE / 8][4];
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 q[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) fragment_a<D>(q[m], queries, M * warp + m, kk);
#pragma unroll
            for (int n = 0; n < TILE / 16; ++n) {
                u32 b[4];
                fragment_b<D>(b, k, n, kk);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply(s[m][2 * n], q[m], b, kk == 0);
                    multiply(s[m][2 * n + 1], q[m], b + 2, kk == 0);
                }
            }
        }
        if (MASKED) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (8 * j + 2 * t + (i & 1) > limit + 16 * m + g + 8 * (i / 2)) s[m][j][i] = -INF;
        }
        u32 p[M][TILE / 16][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float largest = s[m][0][2 * h];
#pragma unroll
                for (int j = 0; j < TILE / 8; ++j) largest = fmaxf(fmaxf(largest, s[m][j][2 * h]), s[m][j][2 * h + 1]);
                const float next = fmaxf(peak[m][h], row_max(largest));
                const float weight = exp2_shared(__fmul_rn(__fsub_rn(peak[m][h], next), factor[m][h]));
                const float scaled = __fmul_rn(next, factor[m][h]);
                peak[m][h] = next;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < TILE / 8; ++j) {
                    const float x = softmax_weight(s[m][j][2 * h], factor[m][h], scaled), y = softmax_weight(s[m][j][2 * h + 1], factor[m][h], scaled);
                    sum = __fadd_rn(sum, __fadd_rn(x, y));
                    p[m][j / 2][2 * (j & 1) + h] = as_u32(__floats2half2_rn(x, y));
                }
                l[m][h] = __fmaf_rn(l[m][h], weight, sum);
#pragma unroll
                for (int j = 0; j < D / 8; ++j) {
                    o[m][j][2 * h] = __fmul_rn(o[m][j][2 * h], weight);
                    o[m][j][2 * h + 1] = __fmul_rn(o[m][j][2 * h + 1], weight);
                }
            }
#pragma unroll
        for (int kk = 0; kk < TILE / 16; ++kk)
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                u32 b[4];
                fragment_b_transposed<D>(b, v, n, kk);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    mma_m16n8k16(o[m][2 * n], p[m][kk], b);
                    mma_m16n8k16(o[m][2 * n + 1], p[m][kk], b + 2);
                }
            }
    }
};

// HALVES: K and V are f16, known when this is compiled: fewer registers and instructions in the loop.
template <int D, bool HALVES>
DEVICE void attend(const Prompt& prompt) {
    constexpr int M = PRODUCTS<D>, WARP_ROWS = 16 * M;
    extern __shared__ uint4 memory[];
    __shared__ float factors[BLOCK_ROWS];
    Heads heads = prompt.heads;
    if (HALVES) heads.k_type = heads.v_type = KV_F16;
    const int head = blockIdx.x, group = head / heads.per_group();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const Block block = prompt.blocks[gridDim.y - 1 - blockIdx.y];  // the longest first
    const int k_row_bytes = kv_row_bytes(heads.k_type, D), v_row_bytes = kv_row_bytes(heads.v_type, D);
    const int raw_k = TILE * k_row_bytes, stage_bytes = raw_k + TILE * v_row_bytes;
    u8* queries = reinterpret_cast<u8*>(memory);
    u8* stages = queries + BLOCK_ROWS * 2 * D;
    u8* unpacked = stages + 2 * stage_bytes;
    u8* unpacked_v = unpacked + (is_16_bit(heads.k_type) ? 0 : TILE * 2 * D);
    const int n_tiles = (block.position + block.n_rows - 1) / TILE + 1;

    pdl_wait();
    pdl_launch();
    request<D>(heads, block, group, stages, 0, k_row_bytes, v_row_bytes);
    cp_async_commit();
    load_queries<D>(queries, factors, heads, block.first_row, head, 1, block.n_rows, BLOCK_ROWS);
    __syncthreads();

    State<D> state;
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            factor[m][h] = factors[WARP_ROWS * warp + 16 * m + g + 8 * h];
            state.peak[m][h] = -INF;
            state.l[m][h] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) state.o[m][j][i] = 0.0f;
    }
    int tile = 0;
    const u8 *k, *v;
    // Waits for the tile's K and V as halves and asks for the next tile.
    auto begin = [&] {
        cp_async_wait<0>();
        __syncthreads();
        u8* stage = stages + (tile & 1) * stage_bytes;
        if (tile + 1 < n_tiles) {
            request<D>(heads, block, group, stages + (~tile & 1) * stage_bytes, tile + 1, k_row_bytes, v_row_bytes);
            cp_async_commit();
        }
        k = as_halves<D>(stage, unpacked, heads.k_type, k_row_bytes);
        v = as_halves<D>(stage + raw_k, unpacked_v, heads.v_type, v_row_bytes);
        if (heads.k_type != KV_F16 || heads.v_type != KV_F16) __syncthreads();
    };
    for (; tile < (block.position + 1) / TILE; ++tile) {  // seen by every row
        begin();
        state.template fold<false>(queries, factor, k, v, TILE - 1);
    }
    for (; tile < n_tiles; ++tile) {
        begin();
        const int limit = block.position + WARP_ROWS * warp - tile * TILE;
        if (limit > -WARP_ROWS && WARP_ROWS * warp < block.n_rows) state.template fold<true>(queries, factor, k, v, limit);
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float l = state.l[m][h];
            l = __fadd_rn(l, __shfl_xor_sync(ALL_LANES, l, 1));
            const float inverse = __frcp_rn(__fadd_rn(l, __shfl_xor_sync(ALL_LANES, l, 2)));
            const int index = WARP_ROWS * warp + 16 * m + g + 8 * h;
            if (index >= block.n_rows) continue;
            float* out = heads.out + (static_cast<u64>(block.first_row + index) * heads.n_head + head) * D + 2 * t;
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *reinterpret_cast<float2*>(out + 8 * j) = make_float2(normalised(state.o[m][j][2 * h], inverse), normalised(state.o[m][j][2 * h + 1], inverse));
        }
}

}  // namespace prompts
