"""DFlash drafts in GGUF files: what is in one, in two dialects, and whether it goes with a target.

lucebox writes keys below its own architecture names and the draft's layers under `dflash.`; llama.cpp writes
architecture `dflash` and other tensor names, and counts target layers from one: it means the input of the
layer behind. What the tensors say counts; keys that contradict them are named in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slotd.daemon.weights.architectures import HyperParameters, Shape
from slotd.daemon.weights.draft_heads import DraftHeads, read_heads
from slotd.daemon.weights.keys import Keys
from slotd.daemon.weights.reader import GgufFile, check_types, check_vectors, open_gguf
from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header
from slotd.protocol.gguf_vocabulary import TOKENS_KEY

log = logging.getLogger(__name__)

#: Most rows of a block.
MOST_ROWS = 64

EMBEDDING, OUTPUT, OUTPUT_NORM, OWN_IDS = "token_embd.weight", "output.weight", "output_norm.weight", "d2t"

#: Types that the ids of rows may have.
_INTEGERS: Mapping[str, npt.DTypeLike] = {"I32": "<i4", "I64": "<i8"}

#: What changes the computation of a draft in ways that are not supported: part of a tensor's name -> what.
_UNSUPPORTED = {
    "domino": "the Domino head",
    "aux_hidden_norm": "a norm for each target layer",
    "attn_gate": "gated attention",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family of files names things.

    Attributes:
        prefix: of the keys that only drafts have, behind the architecture.
        layer_key: target layers, which this dialect counts from `first_layer` on.
        fc: names of the product that joins the features.
        hidden_norm: names of the norm behind it.
    """

    prefix: str
    layer_key: str
    first_layer: int
    fc: tuple[str, ...]
    hidden_norm: tuple[str, ...]


LUCEBOX = Dialect(
    "dflash.", "target_layer_ids", 0, ("dflash.fc.weight", "dflash_fc.weight"),
    ("dflash.hidden_norm.weight", "dflash_hidden_norm.weight"),
)  # fmt: skip
LLAMA_CPP = Dialect("", "target_layers", 1, ("fc.weight",), ("enc.output_norm.weight",))

DIALECTS: Mapping[str, Dialect] = {
    "dflash-draft": LUCEBOX,
    "qwen35-dflash-draft": LUCEBOX,
    "dflash": LLAMA_CPP,
}


@dataclass(frozen=True, slots=True)
class DraftParameters:
    """The numbers that define a DFlash draft.

    Attributes:
        arch: ``general.architecture``.
        n_layer: its own layers.
        n_embd: width of its residual stream, and of its target's.
        n_ff, n_head, n_head_kv, head_dim, value_dim: as of a model.
        rope_base: base of the rotary frequencies, over whole heads.
        rms_eps: epsilon of the RMS norms.
        block_size: rows of the block it was made for: an anchor and masks.
        mask_id: the token that stands for one that is not known yet.
        n_features: target layers whose output it reads.
        target_layers: these layers of the target, from 0 on; () when the file does not name them.
        n_vocab: tokens of the target, None when the file does not say.
        window: how many positions rows of sliding layers see, themselves included.
        sliding: its layers whose rows see so many positions back, and nothing behind themselves.
        causal: whether all layers see of the block only what is not behind them.
        fc, hidden_norm: the names of these tensors.
        ffn_norm: the last part of this norm's name.
        n_own_ids: rows of an output matrix of its own, None: it uses the target's.
        own_embedding: whether it has one; else it uses the target's.
        mapped: whether rows of its output matrix stand for the ids in tensor `d2t`.
        heads: what it has beyond DFlash.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    rope_base: float
    rms_eps: float
    block_size: int
    mask_id: int
    n_features: int
    target_layers: tuple[int, ...]
    n_vocab: int | None
    window: int
    sliding: frozenset[int]
    causal: bool
    fc: str
    hidden_norm: str
    ffn_norm: str
    n_own_ids: int | None
    own_embedding: bool
    mapped: bool
    heads: DraftHeads

    @property
    def first_row(self) -> int:
        """The first row of a block that predicts: 0 when the anchor's predicts the token behind it."""
        markov = self.heads.markov
        return 0 if markov is not None and markov.from_anchor else 1

    @property
    def look_ahead(self) -> int:
        """Most positions behind the anchor that a block predicts."""
        return self.block_size - self.first_row


