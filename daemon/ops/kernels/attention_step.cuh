// Attention of at most 64 step rows, on tensor cores.
//
// Every tile of 64 positions gives for a row and head (peak, weights l, sums o) on its own: peak = largest score,
// p = 2^(score - peak) as halves, l = sum of p, o = p V, k ascending. Tiles are joined in ascending order inside a
// split of eight, splits with the weights 2^(peak - largest peak) in ascending order. Who computes a tile (all warps
// for 16 rows or for 128, together with which rows, in which block) does not change a bit. Heads of up to 128 numbers
// have four warps, those of 256 have eight.
//
// A work item is an entry of the host's list and a kv head. Tiles wholly below the committed end are the same for
// all rows of a sequence and come as SHARED entries, the tiles of a split or, while they are few, one tile; the one or two
// tiles behind come row by row as TAIL (or GATHERED when the row's ancestors are not simply the rows before it). Each
// entry leaves a part for each of its rows; attention_combine joins them. A lone part is the result already.
#pragma once
#include "attention.cuh"

namespace steps {

template <int D>
constexpr int N_WARPS = TILE_THREADS<D> / WARP;
constexpr int SPLIT_TILES = 8;
constexpr int NARROW_ROWS = 16;  // rows of one mma
constexpr int WIDE_ROWS = 128;   // one or two times 16 for each warp
constexpr int ANY_TYPE = -1;
template <int D>
constexpr int PRODUCTS = WIDE_ROWS / NARROW_ROWS / N_WARPS<D>;  // mma rows of a warp in the wide kernel

enum EntryKind { ENTRY_INERT, ENTRY_SHARED, ENTRY_TAIL, ENTRY_GATHERED };

// As packed by ops/cuda_batch.py.
struct alignas(16) Entry {
    int kind;
    int first_row;
    int n_rows;
    int first_page;  // page of the sequence's first tile
    int first_tile;
    int n_tiles;
    int committed;
    int part;  // which part of its rows
};

struct Step {
    Heads heads;
    const Entry* entries;
    const int* n_entries;
    const u8* ancestors;    // [rows][64]
    const int* positions;   // [rows], -1: padding
    const int* first_part;  // [rows + 1]
    const int* split_parts;   // [rows], parts that are splits; the parts behind them are single tiles
    const int* first_single;  // [rows], the first of these tiles
    float* part_sums;       // [parts][n_head][D]
    float2* part_weights;   // [parts][n_head], (peak, l)
    int n_stages;
};

// Shared memory of a block; the host reserves bytes().
template <int D>
struct Layout {
    u8 *queries, *weights, *stages, *unpacked;
    float *factors, *peaks;
    int raw_k, raw_v, stage;

    // unpacks_k: keys of quantised types are unpacked to shared memory.
    DEVICE Layout(u8* base, int rows, const Step& step, int k_row_bytes, int v_row_bytes, bool unpacks_k) {
        queries = base;
        weights = queries + rows * 2 * D;
        stages = weights + NARROW_ROWS * TILE * 2;
        raw_k = TILE * k_row_bytes;
        raw_v = TILE * v_row_bytes;
        stage = raw_k + raw_v;
        unpacked = stages + step.n_stages * stage;
        const int halves = TILE * 2 * D;
        const bool k_there = unpacks_k && !is_16_bit(step.heads.k_type), v_there = !is_16_bit(step.heads.v_type);
        factors = reinterpret_cast<float*>(unpacked + (k_there ? halves : 0) + (v_there ? halves : 0));
        peaks = factors + rows;
    }
};

// ----- one tile for 16 rows: a warp has 16 positions of the scores (8 of eight warps), then its share of the dimensions

// A tile of keys: halves, or with 256 numbers raw blocks.
struct Keys {
    const u8* at;
    int type, row_bytes;
};

// The queries of up to 16 rows: in registers while there are enough.
template <int D>
struct NarrowQueries {
    static constexpr bool KEPT = D < 256;
    u32 q[KEPT ? D / 16 : 1][4];
    const u8* tile;

