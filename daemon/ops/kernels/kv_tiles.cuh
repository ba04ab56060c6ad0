// Tiles of 64 places of one K or V head: from pages to shared memory, and from their stored type to halves.
//
// In a page the rows of a head lie one behind the other, 64 row_bytes in all. In shared memory a tile is either
// raw (as stored) or halves [64][D] whose 16-byte chunks are swizzled: chunk c of row r is at c ^ (r & 7), so that
// neither ldmatrix nor the writes below meet a bank twice.
#pragma once
#include "portable.cuh"

constexpr int TILE = 64;

// Threads that load and unpack tiles of heads of D numbers together: all of a block.
template <int D>
constexpr int TILE_THREADS = D == 256 ? 256 : 128;

enum KvType { KV_F32, KV_F16, KV_BF16, KV_Q8_0, KV_Q4_0, KV_Q4_1, KV_Q5_0, KV_Q5_1, KV_TQ3_0 };

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
        case KV_TQ3_0: return 14;
        default: return 24;
    }
}

// Types of 16 bits lie in shared memory as halves do: bf16 is converted where it is.
DEVICE bool is_16_bit(int type) { return type == KV_F16 || type == KV_BF16; }

DEVICE int kv_row_bytes(int type, int dim) { return kv_item_bytes(type) * (type <= KV_BF16 ? dim : dim / 32); }

// Byte of chunk `chunk` of row `row` in a swizzled tile of halves [rows][D].
template <int D>
DEVICE int chunk_byte(int row, int chunk) {
    return row * (2 * D) + ((chunk ^ (row & 7)) << 4);
}

// ----- global to shared memory