class DraftFile(GgufFile):
    """A GGUF file with a draft.

    Attributes:
        parameters: of the draft.
    """

    memory_tag = "draft"

    def __init__(self, file: GgufFile, parameters: DraftParameters) -> None:
        super().__init__(file.path, file._data, file.header)
        self.parameters = parameters

    def __enter__(self) -> DraftFile:
        return self


def open_draft(path: str | os.PathLike[str]) -> DraftFile:
    """Open a draft and check all that can be checked without its target.

    Raises:
        ModelError: it is no draft that slotd can run: the message names key or tensor.
    """
    file = open_gguf(path)
    parameters = read_draft_parameters(file.header)
    names = _check_tensors(file.header, parameters)
    if parameters.mapped and file.block_type(OWN_IDS).name not in _INTEGERS:
        raise ModelError(f"{file.path}: tensor {OWN_IDS} must be of integers")
    numbers = [name for name in names if name != OWN_IDS]
    check_types(file, numbers)
    check_vectors(file, numbers)
    return DraftFile(file, parameters)


def read_draft_parameters(header: Header) -> DraftParameters:
    """The parameters of a draft. Raises ModelError: a key is missing, of the wrong type or out of range."""
    arch = header.string("general.architecture")
    dialect = DIALECTS.get(arch)
    if dialect is None:
        known = ", ".join(sorted(DIALECTS))
        raise ModelError(f"{header.name}: architecture {arch!r} is not a draft (supported: {known})")
    _refuse_unsupported(header)
    keys = Keys(header, arch)
    n_layer, n_embd, n_head = (
        keys.positive(key) for key in ("block_count", "embedding_length", "attention.head_count")
    )
    if n_layer > len(header.tensors):
        raise keys.refuse("block_count", n_layer, f"the file has only {len(header.tensors)} tensors")
    shared = n_embd // n_head if n_embd % n_head == 0 else None
    fc, hidden_norm = (_one_of(header, names) for names in (dialect.fc, dialect.hidden_norm))
    n_features = _count_features(header, fc, n_embd)
    window, sliding = _sliding(keys, n_layer)
    output = header.tensors.get(OUTPUT)
    parameters = DraftParameters(
        arch=arch,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=keys.positive("feed_forward_length"),
        n_head=n_head,
        n_head_kv=keys.positive("attention.head_count_kv", n_head),
        head_dim=keys.positive("attention.key_length", shared),
        value_dim=keys.positive("attention.value_length", shared),
        rope_base=keys.positive_number("rope.freq_base"),  # a wrong one loads well and is never right
        rms_eps=keys.positive_number("attention.layer_norm_rms_epsilon"),
        block_size=keys.positive(f"{dialect.prefix}block_size"),
        mask_id=_mask_id(keys, dialect),
        n_features=n_features,
        target_layers=_target_layers(keys, dialect, n_features),
        n_vocab=_n_vocab(keys),
        window=window,
        sliding=sliding,
        causal=header.flag(f"{arch}.attention.causal", False),
        fc=fc,
        hidden_norm=hidden_norm,
        ffn_norm="ffn_norm" if "blk.0.ffn_norm.weight" in header.tensors else "post_attention_norm",
        n_own_ids=None if output is None else output.shape[-1],
        own_embedding=EMBEDDING in header.tensors,
        mapped=OWN_IDS in header.tensors,
        heads=read_heads(keys, dialect.prefix, n_embd),
    )
    if parameters.n_head % parameters.n_head_kv:
        raise keys.refuse("attention.head_count_kv", parameters.n_head_kv, f"it must divide {n_head}")
    if not 2 <= parameters.block_size <= MOST_ROWS:
        size = parameters.block_size
        raise keys.refuse(f"{dialect.prefix}block_size", size, f"the limit is 2 to {MOST_ROWS}")
    return parameters


