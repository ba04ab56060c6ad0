// The best of rows of logits: each view of a row (the raw logits, or some of them adjusted) as a sorted list of
// candidates, with the sum of its softmax. Three kernels: a bound from the largest of many groups; what is not
// below it; its order.
#include "portable.cuh"

constexpr int SLICES = 64;           // blocks for each view
constexpr int THREADS = 256;
constexpr int GROUPS = 4096;         // a group: the ids that are equal modulo GROUPS
constexpr int OWN = GROUPS / SLICES; // groups of a slice
constexpr int PARTS = THREADS / OWN; // threads that share a group
constexpr int STRIDE = GROUPS * PARTS;
constexpr int ROOM = 2048;           // most values that are collected
constexpr int SORT_THREADS = ROOM / 2;
constexpr int LOWEST_BIT = 8;        // of the bound: what lies a little below it is collected too
constexpr u32 IMPOSSIBLE = 0x007fffffu; // key of -inf

struct View {
    int row;
    int most;          // candidates that are wanted
    int first;         // of its adjustments
    int n_adjustments;
    float repetition;
    float presence;
    double per_temperature; // 0: the sum is not wanted
};

struct Adjustment { // ids ascending, each once
    int id;
    int kinds;
    float bias;
    float frequency;
};
constexpr int BIASED = 1, PENALISED = 2, BANNED = 4;

struct Slice {
    double sum; // of exp((value - best) / temperature)
    float best;
    int finite;
};

struct State {
    u32 found;
    u32 cut; // whether anything but -inf lies below the bound
};

struct Head {
    double total;
    u32 found;
    int kept;
    int finite;
    int cut;
};