// The first n_rows rows of a tile; the others become zeros. 16 bits go to their swizzled place, other types stay raw.
template <int D>
DEVICE void load_tile(u8* target, const u8* source, int type, int row_bytes, int n_rows) {
    constexpr int THREADS = TILE_THREADS<D>;
    const int thread = threadIdx.x;
    if (is_16_bit(type)) {
        constexpr int ROWS = THREADS / (D / 8);  // a multiple of 8: the swizzle of a thread's chunks is one
        const int row = thread / (D / 8);
        target += chunk_byte<D>(row, thread % (D / 8));
        source += thread * 16;
#pragma unroll
        for (int i = 0; i < TILE / ROWS; ++i)
            cp_async16_or_zero(target + i * ROWS * 2 * D, source + i * THREADS * 16, row + i * ROWS < n_rows);
        return;
    }
    const int valid = n_rows * row_bytes;
#pragma unroll 4
    for (int byte = thread * 16; byte < TILE * row_bytes; byte += THREADS * 16)
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
    if (is_16_bit(type)) {
        for (int c = threadIdx.x; c < TILE * D / 8; c += TILE_THREADS<D>) {
            int row = c / (D / 8), chunk = c % (D / 8);
            const u8* source = path.row(tile * TILE + min(row, n_rows - 1), offset, row_bytes);
            cp_async16_or_zero(target + chunk_byte<D>(row, chunk), source + chunk * 16, row < n_rows);
        }
        return;
    }
    const int words = row_bytes / 4;
    for (int w = threadIdx.x; w < TILE * words; w += TILE_THREADS<D>) {
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
    if constexpr (N == 1) {  // no branch: nothing behind the word is read where it is whole
        const u32 second = static_cast<u32>(reinterpret_cast<u64>(shared)) >> 1 & 1;
        words[0] = __funnelshift_r(aligned[0], aligned[second], 16 * second);
    } else if (reinterpret_cast<u64>(shared) & 2) {
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

// The centroids of tq3_0 (ops/tq3_blocks.py) as halves: their low bytes, then their high ones.
constexpr u32 TQ3_LOW_BYTES[2] = {0x7e358b1au, 0x1a8b357eu}, TQ3_HIGH_BYTES[2] = {0xa5acafb2u, 0x322f2c25u};

// Every second one of 16 numbers of tq3_0, from the first on: their two low bits lie in `low`, the third in the first 16
// bits of `high`. They are the selectors of two byte permutations, a nibble each.
DEVICE u32 tq3_selectors(u32 low, u32 high) {
    u32 y = high & 0x5555u;
    y = (y | y << 8) & 0x00550055u;
    y = (y | y << 4) & 0x05050505u;
    y = (y | y << 2) & 0x11111111u;
    return (low & 0x33333333u) | y << 2;
}

// Four numbers of a block of tq3_0 with the factor d, by the lower half of the selectors.
DEVICE uint2 tq3_numbers(u32 selectors, half2 d) {
    const u32 low = __byte_perm(TQ3_LOW_BYTES[0], TQ3_LOW_BYTES[1], selectors);
    const u32 high = __byte_perm(TQ3_HIGH_BYTES[0], TQ3_HIGH_BYTES[1], selectors);
    return make_uint2(as_u32(__hmul2(as_half2(__byte_perm(low, high, 0x5140)), d)),
                      as_u32(__hmul2(as_half2(__byte_perm(low, high, 0x7362)), d)));
}

// What a block of q4_0, q4_1, q5_0 or q5_1 says of its numbers.
struct Nibbles {
    const u8* at;  // 16 bytes: number j in the low half of byte j, number j + 16 in the high one
    u32 fifth;
    half2 m, offset;
    bool with_minimum;

    DEVICE Nibbles(const u8* source, int type) {
        const bool with_fifth = type >= KV_Q5_0;
        with_minimum = type == KV_Q4_1 || type == KV_Q5_1;
        m = half_pair(source + (with_minimum ? 2 : 0));
        at = source + (with_minimum ? 4 : 2);
        fifth = 0;
        if (with_fifth) {
            fifth = *reinterpret_cast<const u16*>(at) | *reinterpret_cast<const u16*>(at + 2) << 16;
            at += 4;
        }
        offset = __float2half2_rn(1024.0f + (with_minimum ? 0.0f : with_fifth ? 16.0f : 8.0f));
    }
};

// The order of the numbers of each 16 that 256-number keys of quantised types and their queries share, so that four
// neighbours are what one lane holds of a product: words of two numbers 0 2 4 6 1 3 5 7. Of tq3_0 a lane holds every
// second one of 16, see tq3_selectors: of a block of 32, words of the numbers 0 2, 1 3, 16 18, 17 19, then each + 4, + 8, + 12.
DEVICE void pair_up(uint4& low, uint4& high) {
    const uint4 a = low, b = high;
    low = make_uint4(a.x, a.z, b.x, b.z);
    high = make_uint4(a.y, a.w, b.y, b.w);
}

// A block of 32 numbers of tq3_0, raw at `source`, as 64 bytes of halves; PAIRED: in the order of pair_up.
template <bool PAIRED>
DEVICE void unpack_tq3(u32 out[16], const u8* source) {
    const half2 d = half_pair(source);
    u32 words[3];
    load_words<3>(words, source + 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 high = words[2] >> 16 * i;
        const u32 even = tq3_selectors(words[i], high), odd = tq3_selectors(words[i] >> 2, high >> 1);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint2 a = tq3_numbers(even >> 16 * j, d), b = tq3_numbers(odd >> 16 * j, d);
            if (PAIRED) {
                out[8 * j + 2 * i] = a.x, out[8 * j + 2 * i + 1] = b.x;
                out[8 * j + 4 + 2 * i] = a.y, out[8 * j + 4 + 2 * i + 1] = b.y;
            } else {
                u32* at = out + 8 * i + 4 * j;
                at[0] = __byte_perm(a.x, b.x, 0x5410), at[1] = __byte_perm(a.x, b.x, 0x7632);
                at[2] = __byte_perm(a.y, b.y, 0x5410), at[3] = __byte_perm(a.y, b.y, 0x7632);
            }
        }
    }
}

// A block of 32 numbers of q8_0, q4_0, q4_1, q5_0 or q5_1 as 16 words of two halves.
DEVICE void unpack_in_order(u32 out[16], const u8* source, int type) {
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
    const Nibbles block(source, type);
    u32 words[4];
    load_words<4>(words, block.at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint2 low = scaled((words[i] & 0x0f0f0f0fu) | fifth_bits(block.fifth >> 4 * i), block.offset, d, block.m, block.with_minimum);
        uint2 high = scaled((words[i] >> 4 & 0x0f0f0f0fu) | fifth_bits(block.fifth >> (16 + 4 * i)), block.offset, d, block.m, block.with_minimum);
        out[2 * i] = low.x;
        out[2 * i + 1] = low.y;
        out[8 + 2 * i] = high.x;
        out[8 + 2 * i + 1] = high.y;
    }
}

// A block of 32 numbers of a quantised type, raw at `source`, as 64 bytes of halves. GROUPS: it may be of tq3_0. PAIRED:
// in the order of pair_up.
template <bool GROUPS, bool PAIRED>
DEVICE void unpack_block(uint4 halves[4], const u8* source, int type) {
    u32* out = reinterpret_cast<u32*>(halves);
    if (GROUPS && type == KV_TQ3_0) return unpack_tq3<PAIRED>(out, source);
    unpack_in_order(out, source, type);
    if (PAIRED) {
        pair_up(halves[0], halves[1]);
        pair_up(halves[2], halves[3]);
    }
}

// A raw tile to a swizzled tile of halves. PAIRED: see pair_up.
template <int D, bool PAIRED = false>
DEVICE void unpack_tile(u8* halves, const u8* raw, int type, int row_bytes) {
    constexpr int ROUNDS = D / 32 * TILE / TILE_THREADS<D>;
    const int block_bytes = row_bytes / (D / 32), lane = threadIdx.x % WARP;
    for (int i = 0; i < ROUNDS; ++i) {
        // 256: a warp takes eight rows, and lanes that read together are in different banks.
        const int row = D == 256 ? threadIdx.x / WARP * 8 + lane % 8 : threadIdx.x % TILE;
        const int block = D == 256 ? lane / 8 * 2 + i : threadIdx.x / TILE + i * (TILE_THREADS<D> / TILE);
        uint4 chunks[4];
        unpack_block<D % 128 == 0, PAIRED>(chunks, raw + row * row_bytes + block * block_bytes, type);
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<uint4*>(halves + chunk_byte<D>(row, 4 * block + c)) = chunks[c];
    }
}

// A swizzled tile of bf16 to one of halves, in its place.
template <int D>
DEVICE void convert_tile(u8* tile) {
#pragma unroll 2
    for (int c = threadIdx.x; c < TILE * D / 8; c += TILE_THREADS<D>) {
        uint4* at = reinterpret_cast<uint4*>(tile) + c;
        u32 words[4] = {at->x, at->y, at->z, at->w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = as_u32(__floats2half2_rn(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u)));
        *at = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// What was loaded as halves: where it lies, or unpacked to `halves`.
template <int D, bool PAIRED = false>
DEVICE const u8* as_halves(u8* loaded, u8* halves, int type, int row_bytes) {
    if (type == KV_F16) return loaded;
    if (type == KV_BF16) {
        convert_tile<D>(loaded);
        return loaded;
    }
    unpack_tile<D, PAIRED>(halves, loaded, type, row_bytes);
    return halves;
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

// b of a product of 8 columns for two k: rows 8 n .. 8 n + 7 of the tile as columns, its columns 32 k .. as k.
template <int D>
DEVICE void fragment_b_long(u32 b[4], const u8* tile, int n, int k) {
    const int lane = threadIdx.x % WARP;
    ldmatrix_x4(b, tile + chunk_byte<D>(8 * n + (lane & 7), 4 * k + (lane >> 3)));
}

// The same of a raw block, `source`, of the row that is the lane's column: its numbers in pair_up's order. Q8: type is q8_0.
template <bool Q8>
DEVICE void fragment_b_raw(u32 b[4], const u8* source, int type) {
    const int t = threadIdx.x % 4;
    const half2 d = half_pair(source);
    if (Q8) {
        const half2 offset = __float2half2_rn(1024.0f + 128.0f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 word;
            load_words<1>(&word, source + 2 + 16 * i + 4 * t);
            uint2 four = scaled(word ^ 0x80808080u, offset, d, d, false);
            b[2 * i] = four.x;
            b[2 * i + 1] = four.y;
        }
        return;
    }
    if (type == KV_TQ3_0) {
        u32 bits;
        load_words<1>(&bits, source + 2 + 4 * (t / 2));
        const u32 third = *reinterpret_cast<const u16*>(source + 10 + 2 * (t / 2));
        const u32 selectors = tq3_selectors(bits >> 2 * (t % 2), third >> t % 2);
        const uint2 low = tq3_numbers(selectors, d), high = tq3_numbers(selectors >> 16, d);
        b[0] = low.x, b[1] = low.y, b[2] = high.x, b[3] = high.y;
        return;
    }
    const Nibbles block(source, type);
    u32 word;
    load_words<1>(&word, block.at + 4 * t);
    uint2 low = scaled((word & 0x0f0f0f0fu) | fifth_bits(block.fifth >> 4 * t), block.offset, d, block.m, block.with_minimum);
    uint2 high = scaled((word >> 4 & 0x0f0f0f0fu) | fifth_bits(block.fifth >> (16 + 4 * t)), block.offset, d, block.m, block.with_minimum);
    b[0] = low.x, b[1] = low.y, b[2] = high.x, b[3] = high.y;
}

// b of two products: rows 16 k .. of the tile as k, its columns 16 n .. 16 n + 15 as columns.
template <int D>
DEVICE void fragment_b_transposed(u32 b[4], const u8* tile, int n, int k) {
    const int lane = threadIdx.x % WARP;
    ldmatrix_x4_transposed(b, tile + chunk_byte<D>(16 * k + (lane & 15), 2 * n + (lane >> 4)));
}
