// Attention with heads of 256 numbers, of step rows (attention_step.cuh) and of prompt rows (attention_prompt.cuh).
//
// Kernels of their own have the types of K and V that long contexts are decoded with; the others share one, since compiling
// is slow.
#include "attention_prompt.cuh"
#include "attention_step.cuh"

using prompts::Prompt;
using steps::Step;

extern "C" __global__ void __launch_bounds__(256, 2) attention_256_narrow_any(const Step step) { steps::attend<256, false, steps::ANY_TYPE>(step); }
extern "C" __global__ void __launch_bounds__(256, 2) attention_256_narrow_q8_0(const Step step) { steps::attend<256, false, KV_Q8_0>(step); }
extern "C" __global__ void __launch_bounds__(256, 2) attention_256_narrow_tq3_0(const Step step) { steps::attend<256, false, KV_TQ3_0>(step); }
extern "C" __global__ void __launch_bounds__(256, 1) attention_256_wide(const Step step) { steps::attend<256, true, steps::ANY_TYPE>(step); }
extern "C" __global__ void __launch_bounds__(128) attention_256_combine(const Step step) { steps::combine<256>(step); }
extern "C" __global__ void __launch_bounds__(256, 1) attention_256_prompt(const Prompt prompt) { prompts::attend<256, false>(prompt); }
