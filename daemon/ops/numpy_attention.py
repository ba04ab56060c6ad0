"""Attention of the rows of one sequence over tiles of 64 positions, in NumPy.

The result of a row is sum_t P_t V_t / sum_t l_t over its tiles in ascending order, with
P_t = exp(S_t - max over all valid S) and l_t the sum of P_t; a masked column has P = 0. Tiles are read where
they lie, as views of the page storage; only the tail of a tree is gathered for each row.

Shapes: queries are arranged as [B, G, M, D], one product [M, D] x [D, 64] for each tile, B and G. Default
mode has all rows of a kv head in one product (B = 1, M = rows * heads per kv head), exact mode a product of
its own for each row (B = rows, M = heads per kv head), always of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import TILE, Array, Batch, Run, Span
from slotd.daemon.ops.kv_blocks import as_float32, read_stored, width

#: Bytes of scores that are worked on at once; as many again hold the products with V. More rows at a time
#: share the conversion of stored K and V, the scratch of a long context stays bounded.
SCORE_BYTES = 8 * 1024 * 1024

FLOAT32 = np.dtype(np.float32)
#: Behind every tile.
END = 2**62
MINUS_INFINITY = np.float32(-np.inf)
#: P_t times this is l_t; a product with a column of ones is several times faster than a sum over an axis.
ONES = np.ones((TILE, 1), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one span that are worked on together; worked out once for a call.

    Attributes:
        rows: these rows in the call.
        products: (B, G, M), see the module's text.
        per_group: query heads of a kv head.
        n_tiles: tiles up to the largest position.
        shared: the first tiles, read where they lie: (first, stop, run, its tiles of them).
        hidden: bool [tiles, n, 1, 1, TILE], columns of the last tiles that a row must not see.
        gathered: the runs behind the shared tiles, when each row has a tail of its own.
        tail: int64 [n, tail tiles * TILE], places in them, or None.
    """

    rows: slice
    products: tuple[int, int, int]
    per_group: int
    n_tiles: int
    shared: list[tuple[int, int, Run, slice]]
    hidden: npt.NDArray[np.bool_]
    gathered: list[tuple[int, int, Run, slice]]
    tail: npt.NDArray[np.int64] | None

    def by_row(self, x: Array) -> Array:
        """A contiguous [..., B, G, M, m] seen as [..., n, G, heads per kv head, m]."""
        _, n_group, m = self.products
        if m == self.per_group:
            return x
        split = x.reshape(*x.shape[:-4], n_group, m // self.per_group, self.per_group, x.shape[-1])
        return split.swapaxes(-4, -3)


def plan_attention(batch: Batch, exact: bool, n_head: int) -> list[Block]:
    """The work of one layer, the same for all layers."""
    return [
        _plan_block(span, rows, exact, n_head) for span in batch.spans for rows in _row_blocks(span, n_head)
    ]


def _row_blocks(span: Span, n_head: int) -> Iterator[slice]:
    """Rows of one tile where possible, fewer when the context is long. Counted in the span."""
    n, start = len(span.positions), 0
    while start < n:
        position = int(span.positions[start])
        row_bytes = n_head * (position // TILE + 2) * TILE * FLOAT32.itemsize
        most = max(1, min(TILE, SCORE_BYTES // row_bytes))
        if span.tail is None:
            of_tile = span.positions[start : start + most] // TILE == position // TILE
            most = len(of_tile) if of_tile.all() else int(np.argmin(of_tile))
        yield slice(start, min(n, start + most))
        start += most


def _plan_block(span: Span, rows: slice, exact: bool, n_head: int) -> Block:
    positions = span.positions[rows]
    n, n_group = len(positions), span.runs[0].k.shape[2]
    per_group = n_head // n_group
    n_tiles = int(positions.max()) // TILE + 1
    shared = n_tiles if span.tail is None else span.shared
    seen_by_all = (int(positions.min()) + 1) // TILE
    if span.lowest is not None:
        seen_by_all = 0
    columns = np.arange(seen_by_all * TILE, n_tiles * TILE).reshape(-1, 1, 1, 1, TILE)
    hidden = columns > positions[:, None, None, None]
    if span.lowest is not None:
        hidden |= columns < span.lowest[rows, None, None, None]
    return Block(
        rows=slice(span.start + rows.start, span.start + rows.stop),
        products=(n, n_group, per_group) if exact else (1, n_group, n * per_group),
        per_group=per_group,
        n_tiles=n_tiles,
        shared=list(span.tiles(0, shared)),
        hidden=hidden,
        gathered=[] if span.tail is None else list(span.tiles(shared, END)),
        tail=None if span.tail is None else span.tail[rows, : (n_tiles - shared) * TILE],
    )


def attend_block(memory: DeviceMemory, layer: int, q: Array, block: Block, out: Array) -> None:
    """Attention of the rows of a block. q [n, H, D], scaled -> out [n, H, E]."""
    n, _, dim = q.shape
    n_group, value_dim = block.products[1], out.shape[-1]
    queries = q.reshape(n, n_group, block.per_group, dim)
    if block.products[:2] != (n, n_group):
        arranged = memory.empty((*block.products, dim))
        block.by_row(arranged)[...] = queries
        queries = arranged

    scores = memory.empty((block.n_tiles, *block.products, TILE))
    for first, stop, run, inside in block.shared:
        k = as_float32(memory, run.k[layer, inside])
        np.matmul(queries, k[:, None].swapaxes(-1, -2), out=scores[first:stop])
    n_shared = block.n_tiles if block.tail is None else block.n_tiles - block.tail.shape[1] // TILE
    if block.tail is not None:
        k = _gather(memory, [run.k[layer, inside] for _, _, run, inside in block.gathered], block.tail)
        np.matmul(block.by_row(queries), k.swapaxes(-1, -2), out=block.by_row(scores[n_shared:]))

    sums = _softmax_weights(memory, scores, block)

    parts = memory.empty((block.n_tiles, *block.products, value_dim))
    for first, stop, run, inside in block.shared:
        v = as_float32(memory, run.v[layer, inside])
        np.matmul(scores[first:stop], v[:, None], out=parts[first:stop])
    if block.tail is not None:
        v = _gather(memory, [run.v[layer, inside] for _, _, run, inside in block.gathered], block.tail)
        np.matmul(block.by_row(scores[n_shared:]), v, out=block.by_row(parts[n_shared:]))
    # Along the outer axis NumPy adds one tile after the other.
    mixed = np.add.reduce(parts, axis=0, out=memory.empty(parts.shape[1:]))
    by_head = out.reshape(n, n_group, block.per_group, value_dim)
    np.divide(block.by_row(mixed), block.by_row(sums), out=by_head)


def _softmax_weights(memory: DeviceMemory, scores: Array, block: Block) -> Array:
    """Scores [tiles, B, G, M, TILE] become P in place; returns sum_t l_t, [B, G, M, 1]."""
    if len(block.hidden):
        np.copyto(block.by_row(scores[-len(block.hidden) :]), MINUS_INFINITY, where=block.hidden)
    peak = scores[0]
    if len(scores) > 1:
        peak = np.maximum.reduce(scores, axis=0, out=memory.empty(peak.shape))
    scores -= np.maximum.reduce(peak, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    # accumulate is sequential by definition; reduce is not when there is only one sum for each tile.
    total: Array = np.add.accumulate(np.matmul(scores, ONES), axis=0)[-1]
    return total


def _gather(memory: DeviceMemory, tiles: list[Array], places: npt.NDArray[np.int64]) -> Array:
    """Tiles of each row of its own: [t, n, G, TILE, dim] float32.

    tiles: stored, each [.., G, TILE, items], one behind the other. places [n, t * TILE]: index into them.
    """
    n_group, dim = tiles[0].shape[1], width(tiles[0])
    flat = memory.empty((n_group, sum(map(len, tiles)), TILE, dim))
    first = 0
    for part in tiles:
        read_stored(memory, part.swapaxes(0, 1), flat[:, first : first + len(part)])
        first += len(part)
    n, n_places = places.shape
    gathered = memory.empty((n_group, n, n_places, dim))
    np.take(flat.reshape(n_group, -1, dim), places, axis=1, out=gathered, mode="clip")
    by_tile = gathered.reshape(n_group, n, n_places // TILE, TILE, dim)
    return by_tile.transpose(2, 1, 0, 3, 4)
