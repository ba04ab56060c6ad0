"""Malformed calls and paths are refused."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import numpy as np
import pytest

from slotd.daemon.row_checks import check_path, check_rows
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence

PARENTS = [-1, 0, 0, 1, -1]


def tree() -> Rows:
    return Rows.tree(Sequence(), [1, 2, 3, 4, 5], PARENTS)


def changed(rows: Rows, **fields: Any) -> Rows:
    return dataclasses.replace(rows, **fields)


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_good_calls() -> None:
    check_rows(tree(), Kind.STEP, n_vocab=6, max_ctx=3)
    two = Rows.join([Rows.chain(Sequence(), [1, 2]), tree()])
    check_rows(two, Kind.STEP, n_vocab=6, max_ctx=3)
    check_rows(Rows.chain(Sequence(), [0] * 65), Kind.PROMPT, n_vocab=1, max_ctx=65)


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (Rows.chain(Sequence(), []), Kind.PROMPT, "no rows"),
        (Rows.chain(Sequence(), [0] * 65), Kind.STEP, "65 rows in a step, the limit is 64"),
        (Rows.chain(Sequence(), [0, 6]), Kind.STEP, "token id is not below 6"),
        (Rows.chain(Sequence(), [0, -1]), Kind.STEP, "token id is not below 6"),
        (tree(), Kind.PROMPT, "must be a chain"),
        (Rows.join([(twin := tree()), twin]), Kind.STEP, "stands twice"),
        (changed(tree(), sequences=(Sequence(), Sequence())), Kind.STEP, "must be adjacent"),
        (changed(Rows.join([tree(), tree()]), owner=ints(*[0] * 5, *[1] * 4, 0)), Kind.STEP, "adjacent"),
        (changed(tree(), owner=ints(0, 0, 0, 0, 1)), Kind.STEP, "must be adjacent"),
        (changed(tree(), parents=ints(-1, 0, 2, 1, -1)), Kind.STEP, "not an earlier row"),
        (changed(tree(), parents=ints(-1, 0, 0, -2, -1)), Kind.STEP, "not an earlier row"),
        (changed(tree(), depths=ints(0, 1, 1, 1, 0)), Kind.STEP, "not that of its parent plus one"),
        (Rows.chain(Sequence(), [0] * 10), Kind.STEP, "position is not below max_ctx, 9"),
    ],
)
def test_bad_calls(rows: Rows, kind: Kind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(rows, kind, n_vocab=6, max_ctx=9)


def test_a_parent_in_another_sequence_is_refused() -> None:
    rows = Rows.join([tree(), tree()])
    parents = rows.parents.copy()
    parents[6] = 2
    with pytest.raises(ValueError, match="not an earlier row of the same sequence"):
        check_rows(changed(rows, parents=parents), Kind.STEP, 6, 9)


def test_committed_tokens_count_towards_the_context() -> None:
    sequence = Sequence()
    sequence.tokens = array("i", [0] * 8)
    check_rows(Rows.chain(sequence, [0]), Kind.STEP, 6, 9)
    with pytest.raises(ValueError, match="max_ctx"):
        check_rows(Rows.chain(sequence, [0, 0]), Kind.STEP, 6, 9)


@pytest.mark.parametrize("path", [[], [0], [0, 1, 3], [0, 2], [4]])
def test_good_paths(path: list[int]) -> None:
    start = 7  # the sequence's first row of the call
    parents = np.where(np.array(PARENTS) < 0, -1, np.array(PARENTS) + start).astype(np.int32)
    assert check_path(parents, start, [row + start for row in path]).tolist() == path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([1], "row 1 does not follow row -1"),
        ([0, 3], "row 3 does not follow row 0"),
        ([0, 1, 2], "row 2 does not follow row 1"),
        ([0, 0], "row 0 does not follow row 0"),
        ([0, 4], "row 4 does not follow row 0"),
        ([5], "row 5 is not an open row"),
        ([-1], "row -1 is not an open row"),
    ],
)
def test_bad_paths(path: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_path(ints(*PARENTS), 0, path)