    DEVICE explicit NarrowQueries(const u8* tile) : tile(tile) {
        if constexpr (KEPT)
#pragma unroll
            for (int kk = 0; kk < D / 16; ++kk) fragment_a<D>(q[kk], tile, 0, kk);
    }

    DEVICE void fragment(u32 a[4], int kk) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = q[kk][i];
        } else {
            // All 16 rows, also where 8 are enough: with a choice here nvcc 13 drops all but the last product of the
            // loop that asks.
            fragment_a<D>(a, tile, 0, kk);
        }
    }
};

// Products of the warp's positions. Q8: raw keys are q8_0.
template <bool Q8>
DEVICE void raw_products(float s[4], const NarrowQueries<256>& queries, const Keys& keys) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u8* row = keys.at + (8 * warp + lane / 4) * keys.row_bytes;
    const int block_bytes = keys.row_bytes / 8;
#pragma unroll 2
    for (int block = 0; block < 8; ++block) {
        u32 a[4], b[4];
        fragment_b_raw<Q8>(b, row + block * block_bytes, keys.type);
        queries.fragment(a, 2 * block);
        multiply(s, a, b, false);
        queries.fragment(a, 2 * block + 1);
        multiply(s, a, b + 2, false);
    }
}

template <int D, int N>
DEVICE void products(float (&s)[N][4], const NarrowQueries<D>& queries, const Keys& keys) {
    const int warp = threadIdx.x / WARP;
    if constexpr (D == 256) {
        s[0][0] = s[0][1] = s[0][2] = s[0][3] = 0.0f;
        if (keys.type == KV_Q8_0) return raw_products<true>(s[0], queries, keys);
        if (!is_16_bit(keys.type)) return raw_products<false>(s[0], queries, keys);
#pragma unroll
        for (int kk = 0; kk < D / 16; kk += 2) {
            u32 a[4], b[4];
            fragment_b_long<D>(b, keys.at, warp, kk / 2);
            queries.fragment(a, kk);
            multiply(s[0], a, b, false);
            queries.fragment(a, kk + 1);
            multiply(s[0], a, b + 2, false);
        }
    } else {
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 a[4], b[4];
            fragment_b<D>(b, keys.at, warp, kk);
            queries.fragment(a, kk);
            multiply(s[0], a, b, kk == 0);
            multiply(s[1], a, b + 2, kk == 0);
        }
    }
}

template <int D>
struct Narrow {
    static constexpr int N_DIMS = D / 8 / N_WARPS<D>;         // products of 8 dimensions that a warp has
    static constexpr int N_POSITIONS = TILE / 8 / N_WARPS<D>;  // the same of positions
    float o[N_DIMS][4];
    float peak[2], l[2];

