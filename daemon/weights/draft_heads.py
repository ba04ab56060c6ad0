"""What some drafts have beyond DFlash: their tensors say so, under the names of either dialect.

DFlash2: convolutions along the block around both parts of each layer, and a selector that weighs pairs of
neighbouring tokens. DSpark: a low-rank table of pairs (Markov), and a confidence in each position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slotd.daemon.weights.architectures import Shape
from slotd.daemon.weights.keys import Keys
from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header

#: Candidates of a position that a selector weighs, where the file does not say.
TOP_K = 16


@dataclass(frozen=True, slots=True)
class BlockConv:
    """Of DFlash2: each row is mixed with those before it in its block.

    Attributes:
        kernel: taps, the first one is the row's own.
        groups: groups of channels, each with coefficients of its own.
        attn_base, attn_proj, ffn_base, ffn_proj: last parts of the tensors' names in a layer.
    """

    kernel: int
    groups: int
    attn_base: str
    attn_proj: str
    ffn_base: str
    ffn_proj: str


@dataclass(frozen=True, slots=True)
class Selector:
    """Of DFlash2.

    Attributes:
        top_k: candidates of each position.
        rank: width of the tables.
        before, behind, hidden: names of the tables [n_vocab, rank] and of the product [rank, n_embd].
    """

    top_k: int
    rank: int
    before: str
    behind: str
    hidden: str


@dataclass(frozen=True, slots=True)
class Markov:
    """Of DSpark.

    Attributes:
        rank: width of the tables.
        from_anchor: whether row 0 of a block, the anchor, predicts the token behind it, and so on; else row
            i predicts the token of its own position.
        before, behind: names of the tables, [n_vocab, rank] and [rows of the output matrix, rank].
        confidence, bias: names of the weights [n_embd + rank] and the constant; None: there are none.
    """

    rank: int
    from_anchor: bool
    before: str
    behind: str
    confidence: str | None
    bias: str | None


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """What a draft has of them.

    Attributes:
        conv, selector, markov: None: not there.
    """

    conv: BlockConv | None = None
    selector: Selector | None = None
    markov: Markov | None = None

    def __bool__(self) -> bool:
        return any((self.conv, self.selector, self.markov))

    def __str__(self) -> str:
        return "the DSpark head" if self.markov else "the DFlash2 head" if self else "no head"

    def tensors(self, n_layer: int, n_embd: int, n_vocab: int, n_rows: int) -> dict[str, Shape]:
        """Their tensors. n_vocab: tokens of the target; n_rows: of the draft's output matrix."""
        shapes: dict[str, Shape] = {}
        if self.conv is not None:
            c = self.conv
            for i in range(n_layer):
                for base, proj in ((c.attn_base, c.attn_proj), (c.ffn_base, c.ffn_proj)):
                    shapes[f"blk.{i}.{base}"] = (n_embd, c.kernel, 2)
                    shapes[f"blk.{i}.{proj}"] = (n_embd, 2 * c.kernel * c.groups)
        if self.selector is not None:
            s = self.selector
            shapes |= {s.before: (s.rank, n_vocab), s.behind: (s.rank, n_vocab), s.hidden: (n_embd, s.rank)}
        if self.markov is not None:
            m = self.markov
            shapes |= {m.before: (m.rank, n_vocab), m.behind: (m.rank, n_rows)}
            if m.confidence is not None:
                shapes[m.confidence] = (n_embd + m.rank, 1)
            if m.bias is not None:
                shapes[m.bias] = (1,)
        return shapes


def read_heads(keys: Keys, prefix: str, n_embd: int) -> DraftHeads:
    """The heads of a draft. prefix: of keys that only drafts have.

    Raises:
        ModelError: a part of one is missing, or of a shape that cannot be.
    """
    header = keys.header
    return DraftHeads(_conv(header, n_embd), _selector(keys, header, prefix), _markov(keys, header, prefix))


def _conv(header: Header, n_embd: int) -> BlockConv | None:
    names = {
        part: _find(header, f"blk.0.{part}", f"blk.0.{part}.weight")
        for part in ("attn_conv_base", "attn_conv_proj", "ffn_conv_base", "ffn_conv_proj")
    }
    found = _all_or_none(header, names, "DFlash2 convolutions")
    if found is None:
        return None
    base, proj = (header.tensors[found[name]].shape for name in ("attn_conv_base", "attn_conv_proj"))
    kernel = base[1] if len(base) == 3 else 0
    groups = proj[-1] // (2 * kernel) if kernel else 0
    if not groups or n_embd % groups:
        raise ModelError(
            f"{header.name}: tensor {found['attn_conv_proj']}: its groups do not divide {n_embd}"
        )
    return BlockConv(kernel, groups, *(name.removeprefix("blk.0.") for name in found.values()))


def _selector(keys: Keys, header: Header, prefix: str) -> Selector | None:
    names = {
        "before": _find(header, "selector_predecessor.weight", "selector_prev.weight"),
        "behind": _find(header, "selector_successor.weight", "selector_next.weight"),
        "hidden": _find(header, "selector_hidden.weight"),
    }
    found = _all_or_none(header, names, "the DFlash2 path selector")
    if found is None:
        return None
    top_k = keys.positive(f"{prefix}selector_top_k", TOP_K)
    return Selector(top_k, header.tensors[found["hidden"]].shape[-1], **found)


def _markov(keys: Keys, header: Header, prefix: str) -> Markov | None:
    own = "dflash.dspark.markov"
    names = {
        "before": _find(header, "markov_w1.weight", f"{own}.w1", f"{own}.w1.weight"),
        "behind": _find(header, "markov_w2.weight", f"{own}.w2", f"{own}.w2.weight"),
    }
    confidence, bias = (
        _find(header, f"conf_proj.{part}", f"dflash.dspark.confidence.{part}") for part in ("weight", "bias")
    )
    found = _all_or_none(header, names, "the DSpark head")
    if found is None:
        return None
    from_anchor = header.flag(f"{keys.arch}.{prefix}sample_from_anchor", True)
    rank = header.tensors[found["before"]].shape[0]
    return Markov(rank, from_anchor, **found, confidence=confidence, bias=bias)


def _find(header: Header, *names: str) -> str | None:
    return next((name for name in names if name in header.tensors), None)


def _all_or_none(header: Header, names: Mapping[str, str | None], what: str) -> dict[str, str] | None:
    found = {part: name for part, name in names.items() if name is not None}
    if not found:
        return None
    missing = [part for part in names if part not in found]
    if missing:
        raise ModelError(f"{header.name}: {what} of the draft is incomplete: there is no {missing[0]}")
    return found
