"""Seeded random DFlash drafts for tests, in both dialects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.fakes.tiny_gguf import write_gguf

Weights = dict[str, npt.NDArray[Any]]

#: Of every tiny draft.
N_LAYER, N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF = 2, 4, 2, 16, 48
BLOCK, MASK, ROPE_BASE, EPS = 8, 3, 1000.0, 1e-5


def write_tiny_draft(
    path: Path,
    *,
    n_embd: int = 64,
    layers: tuple[int, ...] = (0, 1),
    n_vocab: int = 320,
    dialect: str = "lucebox",
    seed: int = 11,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any] | None] | None = None,
) -> Path:
    """Write a draft with random weights.

    Args:
        n_embd, layers, n_vocab: of its target.
        dialect: lucebox or llama.cpp.
        metadata, tensors: to add or replace; None leaves it out.

    Returns:
        `path`.
    """
    lucebox = dialect == "lucebox"
    arch = "qwen35-dflash-draft" if lucebox else "dflash"
    keys: dict[str, Any] = {
        "block_count": N_LAYER, "context_length": 512, "embedding_length": n_embd,
        "feed_forward_length": N_FF, "attention.head_count": N_HEAD, "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "vocab_size": n_vocab,
        "attention.layer_norm_rms_epsilon": EPS, "rope.freq_base": ROPE_BASE,
    }  # fmt: skip
    if lucebox:
        keys |= {
            "dflash.n_target_layers": len(layers), "dflash.block_size": BLOCK, "dflash.mask_token_id": MASK,
            "dflash.target_layer_ids": list(layers),
        }  # fmt: skip
    else:
        keys |= {"block_size": BLOCK, "target_layers": [layer + 1 for layer in layers]}
    named = {f"{arch}.{key}": value for key, value in keys.items()}
    if not lucebox:
        named["tokenizer.ggml.mask_token_id"] = MASK
    weights = draft_weights(n_embd, len(layers), seed, lucebox=lucebox)
    everything = {"general.architecture": arch, "general.name": "Tiny draft", **named, **dict(metadata or {})}
    write_gguf(path, everything, weights | dict(tensors or {}))
    return path


def matrix(rng: np.random.Generator, n_out: int, n_in: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Random, float32 [n_out, n_in]."""
    return rng.standard_normal((n_out, n_in), dtype=np.float32) * np.float32(scale / math.sqrt(n_in))


def norm(rng: np.random.Generator, n: int) -> npt.NDArray[np.float32]:
    """Random weights of a norm, float32 [n]."""
    return 1 + 0.2 * rng.standard_normal(n, dtype=np.float32)


def draft_weights(n_embd: int, n_features: int, seed: int, *, lucebox: bool) -> Weights:
    """The tensors of a tiny draft by their names in the file."""
    rng = np.random.default_rng(seed)
    fc, hidden = (
        ("dflash.fc.weight", "dflash.hidden_norm.weight")
        if lucebox
        else ("fc.weight", "enc.output_norm.weight")
    )
    weights: Weights = {
        fc: matrix(rng, n_embd, n_features * n_embd), hidden: norm(rng, n_embd),
        "output_norm.weight": norm(rng, n_embd),
    }  # fmt: skip
    for i in range(N_LAYER):
        layer = {
            "attn_norm": norm(rng, n_embd), "attn_q_norm": norm(rng, HEAD_DIM),
            "attn_k_norm": norm(rng, HEAD_DIM), "attn_q": matrix(rng, N_HEAD * HEAD_DIM, n_embd, 1.5),
            "attn_k": matrix(rng, N_HEAD_KV * HEAD_DIM, n_embd, 1.5),
            "attn_v": matrix(rng, N_HEAD_KV * HEAD_DIM, n_embd),
            "attn_output": matrix(rng, n_embd, N_HEAD * HEAD_DIM), "ffn_norm": norm(rng, n_embd),
            "ffn_gate": matrix(rng, N_FF, n_embd), "ffn_up": matrix(rng, N_FF, n_embd),
            "ffn_down": matrix(rng, n_embd, N_FF),
        }  # fmt: skip
        weights |= {f"blk.{i}.{name}.weight": value for name, value in layer.items()}
    return weights
