// Tiles of 64 places of one K or V head: from pages to shared memory, and from their stored type to halves.
//
// In a page the rows of a head lie one behind the other, 64 row_bytes in all. In shared memory a tile is either
// raw (as stored) or halves [64][D] whose 16-byte chunks are swizzled: chunk c of row r is at c ^ (r & 7), so that
// neither ldmatrix nor the writes below meet a bank twice.
#pragma once
#include "portable.cuh"

constexpr int TILE = 64;
constexpr int TILE_THREADS = 128;  // load and unpack tiles together, all of a block

enum KvType { KV_F32, KV_F16, KV_BF16, KV_Q8_0, KV_Q4_0, KV_Q4_1, KV_Q5_0, KV_Q5_1 };

// Bytes of a number (f32, f16, bf16) or of a block of 32 numbers.
DEVICE int kv_item_bytes(int type) {
    switch (type) {
        case KV_F32: return 4;
        case KV_F16: return 2;
        case KV_BF16: return 2;
        case KV_Q8_0: return 34;
        case KV_Q4_0: return 18;
        case KV_Q4_1: return 20;
        case KV_Q5_0: return 22;
        default: return 24;
    }
}

DEVICE int kv_row_bytes(int type, int dim) { return kv_item_bytes(type) * (type <= KV_BF16 ? dim : dim / 32); }

// Byte of chunk `chunk` of row `row` in a swizzled tile of halves [rows][D].
template <int D>
DEVICE int chunk_byte(int row, int chunk) {
    return row * (2 * D) + ((chunk ^ (row & 7)) << 4);
}

// ----- global to shared memory

// The first n_rows rows of a tile; the others become zeros. f16 goes to its swizzled place, other types stay raw.
template <int D>
DEVICE void load_tile(u8* target, const u8* source, int type, int row_bytes, int n_rows) {
    const int thread = threadIdx.x;
    if (type == KV_F16) {
        constexpr int ROWS = TILE_THREADS / (D / 8);  // a multiple of 8: the swizzle of a thread's chunks is one
        const int row = thread / (D / 8);
        target += chunk_byte<D>(row, thread % (D / 8));
        source += thread * 16;
#pragma unroll
        for (int i = 0; i < TILE / ROWS; ++i)
            cp_async16_or_zero(target + i * ROWS * 2 * D, source + i * TILE_THREADS * 16, row + i * ROWS < n_rows);
        return;
    }
    const int valid = n_rows * row_bytes;
#pragma unroll 4
    for (int byte = thread * 16; byte < TILE * row_bytes; byte += TILE_THREADS * 16)
        cp_async16_front(target + byte, source + byte, max(0, min(16, valid - byte)));
}

// Where the positions of a tree row lie: position p below `committed` at place p, position committed + i at place
// committed + ancestors[i].
struct Path {
    const u64* pages;  // of the sequence's first tile
    const u8* ancestors;
    int committed;

    DEVICE const u8* row(int position, u64 offset, int row_bytes) const {
        int place = position < committed ? position : committed + ancestors[position - committed];
        return reinterpret_cast<const u8*>(pages[place / TILE] + offset) + (place % TILE) * row_bytes;
    }
};

// As load_tile, each row from its own place. Rows of raw types are multiples of 4 bytes.
template <int D>
DEVICE void gather_tile(u8* target, const Path& path, int tile, u64 offset, int type, int row_bytes, int n_rows) {
    if (type == KV_F16) {
        for (int c = threadIdx.x; c < TILE * D / 8; c += TILE_THREADS) {
            int row = c / (D / 8), chunk = c % (D / 8);
            const u8* source = path.row(tile * TILE + min(row, n_rows - 1), offset, row_bytes);
            cp_async16_or_zero(target + chunk_byte<D>(row, chunk), source + chunk * 16, row < n_rows);
        }
        return;
    }
    const int words = row_bytes / 4;
    for (int w = threadIdx.x; w < TILE * words; w += TILE_THREADS) {
        int row = w / words;
        const u8* source = path.row(tile * TILE + min(row, n_rows - 1), offset, row_bytes);
        cp_async4_or_zero(target + w * 4, source + (w - row * words) * 4, row < n_rows);
    }
}

// ----- raw to halves

// n words from an address that is a multiple of 2.
template <int N>
DEVICE void load_words(u32 words[N], const u8* shared) {
    const u32* aligned = reinterpret_cast<const u32*>(reinterpret_cast<u64>(shared) & ~3ull);
    if (reinterpret_cast<u64>(shared) & 2) {
        u32 low = aligned[0];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            u32 high = aligned[i + 1];
            words[i] = __funnelshift_r(low, high, 16);
            low = high;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = aligned[i];
    }
}

DEVICE half2 half_pair(const u8* shared) { return __half2half2(*reinterpret_cast<const half*>(shared)); }

