"""A call as the CUDA kernels read it: one buffer, filled on the host and copied in one piece.

`BatchLayout` says where each array lies for given capacities; a captured graph keeps these addresses, so what
changes from step to step is content only. `pack_step` and `pack_prompt` fill a host buffer from rows and page
addresses. Rows beyond those of the call are padding: position -1, no place, no work.

Step attention gets a work list. Tiles wholly below the committed end are the same for all rows of a sequence:
SHARED entries, for as many rows as one block of threads takes. They have up to eight tiles (one split of
512 positions), or one tile while there are so few that the device would not be filled. The one or two tiles
behind are work for each row: TAIL, or GATHERED when the row's ancestors are not simply the rows before it.
Each entry leaves one part for each of its rows; a row's parts are numbered splits first, then single tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.batch import TILE
from slotd.daemon.row_checks import row_counts
from slotd.daemon.rows import COMMITTED_END, MAX_STEP_ROWS, Rows

#: Tiles of a split.
SPLIT_TILES = 8

#: (row, head of one kv head) pairs that a block of threads takes, in the narrow and the wide step kernel.
NARROW_QUERIES, WIDE_QUERIES = 16, 128

#: Rows of a block of prompt attention.
PROMPT_BLOCK_ROWS = 128

#: Sequences of one call.
MOST_SEQUENCES = 64

INERT, SHARED, TAIL, GATHERED = range(4)

#: A token that the step before has yet to choose.
TAKE = -2

#: Columns of an entry of the work list.
ENTRY = ("kind", "first_row", "n_rows", "first_page", "first_tile", "n_tiles", "committed", "part")

#: Columns of a block of prompt rows.
BLOCK = ("first_row", "n_rows", "first_page", "position")

_ALIGNMENT = 16

#: Addresses of a sequence's pages in layer 0, head 0, place 0, of K and of V: uint64 [2, pages].
PageAddresses = npt.NDArray[np.uint64]

Views = dict[str, npt.NDArray[Any]]


def is_wide(n_rows: int, per_group: int) -> bool:
    """Whether a bucket of n_rows rows, per_group query heads of a kv head, is for the wide step kernel."""
    return n_rows * per_group > NARROW_QUERIES


def rows_at_once(n_rows: int, per_group: int) -> int:
    """Rows of a SHARED entry in a bucket of n_rows rows. The heads of a row stay together."""
    return (WIDE_QUERIES if is_wide(n_rows, per_group) else NARROW_QUERIES) // per_group


@dataclass(frozen=True, slots=True)
class Packed:
    """What a packed call needs of the kernels.

    Attributes:
        n_rows: rows of the call, without padding.
        n_entries: entries of the work list, or blocks of prompt rows.
        n_parts: parts that step attention leaves, 0 for a prompt.
        context: positions that the longest sequence of the call reaches.
    """

    n_rows: int
    n_entries: int
    n_parts: int
    context: int


@dataclass(frozen=True)
class BatchLayout:
    """Where the arrays of a call lie in its buffer.

    Attributes:
        step: whether it is for step rows, else for prompt rows.
        rows: capacity; a step's row bucket.
        pages: capacity, of all sequences of the call together.
        entries: capacity of the work list, or of blocks of prompt rows.
        context: tokens that the longest sequence may have, rows of the call included.
        most_single: up to so many tiles below the committed ends are entries of their own.
        blocks: whether what a row sees is not told by its position (`cuda_blocks`).
    """

    step: bool
    rows: int
    pages: int
    entries: int
    context: int
    most_single: int = 0
    blocks: bool = False

    @classmethod
    def for_steps(
        cls, rows: int, pages: int, context: int, per_group: int, most_single: int = 0
    ) -> BatchLayout:
        """Room for every step of up to `rows` rows on `pages` pages, per_group query heads for a kv head."""
        if rows > MAX_STEP_ROWS:
            raise ValueError(f"{rows} rows in a step, the limit is {MAX_STEP_ROWS}")
        groups = math.ceil(rows / rows_at_once(rows, per_group))
        shared = max((pages // SPLIT_TILES + rows) * groups, min(pages * groups, most_single))
        return cls(True, rows, pages, shared + 2 * rows, context, most_single)

    @classmethod
    def for_prompt(cls, rows: int, pages: int, context: int) -> BatchLayout:
        """Room for a prompt piece of up to `rows` rows, of several sequences together."""
        return cls(False, rows, pages, rows // PROMPT_BLOCK_ROWS + min(rows, MOST_SEQUENCES), context)

    @property
    def most_parts(self) -> int:
        """Parts that the rows of a step leave at most."""
        tiles = min(self.pages, math.ceil(self.context / TILE))
        return self.rows * (max(math.ceil(tiles / SPLIT_TILES), min(tiles, self.most_single)) + 2)

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]:
        """Name -> (offset in bytes, shape, dtype). All offsets are multiples of 16."""
        n, s, i32, u64 = self.rows, MOST_SEQUENCES, np.dtype(np.int32), np.dtype(np.uint64)
        arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "counts": ((4,), i32),  # sequences, entries, rows, parts
            "tokens": ((n,), i32),
            "positions": ((n,), i32),
            "sequence": ((n,), i32),
            "write_k": ((n,), u64),
            "write_v": ((n,), u64),
            "first_row": ((s,), i32),
            "n_rows": ((s,), i32),
            "first_page": ((s,), i32),
            "committed": ((s,), i32),
        }
        if self.step:
            arrays["ancestors"] = ((n, MAX_STEP_ROWS), np.dtype(np.uint8))
            arrays["first_part"] = ((n + 1,), i32)
            arrays["split_parts"] = ((n,), i32)
            arrays["first_single"] = ((n,), i32)
            arrays["features"] = ((n,), i32)  # where rows leave them, see cuda_taps
        if self.blocks:
            arrays["visible"] = ((n,), i32)
        arrays["entries"] = ((self.entries, len(ENTRY) if self.step else len(BLOCK)), i32)
        arrays["page_k"] = ((self.pages,), u64)
        arrays["page_v"] = ((self.pages,), u64)
        placed, at = {}, 0
        for name, (shape, dtype) in arrays.items():
            placed[name] = (at, shape, dtype)
            at += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return placed

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        offset, shape, dtype = self.fields["page_v"]
        return offset + -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def address(self, base: int, name: str) -> int:
        """Where an array lies when the buffer is at address `base`."""
        return base + self.fields[name][0]

    def views(self, buffer: npt.NDArray[np.uint8]) -> Views:
        """The arrays in a host buffer of at least nbytes bytes; made once for a buffer."""
        views = {}
        for name, (offset, shape, dtype) in self.fields.items():
            size = math.prod(shape) * dtype.itemsize
            views[name] = buffer[offset : offset + size].view(dtype).reshape(shape)
        return views


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A buffer on the host, and what has to be known to fill it.

    Attributes:
        layout: of the buffer.
        views: its arrays.
        k_row_bytes, v_row_bytes: stored bytes of one head's key and value.
        per_group: query heads of a kv head.
    """

    layout: BatchLayout
    views: Views
    k_row_bytes: int
    v_row_bytes: int
    per_group: int


