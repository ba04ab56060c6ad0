"""Calls of a draft as the CUDA kernels read them: blocks, whose rows see each other, and rows of context.

What a row sees, the place it is written to and the position it is rotated for are three things here: pages of
old context are dropped, so places count from the first page that is left, and a row of a block sees places
behind its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.cuda_batch import (
    TAIL,
    BatchLayout,
    HostBatch,
    Packed,
    PageAddresses,
    WorkList,
    check_room,
    rows_at_once,
)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows behind the context of one sequence.

    Attributes:
        tokens: int32 [n].
        position: of the first one.
        context: places in front of it that it sees.
        addresses: of the pages, from that of the first place on, enough for context + n places.
    """

    tokens: npt.NDArray[np.int32]
    position: int
    context: int
    addresses: PageAddresses


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Rows of one sequence that become context.

    Attributes:
        features: int32 [n], which rows of the features they are.
        position: of the first one.
        place: of the first one.
        addresses: as of Block.
    """

    features: npt.NDArray[np.int32]
    position: int
    place: int
    addresses: PageAddresses


def block_layout(steps: BatchLayout) -> BatchLayout:
    """The layout of blocks in the room of steps."""
    return replace(steps, blocks=True)


def context_layout(rows: int, max_ctx: int) -> BatchLayout:
    """The layout of up to `rows` rows of context: `tokens` are rows of the features."""
    return BatchLayout(step=False, rows=rows, pages=0, entries=0, context=max_ctx)


def pack_blocks(host: HostBatch, blocks: SequenceOf[Block], *, causal: bool = False) -> Packed:
    """Fill a buffer with blocks side by side.

    Args:
        causal: a row sees of its block only what is not behind it.

    Raises:
        ValueError: more than the buffer holds.
    """
    views, layout = host.views, host.layout
    _clear(host, sum(len(block.tokens) for block in blocks))
    at_once = rows_at_once(layout.rows, host.per_group)
    groups = [math.ceil(len(block.tokens) / at_once) for block in blocks]
    work = WorkList(host, [block.context for block in blocks], groups)
    start = first_page = longest = 0
    for s, block in enumerate(blocks):
        n, n_pages = len(block.tokens), block.addresses.shape[1]
        stop, end = start + n, block.context + n
        check_room("pages", first_page + n_pages, layout.pages)
        _place(host, slice(start, stop), block.tokens, block.position, block.context, block.addresses)
        views["sequence"][start:stop] = s
        views["first_row"][s], views["n_rows"][s] = start, n
        views["first_page"][s], views["committed"][s] = first_page, block.context
        views["page_k"][first_page : first_page + n_pages] = block.addresses[0]
        views["page_v"][first_page : first_page + n_pages] = block.addresses[1]
        views["ancestors"][start:stop, :n] = np.arange(n)
        visible = block.context + np.arange(n) if causal else np.full(n, end - 1)
        views["visible"][start:stop] = visible
        tile = block.context // TILE
        n_shared = work.begin(slice(start, stop), tile)
        for first in range(start, stop, at_once):
            work.share(first, min(at_once, stop - first), first_page, tile, block.context, n_shared)
        for row, last in enumerate((visible // TILE).tolist(), start):
            views["first_part"][row] = work.parts
            for number in range(tile, last + 1):
                work.tail(TAIL, row, first_page, number, block.context, n_shared + number - tile)
            work.parts += n_shared + last + 1 - tile
        start, first_page, longest = stop, first_page + n_pages, max(longest, end)
    check_room("positions", longest, layout.context)
    return work.finish(start, len(blocks), longest)


def pack_context(host: HostBatch, parts: SequenceOf[ContextRows]) -> Packed:
    """Fill a buffer with rows of context; as pack_blocks."""
    _clear(host, sum(len(part.features) for part in parts))
    start = 0
    for part in parts:
        stop = start + len(part.features)
        _place(host, slice(start, stop), part.features, part.position, part.place, part.addresses)
        start = stop
    return Packed(start, 0, 0, 0)


def _clear(host: HostBatch, n: int) -> None:
    """Rows behind the n of a call become padding."""
    check_room("rows", n, host.layout.rows)
    for name in ("tokens", "sequence", "write_k", "write_v"):
        host.views[name][n:] = 0
    for name in ("positions", "visible"):
        if name in host.views:
            host.views[name][n:] = -1


def _place(
    host: HostBatch, rows: slice, tokens: npt.NDArray[np.int32], position: int, place: int,
    addresses: PageAddresses,
) -> None:  # fmt: skip
    views, n = host.views, len(tokens)
    if place + n > addresses.shape[1] * TILE:
        raise ValueError(f"{place + n} places, {addresses.shape[1]} pages")
    views["tokens"][rows] = tokens
    views["positions"][rows] = np.arange(position, position + n)
    places = np.arange(place, place + n)
    offsets = (places % TILE).astype(np.uint64)
    views["write_k"][rows] = addresses[0, places // TILE] + offsets * np.uint64(host.k_row_bytes)
    views["write_v"][rows] = addresses[1, places // TILE] + offsets * np.uint64(host.v_row_bytes)