    DEVICE void clear() {
#pragma unroll
        for (int j = 0; j < N_DIMS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[j][i] = 0.0f;
        peak[0] = peak[1] = -INF;
        l[0] = l[1] = 0.0f;
    }

    // limit: last position of the tile that the rows see.
    DEVICE void fold(const Layout<D>& at, const NarrowQueries<D>& queries, const float factor[2], const Keys& keys, const u8* v, int limit) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        float s[N_POSITIONS][4];
        products(s, queries, keys);
        const int first = 8 * N_POSITIONS * warp + 2 * t;
#pragma unroll
        for (int j = 0; j < N_POSITIONS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + 8 * j + (i & 1) > limit) s[j][i] = -INF;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
            for (int j = 1; j < N_POSITIONS; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            largest = row_max(largest);
            if (t == 0) at.peaks[warp * NARROW_ROWS + g + 8 * h] = largest;
        }
        __syncthreads();
        float tile_peak[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = at.peaks[g + 8 * h];
#pragma unroll
            for (int w = 1; w < N_WARPS<D>; ++w) largest = fmaxf(largest, at.peaks[w * NARROW_ROWS + g + 8 * h]);
            tile_peak[h] = __fmul_rn(largest, factor[h]);
#pragma unroll
            for (int j = 0; j < N_POSITIONS; ++j) {
                half2 p = __floats2half2_rn(softmax_weight(s[j][2 * h], factor[h], tile_peak[h]), softmax_weight(s[j][2 * h + 1], factor[h], tile_peak[h]));
                *reinterpret_cast<half2*>(at.weights + chunk_byte<TILE>(g + 8 * h, N_POSITIONS * warp + j) + 4 * t) = p;
            }
        }
        __syncthreads();
        float x[N_DIMS][4], sum[4];
        const u32 ones[2] = {0x3c003c00u, 0x3c003c00u};
#pragma unroll
        for (int kk = 0; kk < TILE / 16; ++kk) {
            u32 p[4];
            fragment_a<TILE>(p, at.weights, 0, kk);
            multiply(sum, p, ones, kk == 0);
#pragma unroll
            for (int n = 0; n < N_DIMS / 2; ++n) {
                u32 b[4];
                fragment_b_transposed<D>(b, v, warp * (N_DIMS / 2) + n, kk);
                multiply(x[2 * n], p, b, kk == 0);
                multiply(x[2 * n + 1], p, b + 2, kk == 0);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float next = fmaxf(peak[h], tile_peak[h]);
            float old_weight = exp2_shared(peak[h] - next), tile_weight = exp2_shared(tile_peak[h] - next);
            peak[h] = next;
            l[h] = joined(l[h], old_weight, sum[2 * h], tile_weight);
#pragma unroll
            for (int j = 0; j < N_DIMS; ++j) {
                o[j][2 * h] = joined(o[j][2 * h], old_weight, x[j][2 * h], tile_weight);
                o[j][2 * h + 1] = joined(o[j][2 * h + 1], old_weight, x[j][2 * h + 1], tile_weight);
            }
        }
    }
};

// ----- one tile for 128 rows: a warp has all of it for PRODUCTS times 16 rows

template <int D>
struct Wide {
    float o[PRODUCTS<D>][D / 8][4];
    float peak[PRODUCTS<D>][2], l[PRODUCTS<D>][2];

    DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < PRODUCTS<D>; ++m) {
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][j][i] = 0.0f;
            peak[m][0] = peak[m][1] = -INF;
            l[m][0] = l[m][1] = 0.0f;
        }
    }

    template <int M>
    DEVICE void fold(const Layout<D>& at, const float factor[PRODUCTS<D>][2], const u8* k, const u8* v) {
        const int warp = threadIdx.x / WARP;
        float s[M][TILE / 8][4] = {};
#pragma unroll (D == 256 ? 2 : D / 16)
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 q[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) fragment_a<D>(q[m], at.queries, warp + N_WARPS<D> * m, kk);
#pragma unroll
            for (int n = 0; n < TILE / 16; ++n) {
                u32 b[4];
                fragment_b<D>(b, k, n, kk);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply(s[m][2 * n], q[m], b, D < 256 && kk == 0);
                    multiply(s[m][2 * n + 1], q[m], b + 2, D < 256 && kk == 0);
                }
            }
        }
        u32 p[M][TILE / 16][4];
        float old_weight[M][2], tile_weight[M][2];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            float sum[4], tile_peak[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float largest = s[m][0][2 * h];
#pragma unroll
                for (int j = 0; j < TILE / 8; ++j) largest = fmaxf(fmaxf(largest, s[m][j][2 * h]), s[m][j][2 * h + 1]);
                tile_peak[h] = __fmul_rn(row_max(largest), factor[m][h]);
#pragma unroll
                for (int j = 0; j < TILE / 8; ++j)
                    p[m][j / 2][2 * (j & 1) + h] = as_u32(__floats2half2_rn(softmax_weight(s[m][j][2 * h], factor[m][h], tile_peak[h]), softmax_weight(s[m][j][2 * h + 1], factor[m][h], tile_peak[h])));
            }
            const u32 ones[2] = {0x3c003c00u, 0x3c003c00u};
