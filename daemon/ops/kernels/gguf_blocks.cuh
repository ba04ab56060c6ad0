// GGUF block formats, number by number: column k of a row is code(k) * s(k) + m(k). Used once, at load.
// Block layouts are those of ggml; sizes in bytes.
#pragma once
#include "portable.cuh"

enum BlockType { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, PLAIN_F16, PLAIN_BF16, PLAIN_F32 };

struct Affine {
    float s, m;
    float peak_s;  // the largest factor that is stored for s, also where a scale beside it is 0
    float peak_m;
};

DEVICE float half_at(const u8* p) { return __half2float(__ushort_as_half(p[0] | p[1] << 8)); }

DEVICE int iq4_value(int code) {
    constexpr signed char VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return VALUES[code];
}

DEVICE Affine plain_affine(float s, float m) { return {s, m, fabsf(s), fabsf(m)}; }

// d times a whole scale; d alone counts for the peak.
DEVICE Affine scaled_affine(float d, int scale, float d_min, int minimum) {
    return {d * scale, d_min * minimum, fabsf(d) * max(abs(scale), 1), fabsf(d_min) * max(abs(minimum), 1)};
}

// Scale and minimum j = 0..7 of Q4_K and Q5_K, six bits each in 12 bytes.
DEVICE int k_scale(const u8* s, int j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4; }
DEVICE int k_minimum(const u8* s, int j) { return j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4; }

// Scale j = 0..15 of Q3_K, six bits in 12 bytes.
DEVICE int q3_scale(const u8* s, int j) {
    const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
    return (low | ((s[8 + j % 4] >> (2 * (j / 4))) & 3) << 4) - 32;
}

template <BlockType TYPE>
DEVICE int code_of(const u8* row, int k) {
    const int i = k % 32, e = k % 256, half_block = e / 128, quarter = e % 128 / 32;
    if constexpr (TYPE == Q4_0 || TYPE == IQ4_NL) {
        const u8 byte = row[k / 32 * 18 + 2 + i % 16];
        const int code = i < 16 ? byte & 15 : byte >> 4;
        return TYPE == IQ4_NL ? iq4_value(code) + 128 : code;
    }
    if constexpr (TYPE == Q4_1) {
        const u8 byte = row[k / 32 * 20 + 4 + i % 16];
        return i < 16 ? byte & 15 : byte >> 4;
    }
    if constexpr (TYPE == Q5_0 || TYPE == Q5_1) {
        const u8* block = row + k / 32 * (TYPE == Q5_0 ? 22 : 24) + (TYPE == Q5_0 ? 2 : 4);
        const u8 byte = block[4 + i % 16];
        return (i < 16 ? byte & 15 : byte >> 4) | ((block[i / 8] >> (i % 8)) & 1) << 4;
    }
    if constexpr (TYPE == Q8_0) return static_cast<signed char>(row[k / 32 * 34 + 2 + i]) + 128;
    if constexpr (TYPE == Q2_K) return (row[k / 256 * 84 + 16 + 32 * half_block + i] >> (2 * quarter)) & 3;
    if constexpr (TYPE == Q3_K) {
        const u8* block = row + k / 256 * 110;
        const int low = (block[32 + 32 * half_block + i] >> (2 * quarter)) & 3;
        return low | ((block[i] >> (4 * half_block + quarter)) & 1) << 2;
    }
    if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
        const u8* block = row + k / 256 * (TYPE == Q4_K ? 144 : 176) + 16;
        const u8 byte = block[(TYPE == Q5_K ? 32 : 0) + e / 64 * 32 + i];
        int code = e % 64 < 32 ? byte & 15 : byte >> 4;
        if (TYPE == Q5_K) code |= ((block[i] >> (e / 32)) & 1) << 4;
        return code;
    }
    if constexpr (TYPE == Q6_K) {
        const u8* block = row + k / 256 * 210;
        const u8 byte = block[64 * half_block + 32 * (quarter % 2) + i];
        return (quarter < 2 ? byte & 15 : byte >> 4) | ((block[128 + 32 * half_block + i] >> (2 * quarter)) & 3) << 4;
    }
    if constexpr (TYPE == IQ4_XS) {
        const u8 byte = row[k / 256 * 136 + 8 + e / 32 * 16 + i % 16];
        return iq4_value(i < 16 ? byte & 15 : byte >> 4) + 128;
    }
    return 0;
}

template <BlockType TYPE>
DEVICE Affine affine_of(const u8* row, int k) {
    const int e = k % 256;
    if constexpr (TYPE == Q4_0) { float d = half_at(row + k / 32 * 18); return plain_affine(d, -8 * d); }
    if constexpr (TYPE == Q4_1) { const u8* b = row + k / 32 * 20; return plain_affine(half_at(b), half_at(b + 2)); }
    if constexpr (TYPE == Q5_0) { float d = half_at(row + k / 32 * 22); return plain_affine(d, -16 * d); }
    if constexpr (TYPE == Q5_1) { const u8* b = row + k / 32 * 24; return plain_affine(half_at(b), half_at(b + 2)); }
    if constexpr (TYPE == Q8_0) { float d = half_at(row + k / 32 * 34); return plain_affine(d, -128 * d); }
    if constexpr (TYPE == IQ4_NL) { float d = half_at(row + k / 32 * 18); return plain_affine(d, -128 * d); }
    if constexpr (TYPE == Q2_K) {
        const u8* b = row + k / 256 * 84;
        return scaled_affine(half_at(b + 80), b[e / 16] & 15, -half_at(b + 82), b[e / 16] >> 4);
    }
    if constexpr (TYPE == Q3_K) {
        const u8* b = row + k / 256 * 110;
        const int scale = q3_scale(b + 96, e / 16);
        return scaled_affine(half_at(b + 108), scale, half_at(b + 108), -4 * scale);
    }
    if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
        const u8* b = row + k / 256 * (TYPE == Q4_K ? 144 : 176);
        return scaled_affine(half_at(b), k_scale(b + 4, e / 32), -half_at(b + 2), k_minimum(b + 4, e / 32));
    }
    if constexpr (TYPE == Q6_K) {
        const u8* b = row + k / 256 * 210;
        const int scale = static_cast<signed char>(b[192 + e / 16]);
        return scaled_affine(half_at(b + 208), scale, half_at(b + 208), -32 * scale);
    }
    if constexpr (TYPE == IQ4_XS) {
        const u8* b = row + k / 256 * 136;
        const int ib = e / 32, high = b[2] | b[3] << 8;
        const int scale = ((b[4 + ib / 2] >> (4 * (ib % 2))) & 15) | ((high >> (2 * ib)) & 3) << 4;
        return scaled_affine(half_at(b), scale - 32, half_at(b), -128 * (scale - 32));
    }
    return {0, 0, 0, 0};
}

template <BlockType TYPE>
DEVICE float plain_value(const u8* row, int k) {
    if constexpr (TYPE == PLAIN_F16) return half_at(row + 2 * k);
    if constexpr (TYPE == PLAIN_BF16) return __uint_as_float((row[2 * k] | row[2 * k + 1] << 8) << 16);
    if constexpr (TYPE == PLAIN_F32) return reinterpret_cast<const float*>(row)[k];
    return 0;
}
