// The delta rule in its chunked form: blocks of 64 rows of a prompt that begin at multiples of 64.
//
// With G the running sum of g in a block, D_ij = e^(G_i - G_j) for j <= i, else 0, and beta on rows:
//   L = strictly lower part of (beta K) K^T * D,   (I + L) [U | W] = [beta V | beta K e^G],   P = Q K^T * D
//   R = U - W M,   O = e^G Q M + P R,   M' = e^(G_last) M + K^T (e^(G_last - G) R)
// delta_prompt_blocks makes U, W, P of all blocks at once; delta_prompt_walk goes through a sequence's blocks with M in
// registers, a value head and COLUMNS of its columns for each block of threads. Which rows share a call changes no bit.
//
// Accuracy: M lives on for thousands of blocks, so it and its products stay float32 in effect. Products run on tensor cores
// as three products of TF32 (x = high + low, 11 + 11 bits): 2^-22 of a product is lost, where TF32 alone loses 2^-11. What a
// block adds to M is summed apart and joined by one fma, so that the tensor cores' cut-off sums never touch M itself. The
// triangular solution is plain fma. G is summed in double: differences of large sums would lose what the rows hold.
#include "delta.cuh"

constexpr int BLOCK = 64;
constexpr int PANEL = 16;  // rows of a step of the triangular solution
constexpr int THREADS = 256;
constexpr int P_STRIDE = BLOCK + 4;

// Room for what delta_prompt_blocks leaves, [blocks][Hv][..] each.
struct Work {
    float* u;         // [64][S]
    float* w;         // [64][S]
    float* p;         // [64][64], columns of later groups of 16 rows are not written
    float2* factors;  // [64], (e^G, e^(G_last - G))
};

struct Prompt {
    const float* q;  // [rows][Hk S]
    Inputs inputs;
    float* out;  // [rows][Hv S]
    Work work;
    Sequences sequences;    // of blocks: first, n_rows count blocks
    const int* first_rows;  // [blocks]
    u64 offset;             // bytes from a state to this layer's matrices, [Hv][S][S]
    int n_key_heads;
    int n_value_heads;
};

// A number as two that TF32 holds: `high` is rounded to 11 bits, the rest is exact and loses its last bits in the product.
struct Pair {
    u32 high, low;
};

DEVICE Pair split(float x) {
    Pair pair;
    pair.high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    pair.low = __float_as_uint(__fsub_rn(x, __uint_as_float(pair.high)));
    return pair;
}

struct APair {
    u32 high[4], low[4];

    DEVICE void set(int i, float x) {
        const Pair pair = split(x);
        high[i] = pair.high, low[i] = pair.low;
    }
    // Rows of a matrix in shared memory: `at` is the element of the lane's row g, column t.
    DEVICE void load(const float* at, int stride) {
        set(0, at[0]), set(1, at[8 * stride]), set(2, at[4]), set(3, at[8 * stride + 4]);
    }
    // Of its transpose: `at` is the element in row t, column g.
    DEVICE void load_transposed(const float* at, int stride) {
        set(0, at[0]), set(1, at[8]), set(2, at[4 * stride]), set(3, at[4 * stride + 8]);
    }
};

struct BPair {
    u32 high[2], low[2];

    DEVICE void set(int i, float x) {
        const Pair pair = split(x);
        high[i] = pair.high, low[i] = pair.low;
    }
    DEVICE void load(const float* at, int step) { set(0, at[0]), set(1, at[step]); }
};

// d += a b, small parts first.
DEVICE void multiply(float (&d)[4], const APair& a, const BPair& b) {
    mma_tf32_m16n8k8(d, a.low, b.high[0], b.high[1]);
    mma_tf32_m16n8k8(d, a.high, b.low[0], b.low[1]);
    mma_tf32_m16n8k8(d, a.high, b.high[0], b.high[1]);
}

// Where a thread's part of a product lies: groups of 16 rows, halves of the columns; lane = 4 g + t.
struct Place {
    int g, t, rows, half;

    DEVICE Place() {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        g = lane / 4, t = lane % 4, rows = warp / 2 * 16, half = warp % 2;
    }
};