#pragma unroll
            for (int kk = 0; kk < TILE / 16; ++kk) multiply(sum, p[m][kk], ones, kk == 0);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float next = fmaxf(peak[m][h], tile_peak[h]);
                old_weight[m][h] = exp2_shared(peak[m][h] - next);
                tile_weight[m][h] = exp2_shared(tile_peak[h] - next);
                peak[m][h] = next;
                l[m][h] = joined(l[m][h], old_weight[m][h], sum[2 * h], tile_weight[m][h]);
            }
        }
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            float x[M][2][4];
#pragma unroll
            for (int kk = 0; kk < TILE / 16; ++kk) {
                u32 b[4];
                fragment_b_transposed<D>(b, v, n, kk);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply(x[m][0], p[m][kk], b, kk == 0);
                    multiply(x[m][1], p[m][kk], b + 2, kk == 0);
                }
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        o[m][2 * n + j][i] = joined(o[m][2 * n + j][i], old_weight[m][i / 2], x[m][j][i], tile_weight[m][i / 2]);
        }
    }
};

// ----- from parts to the result

// A part's sums for two neighbouring dimensions.
DEVICE void store_part(const Step& step, int D, int row, int head, int part, int d, float x, float y) {
    u64 at = static_cast<u64>(step.first_part[row] + part) * step.heads.n_head + head;
    __stcg(reinterpret_cast<float2*>(step.part_sums + at * D + d), make_float2(x, y));
}

DEVICE void store_weights(const Step& step, int row, int head, int part, float peak, float l) {
    __stcg(step.part_weights + static_cast<u64>(step.first_part[row] + part) * step.heads.n_head + head, make_float2(peak, l));
}

// ----- work items

// Where a tile of an entry lies (counted from its first one); of rows that are gathered each has a place of its own.
struct Pages {
    u64 k, v;

    DEVICE void find(const Step& step, const Entry& entry, int tile) {
        if (tile >= entry.n_tiles || entry.kind == ENTRY_GATHERED) return;
        k = step.heads.page_k[entry.first_page + entry.first_tile + tile];
        v = step.heads.page_v[entry.first_page + entry.first_tile + tile];
    }
};

// Asks for tile `tile` of an entry, which lies in `pages`, to come to `stage`.
template <int D>
DEVICE void request(const Step& step, const Layout<D>& at, const Entry& entry, int group, int tile, const Pages& pages, u8* stage, int k_row_bytes, int v_row_bytes) {
    const Heads& heads = step.heads;
    const int number = entry.first_tile + tile;
    const u64 k_offset = heads.k_layer + static_cast<u64>(group) * TILE * k_row_bytes;
    const u64 v_offset = heads.v_layer + static_cast<u64>(group) * TILE * v_row_bytes;
    const int n_rows = entry.kind == ENTRY_SHARED ? TILE : min(TILE, step.positions[entry.first_row] + 1 - number * TILE);
    if (entry.kind == ENTRY_GATHERED) {
        const u8* ancestors = step.ancestors + entry.first_row * 64;
        gather_tile<D>(stage, Path{heads.page_k + entry.first_page, ancestors, entry.committed}, number, k_offset, heads.k_type, k_row_bytes, n_rows);
        gather_tile<D>(stage + at.raw_k, Path{heads.page_v + entry.first_page, ancestors, entry.committed}, number, v_offset, heads.v_type, v_row_bytes, n_rows);
        return;
    }
    load_tile<D>(stage, reinterpret_cast<const u8*>(pages.k + k_offset), heads.k_type, k_row_bytes, n_rows);
    load_tile<D>(stage + at.raw_k, reinterpret_cast<const u8*>(pages.v + v_offset), heads.v_type, v_row_bytes, n_rows);
}

DEVICE void wait_for_stage(int n_stages) {
    if (n_stages == 2) cp_async_wait<0>();
    else if (n_stages == 3) cp_async_wait<1>();
    else cp_async_wait<2>();
}

