// Short convolution of gated DeltaNet along the ancestors of each row, SiLU, unit queries and keys; beta and g.
//
// A projected row is queries, keys, values [channels], gates z [Hv S], beta [Hv], alpha [Hv]. A warp takes a head of a row:
// taps oldest first, sums of squares by lanes and then by warp_sum, so a row's bits depend on its ancestors only. Behind the
// heads a further warp makes beta and g of the row. The row at the end of its sequence leaves the inputs of the last K - 1
// rows where the sequence's new state is wanted; that must not be the place of the old one unless the row is alone.
#include "delta.cuh"

constexpr int MOST_TAPS = 8;
constexpr int MOST_STEP_ROWS = 64;
constexpr int RUN = 8;  // rows of a warp in a prompt
constexpr float UNIT_EPSILON = 1e-6f;

struct Conv {
    const float* projected;  // [rows][stride]
    const float* taps;       // [channels][K]
    const float* a;          // [Hv]
    const float* dt_bias;    // [Hv]
    float* q;                // [rows][Hk S], of length S^-1/2
    Inputs inputs;
    Sequences sequences;
    const int* sequence;   // [rows]
    const int* positions;  // [rows], -1: padding
    const int* committed;  // by sequence
    const u8* ancestors;   // [rows][64], of step rows
    u64 tail_offset;       // bytes from a state to this layer's last inputs, [K - 1][channels]
    int n_rows;
    int stride;
    int n_key_heads;
    int n_value_heads;
    int n_taps;
};

// A lane's channels of a head of S.
template <int S>
struct Lane {
    static constexpr int N = S < WARP ? 1 : S / WARP;
    float x[N];

    DEVICE static bool used(int lane) { return S >= WARP || lane < S; }
};

template <int S>
DEVICE Lane<S> load_lane(const float* from, int lane) {
    constexpr int N = Lane<S>::N;
    Lane<S> out;
    if (N == 4 && reinterpret_cast<u64>(from) % 16 == 0) {
        const float4 four = reinterpret_cast<const float4*>(from)[lane];
        out.x[0] = four.x, out.x[1 % N] = four.y, out.x[2 % N] = four.z, out.x[3 % N] = four.w;
        return out;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out.x[i] = Lane<S>::used(lane) ? from[lane * N + i] : 0.0f;
    return out;
}

template <int S>
DEVICE void store_lane(float* to, const Lane<S>& from, int lane) {
    constexpr int N = Lane<S>::N;
    if (N == 4 && reinterpret_cast<u64>(to) % 16 == 0) {
        reinterpret_cast<float4*>(to)[lane] = make_float4(from.x[0], from.x[1 % N], from.x[2 % N], from.x[3 % N]);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (Lane<S>::used(lane)) to[lane * N + i] = from.x[i];
}

// One sequence of the call, as a head's warp needs it.
struct Place {
    int sequence, first, last;  // rows
    const float* old_tail;      // null: zeros
    float* new_tail;            // null: not wanted
};

DEVICE Place find_place(const Conv& c, int row) {
    const int s = c.sequence[row];
    Place at;
    at.sequence = s;
    at.first = c.sequences.first[s];
    at.last = at.first + c.sequences.n_rows[s] - 1;
    const u64 read = c.sequences.read[s], write = c.sequences.write[s];
    at.old_tail = read ? reinterpret_cast<const float*>(read + c.tail_offset) : nullptr;
    at.new_tail = write ? reinterpret_cast<float*>(write + c.tail_offset) : nullptr;
    return at;
}

// The window's entry `back` rows above a row at `depth`: 0 is the row itself. `row_of` knows its ancestors.
template <int S, typename RowOf>
DEVICE Lane<S> look_back(const Conv& c, const Place& at, int depth, int back, int channel, int channels, int lane,
                         const RowOf& row_of) {
    const int d = depth - back;
    if (d >= 0) return load_lane<S>(c.projected + static_cast<u64>(row_of(d)) * c.stride + channel, lane);
    if (at.old_tail) return load_lane<S>(at.old_tail + (c.n_taps - 1 + d) * channels + channel, lane);
    Lane<S> zero;
#pragma unroll
    for (int i = 0; i < Lane<S>::N; ++i) zero.x[i] = 0.0f;
    return zero;
}

// window[MOST_TAPS - 1] is the row itself, the entries in front of it its ancestors; the last n_taps count.
template <int S>
DEVICE void finish_row(const Conv& c, const Place& at, int row, int head, const Lane<S> (&window)[MOST_TAPS],
                       const Lane<S> (&taps)[MOST_TAPS], int channels, int lane) {
    constexpr int N = Lane<S>::N;
    const int n_keys = c.n_key_heads, channel = head * S;
    Lane<S> y;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < MOST_TAPS; ++j)
            if (j >= MOST_TAPS - c.n_taps) sum = fmaf(taps[j].x[i], window[j].x[i], sum);
        y.x[i] = silu(sum);
    }
    if (c.inputs.u) store_lane<S>(c.inputs.u + static_cast<u64>(row) * channels + channel, window[MOST_TAPS - 1], lane);
    if (at.new_tail && row == at.last) {
#pragma unroll
        for (int j = 1; j < MOST_TAPS; ++j) {
            const int tap = j - (MOST_TAPS - c.n_taps);
            if (tap >= 1) store_lane<S>(at.new_tail + (tap - 1) * channels + channel, window[j], lane);
        }
    }
    if (head >= 2 * n_keys) {
        const int width = c.n_value_heads * S;
        store_lane<S>(c.inputs.v + static_cast<u64>(row) * width + channel - 2 * n_keys * S, y, lane);
        return;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(y.x[i], y.x[i], sum);
    const float length = __fsqrt_rn(__fadd_rn(warp_sum(sum), UNIT_EPSILON));
    const bool is_query = head < n_keys;
    const float wanted = is_query ? __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(S))) : 1.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) y.x[i] = __fmul_rn(__fdiv_rn(y.x[i], length), wanted);
    float* to = is_query ? c.q : c.inputs.k;
    store_lane<S>(to + static_cast<u64>(row) * n_keys * S + channel - (is_query ? 0 : n_keys * S), y, lane);
}

