"""The table of architectures: which keys and tensors a model of each has, and the check that it has them.

A new architecture is one `Architecture` entry: a name and a function that gives a layer's tensors.
Tensor names and shapes are GGUF's (innermost dimension first).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header
from slotd.protocol.gguf_vocabulary import TOKENS_KEY, Vocabulary, read_vocabulary

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"
ROPE_FREQS = "rope_freqs.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """The numbers that define a model.

    Attributes:
        arch: ``general.architecture``.
        n_layer: number of blocks that are computed.
        n_embd: width of the residual stream.
        n_ff: width of the feed-forward layer.
        n_head: query heads.
        n_head_kv: key/value heads; divides n_head.
        head_dim: width of a query and key head.
        value_dim: width of a value head.
        n_vocab: rows of the embedding.
        n_ctx_train: context length the model was made for, in tokens.
        rope_base: base of the rotary frequencies.
        rope_dims: rotated dimensions of a head, even, at most head_dim.
        rope_freqs: whether `rope_freqs.weight` is there: divisors of the angles, [rope_dims / 2].
        rms_eps: epsilon of the RMS norms.
        tied: no `output.weight`: the embedding is the output matrix too.
        bos_id: begin of text, None when the file names none.
        eos_id: end of text, None when the file names none.
        add_bos: whether a prompt starts with bos_id.
        stop_ids: ids that end an answer.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    n_vocab: int
    n_ctx_train: int
    rope_base: float
    rope_dims: int
    rope_freqs: bool
    rms_eps: float
    tied: bool
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry of the table.

    Attributes:
        name: value of ``general.architecture``; its keys start with it.
        layer_tensors: (hyper, layer) -> tensor name without ``blk.N.`` -> shape.
    """

    name: str
    layer_tensors: Callable[[HyperParameters, int], Mapping[str, Shape]]


def _llama_layer(h: HyperParameters, layer: int) -> Mapping[str, Shape]:
    return {
        "attn_norm.weight": (h.n_embd,),
        "attn_q.weight": (h.n_embd, h.n_head * h.head_dim),
        "attn_k.weight": (h.n_embd, h.n_head_kv * h.head_dim),
        "attn_v.weight": (h.n_embd, h.n_head_kv * h.value_dim),
        "attn_output.weight": (h.n_head * h.value_dim, h.n_embd),
        "ffn_norm.weight": (h.n_embd,),
        "ffn_gate.weight": (h.n_embd, h.n_ff),
        "ffn_up.weight": (h.n_embd, h.n_ff),
        "ffn_down.weight": (h.n_ff, h.n_embd),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    entry.name: entry for entry in (Architecture("llama", _llama_layer),)
}


def architecture_of(header: Header) -> Architecture:
    """The table's entry for this file. Raises ModelError: not a model, or not in the table."""
    kind = header.string("general.type", "model")
    if kind != "model":
        raise ModelError(f"{header.name}: general.type is {kind!r}, only 'model' can be run")
    name = header.string("general.architecture")
    if name not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{header.name}: architecture {name!r} is not supported (supported: {supported})")
    return ARCHITECTURES[name]


def read_hyper_parameters(header: Header) -> HyperParameters:
    """Hyper-parameters of a file, checked against each other.

    Raises:
        ModelError: a key is missing, of the wrong type, out of range, or asks for something unsupported.
    """
    arch = architecture_of(header).name
    _refuse_unsupported_keys(header, arch)
    keys = _Keys(header, arch)
    n_embd = keys.positive("embedding_length")
    n_head = keys.positive("attention.head_count")
    # Without keys of their own the heads share the width; where they cannot, the keys are required.
    shared = n_embd // n_head if n_embd % n_head == 0 else None
    head_dim = keys.positive("attention.key_length", shared)
    vocabulary = read_vocabulary(header)
    hyper = HyperParameters(
        arch=arch,
        n_layer=keys.positive("block_count"),
        n_embd=n_embd,
        n_ff=keys.positive("feed_forward_length"),
        n_head=n_head,
        n_head_kv=keys.positive("attention.head_count_kv", n_head),
        head_dim=head_dim,
        value_dim=keys.positive("attention.value_length", shared),
        n_vocab=_n_vocab(header, vocabulary),
        n_ctx_train=keys.positive("context_length"),
        rope_base=keys.positive_number("rope.freq_base", 10_000.0),
        rope_dims=keys.positive("rope.dimension_count", head_dim),
        rope_freqs=ROPE_FREQS in header.tensors,
        rms_eps=keys.positive_number("attention.layer_norm_rms_epsilon"),
        tied=OUTPUT not in header.tensors,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        add_bos=vocabulary.add_bos,
        stop_ids=vocabulary.stop_ids,
    )
    _check_relations(header, hyper)
    return hyper


