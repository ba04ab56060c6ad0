// y = x W^T for few rows of x as whole numbers (prepare.cu, Integers): sums of products of codes are exact, so what is
// rounded is one product and sum for each group of 32 columns (16 where the weight's scales have 16).
//
// A block owns one tile of 16 outputs, its warps share the segments of k. A lane (weight_tiles.cuh) sums its 64 columns
// up, group by group; a segment is (t = 0 + t = 1) + (t = 2 + t = 3), segments are added left to right inside slabs of eight
// counted from k = 0, slab sums left to right. Nothing in it depends on how many rows or warps there are.
#include "linear.cuh"

struct IntegerRows {
    const u32* codes;
    const float4* scale;
    const int4* sums16;
    int n;
    int room;  // rows that there is memory for
};

constexpr int MOST_ROWS = 24;
constexpr int LEAST_THREADS = 128;

// 1.5 * 2^23 as a float: with a whole number below 2^22 added to its bits it is that number larger.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

DEVICE float float_of(int with_magic) { return __fsub_rn(__int_as_float(with_magic), MAGIC); }

// d + four unsigned codes times four signed ones.
DEVICE int dot4(u32 codes, u32 x, int d) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(d) : "r"(codes), "r"(x));
    return d;
}

DEVICE u32 shifted(u32 v, int left) { return left >= 0 ? v << left : v >> -left; }

// Four codes as bytes: columns 64t + 32hi + 16c + 4i + 0..3.
template <int FORMAT>
DEVICE u32 four_codes(const Lane<FORMAT>& lane, int h, int hi, int c, int i) {
    using L = Layout<FORMAT>;
    if constexpr (!L::NIBBLES) return word_of(lane.chunk[h][2 * hi + c], i);
    const u32 v = word_of(lane.chunk[h][c], i);
    u32 codes = (hi ? v >> 4 : v) & 0x0f0f0f0fu;
    if constexpr (L::FIFTH) {
        const u32 bits = c ? lane.high[h].y : lane.high[h].x;
        const int from = 4 * i + 2 * hi;
        codes = and_or(shifted(bits, 4 - from), 0x00100010u, codes);
        codes = and_or(shifted(bits, 11 - from), 0x10001000u, codes);
    }
    if constexpr (L::SIXTH) {
        const u32 bits = word_of(lane.high[h], 2 * c + i / 2);
        const int from = 8 * (i % 2) + 4 * hi;
        codes = and_or(shifted(bits, 4 - from), 0x00300030u, codes);
        codes = and_or(shifted(bits, 10 - from), 0x30003000u, codes);
    }
    return codes;
}

// s and m of the columns 64t + 32hi + 16c + 0..15 (c = 0 where a scale has 32): a weight is code * s + m.
template <int FORMAT>
DEVICE float2 scale_of(const Lane<FORMAT>& lane, int h, int hi, int c) {
    using L = Layout<FORMAT>;
    float2 out;
    if constexpr (L::H32 || L::H16) {
        out = __half22float2(as_half2(L::H32 ? word_of(lane.scale[h], hi) : word_of(lane.scale[h], 2 * hi + c)));
    }
    if constexpr (L::K32) {
        const float2 d = __half22float2(as_half2(lane.row[h]));
        const u32 both = lane.scale[h].x >> (16 * hi);
        out = make_float2(d.x * static_cast<float>(both & 255u), d.y * static_cast<float>(both >> 8 & 255u));  // exact
    }
    if constexpr (L::S16) {
        const float d = __half2float(__ushort_as_half(static_cast<u16>(lane.row[h])));
        const int scale = static_cast<signed char>(lane.scale[h].x >> (16 * hi + 8 * c));
        out = make_float2(d * static_cast<float>(scale), 0.0f);
    }
    out.x *= 0x1p-24f;
    return out;
}

// The weights of a lane in the 32 columns of one hi: codes and scales of [c][h].
template <int FORMAT>
struct Group {
    using L = Layout<FORMAT>;
    static constexpr bool BY_16 = L::S16 || L::H16;
    u32 codes[2][2][4];
    float2 scale[BY_16 ? 2 : 1][2];

    DEVICE void unpack(const Lane<FORMAT>& lane, int hi) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int i = 0; i < 4; ++i) codes[c][h][i] = four_codes<FORMAT>(lane, h, hi, c, i);
                if (BY_16 || c == 0) scale[c][h] = scale_of<FORMAT>(lane, h, hi, c);
            }
    }

    // p[h] += the products with a row of x, whose segment and t are at `at`.
    DEVICE void add(float (&p)[2], const IntegerRows& rows, u64 at, int hi) const {
        const uint4* x = reinterpret_cast<const uint4*>(rows.codes + at * 16 + 8 * hi);
        const float2 of_x = reinterpret_cast<const float2*>(rows.scale + at)[hi];
        int2 sums16 = make_int2(0, 0);
        if constexpr (BY_16) sums16 = reinterpret_cast<const int2*>(rows.sums16 + at)[hi];
        int dot[2] = {MAGIC_BITS, MAGIC_BITS};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const uint4 four = x[c];
            if (BY_16 && c == 1) dot[0] = dot[1] = MAGIC_BITS;
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int i = 0; i < 4; ++i) dot[h] = dot4(codes[c][h][i], word_of(four, i), dot[h]);
            if (!BY_16 && c == 0) continue;
            const int sum16 = c ? sums16.y : sums16.x;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 s = scale[BY_16 ? c : 0][h];
                const float whole = float_of(L::S16 ? dot[h] - 32 * sum16 : dot[h]);
                p[h] = fmaf(whole, __fmul_rn(s.x, of_x.x), p[h]);
                if constexpr (!BY_16) p[h] = fmaf(s.y, of_x.y, p[h]);
                if constexpr (L::H16) p[h] = fmaf(__fmul_rn(s.y, of_x.x), float_of(MAGIC_BITS + sum16), p[h]);
            }
        }
    }
};

