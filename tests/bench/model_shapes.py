"""Shapes of published models: their tensors with names, sizes and types, and the keys of their files.

Sizes are those of the models' own configurations (of qwen35-2b the feed-forward width is inferred from the
size of its published file). Types follow llama.cpp's quantiser: for Q4_K_M the larger type goes to the same
tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench.random_blocks import FALLBACK

Q4_K_M = "Q4_K_M"

#: The mix of a third party's 27B file: hardly two matrices that are multiplied together are of one type.
UNEVEN = "UNEVEN"
_UNEVEN_TYPES = {
    "token_embd": "Q4_K", "output": "Q6_K",
    "attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q8_0",
    **dict.fromkeys(("attn_output", "attn_qkv", "attn_gate", "ssm_out"), "Q5_K"),
    **dict.fromkeys(("ssm_alpha", "ssm_beta"), "F32"),
    **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), "IQ4_XS"),
    "eh_proj": "Q8_0",
}  # fmt: skip

#: What a file's matrices can be of beside one type for all.
MIXES = (Q4_K_M, UNEVEN)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Gated DeltaNet layers: heads for keys and values, width of each, taps of the short convolution."""

    n_k_head: int
    n_v_head: int
    state: int = 128
    conv: int = 4
    interval: int = 4  # every so many layers one has full attention

    @property
    def inner(self) -> int:
        """Width of all value heads."""
        return self.n_v_head * self.state

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.n_k_head * self.state + self.inner


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: sizes, and the type of its matrices (one of TYPES or of MIXES)."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    weight_type: str
    tied: bool = False
    embedding_type: str | None = None
    arch: str = "llama"
    linear: LinearShape | None = None
    n_mtp: int = 0  # blocks behind the layers that predict further tokens
    rms_eps: float = 1e-5

    def is_linear(self, layer: int) -> bool:
        """Whether the mixer of this layer is a DeltaNet; False for all MTP blocks."""
        return self.linear is not None and layer < self.n_layer and (layer + 1) % self.linear.interval != 0

    @property
    def rope_dims(self) -> int:
        """Numbers of a head that are rotated: a quarter of them in qwen35."""
        return self.head_dim // 4 if self.arch == "qwen35" else self.head_dim


def _qwen3(n_layer: int, n_embd: int, n_ff: int, n_head: int, *, tied: bool) -> Shape:
    return Shape(
        n_layer, n_embd, n_ff, n_head, 8, 128, 151936, 40960, 1e6, Q4_K_M, tied, arch="qwen3", rms_eps=1e-6
    )


def _qwen35(
    n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_v_head: int, *, tied: bool
) -> Shape:
    return Shape(
        n_layer, n_embd, n_ff, n_head, n_head_kv, 256, 248320, 262144, 1e7, Q4_K_M, tied, arch="qwen35",
        linear=LinearShape(16, n_v_head), rms_eps=1e-6,
    )  # fmt: skip


PRESETS: Mapping[str, Shape] = {
    "23b": Shape(64, 5120, 17408, 40, 8, 128, 151936, 262144, 1e6, Q4_K_M),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, Q4_K_M, tied=True),
    "135m": Shape(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, "Q4_1", tied=True, embedding_type="Q8_0"),
    "tiny": Shape(2, 256, 512, 4, 2, 64, 512, 16384, 1e4, Q4_K_M),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, tied=False),
    "qwen35-0.8b": _qwen35(24, 1024, 3584, 8, 2, 16, tied=True),
    "qwen35-2b": _qwen35(24, 2048, 6144, 8, 2, 16, tied=True),
    "qwen35-4b": _qwen35(32, 2560, 9216, 16, 4, 32, tied=True),
    "qwen35-9b": _qwen35(32, 4096, 12288, 16, 4, 32, tied=False),
    "qwen35-27b": _qwen35(64, 5120, 17408, 24, 4, 48, tied=False),
}