def expected_tensors(hyper: HyperParameters) -> dict[str, Shape]:
    """Every tensor that a model of these hyper-parameters has, with its shape."""
    shapes: dict[str, Shape] = {EMBEDDING: (hyper.n_embd, hyper.n_vocab), OUTPUT_NORM: (hyper.n_embd,)}
    if not hyper.tied:
        shapes[OUTPUT] = (hyper.n_embd, hyper.n_vocab)
    if hyper.rope_freqs:
        shapes[ROPE_FREQS] = (hyper.rope_dims // 2,)
    layer_tensors = ARCHITECTURES[hyper.arch].layer_tensors
    for layer in range(hyper.n_layer):
        for name, shape in layer_tensors(hyper, layer).items():
            shapes[f"blk.{layer}.{name}"] = shape
    return shapes


def check_tensors(header: Header, hyper: HyperParameters) -> None:
    """Raises ModelError unless the file has exactly the expected tensors, each in its shape."""
    expected = expected_tensors(hyper)
    for name in header.tensors:
        if name not in expected:
            _refuse_extra(header, name, expected)
    missing = [name for name in expected if name not in header.tensors]
    if missing:
        raise ModelError(
            f"{header.name}: tensor {missing[0]} is missing{_and_more(missing)}; "
            f"the file has {len(header.tensors)} tensors, this model needs {len(expected)}"
        )
    for name, shape in expected.items():
        if header.tensors[name].shape != shape:
            found = list(header.tensors[name].shape)
            raise ModelError(f"{header.name}: tensor {name} has shape {found}, it must be {list(shape)}")


# ----- keys


class _Keys:
    """Typed, range-checked access to the keys of one architecture."""

    # Far above any model, and low enough that no product of three of them passes 2**63.
    LIMIT = 2**31 - 1

    def __init__(self, header: Header, arch: str) -> None:
        self.header = header
        self.arch = arch

    def positive(self, suffix: str, default: int | None = None) -> int:
        value = self.header.integer(f"{self.arch}.{suffix}", default)
        if not 1 <= value <= self.LIMIT:
            raise ModelError(
                f"{self.header.name}: key {self.arch}.{suffix} is {value}, the limit is 1 to {self.LIMIT}"
            )
        return value

    def positive_number(self, suffix: str, default: float | None = None) -> float:
        value = self.header.number(f"{self.arch}.{suffix}", default)
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{self.header.name}: key {self.arch}.{suffix} is {value}, it must be above 0")
        return value


#: Keys that change the computation in ways that are not supported, and the value that means "not used".
_NEUTRAL: Mapping[str, float] = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "rope.scale_linear": 1,
    "rope.scaling.attn_factor": 1,
}

_WHAT: Mapping[str, str] = {"expert_count": " (mixture of experts)"}


def _refuse_unsupported_keys(header: Header, arch: str) -> None:
    if header.integer("split.count", 1) > 1:
        raise ModelError(
            f"{header.name}: key split.count is {header.integer('split.count')}: "
            "a model split over several files is not supported, merge them into one"
        )
    for suffix, neutral in _NEUTRAL.items():
        value = header.number(f"{arch}.{suffix}", neutral)
        if value != neutral:
            raise ModelError(
                f"{header.name}: key {arch}.{suffix} is {value:g}{_WHAT.get(suffix, '')}, "
                f"only {neutral:g} is supported"
            )
    if not header.flag(f"{arch}.attention.causal", True):
        raise ModelError(f"{header.name}: key {arch}.attention.causal is false, only true is supported")
    scaling = header.string(f"{arch}.rope.scaling.type", "none")
    linear_without_effect = scaling == "linear" and header.number(f"{arch}.rope.scaling.factor", 1.0) == 1.0
    if scaling != "none" and not linear_without_effect:
        raise ModelError(
            f"{header.name}: key {arch}.rope.scaling.type is {scaling!r}, only 'none' is supported"
        )


def _n_vocab(header: Header, vocabulary: Vocabulary) -> int:
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelError(f"{header.name}: tensor {EMBEDDING} is missing")
    rows = embedding.shape[-1]
    if len(embedding.shape) != 2 or rows > _Keys.LIMIT:
        raise ModelError(f"{header.name}: tensor {EMBEDDING} has shape {list(embedding.shape)}")
    if vocabulary.n_tokens not in (None, rows):
        raise ModelError(
            f"{header.name}: tensor {EMBEDDING} has {rows} rows, "
            f"key {TOKENS_KEY} has {vocabulary.n_tokens} tokens"
        )
    return rows


def _check_relations(header: Header, hyper: HyperParameters) -> None:
    arch = hyper.arch
    if hyper.n_layer > len(header.tensors):
        raise ModelError(
            f"{header.name}: key {arch}.block_count is {hyper.n_layer}, "
            f"the file has only {len(header.tensors)} tensors"
        )
    if hyper.n_head % hyper.n_head_kv:
        raise ModelError(
            f"{header.name}: key {arch}.attention.head_count_kv is {hyper.n_head_kv}, "
            f"which does not divide head_count {hyper.n_head}"
        )
    if hyper.rope_dims % 2 or hyper.rope_dims > hyper.head_dim:
        raise ModelError(
            f"{header.name}: key {arch}.rope.dimension_count is {hyper.rope_dims}, "
            f"it must be even and at most {hyper.head_dim} (the width of a head)"
        )


# ----- tensors


def _refuse_extra(header: Header, name: str, expected: Iterable[str]) -> None:
    if name.endswith(".bias"):
        raise ModelError(f"{header.name}: tensor {name}: bias tensors are not supported")
    if name.endswith("attn_qkv.weight"):
        raise ModelError(f"{header.name}: tensor {name}: fused q/k/v tensors are not supported")
    known = set(expected)
    extra = [other for other in header.tensors if other not in known]
    raise ModelError(
        f"{header.name}: tensor {name} is not part of this model{_and_more(extra)}; "
        f"the file has {len(header.tensors)} tensors, this model needs {len(known)}"
    )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
