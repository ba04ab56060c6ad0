"""Rows: what one forward call computes (design: "the one primitive").

A row is one token to be computed. Its parent is an earlier row of the same call or the committed end of
its sequence; its position follows from that. Rows of several sequences may stand side by side in a call.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slotd.daemon.sequence import Sequence

#: Most rows of one step call, all sequences together: an ancestor mask is one 64-bit word.
MAX_STEP_ROWS = 64

#: Parent of a row that follows the committed end of its sequence.
COMMITTED_END = -1


class Kind(enum.Enum):
    """prompt: one chain of any length per sequence. step: at most 64 rows in all, chains or trees."""

    PROMPT = "prompt"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one call, in call order; rows of one sequence are adjacent.

    Attributes:
        tokens: int32 [n], token ids.
        sequences: the sequences of this call, each once.
        owner: int32 [n], index into `sequences`, ascending.
        parents: int32 [n], index of an earlier row of the same sequence, or COMMITTED_END.
        depths: int32 [n], number of ancestors among the rows; position = committed length + depth.
        logits: bool [n], whether the row's logits are wanted.
    """

    tokens: npt.NDArray[np.int32]
    sequences: tuple[Sequence, ...]
    owner: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]
    logits: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, sequence: Sequence, tokens: SequenceOf[int], *, logits: str = "last") -> Rows:
        """One row after the other behind the committed end. logits: "last", "all" or "none"."""
        n = len(tokens)
        wanted = np.full(n, logits == "all")
        if n and logits == "last":
            wanted[-1] = True
        index = np.arange(n, dtype=np.int32)
        return cls(
            tokens=np.asarray(tokens, dtype=np.int32),
            sequences=(sequence,),
            owner=np.zeros(n, dtype=np.int32),
            parents=index - 1,  # the first one's is COMMITTED_END
            depths=index,
            logits=wanted,
        )

    @classmethod
    def next_tokens(cls, sequences: SequenceOf[Sequence], tokens: SequenceOf[int]) -> Rows:
        """One row behind the committed end of each sequence, logits wanted everywhere: plain decoding."""
        n = len(tokens)
        return cls(
            tokens=np.array(tokens, dtype=np.int32),
            sequences=tuple(sequences),
            owner=np.arange(n, dtype=np.int32),
            parents=np.full(n, COMMITTED_END, dtype=np.int32),
            depths=np.zeros(n, dtype=np.int32),
            logits=np.ones(n, dtype=np.bool_),
        )

    @classmethod
    def tree(cls, sequence: Sequence, tokens: SequenceOf[int], parents: SequenceOf[int]) -> Rows:
        """A tree behind the committed end, logits wanted everywhere.

        Raises:
            ValueError: a parent that is not an earlier row.
        """
        depths = np.zeros(len(tokens), dtype=np.int32)
        for row, parent in enumerate(parents):
            if not COMMITTED_END <= parent < row:
                raise ValueError(f"row {row} has parent {parent}, which is not an earlier row")
            depths[row] = 0 if parent == COMMITTED_END else depths[parent] + 1
        return cls(
            tokens=np.asarray(tokens, dtype=np.int32),
            sequences=(sequence,),
            owner=np.zeros(len(tokens), dtype=np.int32),
            parents=np.asarray(parents, dtype=np.int32),
            depths=depths,
            logits=np.ones(len(tokens), dtype=np.bool_),
        )

    @classmethod
    def join(cls, parts: SequenceOf[Rows]) -> Rows:
        """Rows of different sequences side by side in one call."""
        if len(parts) == 1:
            return parts[0]
        counts = [len(part) for part in parts]
        starts = np.cumsum([0, *counts[:-1]], dtype=np.int32)
        firsts = np.cumsum([0, *(len(part.sequences) for part in parts[:-1])], dtype=np.int32)
        parents = np.concatenate([part.parents for part in parts])
        inside = parents >= 0
        parents[inside] += np.repeat(starts, counts)[inside]
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            sequences=tuple(sequence for part in parts for sequence in part.sequences),
            owner=np.concatenate([part.owner for part in parts]) + np.repeat(firsts, counts),
            parents=parents,
            depths=np.concatenate([part.depths for part in parts]),
            logits=np.concatenate([part.logits for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class OpenRows:
    """The open forward of one sequence: its rows are start .. start+n-1 of the call.

    Attributes:
        start: first of them.
        tokens: int32 [n].
        parents: int32 [n], counted in the call, as a path is.
        kind: of the call.
    """

    start: int
    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    kind: Kind