// Calls fold(keys, v, limit) with each tile of an entry, ascending; v is halves. RAW_K: quantised keys stay raw. EARLY:
// the page of a tile is looked up one tile before it is asked for, where there are registers to hold it.
template <int D, bool RAW_K, bool EARLY, typename Fold>
DEVICE void for_each_tile(const Step& step, const Layout<D>& at, const Entry& entry, int group, int k_row_bytes, int v_row_bytes, Fold fold) {
    const int k_type = step.heads.k_type, v_type = step.heads.v_type;
    const bool raw_k = RAW_K && !is_16_bit(k_type);
    u8* unpacked_v = at.unpacked + (raw_k || is_16_bit(k_type) ? 0 : TILE * 2 * D);
    Pages pages;
    if (EARLY) pages.find(step, entry, step.n_stages - 1);
    int slot = 0;
#pragma unroll 1
    for (int tile = 0; tile < entry.n_tiles; ++tile) {
        wait_for_stage(step.n_stages);
        __syncthreads();
        const int next = tile + step.n_stages - 1;
        if (!EARLY) pages.find(step, entry, next);
        u8* free = at.stages + (slot == 0 ? step.n_stages - 1 : slot - 1) * at.stage;
        if (next < entry.n_tiles) request<D>(step, at, entry, group, next, pages, free, k_row_bytes, v_row_bytes);
        cp_async_commit();
        if (EARLY) pages.find(step, entry, next + 1);
        u8* stage = at.stages + slot * at.stage;
        const u8* k = raw_k ? stage : as_halves<D, D == 256>(stage, at.unpacked, k_type, k_row_bytes);
        const u8* v = as_halves<D>(stage + at.raw_k, unpacked_v, v_type, v_row_bytes);
        if (!raw_k && (k_type != KV_F16 || v_type != KV_F16)) __syncthreads();  // with raw keys fold does it, before it reads v
        const int limit = entry.kind == ENTRY_SHARED ? TILE - 1 : step.positions[entry.first_row] - (entry.first_tile + tile) * TILE;
        fold(Keys{k, k_type, k_row_bytes}, v, limit);
        slot = slot + 1 == step.n_stages ? 0 : slot + 1;
    }
}

// Row and head of row m of the packed queries.
struct Packed {
    int first_row, first_head, per_group, count;

    DEVICE int row(int m) const { return first_row + m / per_group; }
    DEVICE int head(int m) const { return first_head + m % per_group; }
};

template <int D>
DEVICE void run_narrow(const Step& step, const Layout<D>& at, const Entry& entry, int group, const Packed& packed, int k_row_bytes, int v_row_bytes) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const NarrowQueries<D> queries(at.queries);
    const float factor[2] = {at.factors[g], at.factors[g + 8]};
    Narrow<D> state;
    state.clear();
    for_each_tile<D, D == 256, true>(step, at, entry, group, k_row_bytes, v_row_bytes, [&](const Keys& keys, const u8* v, int limit) { state.fold(at, queries, factor, keys, v, limit); });
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int m = g + 8 * h;
        if (m >= packed.count) continue;
        const int row = packed.row(m), head = packed.head(m);
        const bool alone = step.first_part[row + 1] - step.first_part[row] == 1;
#pragma unroll
        for (int j = 0; j < Narrow<D>::N_DIMS; ++j) {
            const int d = 8 * (warp * Narrow<D>::N_DIMS + j) + 2 * t;
            float x = state.o[j][2 * h], y = state.o[j][2 * h + 1];
            if (alone) {
                const float inverse = __frcp_rn(state.l[h]);
                float2 result = make_float2(normalised(x, inverse), normalised(y, inverse));
                *reinterpret_cast<float2*>(step.heads.out + (static_cast<u64>(row) * step.heads.n_head + head) * D + d) = result;
            } else {
                store_part(step, D, row, head, entry.part, d, x, y);
            }
        }
        if (!alone && warp == 0 && t == 0) store_weights(step, row, head, entry.part, state.peak[h], state.l[h]);
    }
}

template <int D>
DEVICE void run_wide(const Step& step, const Layout<D>& at, const Entry& entry, int group, const Packed& packed, int k_row_bytes, int v_row_bytes) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int n_products = (packed.count + 15) / 16;
    float factor[PRODUCTS<D>][2];
