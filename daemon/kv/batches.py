"""From rows and page tables to the batch that the ops read."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from slotd.daemon.draft_rows import ContextRows, DraftBlock
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.kv.store import PageStore
from slotd.daemon.ops.batch import Batch, Span
from slotd.daemon.ops.recurrent_state import RecurrentSpan, StepInputs
from slotd.daemon.row_checks import is_chain, row_counts
from slotd.daemon.rows import COMMITTED_END, Rows
from slotd.daemon.sequence import Sequence


def build_batch(rows: Rows, store: PageStore) -> Batch:
    """Positions, places and views for a call. Every sequence has the pages for all its rows."""
    committed = np.array([len(sequence) for sequence in rows.sequences], dtype=np.int64)
    positions = committed[rows.owner] + rows.depths
    spans = []
    start = 0
    for sequence, n in zip(rows.sequences, row_counts(rows), strict=True):
        parents = rows.parents[start : start + n]
        local = np.where(parents == COMMITTED_END, COMMITTED_END, parents - start)
        spans.append(_span(sequence, start, local, positions[start : start + n], store))
        start += n
    return Batch(rows.tokens, positions, tuple(spans))


def context_batch(rows: ContextRows, store: PageStore) -> Batch:
    """Where keys and values of a draft's context go; nothing is looked at."""
    n = len(rows.rows)
    positions = rows.position + np.arange(n, dtype=np.int64)
    pieces = tuple(store.pieces(rows.pages, rows.place, n, 0))
    return Batch(np.zeros(n, dtype=np.int32), positions, (Span(0, positions, (), pieces, 0, None),))


def block_batch(
    blocks: SequenceOf[DraftBlock], tokens: npt.NDArray[np.int32], n: int, store: PageStore,
    *, causal: bool, window: int = 0,
) -> Batch:  # fmt: skip
    """Blocks of n rows each, behind the contexts of a draft; they have the pages for it.

    Args:
        tokens: of all rows.
        causal: whether a row sees of its block only what is not behind it; else it sees all of it.
        window: how many places a row sees, itself included; 0: all.
    """
    inside = np.arange(n, dtype=np.int64)
    spans = []
    for start, block in enumerate(blocks):
        table = block.pages[: pages_for(block.length + n)]
        last = block.length + (inside if causal else np.full(n, n - 1))
        lowest = np.maximum(block.length + inside - window + 1, 0) if window else None
        pieces = tuple(store.pieces(table, block.length, n, start * n))
        runs = tuple(store.runs(table))
        spans.append(Span(start * n, last, runs, pieces, len(table), None, lowest=lowest))
    positions = np.concatenate([block.position + inside for block in blocks])
    return Batch(tokens, positions, tuple(spans))


def _span(
    sequence: Sequence,
    start: int,
    parents: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    store: PageStore,
) -> Span:
    n, length = len(parents), len(sequence)
    table = sequence.pages[: pages_for(length + n)]
    runs = tuple(store.runs(table))
    pieces = tuple(store.pieces(table, length, n, start))
    recurrent = _recurrent(sequence, parents)
    if is_chain(parents):
        return Span(start, positions, runs, pieces, len(table), None, recurrent)
    shared = length // PAGE
    return Span(start, positions, runs, pieces, shared, _tail(parents, length - shared * PAGE), recurrent)


def _recurrent(sequence: Sequence, parents: npt.NDArray[np.int32]) -> RecurrentSpan | None:
    opened = sequence.open_state
    if opened is None:
        return None
    length, state = len(sequence), sequence.state
    if isinstance(opened, StepInputs):
        return RecurrentSpan(length, parents, state, inputs=opened)
    return RecurrentSpan(length, parents, state, after=opened)


def _tail(parents: npt.NDArray[np.int32], committed: int) -> npt.NDArray[np.int64]:
    """For each row and position of the tail tiles its place in them; `committed` places come first.

    Behind the row's own position its own place stands, masked: nobody else's values come near its sums.
    """
    n = len(parents)
    ancestors = np.repeat(np.arange(n)[:, None], n, axis=1)
    depth = np.zeros(n, dtype=np.int64)
    for row, parent in enumerate(parents.tolist()):
        if parent != COMMITTED_END:
            depth[row] = depth[parent] + 1
            ancestors[row, : depth[row]] = ancestors[parent, : depth[row]]
    tail = np.empty((n, pages_for(committed + int(depth.max()) + 1) * PAGE), dtype=np.int64)
    tail[:, :committed] = np.arange(committed)
    tail[:, committed:] = committed + np.arange(n)[:, None]
    known = min(n, tail.shape[1] - committed)
    tail[:, committed : committed + known] = committed + ancestors[:, :known]
    return tail