// Bytes 0 and 1, or 2 and 3, of a word as halves of 1024 + byte.
DEVICE half2 low_bytes(u32 word) { return as_half2(__byte_perm(word, 0x64646464u, 0x4140)); }
DEVICE half2 high_bytes(u32 word) { return as_half2(__byte_perm(word, 0x64646464u, 0x4342)); }

// Four whole numbers, kept with an offset as bytes, to y = d q (signed types) or d q + m. One rounding.
DEVICE uint2 scaled(u32 bytes, half2 offset, half2 d, half2 m, bool with_minimum) {
    half2 low = __hsub2(low_bytes(bytes), offset), high = __hsub2(high_bytes(bytes), offset);
    if (with_minimum) return make_uint2(as_u32(__hfma2(low, d, m)), as_u32(__hfma2(high, d, m)));
    return make_uint2(as_u32(__hmul2(low, d)), as_u32(__hmul2(high, d)));
}

// Bits 0..3 to bit 4 of bytes 0..3.
DEVICE u32 fifth_bits(u32 four) { return ((four & 15u) * 0x00204081u & 0x01010101u) << 4; }

// A block of 32 numbers, raw at `source`, as 64 bytes of halves.
DEVICE void unpack_block(uint4 halves[4], const u8* source, int type) {
    u32* out = reinterpret_cast<u32*>(halves);
    if (type == KV_BF16) {
        const uint4* chunks = reinterpret_cast<const uint4*>(source);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 c = chunks[i];
            const u32 pairs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                out[4 * i + j] = as_u32(__floats2half2_rn(__uint_as_float(pairs[j] << 16), __uint_as_float(pairs[j] & 0xffff0000u)));
        }
        return;
    }
    const half2 d = half_pair(source);
    if (type == KV_Q8_0) {
        u32 words[8];
        load_words<8>(words, source + 2);
        const half2 offset = __float2half2_rn(1024.0f + 128.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint2 four = scaled(words[i] ^ 0x80808080u, offset, d, d, false);
            out[2 * i] = four.x;
            out[2 * i + 1] = four.y;
        }
        return;
    }
    const bool with_minimum = type == KV_Q4_1 || type == KV_Q5_1, with_fifth = type >= KV_Q5_0;
    const half2 m = with_minimum ? half_pair(source + 2) : d;
    const u8* at = source + (with_minimum ? 4 : 2);
    u32 fifth = 0;
    if (with_fifth) {
        fifth = *reinterpret_cast<const u16*>(at) | *reinterpret_cast<const u16*>(at + 2) << 16;
        at += 4;
    }
    const half2 offset = __float2half2_rn(1024.0f + (with_minimum ? 0.0f : with_fifth ? 16.0f : 8.0f));
    u32 words[4];
    load_words<4>(words, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint2 low = scaled((words[i] & 0x0f0f0f0fu) | fifth_bits(fifth >> 4 * i), offset, d, m, with_minimum);
        uint2 high = scaled((words[i] >> 4 & 0x0f0f0f0fu) | fifth_bits(fifth >> (16 + 4 * i)), offset, d, m, with_minimum);
        out[2 * i] = low.x;
        out[2 * i + 1] = low.y;
        out[8 + 2 * i] = high.x;
        out[8 + 2 * i + 1] = high.y;
    }
}

// A raw tile to a swizzled tile of halves.
template <int D>
DEVICE void unpack_tile(u8* halves, const u8* raw, int type, int row_bytes) {
    const int row = threadIdx.x % TILE, block_bytes = row_bytes / (D / 32);
    for (int block = threadIdx.x / TILE; block < D / 32; block += TILE_THREADS / TILE) {
        uint4 chunks[4];
        unpack_block(chunks, raw + row * row_bytes + block * block_bytes, type);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(halves + chunk_byte<D>(row, 4 * block + i)) = chunks[i];
    }
}

// ----- fragments of a swizzled tile of halves (see mma_m16n8k16 and ldmatrix)

// a: rows 16 m .. 16 m + 15, columns 16 k .. 16 k + 15.
template <int D>
DEVICE void fragment_a(u32 a[4], const u8* tile, int m, int k) {
    const int lane = threadIdx.x % WARP;
    ldmatrix_x4(a, tile + chunk_byte<D>(16 * m + (lane & 15), 2 * k + (lane >> 4)));
}

// b of two products: rows 16 n .. 16 n + 15 of the tile as columns, its columns 16 k .. as k.
template <int D>
DEVICE void fragment_b(u32 b[4], const u8* tile, int n, int k) {
    const int lane = threadIdx.x % WARP;
    ldmatrix_x4(b, tile + chunk_byte<D>(16 * n + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
}

// b of two products: rows 16 k .. of the tile as k, its columns 16 n .. 16 n + 15 as columns.
template <int D>
DEVICE void fragment_b_transposed(u32 b[4], const u8* tile, int n, int k) {
    const int lane = threadIdx.x % WARP;
    ldmatrix_x4_transposed(b, tile + chunk_byte<D>(16 * k + (lane & 15), 2 * n + (lane >> 4)));
}