#pragma unroll
    for (int m = 0; m < PRODUCTS<D>; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) factor[m][h] = at.factors[16 * (warp + N_WARPS<D> * m) + g + 8 * h];
    Wide<D> state;
    state.clear();
    for_each_tile<D, false, false>(step, at, entry, group, k_row_bytes, v_row_bytes, [&](const Keys& keys, const u8* v, int) {
        if (PRODUCTS<D> == 2 && warp + N_WARPS<D> < n_products) state.template fold<PRODUCTS<D>>(at, factor, keys.at, v);
        else if (warp < n_products) state.template fold<1>(at, factor, keys.at, v);
    });
#pragma unroll
    for (int m = 0; m < PRODUCTS<D>; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int index = 16 * (warp + N_WARPS<D> * m) + g + 8 * h;
            if (index >= packed.count) continue;
            const int row = packed.row(index), head = packed.head(index);
#pragma unroll
            for (int j = 0; j < D / 8; ++j) store_part(step, D, row, head, entry.part, 8 * j + 2 * t, state.o[m][j][2 * h], state.o[m][j][2 * h + 1]);
            if (t == 0) store_weights(step, row, head, entry.part, state.peak[m][h], state.l[m][h]);
        }
}

// TYPE: of K and V, where it is known when this is compiled: fewer registers and instructions in the loop.
template <int D, bool WIDE, int TYPE>
DEVICE void attend(Step step) {
    if (TYPE != ANY_TYPE) step.heads.k_type = step.heads.v_type = TYPE;
    extern __shared__ uint4 memory[];
    constexpr int MOST_ROWS = WIDE ? WIDE_ROWS : NARROW_ROWS;
    const Heads& heads = step.heads;
    const int k_row_bytes = kv_row_bytes(heads.k_type, D), v_row_bytes = kv_row_bytes(heads.v_type, D);
    const Layout<D> at(reinterpret_cast<u8*>(memory), MOST_ROWS, step, k_row_bytes, v_row_bytes, WIDE || D != 256);
    const int n_items = *step.n_entries * heads.n_head_kv;
    bool waited = false;
    for (int item = blockIdx.x; item < n_items; item += gridDim.x) {
        const Entry entry = step.entries[item / heads.n_head_kv];
        const int group = item % heads.n_head_kv;
        // Tiles below the committed end are older than the kernel before this one.
        const bool early = waited || entry.kind == ENTRY_SHARED;
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
            if (pass == 1 && !waited) {
                pdl_wait();
                pdl_launch();
                waited = true;
            }
            if (early == (pass == 0))
#pragma unroll 1
                for (int tile = 0; tile < step.n_stages - 1; ++tile) {
                    if (tile < entry.n_tiles) {
                        Pages pages;
                        pages.find(step, entry, tile);
                        request<D>(step, at, entry, group, tile, pages, at.stages + tile * at.stage, k_row_bytes, v_row_bytes);
                    }
                    cp_async_commit();
                }
        }
        const int per_group = heads.per_group();
        const Packed packed = {entry.first_row, group * per_group, per_group, entry.n_rows * per_group};
        const int padded = (packed.count + 15) / 16 * 16;
        load_queries<D>(at.queries, at.factors, heads, packed.first_row, packed.first_head, per_group, packed.count, padded, heads.k_type);
        __syncthreads();
        if (!WIDE || packed.count <= NARROW_ROWS) run_narrow<D>(step, at, entry, group, packed, k_row_bytes, v_row_bytes);
        else run_wide<D>(step, at, entry, group, packed, k_row_bytes, v_row_bytes);
        __syncthreads();
    }
    if (!waited) {
        pdl_wait();
        pdl_launch();
    }
}

// ----- joining the parts: a block has 32 dimensions of one row and head

constexpr int COMBINE_THREADS = 128;
constexpr int COMBINE_WARPS = COMBINE_THREADS / WARP;
constexpr int SPLITS_AT_ONCE = 64;

// Which parts of a row make up its splits. The first ones are splits already, of which the last may lack tiles.
struct Splits {
    int n_parts, split_parts, first_single;

