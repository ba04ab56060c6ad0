// The delta rule in its recurrent form: rows of a step, the ends of a prompt that are no whole block, and commits.
//
// For each row, M [S keys, S values] of each value head being its parent's: M <- e^g M; d = beta (v - M^T k); M <- M + k d^T;
// o = M^T q. A warp owns eight columns of a head's matrix, in registers: lane = 2 group + half has the S / 16 keys of its
// group and four columns. A sum over keys: fma over the lane's keys, ascending, then over groups by xor 1, 2, 4, 8; so a
// row's bits depend on its path only.
//
// A tree is walked depth first, the largest subtree last: `order` says for each visit which row, where its parent's matrix
// is (registers, the committed state, a place in shared memory) and whether the result is to be kept in one. Nothing of a
// tree is written: the rows' inputs stay, and delta_commit replays the accepted path with the same operations.
#include "delta.cuh"

constexpr int COLUMNS = 8;  // of a warp
constexpr int THREADS = 128;
constexpr int N_WARPS = THREADS / WARP;
constexpr int GROUPS = 16;  // of keys

// As packed by ops/tree_order.py: row | start << 8 | keep << 16.
// start: 0 = registers, 1 = the committed state, 2 + place; keep: 0 = no, 1 + place.
constexpr int FROM_COMMITTED = 1, FROM_PLACE = 2;

struct Delta {
    const float* q;  // [rows][Hk S]
    Inputs inputs;
    float* out;  // [rows][Hv S]
    Sequences sequences;
    const int* order;  // [rows], rows counted in their sequence; null: one after the other
    u64 offset;        // bytes from a state to this layer's matrices, [Hv][S][S]
    int n_key_heads;
    int n_value_heads;
    int early;  // whether states are older than the kernel before this one
};

struct Commit {
    Inputs inputs;  // of the first layer, [layers][inputs_rows][width] each
    Sequences sequences;  // n_rows: lengths of the paths
    const int* path;      // [rows], rows counted in their sequence; a path begins at its sequence's first row
    u64 tail_offset;      // of the first layer: bytes from a state to its last inputs, [layers][K - 1][channels]
    u64 offset;           // of the first layer: bytes from a state to its matrices, [layers][Hv][S][S]
    int inputs_rows;
    int n_key_heads;
    int n_value_heads;
    int n_taps;
    int state_blocks;  // blocks of x for matrices; those behind them do the last inputs
};

// A warp's part of a matrix.
template <int S>
struct Slice {
    static constexpr int KEYS = S / GROUPS;
    float m[KEYS][4];
};

// What a row brings for a warp's part.
template <int S>
struct Row {
    float k[Slice<S>::KEYS], q[Slice<S>::KEYS], v[4], g, beta;
};

// Which part of which head a warp has.
template <int S>
struct Part {
    int head, key_head, column, first_key;

    DEVICE Part(int slice, int n_key_heads) {
        const int lane = threadIdx.x % WARP;
        head = slice / (S / COLUMNS);
        key_head = head % n_key_heads;
        column = slice % (S / COLUMNS) * COLUMNS + lane % 2 * 4;
        first_key = lane / 2 * Slice<S>::KEYS;
    }
    DEVICE u64 element(int key) const { return (static_cast<u64>(head) * S + first_key + key) * S + column; }
};

template <int N>
DEVICE void load_numbers(float (&to)[N], const float* from) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = from[i];
    }
}

template <int S>
DEVICE void load_slice(Slice<S>& to, u64 state, const Part<S>& part) {
#pragma unroll
    for (int i = 0; i < Slice<S>::KEYS; ++i) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (state) four = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(state) + part.element(i));
        to.m[i][0] = four.x, to.m[i][1] = four.y, to.m[i][2] = four.z, to.m[i][3] = four.w;
    }
}

template <int S>
DEVICE void store_slice(const Slice<S>& from, u64 state, const Part<S>& part) {
#pragma unroll
    for (int i = 0; i < Slice<S>::KEYS; ++i)
        *reinterpret_cast<float4*>(reinterpret_cast<float*>(state) + part.element(i)) =
            make_float4(from.m[i][0], from.m[i][1], from.m[i][2], from.m[i][3]);
}

// Places in shared memory: [place][warp][key of the lane][lane].
template <int S>
DEVICE float4* place_of(float4* places, int place) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return places + ((place * N_WARPS + warp) * Slice<S>::KEYS) * WARP + lane;
}

template <int S, bool QUERY>
DEVICE void load_inputs(Row<S>& to, const Inputs& in, const float* q, u64 row, const Part<S>& part, int n_key_heads,
                        int n_value_heads) {
    const u64 key = row * n_key_heads * S + part.key_head * S + part.first_key;
    load_numbers(to.k, in.k + key);
    if (QUERY) load_numbers(to.q, q + key);
    load_numbers(to.v, in.v + row * n_value_heads * S + part.head * S + part.column);
    to.g = in.g[row * n_value_heads + part.head];
    to.beta = in.beta[row * n_value_heads + part.head];
}

