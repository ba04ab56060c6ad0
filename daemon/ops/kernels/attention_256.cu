// Attention with heads of 256 numbers, of step rows (attention_step.cuh) and of prompt rows (attention_prompt.cuh).
//
// One kernel each for all K/V types: what they cost apart is little beside heads of this width, and compiling is slow.
#include "attention_prompt.cuh"
#include "attention_step.cuh"

using prompts::Prompt;
using steps::Step;

extern "C" __global__ void __launch_bounds__(256, 2) attention_256_narrow(const Step step) { steps::attend<256, false, false>(step); }
extern "C" __global__ void __launch_bounds__(256, 1) attention_256_wide(const Step step) { steps::attend<256, true, false>(step); }
extern "C" __global__ void __launch_bounds__(128) attention_256_combine(const Step step) { steps::combine<256>(step); }
extern "C" __global__ void __launch_bounds__(256, 1) attention_256_prompt(const Prompt prompt) { prompts::attend<256, false>(prompt); }
