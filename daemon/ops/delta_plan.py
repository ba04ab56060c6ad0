"""How the rows of a prompt call go through the delta rule: which in the chunked form, which one by one.

Blocks of 64 rows that begin at absolute multiples of 64 take the chunked form, so that where a prompt is cut
into pieces, at such multiples, changes nothing. The rows in front of the first whole block of a piece and
those behind its last one are chains for the recurrent form. Several sequences go side by side in each launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

#: Rows of a block.
BLOCK = 64

#: Blocks of a launch, all sequences together: what one leaves for the next is read while it is in the cache.
MOST_BLOCKS = 16

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence in a prompt call.

    Attributes:
        first: its first row in the call.
        n_rows: how many.
        committed: tokens in front of them.
        read: address of the state there, 0 = all zero.
        write: address where the one behind the rows goes, another one.
    """

    first: int
    n_rows: int
    committed: int
    read: int
    write: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Chains of at most 64 rows, or whole blocks.

    Attributes:
        pieces: one for each sequence; `first` and `n_rows` count rows, or blocks in `first_rows`.
        first_rows: of each block its first row; None: chains.
        early: whether the states were there before the call.
    """

    pieces: tuple[Piece, ...]
    first_rows: tuple[int, ...] | None
    early: bool

    @property
    def n_blocks(self) -> int:
        """Whole blocks."""
        return len(self.first_rows or ())

    @property
    def most_rows(self) -> int:
        """Of a sequence."""
        return max(piece.n_rows for piece in self.pieces)


def plan_prompt(
    pieces: Sequence[Piece], *, chunked: bool = True, most_blocks: int = MOST_BLOCKS
) -> list[Launch]:
    """The launches of a call, in order. chunked: False where the device has no room for the chunked form."""
    fronts, rests = [], []
    for piece in pieces:
        front = min(piece.n_rows, -piece.committed % BLOCK)
        if front:
            fronts.append(replace(piece, n_rows=front))
            piece = _behind(piece, front)
        rests.append(piece)
    launches = [Launch(tuple(fronts), None, early=True)] if fronts else []
    groups = list(_groups(rests, most_blocks)) if chunked else _turns(rests)
    launches += [launch for launch in groups if launch.pieces]
    ends = [_behind(rest, rest.n_rows // BLOCK * BLOCK) for rest in rests if rest.n_rows % BLOCK]
    if ends:
        launches.append(Launch(tuple(ends), None, early=not launches))
    return launches


def _behind(piece: Piece, n: int) -> Piece:
    """The rows behind the first n, which have left their state."""
    return Piece(
        piece.first + n, piece.n_rows - n, piece.committed + n, piece.write if n else piece.read, piece.write
    )


def _groups(pieces: Sequence[Piece], most_blocks: int) -> Iterator[Launch]:
    """Whole blocks, sequence after sequence, up to most_blocks in a launch."""
    parts: list[Piece] = []
    first_rows: list[int] = []
    for rest in pieces:
        while rest.n_rows >= BLOCK:
            n = min(rest.n_rows // BLOCK, most_blocks - len(first_rows))
            parts.append(replace(rest, first=len(first_rows), n_rows=n))
            first_rows += [rest.first + BLOCK * i for i in range(n)]
            rest = _behind(rest, n * BLOCK)
            if len(first_rows) == most_blocks:
                yield Launch(tuple(parts), tuple(first_rows), early=False)
                parts, first_rows = [], []
    yield Launch(tuple(parts), tuple(first_rows), early=False)


def _turns(pieces: Sequence[Piece]) -> list[Launch]:
    """Blocks as chains: the first one of every sequence, then the second ones, ..."""
    turns = max((piece.n_rows // BLOCK for piece in pieces), default=0)
    launches = []
    for turn in range(turns):
        rests = [_behind(piece, turn * BLOCK) for piece in pieces if piece.n_rows >= (turn + 1) * BLOCK]
        launches.append(Launch(tuple(replace(rest, n_rows=BLOCK) for rest in rests), None, early=False))
    return launches


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the tables of a launch lie in a buffer, bytes: `cuda_delta.Sequences`, and `first_rows`."""

    read: int
    write: int
    first: int
    n_rows: int
    count: int
    first_rows: int


def pack_tables(launches: Sequence[Launch]) -> tuple[npt.NDArray[np.uint8], list[Tables]]:
    """The tables of all launches as one buffer, and where each one's lie."""
    data = bytearray()

    def put(values: Sequence[int], dtype: type[np.generic]) -> int:
        at = len(data)
        data.extend(np.array(values, dtype).tobytes())
        data.extend(bytes(-len(data) % _ALIGNMENT))
        return at

    tables = [
        Tables(
            put([piece.read for piece in launch.pieces], np.uint64),
            put([piece.write for piece in launch.pieces], np.uint64),
            put([piece.first for piece in launch.pieces], np.int32),
            put([piece.n_rows for piece in launch.pieces], np.int32),
            put([len(launch.pieces)], np.int32),
            put(launch.first_rows or (), np.int32),
        )
        for launch in launches
    ]
    return np.frombuffer(bytes(data), np.uint8), tables