def target_layers(draft: DraftParameters, n_layer: int) -> tuple[int, ...]:
    """The layers of a target with n_layer layers whose outputs the draft reads, in its order.

    A file that does not name them follows the rule of the first drafts: one layer in the middle, or evenly
    spaced from the second to the third last.
    """
    if draft.target_layers:
        return draft.target_layers
    n = draft.n_features
    if n == 1:
        return (n_layer // 2,)
    return tuple(round(1 + i * (n_layer - 4) / (n - 1)) for i in range(n))


def check_fit(file: DraftFile, target: HyperParameters) -> None:
    """Raises ModelError when the draft was not made for such a target: the message says what differs."""
    draft = file.parameters

    def refuse(what: str) -> ModelError:
        return ModelError(f"{file.path}: the draft does not fit the target: {what}")

    if draft.n_embd != target.n_embd:
        raise refuse(f"its hidden size is {draft.n_embd}, the target's is {target.n_embd}")
    outside = [layer for layer in target_layers(draft, target.n_layer) if not 0 <= layer < target.n_layer]
    if outside:
        raise refuse(f"it reads target layer {outside[0]}, the target has {target.n_layer} layers")
    if draft.n_vocab not in (None, target.n_vocab):
        raise refuse(f"its vocabulary has {draft.n_vocab} tokens, the target's {target.n_vocab}")
    if draft.n_own_ids is not None and not draft.mapped and draft.n_own_ids != target.n_vocab:
        raise refuse(f"its output matrix has {draft.n_own_ids} rows, the target {target.n_vocab} tokens")
    ids = own_ids(file)
    if ids is not None and ids.max() >= target.n_vocab:
        raise refuse(f"its output matrix gives token {ids.max()}, the target has {target.n_vocab} tokens")
    rows = _tokens_in(file.header, draft)
    if rows not in (0, target.n_vocab):
        raise refuse(f"its tables have {rows} rows, the target {target.n_vocab} tokens")
    if draft.mask_id >= target.n_vocab:
        raise refuse(f"its mask token is {draft.mask_id}, the target has {target.n_vocab} tokens")


# ----- keys


def _refuse_unsupported(header: Header) -> None:
    for name in header.tensors:
        for part, what in _UNSUPPORTED.items():
            if part in name:
                raise ModelError(f"{header.name}: tensor {name}: {what} of a draft is not supported")
    arch = header.string("general.architecture")
    for key in ("dflash.context_kv_layer_norm", "context_kv_layer_norm"):
        if header.flag(f"{arch}.{key}", False):
            raise ModelError(f"{header.name}: key {arch}.{key} is true, only false is supported")
    for key, neutral in (
        ("logit_scale", (1, 0)), ("embedding_scale", (1, 0)), ("final_logit_softcapping", (0,)),
    ):  # fmt: skip
        value = header.number(f"{arch}.{key}", neutral[0])
        if value not in neutral:
            raise ModelError(f"{header.name}: key {arch}.{key} is {value:g}, only {neutral[0]} is supported")
    scaling = header.string(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(
            f"{header.name}: key {arch}.rope.scaling.type is {scaling!r}, only 'none' is supported"
        )


def _one_of(header: Header, names: tuple[str, ...]) -> str:
    for name in names:
        if name in header.tensors:
            return name
    raise ModelError(f"{header.name}: tensor {names[0]} is missing")


def _count_features(header: Header, fc: str, n_embd: int) -> int:
    n_in = header.tensors[fc].shape[0]
    if n_in % n_embd:
        raise ModelError(
            f"{header.name}: tensor {fc} has {n_in} columns, no multiple of the hidden size {n_embd}"
        )
    return n_in // n_embd


def _target_layers(keys: Keys, dialect: Dialect, n_features: int) -> tuple[int, ...]:
    suffix = f"{dialect.prefix}{dialect.layer_key}"
    claimed = keys.count(f"{dialect.prefix}n_target_layers", n_features)
    if claimed != n_features:
        log.warning(
            "%s: key %s.%sn_target_layers is %d, the weights are for %d: the weights count",
            keys.header.name, keys.arch, dialect.prefix, claimed, n_features,
        )  # fmt: skip
    layers = keys.header.integers(f"{keys.arch}.{suffix}", [])
    if layers and len(layers) != n_features:
        raise keys.refuse(suffix, layers, f"the weights read {n_features} layers")
    if len(set(layers)) != len(layers) or any(layer < dialect.first_layer for layer in layers):
        raise keys.refuse(suffix, layers, f"they must be different, from {dialect.first_layer} on")
    return tuple(layer - dialect.first_layer for layer in layers)


def _mask_id(keys: Keys, dialect: Dialect) -> int:
    """Newer files of llama.cpp name it with the tokenizer."""
    tokenizer_key = "tokenizer.ggml.mask_token_id"
    if dialect is LLAMA_CPP and tokenizer_key in keys.header.metadata:
        return keys.header.integer(tokenizer_key)
    return keys.count(f"{dialect.prefix}mask_token_id")


def _n_vocab(keys: Keys) -> int | None:
    if f"{keys.arch}.vocab_size" in keys.header.metadata:
        return keys.positive("vocab_size")
    tokens = keys.header.strings(TOKENS_KEY, [])
    return len(tokens) or None


def _sliding(keys: Keys, n_layer: int) -> tuple[int, frozenset[int]]:
    """The window, and the layers that have it: all, those marked, or all but every so many-th."""
    window = keys.count("attention.sliding_window", 0)
    suffix = "attention.sliding_window_pattern"
    pattern = keys.header.metadata.get(f"{keys.arch}.{suffix}")
    if not window:
        return 0, frozenset()
    if pattern is None:
        return window, frozenset(range(n_layer))
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        every = keys.positive(suffix)
        return window, frozenset(i for i in range(n_layer) if every == 1 or (i + 1) % every)
    if isinstance(pattern, str | float | bool) or len(pattern) != n_layer:
        raise keys.refuse(suffix, pattern, f"it must be a number, or say it for each of {n_layer} layers")
    return window, frozenset(i for i, marked in enumerate(pattern) if marked)


# ----- tensors


def expected_draft_tensors(draft: DraftParameters, n_vocab: int) -> dict[str, Shape]:
    """Every tensor of such a draft, with its shape. n_vocab: tokens of the target."""
    n_embd, d = draft.n_embd, draft
    shapes: dict[str, Shape] = {
        d.fc: (d.n_features * n_embd, n_embd), d.hidden_norm: (n_embd,), OUTPUT_NORM: (n_embd,)
    }  # fmt: skip
    if d.own_embedding:
        shapes[EMBEDDING] = (n_embd, n_vocab)
    if d.n_own_ids is not None:
        shapes[OUTPUT] = (n_embd, d.n_own_ids)
        if d.mapped:
            shapes[OWN_IDS] = (d.n_own_ids,)
    layer = {
        "attn_norm": (n_embd,), "attn_q_norm": (d.head_dim,), "attn_k_norm": (d.head_dim,),
        "attn_q": (n_embd, d.n_head * d.head_dim), "attn_k": (n_embd, d.n_head_kv * d.head_dim),
        "attn_v": (n_embd, d.n_head_kv * d.value_dim), "attn_output": (d.n_head * d.value_dim, n_embd),
        d.ffn_norm: (n_embd,), "ffn_gate": (n_embd, d.n_ff), "ffn_up": (n_embd, d.n_ff),
        "ffn_down": (d.n_ff, n_embd),
    }  # fmt: skip
    for i in range(d.n_layer):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | d.heads.tensors(d.n_layer, n_embd, n_vocab, d.n_own_ids or n_vocab)


def _tokens_in(header: Header, draft: DraftParameters) -> int:
    """Tokens of the target, as the tables of the file or its keys have them; 0: nothing depends on it."""
    tables = [draft.heads.selector, draft.heads.markov]
    names = [EMBEDDING] if draft.own_embedding else [table.before for table in tables if table is not None]
    return header.tensors[names[0]].shape[-1] if names else 0


def _without_ones(shape: Shape) -> Shape:
    """Dimensions of 1 at the end are left out by some writers."""
    return _without_ones(shape[:-1]) if shape and shape[-1] == 1 else shape


def _check_tensors(header: Header, draft: DraftParameters) -> dict[str, Shape]:
    """The tensors of the draft. Raises ModelError unless the file has exactly these, each in its shape."""
    expected = expected_draft_tensors(draft, _tokens_in(header, draft))
    missing = [name for name in expected if name not in header.tensors]
    if missing:
        raise ModelError(f"{header.name}: tensor {missing[0]} is missing")
    for name, info in header.tensors.items():
        if name not in expected:
            raise ModelError(f"{header.name}: tensor {name} is not part of a draft")
        if _without_ones(info.shape) != _without_ones(expected[name]):
            found, wanted = list(info.shape), list(expected[name])
            raise ModelError(f"{header.name}: tensor {name} has shape {found}, it must be {wanted}")
    return expected


def own_ids(file: DraftFile) -> npt.NDArray[np.int32] | None:
    """Tokens of the target that rows of the draft's output matrix stand for; None: row i is token i.

    Files hold the ids themselves, or what is to be added to the number of the row. Rows are in ascending
    order of their ids, so what does not ascend are differences.

    Raises:
        ModelError: ids that are negative, or two rows with the same.
    """
    if not file.parameters.mapped:
        return None
    stored = file.tensor(OWN_IDS).view(_INTEGERS[file.block_type(OWN_IDS).name]).astype(np.int64)
    ids = stored if (np.diff(stored) > 0).all() else stored + np.arange(len(stored))
    if ids.min() < 0 or len(np.unique(ids)) != len(ids):
        raise ModelError(f"{file.path}: tensor {OWN_IDS} does not give each row an id of its own")
    return ids.astype(np.int32)