// 64 rows of S numbers into shared memory.
template <int S>
DEVICE void request(float* to, int to_stride, const float* from, int from_stride) {
    constexpr int PIECES = S / 4;
    for (int i = threadIdx.x; i < BLOCK * PIECES; i += THREADS)
        cp_async16(to + i / PIECES * to_stride + i % PIECES * 4,
                   from + static_cast<u64>(i / PIECES) * from_stride + i % PIECES * 4);
}

// ----- what does not need M

template <int S>
struct BlockLayout {
    static constexpr int STRIDE = S + 4;
    float *k, *q, *lower, *beta, *grown;  // lower: [j][i] = L_ij, [64][68]
    double* total;

    DEVICE explicit BlockLayout(uint4* memory) {
        total = reinterpret_cast<double*>(memory);
        k = reinterpret_cast<float*>(total + BLOCK);
        q = k + BLOCK * STRIDE;
        lower = q + BLOCK * STRIDE;
        beta = lower + BLOCK * P_STRIDE;
        grown = beta + BLOCK;
    }
};

// G, e^G and e^(G_last - G) of a block, by the first warp; lane l has rows 2l and 2l + 1.
template <int S>
DEVICE void sum_decays(const BlockLayout<S>& at, const float* g, int stride, float2* factors) {
    const int lane = threadIdx.x;
    const double first = g[2 * lane * stride], pair = first + g[(2 * lane + 1) * stride];
    double sum = pair;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const double below = __shfl_sync(ALL_LANES, sum, max(lane - step, 0));
        if (lane >= step) sum += below;
    }
    const double last = __shfl_sync(ALL_LANES, sum, WARP - 1);
    const double totals[2] = {sum - pair + first, sum};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 2 * lane + i;
        at.total[row] = totals[i];
        at.grown[row] = exp_shared(static_cast<float>(totals[i]));
        factors[row] = make_float2(at.grown[row], exp_shared(static_cast<float>(last - totals[i])));
    }
}

// L, transposed, into shared memory and P into the workspace.
template <int S>
DEVICE void make_lower(const BlockLayout<S>& at, float* p) {
    constexpr int TILES = 4;  // of 8 columns
    const Place my;
    const int first_column = my.half * 32;
    float kk[TILES][4] = {}, qk[TILES][4] = {};
    if (first_column > my.rows + 15) return;
#pragma unroll 1
    for (int key = 0; key < S; key += 8) {
        APair a, b;
        const int from = (my.rows + my.g) * at.STRIDE + key + my.t;
        a.load(at.k + from, at.STRIDE);
        b.load(at.q + from, at.STRIDE);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (first_column + 8 * tile > my.rows + 15) continue;  // above the diagonal
            BPair keys;
            keys.load(at.k + (first_column + 8 * tile + my.g) * at.STRIDE + key + my.t, 4);
            multiply(kk[tile], a, keys);
            multiply(qk[tile], b, keys);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = my.rows + my.g + i / 2 * 8, column = first_column + 8 * tile + 2 * my.t + i % 2;
            float decay = 0.0f;
            if (column <= row) decay = exp_shared(static_cast<float>(at.total[row] - at.total[column]));
            at.lower[column * P_STRIDE + row] = column < row ? __fmul_rn(__fmul_rn(at.beta[row], kk[tile][i]), decay) : 0.0f;
            p[row * BLOCK + column] = column <= row ? __fmul_rn(qk[tile][i], decay) : 0.0f;
        }
}

// x[i] -= L_ij x[j] for 16 rows i from `first` on and the 16 rows j in front; j ascending. BELOW: i > j only.
template <bool BELOW>
DEVICE void eliminate(float (&x)[BLOCK], int first, const float* lower) {
#pragma unroll
    for (int j = 0; j < PANEL; ++j)
#pragma unroll
        for (int four = BELOW ? (j + 1) / 4 : 0; four < PANEL / 4; ++four) {
            const float4 l = *reinterpret_cast<const float4*>(lower + j * P_STRIDE + 4 * four);
            const float column[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!BELOW || 4 * four + i > j)
                    x[first + 4 * four + i] = fmaf(-column[i], x[j], x[first + 4 * four + i]);
        }
}