def cut_down(
    shape: Shape, *, layers: int | None = None, width: int | None = None, vocab: int | None = None
) -> Shape:
    """The same kind of model with fewer layers, tokens, or a smaller hidden width.

    With the width go the heads, whose own width and whose number for each key head stay, and the feed-forward
    part in proportion.
    """
    if width is not None:
        n_ff = max(256, shape.n_ff * width // shape.n_embd // 256 * 256)
        linear = shape.linear
        if linear is not None:
            linear = dataclasses.replace(linear, n_k_head=2, n_v_head=2 * linear.n_v_head // linear.n_k_head)
        group = shape.n_head // shape.n_head_kv
        shape = dataclasses.replace(
            shape, n_embd=width, n_ff=n_ff, n_head=group, n_head_kv=1, linear=linear
        )  # fmt: skip
    return dataclasses.replace(shape, n_layer=layers or shape.n_layer, n_vocab=vocab or shape.n_vocab)


# ----- tensors


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor will be.

    Attributes:
        name: in the file.
        shape: in numpy order: (n_out, n_in), or (n,).
        kind: its type.
        std: of a matrix; None: numbers of its own kind, see `synthetic_gguf`.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "F32"
    std: float | None = None


def tensors(shape: Shape) -> Iterator[TensorSpec]:
    """Every tensor of the file, in its order."""
    for spec in _tensors(shape):
        if shape.weight_type == UNEVEN and spec.std is not None:
            kind = _UNEVEN_TYPES[spec.name.split(".")[-2]]
            yield dataclasses.replace(spec, kind=_fitting(kind, spec.shape[-1]))
        else:
            yield spec


def _tensors(shape: Shape) -> Iterator[TensorSpec]:
    output = "Q6_K" if shape.weight_type == Q4_K_M else shape.weight_type
    embedding = shape.embedding_type or (output if shape.tied else _base(shape))
    # A tied embedding is the output matrix too, so it is scaled as that one; its rows are normed anyway.
    yield _matrix("token_embd", shape.n_vocab, shape.n_embd, embedding, 2.0)
    for layer in range(shape.n_layer + shape.n_mtp):
        for spec in _layer(shape, layer):
            yield dataclasses.replace(spec, name=f"blk.{layer}.{spec.name}")
    yield TensorSpec("output_norm.weight", (shape.n_embd,))
    if not shape.tied:
        yield _matrix("output", shape.n_vocab, shape.n_embd, output, 2.0)


def _base(shape: Shape) -> str:
    return "Q4_K" if shape.weight_type == Q4_K_M else shape.weight_type


def _matrix(name: str, n_out: int, n_in: int, kind: str, scale: float = 1.0) -> TensorSpec:
    return TensorSpec(name + ".weight", (n_out, n_in), _fitting(kind, n_in), scale / math.sqrt(n_in))


def _fitting(kind: str, n_in: int) -> str:
    return FALLBACK.get(kind, kind) if n_in % 256 else kind


def _layer(shape: Shape, layer: int) -> Iterator[TensorSpec]:
    n_embd, base = shape.n_embd, _base(shape)
    better = _better(shape, layer, shape.n_layer)
    yield TensorSpec("attn_norm.weight", (n_embd,))
    # One attn_v or attn_qkv in each layer, so its running number is the layer's.
    yield from (_linear_mixer if shape.is_linear(layer) else _attention)(shape, better)
    yield TensorSpec("post_attention_norm.weight" if shape.linear else "ffn_norm.weight", (n_embd,))
    yield _matrix("ffn_gate", shape.n_ff, n_embd, base)
    yield _matrix("ffn_up", shape.n_ff, n_embd, base)
    yield _matrix("ffn_down", n_embd, shape.n_ff, better)
    if layer >= shape.n_layer:
        yield _matrix("nextn.eh_proj", n_embd, 2 * n_embd, base)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield TensorSpec(f"nextn.{name}.weight", (n_embd,))


def _attention(shape: Shape, better: str) -> Iterator[TensorSpec]:
    n_embd, base, dim = shape.n_embd, _base(shape), shape.head_dim
    n_q, n_kv = shape.n_head * dim, shape.n_head_kv * dim
    yield _matrix("attn_q", 2 * n_q if shape.linear else n_q, n_embd, base)  # qwen35: each head with its gate
    yield _matrix("attn_k", n_kv, n_embd, base)
    yield _matrix("attn_v", n_kv, n_embd, better)
    yield _matrix("attn_output", n_embd, n_q, base)
    if shape.arch != "llama":
        yield TensorSpec("attn_q_norm.weight", (dim,))
        yield TensorSpec("attn_k_norm.weight", (dim,))


def _linear_mixer(shape: Shape, better: str) -> Iterator[TensorSpec]:
    linear, n_embd, base = shape.linear, shape.n_embd, _base(shape)
    assert linear is not None
    yield _matrix("attn_qkv", linear.channels, n_embd, better)
    yield _matrix("attn_gate", linear.inner, n_embd, base)
    yield TensorSpec("ssm_conv1d.weight", (linear.channels, linear.conv))
    yield TensorSpec("ssm_a", (linear.n_v_head,))
    yield TensorSpec("ssm_dt.bias", (linear.n_v_head,))
    yield _matrix("ssm_alpha", linear.n_v_head, n_embd, base)
    yield _matrix("ssm_beta", linear.n_v_head, n_embd, base)
    yield TensorSpec("ssm_norm.weight", (linear.state,))
    yield _matrix("ssm_out", n_embd, linear.inner, base)


def _better(shape: Shape, layer: int, n_layer: int) -> str:
    """The type of a layer's ffn_down and attn_v (or attn_qkv)."""
    eighth = n_layer // 8
    gets_more = layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if shape.weight_type == Q4_K_M and gets_more and layer < n_layer else _base(shape)


# ----- keys


def keys(shape: Shape) -> dict[str, Any]:
    """The keys of the architecture, as converters write them."""
    found: dict[str, Any] = {
        "block_count": shape.n_layer + shape.n_mtp,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "rope.freq_base": shape.rope_base,
    }
    if shape.arch == "llama":
        found |= {"rope.dimension_count": shape.head_dim, "vocab_size": shape.n_vocab}
    if shape.linear is not None:
        found |= _linear_keys(shape, shape.linear)
    if shape.n_mtp:
        found["nextn_predict_layers"] = shape.n_mtp
    return {f"{shape.arch}.{key}": value for key, value in found.items()}


def _linear_keys(shape: Shape, linear: LinearShape) -> dict[str, Any]:
    third = shape.rope_dims // 2 // 3
    rest = shape.rope_dims // 2 - 3 * third
    sections = [third + (rest > 0), third + (rest > 1), third, 0]  # of 32 pairs 11, 11 and 10
    return {
        "rope.dimension_count": shape.rope_dims,
        "rope.dimension_sections": sections,
        "ssm.conv_kernel": linear.conv,
        "ssm.state_size": linear.state,
        "ssm.group_count": linear.n_k_head,
        "ssm.time_step_rank": linear.n_v_head,
        "ssm.inner_size": linear.inner,
        "full_attention_interval": linear.interval,
        "attention.recurrent_layers": [
            shape.is_linear(layer) for layer in range(shape.n_layer + shape.n_mtp)
        ],
    }
