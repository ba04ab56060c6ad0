// Gated DeltaNet: what its kernels share. S numbers of a head, Hk query and key heads, Hv value heads.
#pragma once
#include "portable.cuh"

// Which rows belong to which sequence and where their states lie; arrays by sequence. As packed by the host.
struct Sequences {
    const u64* read;    // address of the state in front of the rows; 0: all zero
    const u64* write;   // where the state behind the last row goes; 0: nowhere
    const int* first;   // first row
    const int* n_rows;
    const int* count;   // [1], sequences of the call
};

// What rows put into the recurrence: [rows][width] each.
struct Inputs {
    float* u;     // [channels], before the convolution; null: not kept
    float* k;     // [Hk S]
    float* v;     // [Hv S]
    float* g;     // [Hv], logarithm of the decay
    float* beta;  // [Hv]
};

DEVICE float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, exp_shared(-x))); }

DEVICE float sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_shared(-x))); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), log1p(e) = 2 artanh(s), s = e / (2 + e) <= 1/3.
DEVICE float softplus(float x) {
    const float e = exp_shared(-fabsf(x));
    const float s = __fdiv_rn(e, __fadd_rn(2.0f, e)), s2 = __fmul_rn(s, s);
    float series = 1.0f / 15.0f;
    series = fmaf(series, s2, 1.0f / 13.0f);
    series = fmaf(series, s2, 1.0f / 11.0f);
    series = fmaf(series, s2, 1.0f / 9.0f);
    series = fmaf(series, s2, 1.0f / 7.0f);
    series = fmaf(series, s2, 1.0f / 5.0f);
    series = fmaf(series, s2, 1.0f / 3.0f);
    series = fmaf(series, s2, 1.0f);
    return fmaf(__fmul_rn(2.0f, s), series, x > 0.0f ? x : (x != x ? x : 0.0f));
}