// Keys are ordered as the values are; -0 is 0.
DEVICE u32 key_of(float v) {
    const u32 bits = __float_as_uint(__fadd_rn(v, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float value_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

DEVICE bool usable(float v) { return v < INF; } // -inf is a ban; NaN is not below anything

// As the host does it, each step rounded.
DEVICE float adjusted(const Adjustment& a, const View& view, float v) {
    if (a.kinds & BIASED) v = __fadd_rn(v, a.bias);
    if (a.kinds & PENALISED) {
        v = v > 0.0f ? __fdiv_rn(v, view.repetition) : __fmul_rn(v, view.repetition);
        v = __fsub_rn(__fsub_rn(v, a.frequency), view.presence);
        const float largest = __uint_as_float(0x7f7fffffu);
        v = v > largest ? largest : v;
    }
    return a.kinds & BANNED ? -INF : v;
}

// Where an id is looked at: thread part * OWN + group % OWN of block group / OWN, in round id / STRIDE.
DEVICE bool in_slice(int id) { return id % GROUPS / OWN == blockIdx.x; }
DEVICE int thread_of(int id) { return id / GROUPS % PARTS * OWN + id % OWN; }
DEVICE int first_id() { return threadIdx.x / OWN * GROUPS + blockIdx.x * OWN + threadIdx.x % OWN; }

// Sets the bit of each round in which a thread of this block meets an adjusted id.
DEVICE void mark_adjusted(const View& view, const Adjustment* adjustments, u32 rounds[THREADS]) {
    rounds[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < view.n_adjustments; i += THREADS) {
        const int id = adjustments[i].id;
        if (in_slice(id)) atomicOr(&rounds[thread_of(id)], 1u << (id / STRIDE));
    }
    __syncthreads();
}

DEVICE double warp_sum_double(double v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = __dadd_rn(v, __shfl_xor_sync(ALL_LANES, v, step));
    return v;
}

// A weight of the softmax; what is below 2^-92 of the best one does not count.
DEVICE double weight(float v, float best, double per_temperature) {
    const double x = (static_cast<double>(v) - static_cast<double>(best)) * per_temperature;
    return x > -64.0 ? exp(x) : 0.0;
}

// Grid (SLICES, views): the largest key of each group, and best value and sum of each slice.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_slices(const float* logits, int n_vocab, const View* views, const Adjustment* adjustments, u32* groups,
                  Slice* slices, State* states) {
    __shared__ u32 rounds[THREADS], largest[OWN];
    __shared__ float bests[THREADS / WARP];
    __shared__ double sums[THREADS / WARP];
    __shared__ int bad;
    pdl_wait();
    pdl_launch();
    const View view = views[blockIdx.y];
    const float* row = logits + static_cast<u64>(view.row) * n_vocab;
    adjustments += view.first;
    if (threadIdx.x < OWN) largest[threadIdx.x] = IMPOSSIBLE;
    if (threadIdx.x == 0) bad = 0;
    mark_adjusted(view, adjustments, rounds);

    float best = -INF;
    bool finite = true;
    const u32 skipped = rounds[threadIdx.x];
    int round = 0;
#pragma unroll 4
    for (int id = first_id(); id < n_vocab; id += STRIDE, ++round) {
        const float v = skipped >> round & 1 ? -INF : row[id];
        finite &= usable(v);
        best = v > best ? v : best;
    }
    atomicMax(&largest[threadIdx.x % OWN], key_of(best));
    for (int i = threadIdx.x; i < view.n_adjustments; i += THREADS) {
        const Adjustment a = adjustments[i];
        if (!in_slice(a.id)) continue;
        const float raw = row[a.id], v = adjusted(a, view, raw);
        finite &= usable(raw) && usable(v);
        best = v > best ? v : best;
        atomicMax(&largest[a.id % OWN], key_of(v));
    }
    if (!finite) bad = 1;
    best = warp_max(best);
    if (threadIdx.x % WARP == 0) bests[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x < OWN) groups[blockIdx.y * GROUPS + blockIdx.x * OWN + threadIdx.x] = largest[threadIdx.x];
    best = bests[0];
    for (int i = 1; i < THREADS / WARP; ++i) best = bests[i] > best ? bests[i] : best;

    double sum = 0.0;
    if (view.per_temperature > 0.0) {
        round = 0;
        for (int id = first_id(); id < n_vocab; id += STRIDE, ++round)
            if (!(skipped >> round & 1)) sum = __dadd_rn(sum, weight(row[id], best, view.per_temperature));
        for (int i = threadIdx.x; i < view.n_adjustments; i += THREADS) {
            const Adjustment a = adjustments[i];
            if (in_slice(a.id))
                sum = __dadd_rn(sum, weight(adjusted(a, view, row[a.id]), best, view.per_temperature));
        }
    }
    sum = warp_sum_double(sum);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = sums[0];
        for (int i = 1; i < THREADS / WARP; ++i) sum = __dadd_rn(sum, sums[i]);
        slices[blockIdx.y * SLICES + blockIdx.x] = {sum, best, !bad};
        if (blockIdx.x == 0) states[blockIdx.y] = {0, 0};
    }
}

// Of the largest `bound` with LOWEST_BIT low bits zero that at least `most` keys reach. As many groups have a
// value there, so the `most` largest values do.
DEVICE u32 bound_of(const u32* groups, int most) {
    __shared__ u32 counts[2][THREADS / WARP];
    u32 keys[GROUPS / THREADS];
#pragma unroll
    for (int i = 0; i < GROUPS / THREADS; ++i) keys[i] = groups[i * THREADS + threadIdx.x];
    u32 bound = 0;
    for (int bit = 31; bit >= LOWEST_BIT; --bit) {
        const u32 higher = bound | 1u << bit;
        u32 reach = 0;
#pragma unroll
        for (int i = 0; i < GROUPS / THREADS; ++i) reach += keys[i] >= higher;
        reach = __reduce_add_sync(ALL_LANES, reach);
        if (threadIdx.x % WARP == 0) counts[bit & 1][threadIdx.x / WARP] = reach;
        __syncthreads();
        reach = 0;
#pragma unroll
        for (int i = 0; i < THREADS / WARP; ++i) reach += counts[bit & 1][i];
        if (reach >= most) bound = higher;
    }
    return bound;
}

// Grid (SLICES, views): the values that reach the bound, in any order.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_collect(const float* logits, int n_vocab, const View* views, const Adjustment* adjustments,
                   const u32* groups, State* states, u64* found) {
    __shared__ u32 rounds[THREADS];
    pdl_wait();
    pdl_launch();
    const View view = views[blockIdx.y];
    const float* row = logits + static_cast<u64>(view.row) * n_vocab;
    adjustments += view.first;
    groups += blockIdx.y * GROUPS;
    found += blockIdx.y * ROOM;
    State* state = states + blockIdx.y;
    mark_adjusted(view, adjustments, rounds);
    u32 bound = bound_of(groups, view.most);
    if (blockIdx.x == 0 && threadIdx.x == 0) state->cut = bound > IMPOSSIBLE;
    bound = bound > IMPOSSIBLE ? bound : IMPOSSIBLE + 1;

    const auto collect = [&](float v, int id) {
        const u32 key = key_of(v);
        if (key < bound) return;
        const u32 at = atomicAdd(&state->found, 1u);
        if (at < ROOM) found[at] = static_cast<u64>(key) << 32 | ~static_cast<u32>(id);
    };
    for (int i = threadIdx.x; i < view.n_adjustments; i += THREADS) {
        const Adjustment a = adjustments[i];
        if (in_slice(a.id)) collect(adjusted(a, view, row[a.id]), a.id);
    }
    if (groups[blockIdx.x * OWN + threadIdx.x % OWN] < bound) return;
    const u32 skipped = rounds[threadIdx.x];
    int round = 0;
    for (int id = first_id(); id < n_vocab; id += STRIDE, ++round)
        if (!(skipped >> round & 1)) collect(row[id], id);
}

