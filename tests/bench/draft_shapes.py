"""Shapes of DFlash drafts: their tensors and keys, as lucebox writes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench.model_shapes import Shape, TensorSpec

ARCH = "qwen35-dflash-draft"


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A draft: sizes, the layers of its target that it reads, and the type of its matrices.

    window: positions that all layers but the last see; 0: they see all.
    """

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    layers: tuple[int, ...]
    block: int
    mask: int
    weight_type: str = "Q8_0"
    rms_eps: float = 1e-6
    window: int = 0


DRAFTS: Mapping[str, DraftShape] = {
    # Of the published drafts for the 27B of Qwen3.5 and later.
    "qwen35-27b-draft": DraftShape(
        5, 5120, 17408, 32, 8, 128, 248320, 262144, 1e7, (1, 16, 31, 46, 61), 16, 248070
    ),
    # Of the one that comes with the default model.
    "135m-draft": DraftShape(
        4, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, (1, 8, 14, 20, 27), 16, 4, rms_eps=1e-5
    ),
    "tiny-draft": DraftShape(2, 256, 512, 4, 2, 64, 512, 16384, 1e4, (0, 1), 8, 4),
}


def draft_of(target: Shape, *, n_layer: int = 2, heads: tuple[int, int, int] = (8, 2, 64)) -> DraftShape:
    """A small draft for any target, which reads its first and its last but one layer.

    heads: query heads, key/value heads, width of a head.
    """
    n_head, n_head_kv, head_dim = heads
    return DraftShape(
        n_layer, target.n_embd, 2 * target.n_embd, n_head, n_head_kv, head_dim, target.n_vocab, target.n_ctx,
        target.rope_base, (0, max(1, target.n_layer - 2)), 16, target.n_vocab - 1,
    )  # fmt: skip


def draft_tensors(shape: DraftShape) -> Iterator[TensorSpec]:
    """Every tensor of the file, in its order."""
    n_embd, dim = shape.n_embd, shape.head_dim
    n_q, n_kv = shape.n_head * dim, shape.n_head_kv * dim

    def matrix(name: str, n_out: int, n_in: int) -> TensorSpec:
        return TensorSpec(name + ".weight", (n_out, n_in), shape.weight_type, 1 / math.sqrt(n_in))

    yield matrix("dflash.fc", n_embd, len(shape.layers) * n_embd)
    yield TensorSpec("dflash.hidden_norm.weight", (n_embd,))
    for layer in range(shape.n_layer):
        for spec in (
            TensorSpec("attn_norm.weight", (n_embd,)),
            matrix("attn_q", n_q, n_embd),
            matrix("attn_k", n_kv, n_embd),
            matrix("attn_v", n_kv, n_embd),
            matrix("attn_output", n_embd, n_q),
            TensorSpec("attn_q_norm.weight", (dim,)),
            TensorSpec("attn_k_norm.weight", (dim,)),
            TensorSpec("ffn_norm.weight", (n_embd,)),
            matrix("ffn_gate", shape.n_ff, n_embd),
            matrix("ffn_up", shape.n_ff, n_embd),
            matrix("ffn_down", n_embd, shape.n_ff),
        ):
            yield dataclasses.replace(spec, name=f"blk.{layer}.{spec.name}")
    yield TensorSpec("output_norm.weight", (n_embd,))


def draft_keys(shape: DraftShape) -> dict[str, Any]:
    """The keys of the architecture."""
    found: dict[str, Any] = {
        "block_count": shape.n_layer,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "rope.freq_base": shape.rope_base,
        "vocab_size": shape.n_vocab,
        "dflash.n_target_layers": len(shape.layers),
        "dflash.target_layer_ids": list(shape.layers),
        "dflash.block_size": shape.block,
        "dflash.mask_token_id": shape.mask,
    }
    if shape.window:
        found["attention.sliding_window"] = shape.window
        found["attention.sliding_window_pattern"] = [i < shape.n_layer - 1 for i in range(shape.n_layer)]
    return {f"{ARCH}.{key}": value for key, value in found.items()}
