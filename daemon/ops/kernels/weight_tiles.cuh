// Weight matrices as the linear kernels read them, and the one function that makes halves of them.
//
// A matrix [n_out, n_in] is cut into tiles of 16 rows x 256 columns (k), row tiles outside; n_out and n_in are
// filled up with zeros. A number of a quantised tile is  code * s + m  with a whole code >= 0 and s, m of its
// group of 16 or 32 columns. Codes stay bits: a code in the low bits of a half is the subnormal code * 2^-24, so one
// fused multiply-add per two weights makes them. Every row has a power of two (`row_scale`, its inverse)
// that puts its largest s * 2^24 and m just below 2^15; products are exact in it.
//
// Lane (g = lane / 4, t = lane % 4) of the warp that reads a tile holds rows g and g + 8 (h = 0, 1), columns 64t .. 64t+63.
// Step (w = 0..7, hi = 0..1) multiplies the 16 columns {64t + 32hi + 4w + 0..3}, w ascending, hi 0 before 1:
// this order is part of the result. Planes of a tile, one behind the other:
//   nibbles   [h][c = 0..1][lane] 16 bytes: byte i of c has column 64t+16c+i below and 64t+32+16c+i above
//   bytes     [h][c = 0..3][lane] 16 bytes: columns 64t+16c+i
//   halves    [h][c = 0..7][lane] 8 halves: for w = 2(c%4), 2(c%4)+1 of hi = c/4 the columns 4w + 0, 2, 1, 3
//   fifth     [h][lane] 8 bytes:  word c, bit 4(w%4) + 2hi + odd (+16 for columns 2, 3) has column 4w + ... of w = 4c + w%4
//   sixth     [h][lane] 16 bytes: word w/2, bits 8(w%2) + 4hi + 2odd (+16 ...), two bits each
//   scales    by format, below
#pragma once
#include "portable.cuh"

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLUMNS = 256;  // also the segment in which k is summed
constexpr int SLAB = 8;            // segments to a slab

enum Format {
    U4_H32,  // nibbles; half2 (s, m) for each 32 columns: [h][lane] groups 2t, 2t+1 (Q4_0, Q4_1)
    U4_K32,  // nibbles; bytes (scale, min) x 2: [h][lane]; half2 (d, -dmin) for each row (Q4_K)
    U5_H32,  // + fifth (Q5_0, Q5_1)
    U5_K32,  // + fifth (Q5_K)
    U6_S16,  // nibbles, sixth; signed bytes x 4 for each 16 columns: [h][lane]; half d for each row; code - 32 (Q6_K)
    U4_H16,  // nibbles; half2 (s, m) for each 16 columns: [h][lane] groups 4t .. 4t+3 (Q2_K, Q3_K)
    U8_H32,  // bytes; half2 (s, m) for each 32 columns (Q8_0, IQ4_NL, IQ4_XS)
    F16,     // halves (F16, BF16, F32)
    N_FORMATS
};

template <int FORMAT>
struct Layout {
    static constexpr bool NIBBLES = FORMAT != U8_H32 && FORMAT != F16;
    static constexpr bool FIFTH = FORMAT == U5_H32 || FORMAT == U5_K32;
    static constexpr bool SIXTH = FORMAT == U6_S16;
    static constexpr bool H32 = FORMAT == U4_H32 || FORMAT == U5_H32 || FORMAT == U8_H32;
    static constexpr bool K32 = FORMAT == U4_K32 || FORMAT == U5_K32;
    static constexpr bool S16 = FORMAT == U6_S16;
    static constexpr bool H16 = FORMAT == U4_H16;
    static constexpr int CHUNKS = NIBBLES ? 2 : FORMAT == U8_H32 ? 4 : 8;  // of 16 bytes for each lane and h

    static constexpr int HIGH = 2 * CHUNKS * WARP * 16;  // where the plane of high bits starts
    static constexpr int SCALES = HIGH + (FIFTH ? 512 : SIXTH ? 1024 : 0);
    static constexpr int ROWS = SCALES + (H32 ? 512 : K32 || S16 ? 256 : H16 ? 1024 : 0);
    static constexpr int BYTES = ROWS + (K32 ? 64 : S16 ? 32 : 0);
};

// What a lane holds of a tile.
template <int FORMAT>
struct Lane {
    using L = Layout<FORMAT>;
    uint4 chunk[2][L::CHUNKS];
    uint4 high[2];   // fifth uses .x .y
    uint4 scale[2];  // H16 uses all, H32 .x .y, K32 and S16 .x
    u32 row[2];      // K32 half2 (d, -dmin), S16 half d

    DEVICE void load_chunks(const u8* tile, int lane, int c, int step = 1) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = c; i < L::CHUNKS; i += step)
                chunk[h][i] = load_stream16(tile + ((h * L::CHUNKS + i) * WARP + lane) * 16);
    }

    DEVICE void load_scales(const u8* tile, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = h * WARP + lane;
            if constexpr (L::FIFTH) {
                uint2 v = load_stream8(tile + L::HIGH + at * 8);
                high[h].x = v.x;
                high[h].y = v.y;
            }
            if constexpr (L::SIXTH) high[h] = load_stream16(tile + L::HIGH + at * 16);
            if constexpr (L::H32) {
                uint2 v = load_stream8(tile + L::SCALES + at * 8);
                scale[h].x = v.x;
                scale[h].y = v.y;
            }
            if constexpr (L::H16) scale[h] = load_stream16(tile + L::SCALES + at * 16);
            if constexpr (L::K32 || L::S16) scale[h].x = load_stream4(tile + L::SCALES + at * 4);
            if constexpr (L::K32) row[h] = load_stream4(tile + L::ROWS + (lane / 4 + 8 * h) * 4);
            if constexpr (L::S16) row[h] = reinterpret_cast<const u16*>(tile + L::ROWS)[lane / 4 + 8 * h];
        }
    }

    DEVICE void load(const u8* tile, int lane) {
        load_chunks(tile, lane, 0);
        load_scales(tile, lane);
    }
};

