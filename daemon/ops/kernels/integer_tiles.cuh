// Products of a tile of weight_tiles.cuh with rows of whole numbers (prepare.cu, Integers), for few rows and for many.
//
// A number of x is  code * scale  with the scale of its 32 columns, a number of a weight  code * s + m. The tensor cores sum
// codes times codes of a group of 32 columns (16 where s has 16), exactly; then, for a segment of 256 columns,
//   P = s of group 0 * (sum * scale of x), + s of group 1 * (...), ... in the order of the groups, each product fused
//   M = minima times the sums of x (scale * codes), by the tensor cores in one fixed step: first bits, then the rest
//   segment = P times what all groups share, + M times what they share
// Rows of x are columns of the product and do not touch each other. A tile lies in shared memory as it does in global memory,
// but for the places of 16-byte pieces inside planes of 32.
#pragma once
#include "linear.cuh"

// x as whole numbers: see Integers in prepare.cu.
struct IntegerRows {
    const uint4* codes;
    const float4* scale;  // two rows each
    const uint4* sums;
    const uint4* sums16;
    int n;
    int room;  // even; rows behind n may hold anything
};

// 1.5 * 2^23 as a float: with a whole number below 2^22 added to its bits it is that number larger.
constexpr u32 MAGIC_BITS = 0x4b400000u;
constexpr float MAGIC = 12582912.0f;

template <int FORMAT>
struct IntegerTile {
    using L = Layout<FORMAT>;
    static constexpr bool BY_16 = L::S16 || L::H16;                       // groups of 16 columns
    static constexpr bool IN_PLACE = L::NIBBLES && !L::FIFTH && !L::SIXTH;  // high nibbles stay four bits too high
    static constexpr bool MINIMA = !L::S16;
    static constexpr int GROUPS = BY_16 ? 4 : 2;  // of 64 columns
    static constexpr int PIECES = L::BYTES / 16;
    static constexpr int MOVED = 2 * L::CHUNKS + (L::SIXTH || L::H16 ? 2 : 0);  // planes with pieces in other places
    static constexpr int STRIDE = (L::BYTES + 127) / 128 * 128;                 // bytes in shared memory

    // Place of the piece of (g, t) in its plane: eight pieces of one t, and of eight neighbouring lanes, lie in different banks.
    static DEVICE int place(int g, int t) { return t * 8 + (g ^ (2 * t)); }

    // A warp copies a tile.
    static DEVICE void copy(u8* to, const u8* tile, int lane) {
        const int moved = place(lane / 4, lane % 4);
#pragma unroll
        for (int i = 0; i < (PIECES + WARP - 1) / WARP; ++i) {
            const int piece = i * WARP + lane;
            if (piece < PIECES) cp_async16(to + (i < MOVED ? i * WARP + moved : piece) * 16, tile + piece * 16);
        }
    }

