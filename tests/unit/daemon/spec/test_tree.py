"""Trees of draft tokens, by example. What holds for all of them: tests/property/test_draft_trees.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slotd.daemon.rows import MAX_STEP_ROWS, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.spec.tree import DraftTree, build_tree, chain, cut, grow, root_only

IDS = np.array([[10, 11], [20, 21], [30, 31]], np.int32)
LOGPROBS = np.log(np.array([[0.6, 0.4], [0.9, 0.1], [0.5, 0.3]], np.float32))


def rows(tree: DraftTree) -> list[tuple[int, int, int]]:
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True))


def test_best_first() -> None:
    """0.6, 0.54 behind it, 0.4, then 0.36 behind that before the 0.27 of the third position."""
    tree = build_tree(7, IDS, LOGPROBS, 5)
    assert rows(tree) == [(7, -1, 0), (10, 0, 1), (20, 1, 2), (11, 0, 1), (20, 3, 2), (30, 2, 3)]


def test_a_chain_seed_comes_first() -> None:
    tree = build_tree(7, IDS, LOGPROBS, 5, chain_seed=True)
    assert rows(tree) == [(7, -1, 0), (10, 0, 1), (20, 1, 2), (30, 2, 3), (11, 0, 1), (20, 4, 2)]


def test_equal_weights_go_by_depth_then_by_token() -> None:
    ids = np.array([[5, 3], [9, 8]], np.int32)
    tree = build_tree(7, ids, np.zeros((2, 2), np.float32), 63)
    assert rows(tree)[1:] == [(3, 0, 1), (5, 0, 1), (8, 1, 2), (8, 2, 2), (9, 1, 2), (9, 2, 2)]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_no_candidates_leave_the_root(shape: tuple[int, int]) -> None:
    tree = build_tree(7, np.zeros(shape, np.int32), np.zeros(shape, np.float32), 63)
    assert rows(tree) == rows(root_only(7)) == [(7, -1, 0)]


def test_one_candidate_each_makes_a_chain() -> None:
    tree = build_tree(7, IDS[:, :1], LOGPROBS[:, :1], 63)
    assert rows(tree) == rows(chain(7, [10, 20, 30]))


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_what_is_not_finite_is_no_candidate(value: float) -> None:
    logprobs = LOGPROBS.copy()
    logprobs[0, 1] = logprobs[1, 0] = logprobs[1, 1] = value
    assert rows(build_tree(7, IDS, logprobs, 63)) == [(7, -1, 0), (10, 0, 1)]


def test_a_repeated_candidate_counts_once_by_its_best_value() -> None:
    ids = np.array([[4, 4, 5]], np.int32)
    logprobs = np.array([[-1.0, -2.0, -1.5]], np.float32)
    assert rows(build_tree(7, ids, logprobs, 63))[1:] == [(4, 0, 1), (5, 0, 1)]


def test_cut_keeps_the_first_rows_and_always_the_root() -> None:
    tree = build_tree(7, IDS, LOGPROBS, 5)
    assert rows(cut(tree, 3)) == rows(tree)[:3]
    assert rows(cut(tree, 0)) == rows(tree)[:1]
    assert cut(tree, 6) is tree
    assert cut(tree, 3).child(0, 11) is None


def test_children() -> None:
    tree = build_tree(7, IDS, LOGPROBS, 5)
    assert (tree.child(0, 11), tree.child(3, 20), tree.child(0, 20), tree.child(5, 1)) == (3, 4, None, None)


def test_continuations_share_their_beginning() -> None:
    steps = [(0, 1), (0, 2), (1, 1), (1, 4), (0, 3), (2, 5)]
    tree = grow(7, steps, 5)
    assert rows(tree)[1:] == [(1, 0, 1), (2, 1, 2), (4, 1, 2), (3, 2, 3), (5, 0, 1)]
    assert rows(grow(7, steps, 3)) == rows(tree)[:4]


def test_a_tree_can_be_the_rows_of_a_step() -> None:
    ids = np.tile(np.arange(8, dtype=np.int32), (7, 1))
    logprobs = np.log(np.linspace(0.5, 0.01, 8, dtype=np.float32))[None].repeat(7, 0)
    tree = build_tree(7, ids, logprobs, MAX_STEP_ROWS - 1)
    made = Rows.tree(Sequence(), tree.tokens.tolist(), tree.parents.tolist())
    assert len(made) == MAX_STEP_ROWS
    assert made.depths.tolist() == tree.depths.tolist()