DEVICE void write_gates(const Conv& c, int row, int z_end, int lane) {
    const int n = c.n_value_heads;
    const float* from = c.projected + static_cast<u64>(row) * c.stride + z_end;
    for (int head = lane; head < n; head += WARP) {
        c.inputs.beta[static_cast<u64>(row) * n + head] = sigmoid(from[head]);
        c.inputs.g[static_cast<u64>(row) * n + head] =
            __fmul_rn(c.a[head], softplus(__fadd_rn(from[n + head], c.dt_bias[head])));
    }
}

template <int S>
DEVICE void load_taps(Lane<S> (&taps)[MOST_TAPS], const Conv& c, int channel, int lane) {
    constexpr int N = Lane<S>::N;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float* from = c.taps + static_cast<u64>(channel + (Lane<S>::used(lane) ? lane * N + i : 0)) * c.n_taps;
#pragma unroll
        for (int j = 0; j < MOST_TAPS; ++j) {
            const int tap = j - (MOST_TAPS - c.n_taps);
            taps[j].x[i] = tap >= 0 ? from[tap] : 0.0f;
        }
    }
}

// One row for each warp, ancestors from the table. grid: (heads and gates, rows).
template <int S>
DEVICE void conv_step(const Conv& c) {
    const int lane = threadIdx.x % WARP, head = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, row = blockIdx.y;
    const int n_heads = 2 * c.n_key_heads + c.n_value_heads, channels = n_heads * S, channel = head * S;
    Lane<S> taps[MOST_TAPS], window[MOST_TAPS];
    if (head < n_heads) load_taps<S>(taps, c, channel, lane);  // older than the kernel before this one, as the batch is
    const int position = head <= n_heads ? c.positions[row] : -1;
    Place at;
    int depth = 0;
    if (position >= 0) {
        at = find_place(c, row);
        depth = position - c.committed[at.sequence];
    }
    pdl_wait();
    pdl_launch();
    if (position < 0) return;
    if (head == n_heads) {
        write_gates(c, row, channels + c.n_value_heads * S, lane);
        return;
    }
    const auto row_of = [&](int d) { return d == depth ? row : at.first + c.ancestors[row * MOST_STEP_ROWS + d]; };
#pragma unroll
    for (int j = 0; j < MOST_TAPS; ++j)
        if (j >= MOST_TAPS - c.n_taps)
            window[j] = look_back<S>(c, at, depth, MOST_TAPS - 1 - j, channel, channels, lane, row_of);
    finish_row<S>(c, at, row, head, window, taps, channels, lane);
}

// RUN rows for each warp; a row's ancestors are the rows in front of it. grid: (heads and gates, rows / RUN).
template <int S>
DEVICE void conv_prompt(const Conv& c) {
    const int lane = threadIdx.x % WARP, head = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int n_heads = 2 * c.n_key_heads + c.n_value_heads, channels = n_heads * S, channel = head * S;
    const int from = blockIdx.y * RUN, to = min(from + RUN, c.n_rows);
    pdl_wait();
    pdl_launch();
    if (head > n_heads) return;
    if (head == n_heads) {
        for (int row = from; row < to; ++row) write_gates(c, row, channels + c.n_value_heads * S, lane);
        return;
    }
    Lane<S> taps[MOST_TAPS], window[MOST_TAPS];
    load_taps<S>(taps, c, channel, lane);
    Place at;
    at.last = -1;
    for (int row = from; row < to; ++row) {
        if (row > at.last) at = find_place(c, row);
        const auto row_of = [&](int d) { return at.first + d; };
        const bool whole = row == from || row == at.first;  // the rows in front of it are not in the window
#pragma unroll
        for (int j = 0; j < MOST_TAPS; ++j) {
            if (j < MOST_TAPS - c.n_taps) continue;
            if (j + 1 < MOST_TAPS && !whole) window[j] = window[(j + 1) % MOST_TAPS];
            else window[j] = look_back<S>(c, at, row - at.first, MOST_TAPS - 1 - j, channel, channels, lane, row_of);
        }
        finish_row<S>(c, at, row, head, window, taps, channels, lane);
    }
}

extern "C" __global__ void __launch_bounds__(128) conv_step_16(const Conv c) { conv_step<16>(c); }
extern "C" __global__ void __launch_bounds__(128) conv_step_32(const Conv c) { conv_step<32>(c); }
extern "C" __global__ void __launch_bounds__(128) conv_step_64(const Conv c) { conv_step<64>(c); }
extern "C" __global__ void __launch_bounds__(128) conv_step_128(const Conv c) { conv_step<128>(c); }
extern "C" __global__ void __launch_bounds__(128) conv_prompt_16(const Conv c) { conv_prompt<16>(c); }
extern "C" __global__ void __launch_bounds__(128) conv_prompt_32(const Conv c) { conv_prompt<32>(c); }
extern "C" __global__ void __launch_bounds__(128) conv_prompt_64(const Conv c) { conv_prompt<64>(c); }
extern "C" __global__ void __launch_bounds__(128) conv_prompt_128(const Conv c) { conv_prompt<128>(c); }