// (I + L) x = right-hand side for one of its columns, x used up -> to [64], `step` apart. A panel of 16 rows at a time, so
// that the code is short: the rows that are left move to the front of x.
DEVICE void solve(float (&x)[BLOCK], const float* lower, float* to, int step) {
#pragma unroll 1
    for (int panel = 0; panel < BLOCK; panel += PANEL) {
        const float* l = lower + panel * P_STRIDE + panel;
        eliminate<true>(x, 0, l);
#pragma unroll
        for (int below = PANEL; below < BLOCK; below += PANEL)
            if (panel + below < BLOCK) eliminate<false>(x, below, l + below);
#pragma unroll
        for (int i = 0; i < PANEL; ++i) to[(panel + i) * step] = x[i];
#pragma unroll
        for (int i = PANEL; i < BLOCK; ++i) x[i - PANEL] = x[i];
    }
}

// grid: (blocks, Hv).
template <int S>
DEVICE void delta_prompt_blocks(const Prompt& d) {
    extern __shared__ uint4 memory[];
    const BlockLayout<S> at(memory);
    const int block = blockIdx.x, head = blockIdx.y, key_head = head % d.n_key_heads, n_heads = d.n_value_heads;
    const u64 item = static_cast<u64>(block) * n_heads + head, row = d.first_rows[block];
    pdl_wait();
    pdl_launch();
    const u64 key_row = row * d.n_key_heads * S + key_head * S;
    request<S>(at.k, at.STRIDE, d.inputs.k + key_row, d.n_key_heads * S);
    request<S>(at.q, at.STRIDE, d.q + key_row, d.n_key_heads * S);
    cp_async_commit();
    if (threadIdx.x < WARP) sum_decays<S>(at, d.inputs.g + row * n_heads + head, n_heads, d.work.factors + item * BLOCK);
    else if (threadIdx.x < WARP + BLOCK) {
        const int i = threadIdx.x - WARP;
        at.beta[i] = d.inputs.beta[(row + i) * n_heads + head];
    }
    cp_async_wait<0>();
    __syncthreads();
    make_lower<S>(at, d.work.p + item * BLOCK * BLOCK);
    const int column = threadIdx.x % S;
    const bool values = threadIdx.x < S, keys = threadIdx.x >= S && threadIdx.x < 2 * S;
    float x[BLOCK];
    if (values) {
        const float* v = d.inputs.v + row * n_heads * S + head * S + column;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) x[i] = v[static_cast<u64>(i) * n_heads * S];
    }
    __syncthreads();
    if (!values && !keys) return;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        if (keys) x[i] = __fmul_rn(at.k[i * at.STRIDE + column], at.grown[i]);
        x[i] = __fmul_rn(at.beta[i], x[i]);
    }
    solve(x, at.lower, (values ? d.work.u : d.work.w) + item * BLOCK * S + column, S);
}

// ----- the walk

template <int S, int COLUMNS>
struct WalkLayout {
    static constexpr int ROW_STRIDE = S + 4, KEY_STRIDE = S + 8, STRIDE = COLUMNS + 8;
    float *w, *q, *k, *p, *m, *r, *grown_r;  // grown_r: e^(G_last - G) R

    DEVICE explicit WalkLayout(uint4* memory) {
        w = reinterpret_cast<float*>(memory);
        q = w + BLOCK * ROW_STRIDE;
        k = q + BLOCK * ROW_STRIDE;
        p = k + BLOCK * KEY_STRIDE;
        m = p + BLOCK * P_STRIDE;
        r = m + S * STRIDE;
        grown_r = r + BLOCK * STRIDE;
    }
};

