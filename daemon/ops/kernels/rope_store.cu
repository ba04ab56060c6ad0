// Rotates the queries and keys of rows, and stores keys and values in their K/V type: a warp for each head.
//
// Lane i of the warp has numbers i, i + 32, ... of the head, so a block of 32 is one number of every lane. Bytes are
// those of the ggml reference quantiser; no product and sum is fused. With keys in tq3_0 queries are left rotated as they are.
// Rows may hold the heads of several layers, one layer behind the other: blockIdx.z is the layer.
#include "kv_tiles.cuh"
#include "rotation.cuh"

constexpr int THREADS = 128;
constexpr int N_WARPS = THREADS / WARP;
constexpr int MOST_BLOCKS = 8;  // heads of at most 256 numbers

enum Pairs { PAIRS_INTERLEAVED, PAIRS_HALF };

struct RopeStore {
    float* qkv;  // row r at qkv + r stride: query heads [q_head], key heads [D], value heads [E]
    const int* positions;  // -1: padding
    const u64* write_k;    // address of the row's place in layer 0, head 0; 0: nothing is stored
    const u64* write_v;
    const float2* angles;  // (cos, sin) [positions][dims / 2]
    const float* q_norm;   // [D] weights of an RMS norm over each query head, or null
    const float* k_norm;
    u64 k_layer;
    u64 v_layer;
    u64 k_step;  // bytes from one layer to the next
    u64 v_step;
    int stride;
    int width;   // numbers of a layer in a row
    int q_head;  // numbers from one query to the next: D, or 2 D with a gate behind each
    int n_head;
    int n_head_kv;
    int head_dim;
    int value_dim;
    int dims;  // of a head that turn
    int pairs;
    int k_type;
    int v_type;
    float eps;
};

DEVICE void store_half(u8* at, float x) { *reinterpret_cast<half*>(at) = __float2half_rn(x); }

// To the nearest, ties to even; a NaN stays one.
DEVICE u16 bf16_bits(float x) {
    u32 bits = __float_as_uint(x);
    if (x != x) bits = (bits & 0xffff0000u) | 0x400000u;
    return (bits + (bits >> 16 & 1) + 0x7fffu) >> 16;
}

DEVICE float inverse(float d) { return d != 0.0f ? __fdiv_rn(1.0f, d) : 0.0f; }

DEVICE float round_half_away(float x) {
    float whole = truncf(x), rest = __fsub_rn(x, whole);
    return __fadd_rn(whole, truncf(__fadd_rn(rest, rest)));
}

DEVICE float warp_least(float v) { return -warp_max(-v); }

// Whole numbers of 4 or 5 bits: q of lane i and of lane i + 16 share byte i, fifth bits are a word of their own.
DEVICE void store_nibbles(u8* at, float shifted, int most) {
    const int lane = threadIdx.x % WARP;
    const u32 q = static_cast<u32>(static_cast<int>(fminf(shifted, static_cast<float>(most))));
    if (most > 15) {
        u32 fifth = __ballot_sync(ALL_LANES, q >> 4 & 1);
        if (lane < 2) reinterpret_cast<u16*>(at)[lane] = fifth >> 16 * lane;
        at += 4;
    }
    const u32 high = __shfl_down_sync(ALL_LANES, q, 16);
    if (lane < 16) at[lane] = (q & 15) | (high & 15) << 4;
}

