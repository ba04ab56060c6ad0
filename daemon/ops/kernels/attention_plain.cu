// Attention in float32 throughout, for K or V kept as f32: a block of 64 threads for each row and head.
//
// Plain and slow on purpose: it is there for comparison. Tiles of 64 positions are folded in ascending order, each
// with sums of its own, as in attention.cu; all sums run over positions or dimensions in ascending order.
#include "attention.cuh"

constexpr int MOST_DIMS = 256;

struct Plain {
    Heads heads;
    const int* positions;    // [rows], -1: padding
    const int* sequence;     // [rows]
    const int* first_page;   // [sequences]
    const int* committed;    // [sequences]
    const u8* ancestors;     // [rows][64], null: the rows before
    int head_dim;
    int value_dim;
};

// Number i of a stored row.
DEVICE float stored_number(const u8* row, int i, int type) {
    if (type == KV_F32) return reinterpret_cast<const float*>(row)[i];
    if (type == KV_F16) return __half2float(reinterpret_cast<const half*>(row)[i]);
    if (type == KV_BF16) return __uint_as_float(static_cast<u32>(reinterpret_cast<const u16*>(row)[i]) << 16);
    const u8* at = row + i / 32 * kv_item_bytes(type);
    const int j = i % 32;
    const float d = __half2float(*reinterpret_cast<const half*>(at));
    if (type == KV_Q8_0) return __fmul_rn(d, static_cast<float>(static_cast<signed char>(at[2 + j])));
    const bool with_minimum = type == KV_Q4_1 || type == KV_Q5_1, with_fifth = type >= KV_Q5_0;
    const float m = with_minimum ? __half2float(*reinterpret_cast<const half*>(at + 2)) : 0.0f;
    at += with_minimum ? 4 : 2;
    int q = 0;
    if (with_fifth) {
        q = (at[j / 8] >> j % 8 & 1) << 4;
        at += 4;
    }
    q |= j < 16 ? at[j] & 15 : at[j - 16] >> 4;
    if (with_minimum) return __fadd_rn(__fmul_rn(d, static_cast<float>(q)), m);
    return __fmul_rn(d, static_cast<float>(q - (with_fifth ? 16 : 8)));
}

extern "C" __global__ void __launch_bounds__(TILE) attention_plain(const Plain a) {
    __shared__ float query[MOST_DIMS], scores[TILE], weights[TILE];
    const Heads& heads = a.heads;
    const int head = blockIdx.x, row = blockIdx.y, group = head / heads.per_group(), thread = threadIdx.x;
    const int position = a.positions[row];
    pdl_wait();
    pdl_launch();
    if (position < 0) return;
    const int sequence = a.sequence[row], first_page = a.first_page[sequence];
    const int k_row_bytes = kv_row_bytes(heads.k_type, a.head_dim), v_row_bytes = kv_row_bytes(heads.v_type, a.value_dim);
    const u64 k_offset = heads.k_layer + static_cast<u64>(group) * TILE * k_row_bytes;
    const u64 v_offset = heads.v_layer + static_cast<u64>(group) * TILE * v_row_bytes;
    const int committed = a.ancestors ? a.committed[sequence] : position + 1;
    const u8* ancestors = a.ancestors ? a.ancestors + row * 64 : nullptr;
    const Path k_path = {heads.page_k + first_page, ancestors, committed}, v_path = {heads.page_v + first_page, ancestors, committed};
    for (int i = thread; i < a.head_dim; i += TILE) query[i] = heads.q[static_cast<u64>(row) * heads.q_stride + head * heads.q_head + i];

    float o[MOST_DIMS / TILE] = {}, l = 0.0f, peak = -INF;
    for (int tile = 0; tile <= position / TILE; ++tile) {
        const int n = min(TILE, position + 1 - tile * TILE);
        __syncthreads();
        float score = -INF;
        if (thread < n) {
            const u8* k = k_path.row(tile * TILE + thread, k_offset, k_row_bytes);
            score = 0.0f;
            for (int i = 0; i < a.head_dim; ++i) score = __fmaf_rn(query[i], stored_number(k, i, heads.k_type), score);
            score = __fmul_rn(score, heads.factor);
        }
        scores[thread] = score;
        __syncthreads();
        float tile_peak = scores[0];
        for (int i = 1; i < n; ++i) tile_peak = max_or_nan(tile_peak, scores[i]);
        weights[thread] = exp2_shared(__fsub_rn(score, tile_peak));
        __syncthreads();
        const float next = max_or_nan(peak, tile_peak);
        const float old_weight = exp2_shared(peak - next), tile_weight = exp2_shared(tile_peak - next);
        peak = next;
        float sum = 0.0f, x[MOST_DIMS / TILE] = {};
        for (int i = 0; i < n; ++i) {
            const float p = weights[i];
            const u8* v = v_path.row(tile * TILE + i, v_offset, v_row_bytes);
            sum = __fadd_rn(sum, p);
#pragma unroll
            for (int j = 0; j < MOST_DIMS / TILE; ++j)
                if (thread + j * TILE < a.value_dim) x[j] = __fmaf_rn(p, stored_number(v, thread + j * TILE, heads.v_type), x[j]);
        }
        l = joined(l, old_weight, sum, tile_weight);
#pragma unroll
        for (int j = 0; j < MOST_DIMS / TILE; ++j) o[j] = joined(o[j], old_weight, x[j], tile_weight);
    }
#pragma unroll
    for (int j = 0; j < MOST_DIMS / TILE; ++j)
        if (thread + j * TILE < a.value_dim)
            heads.out[(static_cast<u64>(row) * heads.n_head + head) * a.value_dim + thread + j * TILE] = normalised(o[j], __frcp_rn(l));
}
