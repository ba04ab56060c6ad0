// GGUF rows into the tiles of weight_tiles.cuh, and back for embeddings and tests.
#include "gguf_blocks.cuh"
#include "weight_tiles.cuh"

template <BlockType TYPE>
DEVICE constexpr int format_of() {
    switch (TYPE) {
        case Q4_0: case Q4_1: return U4_H32;
        case Q5_0: case Q5_1: return U5_H32;
        case Q8_0: case IQ4_NL: case IQ4_XS: return U8_H32;
        case Q2_K: case Q3_K: return U4_H16;
        case Q4_K: return U4_K32;
        case Q5_K: return U5_K32;
        case Q6_K: return U6_S16;
        default: return F16;
    }
}

// The power of two of a row: its peak comes to 2^14 .. 2^15.
DEVICE int exponent_of(float peak) {
    if (!(peak > 0.0f) || isinf(peak)) return 0;
    return min(max(14 - ilogbf(peak), -100), 100);
}

DEVICE float scale_up(float v, int e) { return v * power_of_two(e / 2) * power_of_two(e - e / 2); }

// One warp for each row: row_scale[row] = 2^-e.
template <BlockType TYPE>
DEVICE void find_row_scale(const u8* data, u64 row_bytes, int n_rows, int n_in, float* row_scale) {
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= n_rows) return;
    const u8* bytes = data + row * row_bytes;
    float peak = 0.0f;
    if constexpr (TYPE >= PLAIN_F16) {
        for (int k = lane; k < n_in; k += WARP) peak = fmaxf(peak, fabsf(plain_value<TYPE>(bytes, k)));
    } else {
        for (int k = lane * 16; k < n_in; k += WARP * 16) {
            const Affine a = affine_of<TYPE>(bytes, k);
            peak = fmaxf(peak, fmaxf(a.peak_s * 0x1p24f, a.peak_m));
        }
    }
    peak = warp_max(peak);
    if (lane == 0) row_scale[row] = power_of_two(-exponent_of(peak));
}

DEVICE u32 pair_bits(float s, float m, int e) {
    return as_u32(__floats2half2_rn(scale_up(s, 24 + e), scale_up(m, e)));
}