// grid: (Hv * S / COLUMNS, sequences). A warp has 16 rows of R and O, and S / 4 rows of M (at least 16), times half of
// the columns.
template <int S, int COLUMNS>
DEVICE void delta_prompt_walk(const Prompt& d) {
    constexpr int TILES = COLUMNS / 16;               // of 8 columns
    constexpr int KEY_TILES = S >= 128 ? S / 64 : 1;  // of 16 rows of M
    using At = WalkLayout<S, COLUMNS>;
    extern __shared__ uint4 memory[];
    const At at(memory);
    const Place my;
    const int s = blockIdx.y, head = blockIdx.x / (S / COLUMNS), key_head = head % d.n_key_heads, n_heads = d.n_value_heads;
    const int column = my.half * (COLUMNS / 2), first_key = my.rows * KEY_TILES;
    const bool has_keys = first_key < S;
    const u64 in_head = blockIdx.x % (S / COLUMNS) * COLUMNS + column + 2 * my.t;
    const int first = d.sequences.first[s], n = d.sequences.n_rows[s];
    pdl_wait();
    pdl_launch();

    const auto request_rows = [&](int block) {
        const u64 row = d.first_rows[block];
        request<S>(at.w, At::ROW_STRIDE, d.work.w + (static_cast<u64>(block) * n_heads + head) * BLOCK * S, S);
        request<S>(at.q, At::ROW_STRIDE, d.q + row * d.n_key_heads * S + key_head * S, d.n_key_heads * S);
        cp_async_commit();
    };
    const auto request_keys = [&](int block) {
        const u64 row = d.first_rows[block];
        request<S>(at.k, At::KEY_STRIDE, d.inputs.k + row * d.n_key_heads * S + key_head * S, d.n_key_heads * S);
        request<BLOCK>(at.p, P_STRIDE, d.work.p + (static_cast<u64>(block) * n_heads + head) * BLOCK * BLOCK, BLOCK);
        cp_async_commit();
    };
    if (n == 0) return;
    request_rows(first);

    float m[KEY_TILES][TILES][4] = {};
    const auto element = [&](int i, int tile, int low) {
        return (static_cast<u64>(head) * S + first_key + 16 * i + my.g + 8 * low) * S + in_head + 8 * tile;
    };
    const auto show = [&](int i, int tile, int low) {
        *reinterpret_cast<float2*>(at.m + (first_key + 16 * i + my.g + 8 * low) * At::STRIDE + column + 8 * tile + 2 * my.t) =
            make_float2(m[i][tile][2 * low], m[i][tile][2 * low + 1]);
    };
    const u64 read = d.sequences.read[s];
    const float* old = reinterpret_cast<const float*>(read + d.offset);
#pragma unroll
    for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                if (!has_keys) continue;
                const float2 two = read ? *reinterpret_cast<const float2*>(old + element(i, tile, low)) : make_float2(0.0f, 0.0f);
                m[i][tile][2 * low] = two.x, m[i][tile][2 * low + 1] = two.y;
                show(i, tile, low);
            }
    cp_async_wait<0>();
    __syncthreads();

    for (int block = first; block < first + n; ++block) {
        const u64 item = static_cast<u64>(block) * n_heads + head;
        const float2* factors = d.work.factors + item * BLOCK;
        request_keys(block);
        const float* u = d.work.u + item * BLOCK * S;
        float2 added[TILES][2];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int low = 0; low < 2; ++low)
                added[tile][low] = *reinterpret_cast<const float2*>(u + (my.rows + my.g + 8 * low) * S + in_head + 8 * tile);
        const float2 factor[2] = {factors[my.rows + my.g], factors[my.rows + my.g + 8]};
        const float kept = factors[BLOCK - 1].x;

        float x[TILES][4] = {}, y[TILES][4] = {};  // W M, Q M