// ONE: there is one row. Shared memory holds sums, [2][warps][n][16 outputs][4].
template <int FORMAT, bool ONE>
DEVICE void multiply(const Parts& parts, const Part& part, int tile, const IntegerRows& rows, const Output& out) {
    extern __shared__ float4 sums[];
    using L = Layout<FORMAT>;
    constexpr int ADDED = ONE ? 1 : MOST_ROWS * TILE_ROWS / LEAST_THREADS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const int g = lane / 4, t = lane % 4, n = ONE ? 1 : rows.n, n_segments = parts.n_segments;
    const u8* tiles = part.tiles + static_cast<u64>(tile) * n_segments * L::BYTES;

    Lane<FORMAT> held;
    if (warp < n_segments) held.load(tiles + static_cast<u64>(warp) * L::BYTES, lane);
    pdl_wait();
    pdl_launch();

    float slab[ADDED], total[ADDED];
#pragma unroll
    for (int k = 0; k < ADDED; ++k) slab[k] = total[k] = 0.0f;

    for (int first = 0, half = 0; first < n_segments; first += n_warps, half ^= 1) {
        float4* turn = sums + half * n_warps * n * TILE_ROWS;
        const int segment = first + warp;
        if (segment < n_segments) {
            const u8* next = tiles + static_cast<u64>(segment + n_warps) * L::BYTES;
            const bool more = segment + n_warps < n_segments;
            const u64 at = static_cast<u64>(segment) * rows.room * 4 + t;
            float* to = reinterpret_cast<float*>(turn + warp * n * TILE_ROWS + g) + t;
            if constexpr (ONE) {
                float p[2] = {0.0f, 0.0f};
#pragma unroll
                for (int hi = 0; hi < 2; ++hi) {
                    Group<FORMAT> group;
                    group.unpack(held, hi);
                    if (hi == 1 && more) held.load(next, lane);  // under way while this one is finished
                    group.add(p, rows, at, hi);
                }
                to[0] = p[0];
                to[8 * 4] = p[1];
            } else {
                Group<FORMAT> groups[2];
                groups[0].unpack(held, 0);
                groups[1].unpack(held, 1);
                if (more) held.load(next, lane);
#pragma unroll 1
                for (int r = 0; r < n; ++r) {
                    float p[2] = {0.0f, 0.0f};
                    groups[0].add(p, rows, at + 4 * r, 0);
                    groups[1].add(p, rows, at + 4 * r, 1);
                    to[r * TILE_ROWS * 4] = p[0];
                    to[(r * TILE_ROWS + 8) * 4] = p[1];
                }
            }
        }
        __syncthreads();
        // Everybody adds some outputs up, segments in order. The other half of `sums` is free meanwhile.
        const int count = min(n_warps, n_segments - first);
#pragma unroll
        for (int k = 0; k < ADDED; ++k) {
            const int index = threadIdx.x + k * blockDim.x;
            if (index >= n * TILE_ROWS) break;
            for (int i = 0; i < count; ++i) {
                const float4 four = turn[i * n * TILE_ROWS + index];
                slab[k] = __fadd_rn(slab[k], __fadd_rn(__fadd_rn(four.x, four.y), __fadd_rn(four.z, four.w)));
                if ((first + i) % SLAB == SLAB - 1) {
                    total[k] = __fadd_rn(total[k], slab[k]);
                    slab[k] = 0.0f;
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < ADDED; ++k) {
        const int index = threadIdx.x + k * blockDim.x;
        if (index >= n * TILE_ROWS) break;
        const int row = index / TILE_ROWS, output = tile * TILE_ROWS + index % TILE_ROWS;
        if (output >= part.n_rows) continue;
        const float value = __fmul_rn(__fadd_rn(total[k], slab[k]), part.row_scale[output]);
        float* y = out.y + static_cast<u64>(row) * out.stride + part.first_output + output;
        *y = out.add ? __fadd_rn(*y, value) : value;
    }
}

// Entries for each format of whole numbers: for one row, and for up to MOST_ROWS. A block has at least LEAST_THREADS threads,
// the parts of a launch have one format.
#define ENTRY(NAME, FORMAT, ONE, THREADS, BLOCKS)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                             \
        linear_q8_##NAME(const __grid_constant__ Parts parts, const IntegerRows rows, const Output out) {     \
        int tile = blockIdx.x, p = 0;                                                                         \
        while (p + 1 < parts.n_parts && tile >= parts.part[p].n_tiles) tile -= parts.part[p++].n_tiles;       \
        multiply<FORMAT, ONE>(parts, parts.part[p], tile, rows, out);                                         \
    }

#define ENTRIES(NAME, FORMAT, THREADS, BLOCKS)       \
    ENTRY(NAME##_one, FORMAT, true, THREADS, BLOCKS) \
    ENTRY(NAME##_few, FORMAT, false, 256, 2)

ENTRIES(u4_h32, U4_H32, 320, 3)
ENTRIES(u4_k32, U4_K32, 320, 3)
ENTRIES(u5_h32, U5_H32, 320, 3)
ENTRIES(u5_k32, U5_K32, 256, 3)
ENTRIES(u6_s16, U6_S16, 256, 3)
ENTRIES(u4_h16, U4_H16, 256, 3)
ENTRIES(u8_h32, U8_H32, 320, 2)
