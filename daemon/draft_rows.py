"""What a draft computes: committed rows become its context, blocks stand behind it, proposals come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Committed rows of one sequence whose features become context of the draft.

    Attributes:
        pages: page table of the context; the pages of these rows are there and private.
        place: where the first row goes, the others behind it.
        position: of the first row in its sequence.
        rows: int64 [m], the rows in the last call of the target.
        features: what `DraftRunner.take` gave for them, in order; then `rows` are no rows of that call.
    """

    pages: list[int]
    place: int
    position: int
    rows: npt.NDArray[np.int64]
    features: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Where the block of one sequence is computed.

    Attributes:
        pages: page table of the context; the pages of the block are there and private.
        length: places of the context; the first row of the block goes behind them.
        position: of the first row in its sequence.
        token: the pending one, of the first row.
    """

    pages: list[int]
    length: int
    position: int
    token: int


@dataclass(frozen=True, slots=True)
class Proposals:
    """What the draft finds best behind the pending tokens of m sequences.

    Attributes:
        ids: int32 [m, L, K], for each sequence and each of the next L positions, best first.
        logprobs: float32 [m, L, K], logarithms of their probabilities among all tokens, descending.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
