"""The table of architectures: which keys and tensors a model of each has, and the check that it has them.

A new architecture is one `Architecture` entry: a name and a function that gives a layer's tensors.
Tensor names and shapes are GGUF's (innermost dimension first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from slotd.daemon.weights.delta_net import DeltaNet, check_rope_sections, delta_net_tensors, read_delta_net
from slotd.daemon.weights.keys import Keys
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
        n_nextn: number of blocks behind them that guess further tokens (MTP); they are left out.
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
        fused_qkv: attention layers whose q, k and v are one tensor in the file.
        delta_net: the recurrent layers; None when all have attention.
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
    n_nextn: int = 0
    fused_qkv: frozenset[int] = frozenset()
    delta_net: DeltaNet | None = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have K/V, ascending; in pages they are counted without the others."""
        recurrent = self.delta_net.layers if self.delta_net is not None else ()
        return tuple(layer for layer in range(self.n_layer) if layer not in recurrent)

    def qkv_names(self, layer: int) -> tuple[str, ...]:
        """The tensors that hold q, k and v of an attention layer, in this order."""
        parts = ("attn_qkv",) if layer in self.fused_qkv else ("attn_q", "attn_k", "attn_v")
        return tuple(f"blk.{layer}.{part}.weight" for part in parts)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry of the table.

    Attributes:
        name: value of ``general.architecture``; its keys start with it.
        layer_tensors: (hyper, layer) -> tensor name without ``blk.N.`` -> shape.
        rope_freqs: a file may have divisors of the angles.
        hybrid: some layers are gated DeltaNet, and blocks for further tokens may follow.
    """

    name: str
    layer_tensors: Callable[[HyperParameters, int], Mapping[str, Shape]]
    rope_freqs: bool = False
    hybrid: bool = False


def _attention(h: HyperParameters, layer: int, q: int) -> Mapping[str, Shape]:
    k, v = h.n_head_kv * h.head_dim, h.n_head_kv * h.value_dim
    output = {"attn_output.weight": (h.n_head * h.value_dim, h.n_embd)}
    if layer in h.fused_qkv:
        return {"attn_qkv.weight": (h.n_embd, q + k + v), **output}
    shapes = {"attn_q": (h.n_embd, q), "attn_k": (h.n_embd, k), "attn_v": (h.n_embd, v)}
    return {**{f"{name}.weight": shape for name, shape in shapes.items()}, **output}


def _feed_forward(h: HyperParameters) -> Mapping[str, Shape]:
    return {
        "ffn_gate.weight": (h.n_embd, h.n_ff),
        "ffn_up.weight": (h.n_embd, h.n_ff),
        "ffn_down.weight": (h.n_ff, h.n_embd),
    }


def _llama_layer(h: HyperParameters, layer: int) -> Mapping[str, Shape]:
    norms = {"attn_norm.weight": (h.n_embd,), "ffn_norm.weight": (h.n_embd,)}
    return {**norms, **_attention(h, layer, h.n_head * h.head_dim), **_feed_forward(h)}


def _head_norms(h: HyperParameters) -> Mapping[str, Shape]:
    return {"attn_q_norm.weight": (h.head_dim,), "attn_k_norm.weight": (h.head_dim,)}


def _qwen3_layer(h: HyperParameters, layer: int) -> Mapping[str, Shape]:
    return {**_llama_layer(h, layer), **_head_norms(h)}


def _qwen35_layer(h: HyperParameters, layer: int) -> Mapping[str, Shape]:
    norms = {"attn_norm.weight": (h.n_embd,), "post_attention_norm.weight": (h.n_embd,)}
    assert h.delta_net is not None
    if layer in h.delta_net.layers:
        return {**norms, **delta_net_tensors(h.n_embd, h.delta_net), **_feed_forward(h)}
    attention = _attention(h, layer, 2 * h.n_head * h.head_dim)  # each query with its gate
    return {**norms, **attention, **_head_norms(h), **_feed_forward(h)}


#: What a block that guesses further tokens has beside an attention layer, each optional.
_NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head_norm", "embed_tokens", "shared_head_head")

ARCHITECTURES: Mapping[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture("llama", _llama_layer, rope_freqs=True),
        Architecture("qwen3", _qwen3_layer),
        Architecture("qwen35", _qwen35_layer, hybrid=True),
    )
}

#: Mixtures of experts with a name of their own.
_EXPERTS = frozenset({"qwen2moe", "qwen3moe", "qwen3vlmoe", "qwen3next", "qwen35moe"})


def architecture_of(header: Header) -> Architecture:
    """The table's entry for this file. Raises ModelError: not a model, or not in the table."""
    kind = header.string("general.type", "model")
    if kind != "model":
        raise ModelError(f"{header.name}: general.type is {kind!r}, only 'model' can be run")
    name = header.string("general.architecture")
    if name not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        what = f"architecture {name!r}{' (mixture of experts)' if name in _EXPERTS else ''}"
        raise ModelError(f"{header.name}: {what} is not supported (supported: {supported})")
    return ARCHITECTURES[name]


