"""Small seeded GGUF models, written in milliseconds: real format, real tokenizer, random weights.

The vocabulary is byte-level BPE: control tokens ``<|endoftext|> <|im_start|> <|im_end|>`` (ids 0, 1, 2),
the 256 bytes (ids 3..258, in byte order), then one token per merge up to n_vocab.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_BYTE_TOKEN = len(CONTROL_TOKENS)

_NORMAL, _CONTROL = 1, 3
_COMMON_MERGES = (
    "h e", "Ġ t", "Ġt he", "i n", "e r", "o n", "Ġ a", "r e", "l l", "ll o", "he llo", "Ġ w", "o r", "or l",
    "orl d", "Ġw orld", "a t", "e n", "i s", "Ġ s", "Ġ o", "in g", "o u", "e d", "a n", "an d", "Ġ and",
)  # fmt: skip

Weights = dict[str, npt.NDArray[np.float32]]


def write_tiny_llama(
    path: Path,
    *,
    seed: int = 1,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    n_vocab: int = 320,
    n_ctx: int = 512,
    tied: bool = False,
    weight_type: str = "F32",
    chat_template: str | None = CHATML,
    tokenizer: bool = True,
    pre: str = "smollm",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[np.float32] | None] | None = None,
    weight_types: Mapping[str, str] | None = None,
) -> Path:
    """Write a llama model with random weights.

    Args:
        weight_type: type of the matrices, one that gguf can quantise; vectors are always F32.
        metadata: keys to add or replace; a value of None leaves the key out.
        tensors: tensors to add or replace, in numpy order; None leaves the tensor out.
        weight_types: types of single tensors, by name.

    Returns:
        `path`.
    """
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "llama.block_count": n_layer,
        "llama.context_length": n_ctx,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": n_embd // n_head,
    }
    if tokenizer:
        keys |= tokenizer_keys(n_vocab, pre)
        if chat_template is not None:
            keys["tokenizer.chat_template"] = chat_template
    weights = llama_weights(seed, n_layer, n_embd, n_head, n_head_kv, n_ff, n_vocab, tied=tied)
    write_gguf(path, keys | dict(metadata or {}), weights | dict(tensors or {}), weight_type, weight_types)
    return path


def llama_weights(
    seed: int, n_layer: int, n_embd: int, n_head: int, n_head_kv: int, n_ff: int, n_vocab: int, *, tied: bool
) -> Weights:
    """Random weights whose residual stream and logits keep a spread of a few units."""
    rng = np.random.default_rng(seed)
    head_dim = n_embd // n_head

    def matrix(n_out: int, n_in: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        return rng.standard_normal((n_out, n_in), dtype=np.float32) * np.float32(scale / math.sqrt(n_in))

    def norm() -> npt.NDArray[np.float32]:
        return 1 + 0.2 * rng.standard_normal(n_embd, dtype=np.float32)

    weights: Weights = {"token_embd.weight": matrix(n_vocab, n_embd, 4.0)}
    for layer in range(n_layer):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(n_head * head_dim, n_embd, 1.5),
            f"blk.{layer}.attn_k.weight": matrix(n_head_kv * head_dim, n_embd, 1.5),
            f"blk.{layer}.attn_v.weight": matrix(n_head_kv * head_dim, n_embd),
            f"blk.{layer}.attn_output.weight": matrix(n_embd, n_head * head_dim),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(n_ff, n_embd),
            f"blk.{layer}.ffn_up.weight": matrix(n_ff, n_embd),
            f"blk.{layer}.ffn_down.weight": matrix(n_embd, n_ff),
        }
    weights["output_norm.weight"] = norm()
    if not tied:
        weights["output.weight"] = matrix(n_vocab, n_embd, 4.0)
    return weights


def tokenizer_keys(n_vocab: int, pre: str = "smollm") -> dict[str, Any]:
    """The tokenizer section for a vocabulary of n_vocab tokens (259 at least)."""
    alphabet = _byte_alphabet()
    tokens = [*CONTROL_TOKENS, *alphabet]
    if n_vocab < len(tokens):
        raise ValueError(f"a byte-level vocabulary needs at least {len(tokens)} tokens, not {n_vocab}")
    merges: list[str] = []
    known = set(tokens)
    pairs = (f"{left} {right}" for left, right in itertools.product(alphabet, repeat=2))
    for merge in itertools.chain(_COMMON_MERGES, pairs):
        if len(tokens) == n_vocab:
            break
        token = merge.replace(" ", "")
        if token not in known:
            known.add(token)
            tokens.append(token)
            merges.append(merge)
    types = [_CONTROL] * len(CONTROL_TOKENS) + [_NORMAL] * (n_vocab - len(CONTROL_TOKENS))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": IM_START,
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.padding_token_id": IM_END,
        "tokenizer.ggml.add_bos_token": False,
    }


def write_gguf(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any] | None],
    weight_type: str = "F32",
    weight_types: Mapping[str, str] | None = None,
) -> None:
    """Write any GGUF file; None values are left out. Integers become uint32 (int32 below 0).

    Tensors of integers stay what they are.
    """
    writer = gguf.GGUFWriter(path, str(keys.get("general.architecture") or "none"))
    if keys.get("general.architecture") is None:
        writer.kv_data[0].pop("general.architecture")
    for key, value in keys.items():
        if value is not None and key != "general.architecture":
            add_key(writer, key, value)
    for name, weights in tensors.items():
        if weights is not None:
            if weights.dtype.kind == "i":
                writer.add_tensor(name, weights)
                continue
            kind = (weight_types or {}).get(name, weight_type if weights.ndim > 1 else "F32")
            _add_tensor(writer, name, weights, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A metadata key, its type that of the value: integers as uint32, or int32 below 0."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, weights: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType
) -> None:
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(weights, dtype=np.float32))
    elif kind == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, weights.astype(np.float16))
    else:
        writer.add_tensor(name, quants.quantize(weights, kind), raw_dtype=kind)


def _byte_alphabet() -> list[str]:
    """One printable character per byte, as GPT-2's tokenizer has them: byte b -> element b."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
