"""What must hold for the rows of a call and the path of a commit. A breach is a bug: ValueError."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from slotd.daemon.rows import COMMITTED_END, MAX_STEP_ROWS, Kind, Rows


def row_counts(rows: Rows) -> list[int]:
    """Rows of each sequence, in call order."""
    counts: list[int] = np.bincount(rows.owner, minlength=len(rows.sequences)).tolist()
    return counts


def is_chain(parents: npt.NDArray[np.int32]) -> bool:
    """Whether each row follows the one before it (parents counted from the sequence's first row)."""
    return bool((parents == np.arange(-1, len(parents) - 1)).all())


def check_rows(rows: Rows, kind: Kind, n_vocab: int, max_ctx: int) -> None:
    """Raises ValueError unless the rows are a call: see `Rows` and `Kind`."""
    n = len(rows)
    if n == 0:
        raise ValueError("no rows")
    if _is_plain_step(rows, kind, n_vocab, max_ctx):
        return  # nothing below could object, and it takes ten times as long
    if kind is Kind.STEP and n > MAX_STEP_ROWS:
        raise ValueError(f"{n} rows in a step, the limit is {MAX_STEP_ROWS}")
    if rows.tokens.min() < 0 or rows.tokens.max() >= n_vocab:
        raise ValueError(f"a token id is not below {n_vocab}")
    if len(set(rows.sequences)) != len(rows.sequences):
        raise ValueError("a sequence stands twice in the call")
    counts = row_counts(rows)
    if len(counts) != len(rows.sequences) or 0 in counts or (np.diff(rows.owner) < 0).any():
        raise ValueError("rows of a sequence must be adjacent, in the order of the sequences")
    start = 0
    for sequence, count in zip(rows.sequences, counts, strict=True):
        depths = rows.depths[start : start + count]
        _check_parents(rows.parents[start : start + count], depths, start, kind)
        if len(sequence) + int(depths.max()) >= max_ctx:
            raise ValueError(f"a position is not below max_ctx, {max_ctx}")
        start += count


def check_path(parents: npt.NDArray[np.int32], start: int, path: SequenceOf[int]) -> npt.NDArray[np.int64]:
    """The path counted from the sequence's first row.

    Args:
        parents: of the sequence's open rows, as they stood in the call.
        start: first of these rows in the call.
        path: row numbers of the call.

    Raises:
        ValueError: not a root path of these rows.
    """
    expected = COMMITTED_END
    local = []
    for row in path:
        index = row - start
        if not 0 <= index < len(parents):
            raise ValueError(f"row {row} is not an open row of this sequence")
        if parents[index] != expected:
            raise ValueError(f"row {row} does not follow row {expected}")
        local.append(index)
        expected = row
    return np.array(local, dtype=np.int64)


def _is_plain_step(rows: Rows, kind: Kind, n_vocab: int, max_ctx: int) -> bool:
    """Whether the rows are a good step of one row for each sequence."""
    n = len(rows)
    if kind is not Kind.STEP or n > MAX_STEP_ROWS or n != len(rows.sequences):
        return False
    return (
        rows.owner.tolist() == list(range(n))
        and rows.parents.tolist() == [COMMITTED_END] * n
        and rows.depths.tolist() == [0] * n
        and all(0 <= token < n_vocab for token in rows.tokens.tolist())
        and (n == 1 or len(set(rows.sequences)) == n)
        and all(len(sequence) < max_ctx for sequence in rows.sequences)
    )


def _check_parents(
    parents: npt.NDArray[np.int32], depths: npt.NDArray[np.int32], start: int, kind: Kind
) -> None:
    rooted = parents == COMMITTED_END
    local = np.where(rooted, COMMITTED_END, parents - start)
    if kind is Kind.PROMPT and not is_chain(local):
        raise ValueError("rows of a prompt must be a chain")
    earlier = (local >= 0) & (local < np.arange(len(local)))
    if not (rooted | earlier).all():
        raise ValueError("a parent is not an earlier row of the same sequence")
    if (depths != np.where(rooted, 0, depths[local] + 1)).any():
        raise ValueError("a depth is not that of its parent plus one")