def read_hyper_parameters(header: Header) -> HyperParameters:
    """Hyper-parameters of a file, checked against each other.

    Raises:
        ModelError: a key is missing, of the wrong type, out of range, or asks for something unsupported.
    """
    entry = architecture_of(header)
    arch = entry.name
    _refuse_unsupported_keys(header, arch)
    keys = Keys(header, arch)
    n_layer, n_nextn = _count_blocks(keys, entry)
    n_embd = keys.positive("embedding_length")
    n_head = keys.positive("attention.head_count")
    # Without keys of their own the heads share the width; where they cannot, the keys are required.
    shared = n_embd // n_head if n_embd % n_head == 0 else None
    head_dim = keys.positive("attention.key_length", shared)
    vocabulary = read_vocabulary(header)
    delta_net = read_delta_net(keys, n_layer, n_nextn) if entry.hybrid else None
    hyper = HyperParameters(
        arch=arch,
        n_layer=n_layer,
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
        rope_freqs=entry.rope_freqs and ROPE_FREQS in header.tensors,
        rms_eps=keys.positive_number("attention.layer_norm_rms_epsilon"),
        tied=OUTPUT not in header.tensors,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        add_bos=vocabulary.add_bos,
        stop_ids=vocabulary.stop_ids,
        n_nextn=n_nextn,
        fused_qkv=_fused_layers(header, n_layer, delta_net),
        delta_net=delta_net,
    )
    _check_relations(header, hyper)
    if entry.hybrid:
        check_rope_sections(keys, hyper.rope_dims)
        if hyper.value_dim != hyper.head_dim:  # a gate is as wide as its query
            raise keys.refuse("attention.value_length", hyper.value_dim, f"it must be {hyper.head_dim}")
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


def left_out(header: Header, hyper: HyperParameters) -> frozenset[str]:
    """Tensors of the file that belong to blocks which are not computed: those that guess further tokens."""
    mixer = {**_attention(hyper, hyper.n_layer, 0), **_head_norms(hyper), **_feed_forward(hyper)}
    parts = {*mixer, "attn_qkv.weight", "attn_norm.weight", "post_attention_norm.weight"}
    parts |= {f"nextn.{part}.weight" for part in _NEXTN}
    blocks = range(hyper.n_layer, hyper.n_layer + hyper.n_nextn)
    return frozenset(
        name
        for name in (f"blk.{block}.{part}" for block in blocks for part in parts)
        if name in header.tensors
    )


def check_tensors(header: Header, hyper: HyperParameters) -> None:
    """Raises ModelError unless the file has exactly the expected tensors, each in its shape."""
    expected = expected_tensors(hyper)
    known = expected.keys() | left_out(header, hyper)
    for name in header.tensors:
        if name not in known:
            _refuse_extra(header, name, known, len(expected))
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


def _count_blocks(keys: Keys, entry: Architecture) -> tuple[int, int]:
    """Blocks that are computed, and those behind them that guess further tokens. The key counts both."""
    n_blocks, n_nextn = keys.positive("block_count"), keys.count("nextn_predict_layers", 0)
    n_tensors = len(keys.header.tensors)
    if n_blocks > n_tensors:
        raise keys.refuse("block_count", n_blocks, f"the file has only {n_tensors} tensors")
    if n_nextn and not entry.hybrid:
        raise keys.refuse("nextn_predict_layers", n_nextn, "only 0 is supported")
    if n_nextn >= n_blocks:
        raise keys.refuse("nextn_predict_layers", n_nextn, f"it must be below block_count {n_blocks}")
    return n_blocks - n_nextn, n_nextn


def _fused_layers(header: Header, n_layer: int, delta_net: DeltaNet | None) -> frozenset[int]:
    """Attention layers with one tensor for q, k and v. DeltaNet layers have a tensor of that name too."""
    recurrent = delta_net.layers if delta_net is not None else ()
    return frozenset(
        i for i in range(n_layer) if i not in recurrent and f"blk.{i}.attn_qkv.weight" in header.tensors
    )


def _n_vocab(header: Header, vocabulary: Vocabulary) -> int:
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelError(f"{header.name}: tensor {EMBEDDING} is missing")
    rows = embedding.shape[-1]
    if len(embedding.shape) != 2 or rows > Keys.LIMIT:
        raise ModelError(f"{header.name}: tensor {EMBEDDING} has shape {list(embedding.shape)}")
    if vocabulary.n_tokens not in (None, rows):
        raise ModelError(
            f"{header.name}: tensor {EMBEDDING} has {rows} rows, "
            f"key {TOKENS_KEY} has {vocabulary.n_tokens} tokens"
        )
    return rows


def _check_relations(header: Header, hyper: HyperParameters) -> None:
    arch = hyper.arch
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


def _refuse_extra(header: Header, name: str, known: Iterable[str], n_expected: int) -> None:
    if name.endswith(".bias"):
        raise ModelError(f"{header.name}: tensor {name}: bias tensors are not supported")
    known = set(known)
    extra = [other for other in header.tensors if other not in known]
    raise ModelError(
        f"{header.name}: tensor {name} is not part of this model{_and_more(extra)}; "
        f"the file has {len(header.tensors)} tensors, this model needs {n_expected}"
    )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
