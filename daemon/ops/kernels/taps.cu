// Copies the residual stream behind a layer into its part of the features, as halves.
#include "portable.cuh"

constexpr int THREADS = 256;
constexpr float MOST = 65504.0f;  // what is larger becomes the largest half; a NaN stays one

DEVICE half as_half(float x) { return __float2half_rn(x > MOST ? MOST : x < -MOST ? -MOST : x); }

// Grid (width / 1024, rows). Row r goes to features + to[r] stride, a negative one nowhere, all to their own number when `to`
// is null. Width and stride are multiples of four.
extern "C" __global__ void __launch_bounds__(THREADS) taps_store(const float* x, int width, half* features, int stride, const int* to) {
    const int k = 4 * (blockIdx.x * THREADS + threadIdx.x);
    pdl_wait();
    pdl_launch();
    const int row = to ? to[blockIdx.y] : blockIdx.y;
    if (k >= width || row < 0) return;
    const float4 four = *reinterpret_cast<const float4*>(x + static_cast<u64>(blockIdx.y) * width + k);
    const half2 low = __halves2half2(as_half(four.x), as_half(four.y)), high = __halves2half2(as_half(four.z), as_half(four.w));
    *reinterpret_cast<uint2*>(features + static_cast<u64>(row) * stride + k) = make_uint2(as_u32(low), as_u32(high));
}