class WorkList:
    """The entries of a step, and the parts that they leave."""

    def __init__(self, host: HostBatch, committed: SequenceOf[int], groups: SequenceOf[int]) -> None:
        """committed: tokens, groups: SHARED entries for each tile or split, both by sequence."""
        self._views, self._layout = host.views, host.layout
        tiles = (length // TILE * n for length, n in zip(committed, groups, strict=True))
        self._single = sum(tiles) <= host.layout.most_single  # tiles are entries of their own
        self._n_entries = self.parts = 0
        self._tails: list[tuple[int, ...]] = []

    def begin(self, rows: slice, tile: int) -> int:
        """Rows of a sequence whose tiles 0 .. tile - 1 are shared. Returns the parts that these leave."""
        n_shared = tile if self._single else -(-tile // SPLIT_TILES)
        self._views["split_parts"][rows] = 0 if self._single else n_shared
        self._views["first_single"][rows] = 0 if self._single else tile
        return n_shared

    def share(self, first_row: int, n_rows: int, first_page: int, tiles: int, committed: int, n: int) -> None:
        """n SHARED entries of tiles 0 .. tiles - 1, one a tile or split, for some rows of a sequence."""
        first, self._n_entries = self._n_entries, self._n_entries + n
        check_room("entries of the work list", self._n_entries, self._layout.entries)
        if not n:
            return
        size = 1 if self._single else SPLIT_TILES
        entries, numbers = self._views["entries"][first : first + n], np.arange(n, dtype=np.int32)
        entries[:] = (SHARED, first_row, n_rows, first_page, 0, size, committed, 0)
        entries[:, 4] = numbers * size
        entries[:, 7] = numbers
        if tiles % size:
            entries[-1, 5] = tiles % size

    def tail(self, kind: int, row: int, first_page: int, tile: int, committed: int, part: int) -> None:
        """An entry of one tile for one row."""
        self._tails.append((kind, row, 1, first_page, tile, 1, committed, part))

    def finish(self, n: int, n_sequences: int, context: int) -> Packed:
        """The tails behind the shared entries, padding behind the n rows, counts."""
        views, first = self._views, self._n_entries
        n_entries = first + len(self._tails)
        check_room("entries of the work list", n_entries, self._layout.entries)
        views["entries"][first:n_entries] = self._tails
        views["entries"][n_entries:, 0] = INERT
        for name, filler in (("first_part", self.parts), ("split_parts", 0), ("first_single", 0)):
            views[name][n:] = filler
        views["counts"][:] = (n_sequences, n_entries, n, self.parts)
        return Packed(n, n_entries, self.parts, context)


def pack_step(host: HostBatch, rows: Rows, addresses: SequenceOf[PageAddresses]) -> Packed:
    """Fill a buffer with a step.

    Args:
        rows: of the call, at most as many as the layout has.
        addresses: page addresses of each sequence, enough for its rows.

    Raises:
        ValueError: the call is larger than the layout.
    """
    if len(rows) == len(rows.sequences):
        return _pack_next_tokens(host, rows, addresses)
    return _pack_trees(host, rows, addresses)


def pack_ahead(host: HostBatch, rows: Rows, addresses: SequenceOf[PageAddresses]) -> Packed:
    """The step behind a step of plain decoding: its tokens are what the device finds best there (TAKE).

    Args: as pack_step's; addresses cover one token more.
    """
    packed = _pack_next_tokens(host, rows, addresses, ahead=1)
    host.views["tokens"][: len(rows)] = TAKE
    return packed


def _pack_trees(host: HostBatch, rows: Rows, addresses: SequenceOf[PageAddresses]) -> Packed:
    """As pack_step, for any rows."""
    views = host.views
    context = _pack_rows(host, rows, addresses)
    at_once = rows_at_once(host.layout.rows, host.per_group)
    counts, depths = row_counts(rows), rows.depths.tolist()
    lengths = [len(sequence) for sequence in rows.sequences]
    work = WorkList(host, lengths, [math.ceil(count / at_once) for count in counts])
    start = 0
    for s, count in enumerate(counts):
        stop = start + count
        committed, first_page = int(views["committed"][s]), int(views["first_page"][s])
        tile = committed // TILE
        n_shared = work.begin(slice(start, stop), tile)
        straight = _pack_ancestors(rows, start, count, views["ancestors"])
        for first in range(start, stop, at_once):
            work.share(first, min(at_once, stop - first), first_page, tile, committed, n_shared)
        firsts = []
        for row, (depth, is_straight) in enumerate(zip(depths[start:stop], straight, strict=True), start):
            firsts.append(work.parts)
            last, kind = (committed + depth) // TILE, TAIL if is_straight else GATHERED
            for number in range(tile, last + 1):
                work.tail(kind, row, first_page, number, committed, n_shared + number - tile)
            work.parts += n_shared + last + 1 - tile
        views["first_part"][start:stop] = firsts
        start = stop
    return work.finish(len(rows), len(rows.sequences), context)


def _pack_next_tokens(
    host: HostBatch, rows: Rows, addresses: SequenceOf[PageAddresses], ahead: int = 0
) -> Packed:
    """As pack_step, for one row of each sequence: plain decoding, where the host has to be quick.

    ahead: uncommitted rows of each sequence that count as committed.
    """
    layout, views, n = host.layout, host.views, len(rows)
    check_room("rows", n, layout.rows)
    for name, filler in (("tokens", 0), ("positions", -1), ("sequence", 0), ("write_k", 0), ("write_v", 0)):
        if n < layout.rows:
            views[name][n:] = filler
    views["tokens"][:n] = rows.tokens
    work = WorkList(host, [len(sequence) for sequence in rows.sequences], [1] * n)
    first_page = context = 0
    for row, (sequence, (k, v)) in enumerate(zip(rows.sequences, addresses, strict=True)):
        committed, n_pages = len(sequence) + ahead, len(k)
        tile, place = divmod(committed, TILE)
        check_room("pages", first_page + n_pages, layout.pages)
        if tile >= n_pages:
            raise ValueError(f"sequence {row}: {committed + 1} tokens, {n_pages} pages")
        views["positions"][row] = views["committed"][row] = committed
        views["sequence"][row] = views["first_row"][row] = row
        views["n_rows"][row], views["first_page"][row] = 1, first_page
        views["write_k"][row] = int(k[tile]) + place * host.k_row_bytes
        views["write_v"][row] = int(v[tile]) + place * host.v_row_bytes
        views["page_k"][first_page : first_page + n_pages] = k
        views["page_v"][first_page : first_page + n_pages] = v
        views["ancestors"][row, 0] = 0
        views["first_part"][row] = work.parts
        n_shared = work.begin(slice(row, row + 1), tile)
        work.share(row, 1, first_page, tile, committed, n_shared)
        work.tail(TAIL, row, first_page, tile, committed, n_shared)
        work.parts += n_shared + 1
        first_page += n_pages
        context = max(context, committed + 1)
    check_room("positions", context, layout.context)
    return work.finish(n, n, context)


def pack_prompt(host: HostBatch, rows: Rows, addresses: SequenceOf[PageAddresses]) -> Packed:
    """Fill a buffer with prompt pieces, a chain of rows for each sequence; as pack_step.

    Raises:
        ValueError: the call is larger than the layout.
    """
    layout, views = host.layout, host.views
    context = _pack_rows(host, rows, addresses)
    blocks: list[tuple[int, ...]] = []
    start = 0
    for s, count in enumerate(row_counts(rows)):
        committed, first_page = int(views["committed"][s]), int(views["first_page"][s])
        for first in range(0, count, PROMPT_BLOCK_ROWS):
            n = min(PROMPT_BLOCK_ROWS, count - first)
            blocks.append((start + first, n, first_page, committed + first))
        start += count
    check_room("blocks of prompt rows", len(blocks), layout.entries)
    # The kernel starts the last ones first: they have the most tiles.
    blocks.sort(key=lambda block: block[3])
    views["entries"][: len(blocks)] = blocks
    views["counts"][:] = (len(rows.sequences), len(blocks), len(rows), 0)
    return Packed(len(rows), len(blocks), 0, context)


def check_room(what: str, n: int, most: int) -> None:
    """Raises ValueError: more than the buffer holds."""
    if n > most:
        raise ValueError(f"{n} {what}, the buffer holds {most}")


def _pack_rows(host: HostBatch, rows: Rows, addresses: SequenceOf[PageAddresses]) -> int:
    """Tokens, positions, places and page tables. Returns the positions that the longest sequence reaches."""
    layout, views, n = host.layout, host.views, len(rows)
    check_room("rows", n, layout.rows)
    check_room("sequences", len(rows.sequences), MOST_SEQUENCES)
    positions, write_k, write_v = views["positions"], views["write_k"], views["write_v"]
    views["tokens"][:n] = rows.tokens
    views["tokens"][n:] = 0
    views["sequence"][:n] = rows.owner
    views["sequence"][n:] = 0
    positions[n:] = -1
    write_k[n:] = 0
    write_v[n:] = 0
    start = first_page = context = 0
    for s, (sequence, count, (k, v)) in enumerate(
        zip(rows.sequences, row_counts(rows), addresses, strict=True)
    ):
        stop, committed, n_pages = start + count, len(sequence), len(k)
        check_room("pages", first_page + n_pages, layout.pages)
        if committed + count > n_pages * TILE:
            raise ValueError(f"sequence {s}: {committed + count} tokens, {n_pages} pages")
        views["first_row"][s], views["n_rows"][s] = start, count
        views["first_page"][s], views["committed"][s] = first_page, committed
        views["page_k"][first_page : first_page + n_pages] = k
        views["page_v"][first_page : first_page + n_pages] = v
        np.add(rows.depths[start:stop], committed, out=positions[start:stop], casting="unsafe")
        context = max(context, int(positions[start:stop].max()) + 1)
        places = np.arange(committed, committed + count)
        pages, offsets = places // TILE, (places % TILE).astype(np.uint64)
        write_k[start:stop] = k[pages] + offsets * np.uint64(host.k_row_bytes)
        write_v[start:stop] = v[pages] + offsets * np.uint64(host.v_row_bytes)
        start, first_page = stop, first_page + n_pages
    check_room("positions", context, layout.context)
    return context


def _pack_ancestors(rows: Rows, start: int, count: int, ancestors: npt.NDArray[np.uint8]) -> list[bool]:
    """Ancestor of each row at each depth, itself at its own; counted from the sequence's first row.

    Returns whether a row's ancestors are 0, 1, .. depth.
    """
    straight: list[bool] = []
    paths: list[list[int]] = []
    for row, parent in enumerate(rows.parents[start : start + count].tolist()):
        if parent == COMMITTED_END:
            paths.append([row])
            straight.append(row == 0)
        else:
            paths.append([*paths[parent - start], row])
            straight.append(straight[parent - start] and row == len(paths[-1]) - 1)
        ancestors[start + row, : len(paths[-1])] = paths[-1]
    return straight
