// Attention of prompt rows (attention_prompt.cuh), heads of 64 and 128 numbers.
#include "attention_prompt.cuh"

using prompts::attend;
using prompts::Prompt;

extern "C" __global__ void __launch_bounds__(128, 2) attention_prompt_f16_64(const Prompt prompt) { attend<64, true>(prompt); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_prompt_f16_128(const Prompt prompt) { attend<128, true>(prompt); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_prompt_any_64(const Prompt prompt) { attend<64, false>(prompt); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_prompt_any_128(const Prompt prompt) { attend<128, false>(prompt); }
