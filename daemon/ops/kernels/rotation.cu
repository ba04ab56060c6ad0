// Rotates back what attention gives when values are stored rotated (tq3_0), in place: a warp for each 128 numbers.
#include "rotation.cuh"

constexpr int THREADS = 128;
constexpr int GROUP = GROUP_BLOCKS * WARP;

struct Rotation {
    float* x;              // [rows][groups][128]
    const int* positions;  // [rows], -1: padding
    int n_groups;          // of a row
};

extern "C" __global__ void __launch_bounds__(THREADS) rotation_back(const Rotation a) {
    const int lane = threadIdx.x % WARP, group = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, row = blockIdx.y;
    const bool here = group < a.n_groups && a.positions[row] >= 0;
    pdl_wait();
    pdl_launch();
    if (!here) return;
    float* at = a.x + (static_cast<u64>(row) * a.n_groups + group) * GROUP + lane;
    float x[GROUP_BLOCKS];
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b) x[b] = at[b * WARP];
    rotate_group<true>(x);
#pragma unroll
    for (int b = 0; b < GROUP_BLOCKS; ++b) at[b * WARP] = x[b];
}