// sum over all keys of x[key] m[key][column], for the lane's four columns; every group of keys gets it.
template <int S>
DEVICE void sum_keys(float (&sum)[4], const Slice<S>& m, const float (&x)[Slice<S>::KEYS]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        sum[c] = __fmul_rn(x[0], m.m[0][c]);
#pragma unroll
        for (int i = 1; i < Slice<S>::KEYS; ++i) sum[c] = fmaf(x[i], m.m[i][c], sum[c]);
    }
#pragma unroll
    for (int step = 2; step < WARP; step *= 2)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] = __fadd_rn(sum[c], __shfl_xor_sync(ALL_LANES, sum[c], step));
}

// A row's write.
template <int S>
DEVICE void advance(Slice<S>& m, const Row<S>& row) {
    const float decay = exp_shared(row.g);
#pragma unroll
    for (int i = 0; i < Slice<S>::KEYS; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) m.m[i][c] = __fmul_rn(m.m[i][c], decay);
    float found[4];
    sum_keys<S>(found, m, row.k);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float d = __fmul_rn(row.beta, __fsub_rn(row.v[c], found[c]));
#pragma unroll
        for (int i = 0; i < Slice<S>::KEYS; ++i) m.m[i][c] = fmaf(row.k[i], d, m.m[i][c]);
    }
}

// The visits of one sequence, at most 64; each lane holds those numbered `lane` and `lane + 32`.
struct Visits {
    int first, n, mine, mine_behind;

    DEVICE Visits(const Delta& d, int s) {
        const int lane = threadIdx.x % WARP;
        first = d.sequences.first[s], n = d.sequences.n_rows[s];
        mine = lane, mine_behind = lane + WARP;
        if (d.order) {
            mine = lane < n ? d.order[first + lane] : 0;
            mine_behind = lane + WARP < n ? d.order[first + lane + WARP] : 0;
        }
    }
    DEVICE int operator[](int i) const { return __shfl_sync(ALL_LANES, i < WARP ? mine : mine_behind, i % WARP); }
};

// The rows of one sequence, for a warp's part; the committed state is in m.
template <int S>
DEVICE void walk(const Delta& d, const Visits& visits, u64 committed, Slice<S>& m, const Part<S>& part, float4* places) {
    const int lane = threadIdx.x % WARP, first = visits.first, n = visits.n;
    Row<S> row, next;
    int now = visits[0];
    load_inputs<S, true>(row, d.inputs, d.q, first + (now & 255), part, d.n_key_heads, d.n_value_heads);
    for (int i = 0; i < n; ++i) {
        const int behind = visits[min(i + 1, n - 1)];
        load_inputs<S, true>(next, d.inputs, d.q, first + (behind & 255), part, d.n_key_heads, d.n_value_heads);
        const int start = now >> 8 & 255, keep = now >> 16;
        if (start == FROM_COMMITTED && i) load_slice<S>(m, committed, part);
        if (start >= FROM_PLACE) {
            const float4* from = place_of<S>(places, start - FROM_PLACE);
#pragma unroll
            for (int key = 0; key < Slice<S>::KEYS; ++key) {
                const float4 four = from[key * WARP];
                m.m[key][0] = four.x, m.m[key][1] = four.y, m.m[key][2] = four.z, m.m[key][3] = four.w;
            }
        }
        advance<S>(m, row);
        if (keep) {
            float4* to = place_of<S>(places, keep - 1);
#pragma unroll
            for (int key = 0; key < Slice<S>::KEYS; ++key)
                to[key * WARP] = make_float4(m.m[key][0], m.m[key][1], m.m[key][2], m.m[key][3]);
        }
        float o[4];
        sum_keys<S>(o, m, row.q);
        if (lane < 2)
            *reinterpret_cast<float4*>(d.out + static_cast<u64>(first + (now & 255)) * d.n_value_heads * S +
                                       part.head * S + part.column) = make_float4(o[0], o[1], o[2], o[3]);
        now = behind;
        row = next;
    }
}

