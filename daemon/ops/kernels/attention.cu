// Attention of step rows (attention_step.cuh), heads of 64 and 128 numbers.
#include "attention_step.cuh"

using steps::attend;
using steps::combine;
using steps::Step;

extern "C" __global__ void __launch_bounds__(128, 3) attention_narrow_f16_64(const Step step) { attend<64, false, KV_F16>(step); }
extern "C" __global__ void __launch_bounds__(128, 3) attention_narrow_f16_128(const Step step) { attend<128, false, KV_F16>(step); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_wide_f16_64(const Step step) { attend<64, true, KV_F16>(step); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_wide_f16_128(const Step step) { attend<128, true, KV_F16>(step); }
extern "C" __global__ void __launch_bounds__(128, 3) attention_narrow_any_64(const Step step) { attend<64, false, steps::ANY_TYPE>(step); }
extern "C" __global__ void __launch_bounds__(128, 3) attention_narrow_any_128(const Step step) { attend<128, false, steps::ANY_TYPE>(step); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_wide_any_64(const Step step) { attend<64, true, steps::ANY_TYPE>(step); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_wide_any_128(const Step step) { attend<128, true, steps::ANY_TYPE>(step); }
extern "C" __global__ void __launch_bounds__(128) attention_combine_64(const Step step) { combine<64>(step); }
extern "C" __global__ void __launch_bounds__(128) attention_combine_128(const Step step) { combine<128>(step); }
