"""What the ops need to know of a call: positions, where K/V of each row go, what each row attends to.

Everything here is worked out once for a call and used in every layer. All K/V arrays are views of the page
storage; "tile" and "page" are the same 64 places, seen by attention and by the accounting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.recurrent_state import RecurrentSpan

#: Places of an attention tile: position p sits in column p % TILE of its tile.
TILE = 64

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles that lie one behind the other in storage.

    Attributes:
        first: number of the first tile in its sequence.
        k: [n_layer, tiles, n_head_kv, TILE, items of a key], as stored (see kv_blocks).
        v: [n_layer, tiles, n_head_kv, TILE, items of a value].
    """

    first: int
    k: Array
    v: Array

    @property
    def stop(self) -> int:
        """Number of the tile behind the last one."""
        return self.first + len(self.k[0])


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of the call whose places are next to each other in one page.

    Attributes:
        start: first row of the call.
        stop: row behind the last one.
        k: [n_layer, n_head_kv, stop - start, items of a key], where their keys go.
        v: [n_layer, n_head_kv, stop - start, items of a value].
    """

    start: int
    stop: int
    k: Array
    v: Array


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence.

    Attributes:
        start: its first row in the call.
        positions: int64 [n], the last place that each row sees: its own position where places are positions.
        runs: tiles of all its places, committed and of this call, in order.
        pieces: where K/V of the rows are written.
        shared: tiles that all rows read where they lie; they hold no place that a row must not see, save
            behind its own position.
        tail: None for a chain. For a tree int64 [n, tail tiles * TILE]: for each row and position behind
            the shared tiles the place that holds it, counted from the first place behind the shared tiles.
            Position C + i (C = committed length) is the row's ancestor at depth i.
        recurrent: for models with recurrent layers.
        lowest: int64 [n], the first place that each row sees; None: the first there is.
    """

    start: int
    positions: npt.NDArray[np.int64]
    runs: tuple[Run, ...]
    pieces: tuple[Piece, ...]
    shared: int
    tail: npt.NDArray[np.int64] | None
    recurrent: RecurrentSpan | None = None
    lowest: npt.NDArray[np.int64] | None = None

    def tiles(self, first: int, stop: int) -> Iterator[tuple[int, int, Run, slice]]:
        """Runs that cover tiles first..stop-1: (tile, tile behind, run, its tiles of them)."""
        for run in self.runs:
            begin, end = max(first, run.first), min(stop, run.stop)
            if begin < end:
                yield begin, end, run, slice(begin - run.first, end - run.first)


@dataclass(frozen=True, slots=True)
class Batch:
    """One call.

    Attributes:
        tokens: int32 [n].
        positions: int64 [n], what rows are rotated for.
        spans: the rows of each sequence, in call order.
        plans: what a backend works out once for the call and uses in every layer; empty at first.
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    spans: tuple[Span, ...]
    plans: dict[object, Any] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)