// grid: x, any; blocks take (sequence, part) in turn.
template <int S>
DEVICE void delta_step(const Delta& d) {
    extern __shared__ uint4 memory[];
    float4* places = reinterpret_cast<float4*>(memory);
    const int n_slices = d.n_value_heads * (S / COLUMNS), blocks = (n_slices + N_WARPS - 1) / N_WARPS;
    const int n_items = *d.sequences.count * blocks;
    bool waited = false;
    for (int item = blockIdx.x; item < n_items; item += gridDim.x) {
        const int s = item / blocks, slice = item % blocks * N_WARPS + threadIdx.x / WARP;
        if (slice >= n_slices) continue;
        const Visits visits(d, s);
        if (visits.n == 0) continue;
        const Part<S> part(slice, d.n_key_heads);
        const u64 read = d.sequences.read[s], write = d.sequences.write[s];
        const u64 committed = read ? read + d.offset : 0;
        Slice<S> m;
        if (d.early || waited) load_slice<S>(m, committed, part);
        if (!waited) {
            pdl_wait();
            pdl_launch();
            waited = true;
            if (!d.early) load_slice<S>(m, committed, part);
        }
        walk<S>(d, visits, committed, m, part, places);
        if (write) store_slice<S>(m, write + d.offset, part);
    }
    if (!waited) {
        pdl_wait();
        pdl_launch();
    }
}

template <int S>
DEVICE void commit_slice(const Commit& c, int s, u64 read, u64 write, int layer) {
    const int slice = blockIdx.x * N_WARPS + threadIdx.x / WARP, first = c.sequences.first[s];
    if (slice >= c.n_value_heads * (S / COLUMNS)) return;
    const Part<S> part(slice, c.n_key_heads);
    const u64 offset = c.offset + static_cast<u64>(layer) * c.n_value_heads * S * S * sizeof(float);
    const u64 row_of_layer = static_cast<u64>(layer) * c.inputs_rows + first;
    Slice<S> m;
    load_slice<S>(m, read ? read + offset : 0, part);
    const int n = c.sequences.n_rows[s];
    Row<S> row, next;
    if (n) load_inputs<S, false>(row, c.inputs, nullptr, row_of_layer + c.path[first], part, c.n_key_heads, c.n_value_heads);
    for (int i = 0; i < n; ++i) {
        load_inputs<S, false>(next, c.inputs, nullptr, row_of_layer + c.path[first + min(i + 1, n - 1)], part,
                              c.n_key_heads, c.n_value_heads);
        advance<S>(m, row);
        row = next;
    }
    store_slice<S>(m, write + offset, part);
}

// The last K - 1 inputs behind the path, of some channels; in place as well.
DEVICE void commit_tail(const Commit& c, int s, u64 read, u64 write, int layer, int channels) {
    constexpr int MOST_TAPS = 8;
    const int channel = (blockIdx.x - c.state_blocks) * THREADS + threadIdx.x;
    if (channel >= channels) return;
    const int first = c.sequences.first[s], n = c.sequences.n_rows[s], kept = c.n_taps - 1;
    const u64 offset = c.tail_offset + static_cast<u64>(layer) * kept * channels * sizeof(float);
    const float* u = c.inputs.u + (static_cast<u64>(layer) * c.inputs_rows + first) * channels + channel;
    float values[MOST_TAPS - 1];
#pragma unroll
    for (int i = 0; i < MOST_TAPS - 1; ++i) {
        const int from = n + i;  // counted from the oldest committed one
        values[i] = 0.0f;
        if (i >= kept) continue;
        if (from >= kept) values[i] = u[static_cast<u64>(c.path[first + from - kept]) * channels];
        else if (read) values[i] = reinterpret_cast<const float*>(read + offset)[from * channels + channel];
    }
#pragma unroll
    for (int i = 0; i < MOST_TAPS - 1; ++i)
        if (i < kept) reinterpret_cast<float*>(write + offset)[i * channels + channel] = values[i];
}

// grid: (parts and channels, layers, sequences).
template <int S>
DEVICE void delta_commit(const Commit& c) {
    pdl_wait();
    pdl_launch();
    const int s = blockIdx.z;
    if (s >= *c.sequences.count) return;
    const u64 read = c.sequences.read[s], write = c.sequences.write[s];
    if (!write) return;
    const int channels = (2 * c.n_key_heads + c.n_value_heads) * S;
    if (blockIdx.x < c.state_blocks) commit_slice<S>(c, s, read, write, blockIdx.y);
    else commit_tail(c, s, read, write, blockIdx.y, channels);
}

extern "C" __global__ void __launch_bounds__(128) delta_step_16(const Delta d) { delta_step<16>(d); }
extern "C" __global__ void __launch_bounds__(128) delta_step_32(const Delta d) { delta_step<32>(d); }
extern "C" __global__ void __launch_bounds__(128) delta_step_64(const Delta d) { delta_step<64>(d); }
extern "C" __global__ void __launch_bounds__(128) delta_step_128(const Delta d) { delta_step<128>(d); }
extern "C" __global__ void __launch_bounds__(128) delta_commit_16(const Commit c) { delta_commit<16>(c); }
extern "C" __global__ void __launch_bounds__(128) delta_commit_32(const Commit c) { delta_commit<32>(c); }
extern "C" __global__ void __launch_bounds__(128) delta_commit_64(const Commit c) { delta_commit<64>(c); }
extern "C" __global__ void __launch_bounds__(128) delta_commit_128(const Commit c) { delta_commit<128>(c); }