    // Codes of the columns 64j + 32hi + 0..31 as the tensor cores take them: bytes; of S16 four times code - 32.
    static DEVICE void codes(u32 (&a)[2][4], const u8* tile, int lane, int j) {
        const int g = lane / 4, t = lane % 4;
        // Lane l names row l % 8 of matrix l / 8: [c][h].
        const u8* row = tile + ((lane / 8 % 2 * L::CHUNKS + lane / 16) * WARP + place(lane % 8, j)) * 16;
        if constexpr (!L::NIBBLES) {
            ldmatrix_x4(a[0], row);
            ldmatrix_x4(a[1], row + 2 * WARP * 16);
            return;
        }
        u32 v[4];
        ldmatrix_x4(v, row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (L::SIXTH) {
                a[0][i] = ((v[i] << 2) & 0x3c3c3c3cu) ^ 0x80808080u;
                a[1][i] = ((v[i] >> 2) & 0x3c3c3c3cu) ^ 0x80808080u;
            } else {
                a[0][i] = v[i] & 0x0f0f0f0fu;
                a[1][i] = IN_PLACE ? v[i] & 0xf0f0f0f0u : (v[i] >> 4) & 0x0f0f0f0fu;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Bits of columns 4w + 0, 1 and 2, 3 lie side by side; a product puts them into their bytes, beside bits to drop.
            if constexpr (L::FIFTH) {
                const uint2 both = *reinterpret_cast<const uint2*>(tile + L::HIGH + (h * WARP + g * 4 + j) * 8);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const u32 bits = (c ? both.y : both.x) >> (4 * t);
                    a[0][2 * c + h] |= ((bits & 0x00030003u) * 0x0810u) & 0x10101010u;
                    a[1][2 * c + h] |= ((bits & 0x000c000cu) * 0x0204u) & 0x10101010u;
                }
            }
            if constexpr (L::SIXTH) {
                const u32* words = reinterpret_cast<const u32*>(tile + L::HIGH + (h * WARP + place(g, j)) * 16);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const u32 bits = words[2 * c + t / 2] >> (8 * (t % 2));
                    a[0][2 * c + h] ^= ((bits & 0x000f000fu) * 0x1040u) & 0xc0c0c0c0u;
                    a[1][2 * c + h] ^= ((bits & 0x00f000f0u) * 0x0104u) & 0xc0c0c0c0u;
                }
            }
        }
    }

    // s of rows g and g + 8 for the groups of the columns 64j .. 64j+63, of K32 and S16 without d.
    static DEVICE void factors(float (&s)[2][GROUPS], const u8* tile, int g, int j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = h * WARP + g * 4 + j;
            if constexpr (L::K32) {
                const u32 word = *reinterpret_cast<const u32*>(tile + L::SCALES + at * 4);
                s[h][0] = byte_as_float<0>(word);
                if (IN_PLACE)  // a sixteenth: 0x49000000 is 2^19
                    s[h][1] = __fsub_rn(__uint_as_float(__byte_perm(word, 0x49000000u, 0x7552)), 0x1p19f);
                else
                    s[h][1] = byte_as_float<2>(word);
            }
            if constexpr (L::S16) {
                const u32 word = *reinterpret_cast<const u32*>(tile + L::SCALES + at * 4) ^ 0x80808080u;
                s[h][0] = byte_as_float<0>(word, 128.0f);
                s[h][1] = byte_as_float<1>(word, 128.0f);
                s[h][2] = byte_as_float<2>(word, 128.0f);
                s[h][3] = byte_as_float<3>(word, 128.0f);
            }
            if constexpr (L::H32) {
                const uint2 both = *reinterpret_cast<const uint2*>(tile + L::SCALES + at * 8);
                s[h][0] = __low2float(as_half2(both.x));
                s[h][1] = __low2float(as_half2(both.y));
                if (IN_PLACE) s[h][1] = __fmul_rn(s[h][1], 0.0625f);
            }
            if constexpr (L::H16) {
                const uint4 four = *reinterpret_cast<const uint4*>(tile + L::SCALES + (h * WARP + place(g, j)) * 16);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[h][i] = __low2float(as_half2(word_of(four, i)));
                    if (i >= 2) s[h][i] = __fmul_rn(s[h][i], 0.0625f);
                }
            }
        }
    }

    // d += minima times sums of x, first bits and rest; for H16 both planes.
    static DEVICE void minima(u32 (&a)[2][4], const u8* tile, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = h * WARP + lane;
            if constexpr (L::K32) {
                const u32 word = *reinterpret_cast<const u32*>(tile + L::SCALES + at * 4);
                a[0][h] = __float_as_uint(byte_as_float<1>(word));
                a[0][h + 2] = __float_as_uint(byte_as_float<3>(word));
            }
            if constexpr (L::H32) {
                const uint2 both = *reinterpret_cast<const uint2*>(tile + L::SCALES + at * 8);
                a[0][h] = __float_as_uint(__high2float(as_half2(both.x)));
                a[0][h + 2] = __float_as_uint(__high2float(as_half2(both.y)));
            }
            if constexpr (L::H16) {
                const uint4 four =
                    *reinterpret_cast<const uint4*>(tile + L::SCALES + (h * WARP + place(lane / 4, lane % 4)) * 16);
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i / 2][h + 2 * (i % 2)] = __float_as_uint(__high2float(as_half2(word_of(four, i))));
            }
        }
    }

    // What P and M of rows g and g + 8 are multiplied by.
    static DEVICE void shared_factors(float (&of_p)[2], float (&of_m)[2], const u8* tile, int g) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            of_p[h] = 0x1p-24f;
            of_m[h] = 1.0f;
            if constexpr (L::K32) {
                const half2 both = *reinterpret_cast<const half2*>(tile + L::ROWS + (g + 8 * h) * 4);
                of_p[h] = __fmul_rn(__low2float(both), 0x1p-24f);
                of_m[h] = __high2float(both);
            }
            if constexpr (L::S16)
                of_p[h] = __fmul_rn(__half2float(*reinterpret_cast<const half*>(tile + L::ROWS + (g + 8 * h) * 2)), 0x1p-26f);
        }
    }

    // Byte I of a word less `zero`.
    template <int I>
    static DEVICE float byte_as_float(u32 word, float zero = 0.0f) {
        return __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7550 + I)), 0x1p23f + zero);
    }

    // Sums of the codes of a group by the tensor cores, MAGIC added.
    static DEVICE void dot(u32 (&v)[4], const u32 (&a)[4], u32 b0, u32 b1, int part) {
        if constexpr (!BY_16) mma_u8s8_m16n8k32(v, a, b0, b1, MAGIC_BITS);
        if constexpr (L::H16) mma_u8s8_m16n8k16(v, a[2 * part], a[2 * part + 1], part ? b1 : b0, MAGIC_BITS);
        if constexpr (L::S16) mma_s8s8_m16n8k16(v, a[2 * part], a[2 * part + 1], part ? b1 : b0, MAGIC_BITS);
    }
};

