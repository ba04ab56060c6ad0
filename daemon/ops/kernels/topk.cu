// The K largest logits of each row with their log-probabilities, equal ones by the lowest id.
//
// A logit and its id make one whole number that sorts as both: the logit's bits turned so that larger is larger, then
// the id's complement. A block takes 2048 logits, a warp 256 of them; a warp takes its largest number K times, one warp
// does the same with what the warps of its block found, and a second kernel with what the blocks of a row found. What
// is not a number counts as -inf and as no weight.
#include "portable.cuh"

constexpr int THREADS = 256;
constexpr int N_WARPS = THREADS / WARP;
constexpr int PER_LANE = 8;
constexpr int CHUNK = THREADS * PER_LANE;
constexpr int MOST_CHUNKS = 128;  // of a row

constexpr u64 NONE = 0;

// Weights of some logits: sum of exp((x - peak) * per_temperature).
struct Weight {
    float peak;
    float sum;
};

struct Choice {
    int id;
    float logprob;
};

DEVICE u64 as_number(float x, int id) {
    const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 is 0
    const u32 turned = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(x == x ? turned : 0x007fffffu) << 32 | ~static_cast<u32>(id);
}

DEVICE float logit_of(u64 number) {
    const u32 turned = static_cast<u32>(number >> 32);
    return __uint_as_float(turned & 0x80000000u ? turned & 0x7fffffffu : ~turned);
}

DEVICE int id_of(u64 number) { return static_cast<int>(~static_cast<u32>(number)); }

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The largest number of a warp.
DEVICE u64 warp_largest(u64 mine) {
    const u32 high = static_cast<u32>(mine >> 32), highest = __reduce_max_sync(ALL_LANES, high);
    const u32 low = __reduce_max_sync(ALL_LANES, high == highest ? static_cast<u32>(mine) : 0u);
    return static_cast<u64>(highest) << 32 | low;
}

// The K largest of a warp's numbers, number i in lane i; they are all different but for NONE.
template <int K, int N>
DEVICE u64 take_largest(u64 (&numbers)[N]) {
    const int lane = threadIdx.x % WARP;
    u64 found = NONE;
    u64 mine = numbers[0];
#pragma unroll
    for (int i = 1; i < N; ++i) mine = larger(mine, numbers[i]);
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        const u64 largest = warp_largest(mine);
        if (lane == k) found = largest;
        if (mine != largest) continue;
        mine = NONE;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (numbers[i] == largest) numbers[i] = NONE;
            mine = larger(mine, numbers[i]);
        }
    }
    return found;
}

// The same of a whole block, in the lanes of its first warp.
template <int K>
DEVICE u64 block_largest(u64 (&numbers)[PER_LANE]) {
    __shared__ u64 found[N_WARPS * K];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 of_warp = take_largest<K>(numbers);
    if (lane < K) found[warp * K + lane] = of_warp;
    __syncthreads();
    if (warp > 0) return NONE;
    constexpr int N = N_WARPS * K / WARP;
    u64 all[N];
#pragma unroll
    for (int i = 0; i < N; ++i) all[i] = found[i * WARP + lane];
    return take_largest<K>(all);
}

DEVICE float weight_of(float x, float peak, float per_temperature) {
    return x > -INF ? exp_shared(__fmul_rn(__fsub_rn(x, peak), per_temperature)) : 0.0f;  // also for what is not a number
}

// A weight against a higher peak.
DEVICE float against(const Weight& w, float peak, float per_temperature) { return __fmul_rn(w.sum, weight_of(w.peak, peak, per_temperature)); }

// Grid (chunks, rows): the largest of a chunk, and the weight of all of it.
template <int K>
DEVICE void chunks(const float* logits, int n_vocab, float per_temperature, u64* largest, Weight* weights) {
    __shared__ Weight of_warp[N_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 at = static_cast<u64>(blockIdx.y) * gridDim.x + blockIdx.x;
    const int first = blockIdx.x * CHUNK + warp * WARP * PER_LANE + lane;
    pdl_wait();
    pdl_launch();
    const float* row = logits + static_cast<u64>(blockIdx.y) * n_vocab;
    float x[PER_LANE];
    u64 numbers[PER_LANE];
    float peak = -INF;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int id = first + i * WARP;
        x[i] = id < n_vocab ? row[id] : -INF;
        numbers[i] = id < n_vocab ? as_number(x[i], id) : NONE;
        peak = fmaxf(peak, x[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, step));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum = __fadd_rn(sum, weight_of(x[i], peak, per_temperature));
    sum = warp_sum(sum);
    if (lane == 0) of_warp[warp] = {peak, sum};
    const u64 found = block_largest<K>(numbers);  // its barrier is that of of_warp too
    if (warp > 0) return;
    if (lane < K) largest[at * K + lane] = found;
    if (lane > 0) return;
    for (int i = 1; i < N_WARPS; ++i) peak = fmaxf(peak, of_warp[i].peak);
    sum = 0.0f;
    for (int i = 0; i < N_WARPS; ++i) sum = __fadd_rn(sum, against(of_warp[i], peak, per_temperature));
    weights[at] = {peak, sum};
}

// A block for each row: out[row][0 .. K - 1].
template <int K>
DEVICE void rows(const u64* largest, const Weight* weights, int n_chunks, float per_temperature, Choice* out) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    pdl_wait();
    pdl_launch();
    largest += static_cast<u64>(blockIdx.x) * n_chunks * K;
    weights += static_cast<u64>(blockIdx.x) * n_chunks;
    u64 numbers[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int at = i * THREADS + threadIdx.x;
        numbers[i] = at < n_chunks * K ? largest[at] : NONE;
    }
    const u64 found = block_largest<K>(numbers);
    if (warp > 0) return;
    const float peak = logit_of(__shfl_sync(ALL_LANES, found, 0));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_CHUNKS / WARP; ++i) {
        const int chunk = i * WARP + lane;
        if (chunk < n_chunks) sum = __fadd_rn(sum, against(weights[chunk], peak, per_temperature));
    }
    sum = warp_sum(sum);
    if (lane >= K) return;
    const float logprob = __fsub_rn(__fmul_rn(__fsub_rn(logit_of(found), peak), per_temperature), logf(sum));
    out[static_cast<u64>(blockIdx.x) * K + lane] = {id_of(found), logprob == logprob ? logprob : -INF};
}

#define ENTRIES(K)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        topk_chunks_##K(const float* logits, int n_vocab, float per_temperature, u64* largest, Weight* weights) {      \
        chunks<K>(logits, n_vocab, per_temperature, largest, weights);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        topk_rows_##K(const u64* largest, const Weight* weights, int n_chunks, float per_temperature, Choice* out) {   \
        rows<K>(largest, weights, n_chunks, per_temperature, out);                                                     \
    }

ENTRIES(8)
ENTRIES(16)