// One thread for each row and 64 columns of a tile.
template <BlockType TYPE>
DEVICE void pack(const u8* data, u64 row_bytes, int n_rows, int n_in, const float* row_scale, u8* tiles, int n_segments) {
    constexpr int FORMAT = format_of<TYPE>();
    using L = Layout<FORMAT>;
    const u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int t = index % 4, segment = index / 4 % n_segments;
    const int row = index / 4 / n_segments;
    if (row >= (n_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS) return;
    const int g = row % 8, h = row % TILE_ROWS / 8, lane = g * 4 + t;
    u8* tile = tiles + (static_cast<u64>(row / TILE_ROWS) * n_segments + segment) * L::BYTES;
    const u8* bytes = data + min(row, n_rows - 1) * row_bytes;
    const bool real = row < n_rows;
    const int first = segment * TILE_COLUMNS + 64 * t;
    const int e = real ? -ilogbf(row_scale[row]) : 0;

    if constexpr (FORMAT == F16) {
        half* to[8];
        for (int c = 0; c < 8; ++c) to[c] = reinterpret_cast<half*>(tile + ((h * 8 + c) * WARP + lane) * 16);
        for (int i = 0; i < 64; ++i) {
            const int k = first + i, hi = i / 32, w = i % 32 / 4, place = i % 4;
            constexpr int PLACES[4] = {0, 2, 1, 3};
            const float v = real && k < n_in ? plain_value<TYPE>(bytes, k) : 0.0f;
            to[4 * hi + w / 2][4 * (w % 2) + PLACES[place]] = __float2half_rn(scale_up(v, e));
        }
    } else {
        u64 fifth = 0, sixth[2] = {0, 0};
        for (int i = 0; i < 32; ++i) {
            const int low_k = first + i, high_k = first + 32 + i;
            const int low = real && low_k < n_in ? code_of<TYPE>(bytes, low_k) : 0;
            const int high = real && high_k < n_in ? code_of<TYPE>(bytes, high_k) : 0;
            if constexpr (L::NIBBLES) {
                tile[((h * 2 + i / 16) * WARP + lane) * 16 + i % 16] = (low & 15) | (high & 15) << 4;
            } else {
                tile[((h * 4 + i / 16) * WARP + lane) * 16 + i % 16] = low;
                tile[((h * 4 + 2 + i / 16) * WARP + lane) * 16 + i % 16] = high;
            }
            const int w = i / 4, odd = i % 2, upper = 16 * (i % 4 / 2);
            if constexpr (L::FIFTH) {
                const int at = 32 * (w / 4) + 4 * (w % 4) + odd + upper;
                fifth |= static_cast<u64>(low >> 4) << at | static_cast<u64>(high >> 4) << (at + 2);
            }
            if constexpr (L::SIXTH) {
                const int at = 32 * (w / 2 % 2) + 8 * (w % 2) + 2 * odd + upper;
                sixth[w / 4] |= static_cast<u64>(low >> 4) << at | static_cast<u64>(high >> 4) << (at + 4);
            }
        }
        if constexpr (L::FIFTH) reinterpret_cast<u64*>(tile + L::HIGH)[h * WARP + lane] = fifth;
        if constexpr (L::SIXTH) {
            reinterpret_cast<u64*>(tile + L::HIGH)[(h * WARP + lane) * 2] = sixth[0];
            reinterpret_cast<u64*>(tile + L::HIGH)[(h * WARP + lane) * 2 + 1] = sixth[1];
        }
        u32 scales[4] = {0, 0, 0, 0};  // half2 (s, m) of each 16 columns
        u32 whole = 0;                 // the bytes of K32 and S16
        for (int j = 0; j < 4; ++j) {
            const int k = first + 16 * j;
            if (!real || k >= n_in) continue;
            const Affine a = affine_of<TYPE>(bytes, k);
            scales[j] = pair_bits(a.s, a.m, e);
            if constexpr (L::K32) {
                const u8* block = bytes + k / 256 * (TYPE == Q4_K ? 144 : 176);
                const int group = k % 256 / 32;
                if (j % 2 == 0) whole |= (k_scale(block + 4, group) | k_minimum(block + 4, group) << 8) << (8 * j);
                reinterpret_cast<u32*>(tile + L::ROWS)[row % TILE_ROWS] = pair_bits(half_at(block), -half_at(block + 2), e);
            }
            if constexpr (L::S16) {
                const u8* block = bytes + k / 256 * 210;
                whole |= static_cast<u32>(block[192 + k % 256 / 16]) << (8 * j);
                reinterpret_cast<u16*>(tile + L::ROWS)[row % TILE_ROWS] =
                    __half_as_ushort(__float2half_rn(scale_up(half_at(block + 208), 24 + e)));
            }
        }
        if constexpr (L::H32) {
            reinterpret_cast<u32*>(tile + L::SCALES)[(h * WARP + lane) * 2] = scales[0];
            reinterpret_cast<u32*>(tile + L::SCALES)[(h * WARP + lane) * 2 + 1] = scales[2];
        }
        if constexpr (L::H16)
            for (int j = 0; j < 4; ++j) reinterpret_cast<u32*>(tile + L::SCALES)[(h * WARP + lane) * 4 + j] = scales[j];
        if constexpr (L::K32 || L::S16) {
            reinterpret_cast<u32*>(tile + L::SCALES)[h * WARP + lane] = whole;
            // Rows that are not there, and a tile column behind the last block, need their d too.
            if (t == 0 && (!real || first >= n_in)) {
                if constexpr (L::K32) reinterpret_cast<u32*>(tile + L::ROWS)[row % TILE_ROWS] = 0;
                if constexpr (L::S16) reinterpret_cast<u16*>(tile + L::ROWS)[row % TILE_ROWS] = 0;
            }
        }
    }
}

// Everything of a tile as floats: emit(row in the tile, column in the tile, value without the row's power of two).
template <int FORMAT, typename Emit>
DEVICE void unpack_tile(const u8* tile, int lane, Emit emit) {
    Lane<FORMAT> held;
    held.load(tile, lane);
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const Scales scales = scales_of<FORMAT>(held, c);
#pragma unroll
        for (int w = 4 * c; w < 4 * c + 4; ++w)
#pragma unroll
            for (int hi = 0; hi < 2; ++hi) {
                u32 a[4];
                step_halves<FORMAT>(a, held, scales, w, hi);
                const int column = 64 * t + 32 * hi + 4 * w;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 even = __half22float2(as_half2(a[h])), odd = __half22float2(as_half2(a[h + 2]));
                    emit(g + 8 * h, column, even.x);
                    emit(g + 8 * h, column + 1, odd.x);
                    emit(g + 8 * h, column + 2, even.y);
                    emit(g + 8 * h, column + 3, odd.y);
                }
            }
    }
}