// 32 numbers, one a lane, as item `block` of a row.
DEVICE void store_block(u8* row, int block, float x, int type) {
    const int lane = threadIdx.x % WARP;
    u8* at = row + block * kv_item_bytes(type) * (type <= KV_BF16 ? WARP : 1);
    switch (type) {
        case KV_F32: reinterpret_cast<float*>(at)[lane] = x; return;
        case KV_F16: store_half(at + 2 * lane, x); return;
        case KV_BF16: reinterpret_cast<u16*>(at)[lane] = bf16_bits(x); return;
        case KV_Q8_0: {
            const float d = __fdiv_rn(warp_max(fabsf(x)), 127.0f);
            if (lane == 0) store_half(at, d);
            at[2 + lane] = static_cast<u8>(static_cast<int>(round_half_away(__fmul_rn(x, inverse(d)))));
            return;
        }
        case KV_Q4_1:
        case KV_Q5_1: {
            const int most = type == KV_Q4_1 ? 15 : 31;
            const float m = warp_least(x), d = __fdiv_rn(__fsub_rn(warp_max(x), m), static_cast<float>(most));
            if (lane == 0) {
                store_half(at, d);
                store_half(at + 2, m);
            }
            store_nibbles(at + 4, __fadd_rn(__fmul_rn(__fsub_rn(x, m), inverse(d)), 0.5f), most);
            return;
        }
        default: {
            const int low = type == KV_Q4_0 ? -8 : -16;
            // The first number of largest magnitude becomes `low` exactly.
            const u32 largest = __ballot_sync(ALL_LANES, fabsf(x) == warp_max(fabsf(x)));
            const float peak = __shfl_sync(ALL_LANES, x, largest ? __ffs(largest) - 1 : 0);
            const float d = __fdiv_rn(peak, static_cast<float>(low));
            if (lane == 0) store_half(at, d);
            store_nibbles(at + 2, __fadd_rn(__fmul_rn(x, inverse(d)), 0.5f - low), -2 * low - 1);
            return;
        }
    }
}

// The sum of a group's 128 numbers, one for each lane and block, in the order of ops/tq3_blocks.py.
DEVICE float group_sum(const float x[GROUP_BLOCKS]) { return warp_sum(__fadd_rn(__fadd_rn(x[0], x[2]), __fadd_rn(x[1], x[3]))); }

// Bits 0 .. 3 to bits 0, 2, 4, 6.
DEVICE u32 spread_bits(u32 four) {
    four = (four | four << 2) & 0x33u;
    return (four | four << 1) & 0x55u;
}