#pragma unroll 4
        for (int key = 0; key < S; key += 8) {
            APair w, q;
            const int from = (my.rows + my.g) * At::ROW_STRIDE + key + my.t;
            w.load(at.w + from, At::ROW_STRIDE);
            q.load(at.q + from, At::ROW_STRIDE);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                BPair b;
                b.load(at.m + (key + my.t) * At::STRIDE + column + 8 * tile + my.g, 4 * At::STRIDE);
                multiply(x[tile], w, b);
                multiply(y[tile], q, b);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                const float2 r = make_float2(__fsub_rn(added[tile][low].x, x[tile][2 * low]),
                                             __fsub_rn(added[tile][low].y, x[tile][2 * low + 1]));
                const int to = (my.rows + my.g + 8 * low) * At::STRIDE + column + 8 * tile + 2 * my.t;
                *reinterpret_cast<float2*>(at.r + to) = r;
                *reinterpret_cast<float2*>(at.grown_r + to) = make_float2(__fmul_rn(r.x, factor[low].y), __fmul_rn(r.y, factor[low].y));
            }
        cp_async_wait<0>();
        __syncthreads();  // R, K and P are there; W, Q and M are read
        if (block + 1 < first + n) request_rows(block + 1);

        float o[TILES][4] = {};
        for (int row = 0; row < my.rows + 16; row += 8) {  // P is zero behind the diagonal
            APair p;
            p.load(at.p + (my.rows + my.g) * P_STRIDE + row + my.t, P_STRIDE);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                BPair b;
                b.load(at.r + (row + my.t) * At::STRIDE + column + 8 * tile + my.g, 4 * At::STRIDE);
                multiply(o[tile], p, b);
            }
        }
        const u64 row = d.first_rows[block];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int low = 0; low < 2; ++low)
                *reinterpret_cast<float2*>(d.out + ((row + my.rows + my.g + 8 * low) * n_heads + head) * S + in_head + 8 * tile) =
                    make_float2(fmaf(factor[low].x, y[tile][2 * low], o[tile][2 * low]),
                                fmaf(factor[low].x, y[tile][2 * low + 1], o[tile][2 * low + 1]));
        if (has_keys) {
            float written[KEY_TILES][TILES][4] = {};
#pragma unroll 2
            for (int at_row = 0; at_row < BLOCK; at_row += 8) {
                APair k[KEY_TILES];
#pragma unroll
                for (int i = 0; i < KEY_TILES; ++i)
                    k[i].load_transposed(at.k + (at_row + my.t) * At::KEY_STRIDE + first_key + 16 * i + my.g, At::KEY_STRIDE);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    BPair b;
                    b.load(at.grown_r + (at_row + my.t) * At::STRIDE + column + 8 * tile + my.g, 4 * At::STRIDE);
#pragma unroll
                    for (int i = 0; i < KEY_TILES; ++i) multiply(written[i][tile], k[i], b);
                }
            }
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) m[i][tile][e] = fmaf(kept, m[i][tile][e], written[i][tile][e]);
                    show(i, tile, 0), show(i, tile, 1);
                }
        }
        cp_async_wait<0>();
        __syncthreads();  // the next W and Q and M are there; K, P and R are read
    }
    float* to = reinterpret_cast<float*>(d.sequences.write[s] + d.offset);
#pragma unroll
    for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int low = 0; low < 2; ++low)
                if (has_keys)
                    *reinterpret_cast<float2*>(to + element(i, tile, low)) = make_float2(m[i][tile][2 * low], m[i][tile][2 * low + 1]);
}

extern "C" __global__ void __launch_bounds__(256, 2) delta_prompt_blocks_16(const Prompt d) { delta_prompt_blocks<16>(d); }
extern "C" __global__ void __launch_bounds__(256, 2) delta_prompt_blocks_32(const Prompt d) { delta_prompt_blocks<32>(d); }
extern "C" __global__ void __launch_bounds__(256, 2) delta_prompt_blocks_64(const Prompt d) { delta_prompt_blocks<64>(d); }
extern "C" __global__ void __launch_bounds__(256, 2) delta_prompt_blocks_128(const Prompt d) { delta_prompt_blocks<128>(d); }
extern "C" __global__ void __launch_bounds__(256) delta_prompt_walk_16_16(const Prompt d) { delta_prompt_walk<16, 16>(d); }
extern "C" __global__ void __launch_bounds__(256) delta_prompt_walk_32_32(const Prompt d) { delta_prompt_walk<32, 32>(d); }
extern "C" __global__ void __launch_bounds__(256) delta_prompt_walk_64_32(const Prompt d) { delta_prompt_walk<64, 32>(d); }
extern "C" __global__ void __launch_bounds__(256) delta_prompt_walk_128_32(const Prompt d) { delta_prompt_walk<128, 32>(d); }
extern "C" __global__ void __launch_bounds__(256) delta_prompt_walk_128_64(const Prompt d) { delta_prompt_walk<128, 64>(d); }