template <typename Emit>
DEVICE void unpack_any(int format, const u8* tiles, u64 index, int lane, Emit emit) {
    switch (format) {
        case U4_H32: return unpack_tile<U4_H32>(tiles + index * Layout<U4_H32>::BYTES, lane, emit);
        case U4_K32: return unpack_tile<U4_K32>(tiles + index * Layout<U4_K32>::BYTES, lane, emit);
        case U5_H32: return unpack_tile<U5_H32>(tiles + index * Layout<U5_H32>::BYTES, lane, emit);
        case U5_K32: return unpack_tile<U5_K32>(tiles + index * Layout<U5_K32>::BYTES, lane, emit);
        case U6_S16: return unpack_tile<U6_S16>(tiles + index * Layout<U6_S16>::BYTES, lane, emit);
        case U4_H16: return unpack_tile<U4_H16>(tiles + index * Layout<U4_H16>::BYTES, lane, emit);
        case U8_H32: return unpack_tile<U8_H32>(tiles + index * Layout<U8_H32>::BYTES, lane, emit);
        case F16: return unpack_tile<F16>(tiles + index * Layout<F16>::BYTES, lane, emit);
    }
}

// Rows `tokens` of a matrix as floats: out [n, n_in]. A block for each row; a negative token is a row of zeros.
extern "C" __global__ void repack_embed(const int* tokens, const u8* tiles, const float* row_scale, int format,
                                        int n_segments, int n_in, float* out) {
    pdl_wait();
    pdl_launch();
    const int token = tokens[blockIdx.x], lane = threadIdx.x % WARP;
    float* y = out + static_cast<u64>(blockIdx.x) * n_in;
    if (token < 0) {
        for (int k = threadIdx.x; k < n_in; k += blockDim.x) y[k] = 0.0f;
        return;
    }
    const float scale = row_scale[token];
    for (int segment = threadIdx.x / WARP; segment < n_segments; segment += blockDim.x / WARP) {
        const u64 index = static_cast<u64>(token / TILE_ROWS) * n_segments + segment;
        unpack_any(format, tiles, index, lane, [&](int row, int column, float value) {
            const int k = segment * TILE_COLUMNS + column;
            if (row == token % TILE_ROWS && k < n_in) y[k] = value * scale;
        });
    }
}

// For each type: the rows' powers of two (a warp for each row), then the tiles (a thread for each row and 64 columns).
#define ENTRIES(NAME, TYPE)                                                                                       \
    extern "C" __global__ void repack_scale_##NAME(const u8* data, u64 row_bytes, int n_rows, int n_in,           \
                                                   float* row_scale) {                                            \
        find_row_scale<TYPE>(data, row_bytes, n_rows, n_in, row_scale);                                           \
    }                                                                                                             \
    extern "C" __global__ void repack_##NAME(const u8* data, u64 row_bytes, int n_rows, int n_in,                 \
                                             const float* row_scale, u8* tiles, int n_segments) {                 \
        pack<TYPE>(data, row_bytes, n_rows, n_in, row_scale, tiles, n_segments);                                  \
    }

ENTRIES(q4_0, Q4_0)
ENTRIES(q4_1, Q4_1)
ENTRIES(q5_0, Q5_0)
ENTRIES(q5_1, Q5_1)
ENTRIES(q8_0, Q8_0)
ENTRIES(q2_k, Q2_K)
ENTRIES(q3_k, Q3_K)
ENTRIES(q4_k, Q4_K)
ENTRIES(q5_k, Q5_K)
ENTRIES(q6_k, Q6_K)
ENTRIES(iq4_nl, IQ4_NL)
ENTRIES(iq4_xs, IQ4_XS)
ENTRIES(f16, PLAIN_F16)
ENTRIES(bf16, PLAIN_BF16)
ENTRIES(f32, PLAIN_F32)