// 128 numbers as four blocks of tq3_0: a factor and, for each number of the rotated direction, which centroid is nearest.
DEVICE void store_group(u8* at, const float x[GROUP_BLOCKS]) {
    constexpr float BORDERS[3] = {0.043589f, 0.091775f, 0.154259f};
    constexpr float CENTROIDS[4] = {0.021460f, 0.065717f, 0.117832f, 0.190685f};
    const int lane = threadIdx.x % WARP;
    float squares[GROUP_BLOCKS], unit[GROUP_BLOCKS];
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b) squares[b] = __fmul_rn(x[b], x[b]);
    const float length = __fsqrt_rn(group_sum(squares));
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b) unit[b] = length != 0.0f ? __fdiv_rn(x[b], length) : 0.0f;
    rotate_group<false>(unit);
    u32 code[GROUP_BLOCKS];
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b) {
        int c = !(unit[b] < 0.0f);  // what is not a number counts as large
#pragma unroll
        for (int i = 0; i < 3; ++i) c += !(unit[b] < BORDERS[i]) + !(unit[b] < -BORDERS[i]);
        code[b] = c;
        const int magnitude = c < 4 ? 3 - c : c - 4;
        const float centroid = magnitude == 0 ? CENTROIDS[0] : magnitude == 1 ? CENTROIDS[1] : magnitude == 2 ? CENTROIDS[2] : CENTROIDS[3];
        squares[b] = __fmul_rn(centroid, centroid);
    }
    const float d = __fdiv_rn(length, __fsqrt_rn(group_sum(squares)));
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b, at += kv_item_bytes(KV_TQ3_0)) {
        const u32 ones = __ballot_sync(ALL_LANES, code[b] & 1), twos = __ballot_sync(ALL_LANES, code[b] >> 1 & 1);
        const u32 fours = __ballot_sync(ALL_LANES, code[b] >> 2);
        if (lane == 0) store_half(at, d);
        if (lane < 8) at[2 + lane] = spread_bits(ones >> 4 * lane & 15) | spread_bits(twos >> 4 * lane & 15) << 1;
        if (lane < 4) at[10 + lane] = fours >> 8 * lane;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rope_store(const RopeStore a) {
    __shared__ float heads[N_WARPS][WARP * MOST_BLOCKS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.y;
    const int head = blockIdx.x * N_WARPS + warp;
    const int position = a.positions[row];
    const bool here = position >= 0 && head < a.n_head + 2 * a.n_head_kv;
    pdl_wait();
    pdl_launch();
    if (!here) return;

    const bool is_q = head < a.n_head, is_v = head >= a.n_head + a.n_head_kv;
    const int group = is_q ? 0 : head - a.n_head - (is_v ? a.n_head_kv : 0);
    const int dim = is_v ? a.value_dim : a.head_dim, n_blocks = dim / WARP;
    const int keys = a.n_head * a.q_head, values = keys + a.n_head_kv * a.head_dim;
    float* source = a.qkv + static_cast<u64>(row) * a.stride + blockIdx.z * a.width +
                    (is_q ? head * a.q_head : is_v ? values + group * a.value_dim : keys + group * a.head_dim);
    float x[MOST_BLOCKS];
#pragma unroll
    for (int b = 0; b < MOST_BLOCKS; ++b)
        if (b < n_blocks) x[b] = source[b * WARP + lane];

    const float* norm = is_q ? a.q_norm : a.k_norm;
    if (!is_v && norm) {
        float square = 0.0f;
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; ++b)
            if (b < n_blocks) square = __fmaf_rn(x[b], x[b], square);
        const float scale = __fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(square), static_cast<float>(dim)), a.eps));
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; ++b)
            if (b < n_blocks) x[b] = __fmul_rn(__fdiv_rn(x[b], scale), norm[blockIdx.z * dim + b * WARP + lane]);
    }
    if (!is_v) {
        float* mine = heads[warp];
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; ++b)
            if (b < n_blocks) mine[b * WARP + lane] = x[b];
        __syncwarp();
        const float2* angles = a.angles + static_cast<u64>(position) * (a.dims / 2);
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; ++b) {
            const int i = b * WARP + lane;
            if (b >= n_blocks || i >= a.dims) continue;
            const bool second = a.pairs == PAIRS_INTERLEAVED ? i & 1 : i >= a.dims / 2;
            const int pair = a.pairs == PAIRS_INTERLEAVED ? i / 2 : i % (a.dims / 2);
            const int other = a.pairs == PAIRS_INTERLEAVED ? i ^ 1 : second ? i - a.dims / 2 : i + a.dims / 2;
            const float2 angle = angles[pair];
            const float turned = __fmul_rn(mine[other], angle.y), kept = __fmul_rn(x[b], angle.x);
            x[b] = second ? __fadd_rn(kept, turned) : __fsub_rn(kept, turned);
        }
    }
    if (is_q) {
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; b += GROUP_BLOCKS)
            if (a.k_type == KV_TQ3_0 && b < n_blocks) rotate_group<false>(x + b);
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; ++b)
            if (b < n_blocks) source[b * WARP + lane] = x[b];
        return;
    }
    const u64 place = is_v ? a.write_v[row] : a.write_k[row];
    if (place == 0) return;
    const int type = is_v ? a.v_type : a.k_type;
    const u64 layer = is_v ? a.v_layer + blockIdx.z * a.v_step : a.k_layer + blockIdx.z * a.k_step;
    u8* target = reinterpret_cast<u8*>(place + layer) + static_cast<u64>(group) * TILE * kv_row_bytes(type, dim);
    if (type == KV_TQ3_0) {
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; b += GROUP_BLOCKS)
            if (b < n_blocks) store_group(target + b * kv_item_bytes(KV_TQ3_0), x + b);
        return;
    }
#pragma unroll
    for (int b = 0; b < MOST_BLOCKS; ++b)
        if (b < n_blocks) store_block(target, b, x[b], type);
}