// Descending order of `size` entries, a power of two, by SORT_THREADS threads (Batcher's bitonic network).
DEVICE void sort(u64* entries, int size) {
    __syncthreads();
    for (int run = 2; run <= size; run *= 2)
        for (int apart = run / 2; apart > 0; apart /= 2) {
            // Pairs that are at most a warp's width apart lie in what the warp works on alone.
            if (apart >= WARP)
                __syncthreads();
            else
                __syncwarp();
            const int i = threadIdx.x;
            if (i >= size / 2) continue;
            const int a = 2 * i - (i & (apart - 1)), b = a + apart;
            const u64 x = entries[a], y = entries[b];
            if ((x < y) == ((a & run) == 0)) {
                entries[a] = y;
                entries[b] = x;
            }
        }
    __syncthreads();
}

// A block for each view: its candidates in order, and the total of its slices. out: `stride` values, then ids,
// then raw logits of each view.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    sample_sort(const float* logits, int n_vocab, const View* views, const Slice* slices, const State* states,
                const u64* found, Head* heads, u32* out, int stride) {
    __shared__ u64 entries[ROOM];
    pdl_wait();
    pdl_launch();
    const View view = views[blockIdx.x];
    const float* row = logits + static_cast<u64>(view.row) * n_vocab;
    const State state = states[blockIdx.x];
    found += blockIdx.x * ROOM;
    out += static_cast<u64>(blockIdx.x) * 3 * stride;
    const int n = state.found <= ROOM ? state.found : 0;
    int size = 2;
    while (size < n) size *= 2;
    for (int i = threadIdx.x; i < size; i += SORT_THREADS) entries[i] = i < n ? found[i] : 0;
    sort(entries, size);
    const int kept = n < view.most ? n : view.most;
    for (int i = threadIdx.x; i < kept; i += SORT_THREADS) {
        const int id = ~static_cast<u32>(entries[i]);
        out[i] = __float_as_uint(value_of(entries[i] >> 32));
        out[stride + i] = id;
        out[2 * stride + i] = __float_as_uint(row[id]);
    }
    if (threadIdx.x >= WARP) return;
    const Slice a = slices[blockIdx.x * SLICES + threadIdx.x], b = slices[blockIdx.x * SLICES + WARP + threadIdx.x];
    const float best = warp_max(a.best > b.best ? a.best : b.best);
    const auto share = [&](const Slice& s) {
        return s.best > -INF ? s.sum * weight(s.best, best, view.per_temperature) : 0.0;
    };
    const double total = warp_sum_double(__dadd_rn(share(a), share(b)));
    const bool finite = __ballot_sync(ALL_LANES, a.finite && b.finite) == ALL_LANES;
    if (threadIdx.x == 0)
        heads[blockIdx.x] = {total, state.found, kept, finite, static_cast<int>(state.cut)};
}