    DEVICE int whole() const { return first_single % SPLIT_TILES == 0 ? split_parts : split_parts - 1; }
    DEVICE int count() const { return (first_single + n_parts - split_parts - 1) / SPLIT_TILES + 1; }
    DEVICE int first(int split) const {
        return split < split_parts ? split : split_parts + max(split * SPLIT_TILES - first_single, 0);
    }
    DEVICE int stop(int split) const {
        const int singles = min((split + 1) * SPLIT_TILES - first_single, n_parts - split_parts);
        return split + 1 < split_parts ? split + 1 : split_parts + max(singles, 0);
    }
};

template <int D>
DEVICE void combine(const Step& step) {
    __shared__ float sums[SPLITS_AT_ONCE][WARP];
    __shared__ float2 weights[SPLITS_AT_ONCE];  // (peak, l) of a split
    __shared__ float peaks[COMBINE_WARPS];
    const Heads& heads = step.heads;
    const int row = blockIdx.z, head = blockIdx.y, d = blockIdx.x * WARP;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first_part = step.first_part[row];
    const Splits splits = {step.first_part[row + 1] - first_part, step.split_parts[row], step.first_single[row]};
    pdl_wait();
    pdl_launch();
    if (splits.n_parts < 2) return;  // padding, or written by the block that had its only part
    const u64 at = static_cast<u64>(first_part) * heads.n_head + head, stride = static_cast<u64>(heads.n_head) * D;
    const float* part_sums = step.part_sums + at * D + d + lane;
    const float2* part_weights = step.part_weights + at;
    float largest = -INF;
    for (int i = threadIdx.x; i < splits.n_parts; i += COMBINE_THREADS) largest = fmaxf(largest, __ldcg(part_weights + static_cast<u64>(i) * heads.n_head).x);
    largest = warp_max(largest);
    if (lane == 0) peaks[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < COMBINE_WARPS; ++w) largest = fmaxf(largest, peaks[w]);
    float sum = 0.0f, l = 0.0f;
    const int n_splits = splits.count();
    for (int start = 0; start < n_splits; start += SPLITS_AT_ONCE) {
        const int n = min(SPLITS_AT_ONCE, n_splits - start);
        __syncthreads();
        const int n_whole = min(n, splits.whole() - start);
#pragma unroll 8
        for (int split = warp; split < n_whole; split += COMBINE_WARPS) {
            sums[split][lane] = __ldcg(part_sums + (start + split) * stride);
            const float2 w = __ldcg(part_weights + static_cast<u64>(start + split) * heads.n_head);
            if (lane == 0) weights[split] = make_float2(exp2_shared(w.x - largest), w.y);
        }
        for (int split = max(n_whole, 0) + warp; split < n; split += COMBINE_WARPS) {
            const int first = splits.first(start + split), count = splits.stop(start + split) - first;
            float x[SPLIT_TILES];
            float2 w[SPLIT_TILES];
#pragma unroll
            for (int i = 0; i < SPLIT_TILES; ++i)
                if (i < count) {
                    x[i] = __ldcg(part_sums + (first + i) * stride);
                    w[i] = __ldcg(part_weights + static_cast<u64>(first + i) * heads.n_head);
                }
            float joint = x[0], peak = w[0].x, joint_l = w[0].y;
#pragma unroll
            for (int i = 1; i < SPLIT_TILES; ++i)
                if (i < count) {
                    const float next = fmaxf(peak, w[i].x);
                    const float old_weight = exp2_shared(peak - next), tile_weight = exp2_shared(w[i].x - next);
                    joint = joined(joint, old_weight, x[i], tile_weight);
                    joint_l = joined(joint_l, old_weight, w[i].y, tile_weight);
                    peak = next;
                }
            sums[split][lane] = joint;
            if (lane == 0) weights[split] = make_float2(exp2_shared(peak - largest), joint_l);
        }
        __syncthreads();
        if (warp == 0) {
#pragma unroll 8
            for (int i = 0; i < n; ++i) {
                sum = __fmaf_rn(weights[i].x, sums[i][lane], sum);
                l = __fmaf_rn(weights[i].x, weights[i].y, l);
            }
        }
    }
    if (warp == 0) heads.out[(static_cast<u64>(row) * heads.n_head + head) * D + d + lane] = normalised(sum, __frcp_rn(l));
}

}  // namespace steps