// Sums over a segment of MT tiles and NT groups of eight rows of x, as mma leaves them: [e] is output g + 8(e / 2) of the tile
// and row 2t + e % 2 of the group. ODD: also odd rows. x.codes(j, i), x.scale(j, i), x.sums(i), x.sums16(part, i) fetch what
// a lane needs of columns 64j .. 64j+63 of group i.
template <int FORMAT, int MT, int NT, bool ODD, typename X>
DEVICE void multiply_segment(float (&sum)[MT][NT][4], const u8* const (&tile)[MT], int lane, const X& x) {
    using T = IntegerTile<FORMAT>;
    const int g = lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 a[MT][2][4];
        float s[MT][2][T::GROUPS];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            T::codes(a[m], tile[m], lane, j);
            T::factors(s[m], tile[m], g, j);
        }
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            const uint4 b = x.codes(j, i);
            const float4 four = x.scale(j, i);
            const float scale[2][2] = {{four.x, four.z}, {four.y, four.w}};  // [hi][odd]
            // (MAGIC + sum) * scale + minus is the rounded sum * scale: MAGIC * scale is exact.
            float minus[2][2];
#pragma unroll
            for (int k = 0; k < 4; ++k) minus[k / 2][k % 2] = __fmul_rn(-MAGIC, scale[k / 2][k % 2]);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int group = 0; group < T::GROUPS; ++group) {
                    const int hi = group / (T::GROUPS / 2);
                    u32 v[4];
                    T::dot(v, a[m][hi], hi ? b.z : b.x, hi ? b.w : b.y, group % 2);
#pragma unroll
                    for (int e = 0; e < 4; e += ODD ? 1 : 2) {
                        const float u = fmaf(__uint_as_float(v[e]), scale[hi][e % 2], minus[hi][e % 2]);
                        sum[m][i][e] = j == 0 && group == 0 ? __fmul_rn(s[m][e / 2][group], u)
                                                            : fmaf(s[m][e / 2][group], u, sum[m][i][e]);
                    }
                }
        }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float of_p[2], of_m[2];
        T::shared_factors(of_p, of_m, tile[m], g);
        u32 a[2][4];
        T::minima(a, tile[m], lane);
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if constexpr (FORMAT == U4_H16) {
                const uint4 first = x.sums16(0, i), rest = x.sums16(1, i);
                mma_tf32_m16n8k8(d, a[0], first.x, first.y);
                mma_tf32_m16n8k8(d, a[1], first.z, first.w);
                mma_tf32_m16n8k8(d, a[0], rest.x, rest.y);
                mma_tf32_m16n8k8(d, a[1], rest.z, rest.w);
            } else if constexpr (T::MINIMA) {
                const uint4 b = x.sums(i);
                mma_tf32_m16n8k8(d, a[0], b.x, b.y);
                mma_tf32_m16n8k8(d, a[0], b.z, b.w);
            }
#pragma unroll
            for (int e = 0; e < 4; e += ODD ? 1 : 2) {
                const float p = sum[m][i][e];
                if constexpr (!T::MINIMA) sum[m][i][e] = __fmul_rn(p, of_p[e / 2]);
                if constexpr (T::L::K32) sum[m][i][e] = fmaf(p, of_p[e / 2], __fmul_rn(d[e], of_m[e / 2]));
                if constexpr (T::L::H32 || T::L::H16) sum[m][i][e] = fmaf(p, of_p[e / 2], d[e]);
            }
        }
    }
}