DEVICE u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// s and m of both rows and both halves (hi) of the columns with w in 4c .. 4c+3, ready for the codes: s counts a
// code in units of 2^-24, of 2^-20 where it stands four bits higher.
struct Scales {
    half2 s[2][2], m[2][2];  // [h][hi]
};

template <int FORMAT>
DEVICE Scales scales_of(const Lane<FORMAT>& lane, int c) {
    using L = Layout<FORMAT>;
    Scales out;
    const half2 sixteenth = __float2half2_rn(0.0625f);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if constexpr (L::H32 || L::H16) {
#pragma unroll
            for (int hi = 0; hi < 2; ++hi) {
                half2 both = as_half2(L::H32 ? word_of(lane.scale[h], hi) : word_of(lane.scale[h], 2 * hi + c));
                out.s[h][hi] = __low2half2(both);
                out.m[h][hi] = __high2half2(both);
            }
        }
        if constexpr (L::K32) {
            const half2 d = as_half2(lane.row[h]);
#pragma unroll
            for (int hi = 0; hi < 2; ++hi) {
                // 0x6400 | byte is the half 1024 + byte.
                u32 bytes = __byte_perm(lane.scale[h].x, 0x64646464u, hi ? 0x4342 : 0x4140);
                half2 both = __hmul2_rn(__hsub2(as_half2(bytes), __float2half2_rn(1024.0f)), d);
                out.s[h][hi] = __low2half2(both);
                out.m[h][hi] = __high2half2(both);
            }
        }
        if constexpr (L::S16) {
            const half d = __ushort_as_half(static_cast<u16>(lane.row[h]));
            // Bytes c and 2 + c are the groups of hi = 0 and 1; 0x6400 | (b + 128) is 1152 + b.
            u32 bytes = __byte_perm(lane.scale[h].x ^ 0x80808080u, 0x64646464u, c ? 0x4341 : 0x4240);
            half2 both = __hmul2_rn(__hsub2(as_half2(bytes), __float2half2_rn(1152.0f)), __half2half2(d));
            half2 minus = __hmul2_rn(both, __float2half2_rn(-0x1p-19f));  // code - 32, in units of 2^-24
            out.s[h][0] = __low2half2(both);
            out.s[h][1] = __high2half2(both);
            out.m[h][0] = __low2half2(minus);
            out.m[h][1] = __high2half2(minus);
        }
        if constexpr (L::NIBBLES) out.s[h][1] = __hmul2_rn(out.s[h][1], sixteenth);
    }
    return out;
}

// The halves of step (w, hi) of both rows, as mma_m16n8k16 takes them.
template <int FORMAT>
DEVICE void step_halves(u32 a[4], const Lane<FORMAT>& lane, const Scales& scales, int w, int hi) {
    using L = Layout<FORMAT>;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if constexpr (FORMAT == F16) {
            const uint4& v = lane.chunk[h][4 * hi + w / 2];
            a[h] = word_of(v, 2 * (w % 2));
            a[h + 2] = word_of(v, 2 * (w % 2) + 1);
        } else {
            const u32 v = word_of(lane.chunk[h][L::NIBBLES ? w / 4 : 2 * hi + w / 4], w % 4);
            u32 even, odd;  // columns 4w + 0, 2 and 4w + 1, 3
            if constexpr (!L::NIBBLES) {
                even = v & 0x00ff00ffu;
                odd = (v >> 8) & 0x00ff00ffu;
            } else {
                const u32 mask = hi ? 0x00f000f0u : 0x000f000fu;
                even = v & mask;
                odd = (v >> 8) & mask;
            }
            if constexpr (L::FIFTH) {
                const u32 bits = w / 4 ? lane.high[h].y : lane.high[h].x;
                const int from = 4 * (w % 4) + 2 * hi, to = hi ? 8 : 4;
                const u32 mask = 0x00010001u << to;
                even = and_or(to >= from ? bits << (to - from) : bits >> (from - to), mask, even);
                odd = and_or(to >= from + 1 ? bits << (to - from - 1) : bits >> (from + 1 - to), mask, odd);
            }
            if constexpr (L::SIXTH) {
                const u32 bits = word_of(lane.high[h], w / 2);
                const int from = 8 * (w % 2) + 4 * hi, to = hi ? 8 : 4;
                const u32 mask = 0x00030003u << to;
                even = and_or(to >= from ? bits << (to - from) : bits >> (from - to), mask, even);
                odd = and_or(to >= from + 2 ? bits << (to - from - 2) : bits >> (from + 2 - to), mask, odd);
            }
            a[h] = as_u32(__hfma2(as_half2(even), scales.s[h][hi], scales.m[h][hi]));
            a[h + 2] = as_u32(__hfma2(as_half2(odd), scales.s[h][hi], scales.m[h][hi]));
        }
    }
}
