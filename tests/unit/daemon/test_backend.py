"""Outputs in host memory: the best id of each row, and rows that have none."""

from __future__ import annotations

import numpy as np
import pytest

from slotd.daemon.backend import HostOutputs

INF, NAN = np.inf, np.nan


def greedy(*logits: list[float]) -> tuple[list[int], list[bool]]:
    ids, finite = HostOutputs(np.array(logits, np.float32), np.arange(len(logits))).greedy()
    assert (ids.dtype, finite.dtype) == (np.int32, np.bool_)
    return ids.tolist(), finite.tolist()


def test_the_lowest_id_of_equal_logits() -> None:
    assert greedy([1, 3, 3], [3, 1, 3], [-INF, -INF, 0]) == ([1, 0, 2], [True, True, True])


@pytest.mark.parametrize("row", [[1, NAN, 3], [1, INF, 3], [-INF, -INF, -INF], [NAN, INF, 0]])
def test_a_row_without_a_best_one(row: list[float]) -> None:
    assert greedy([1, 2, 3], row)[1] == [True, False]


def test_no_rows() -> None:
    ids, finite = HostOutputs(np.empty((0, 5), np.float32), np.empty(0, np.int64)).greedy()
    assert (len(ids), len(finite)) == (0, 0)
