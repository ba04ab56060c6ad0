// The largest logit of each row, equal ones by the lowest id, and whether it can be used: no NaN or +inf beside it.
#include "portable.cuh"

constexpr int CHUNKS = 64;  // blocks for each row
constexpr int THREADS = 256;

struct Best {
    float value;
    int id;
    int finite;
};

DEVICE Best better(const Best& a, const Best& b) {
    const bool first = a.value > b.value || (a.value == b.value && a.id < b.id);
    return {first ? a.value : b.value, first ? a.id : b.id, a.finite & b.finite};
}

DEVICE Best warp_best(Best v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        Best other;
        other.value = __shfl_xor_sync(ALL_LANES, v.value, step);
        other.id = __shfl_xor_sync(ALL_LANES, v.id, step);
        other.finite = __shfl_xor_sync(ALL_LANES, v.finite, step);
        v = better(v, other);
    }
    return v;
}

// Grid (CHUNKS, rows): the best of each chunk.
extern "C" __global__ void __launch_bounds__(THREADS) greedy_chunks(const float* logits, int n_vocab, Best* chunks) {
    __shared__ Best warps[THREADS / WARP];
    pdl_wait();
    pdl_launch();
    const float* row = logits + static_cast<u64>(blockIdx.y) * n_vocab;
    Best best = {-INF, 0x7fffffff, 1};
    for (int id = blockIdx.x * THREADS + threadIdx.x; id < n_vocab; id += CHUNKS * THREADS) {
        const float v = row[id];
        best.finite &= !(v != v) && v != INF;  // -inf is a ban
        if (v > best.value || (v == best.value && id < best.id)) {
            best.value = v;
            best.id = id;
        }
    }
    best = warp_best(best);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS / WARP; ++i) best = better(best, warps[i]);
        chunks[blockIdx.y * CHUNKS + blockIdx.x] = best;
    }
}

// A warp for each row: out[row] = (id, finite).
extern "C" __global__ void greedy_best(const Best* chunks, int2* out) {
    pdl_wait();
    pdl_launch();
    const Best* row = chunks + blockIdx.x * CHUNKS;
    const Best best = warp_best(better(row[threadIdx.x], row[threadIdx.x + WARP]));
    if (threadIdx.x == 0) out[blockIdx.x] = make_int2(best.id, best.finite && best.value > -INF);
}

// Tokens that stand as TAKE become what another step found best for the same row.
constexpr int TAKE = -2;

extern "C" __global__ void greedy_take(int* tokens, const int2* best, int n) {
    pdl_wait();
    pdl_launch();
    if (threadIdx.x < n && tokens[threadIdx.x] == TAKE) tokens[threadIdx.x] = best[threadIdx.x].x;
}
