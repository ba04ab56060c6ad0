"""Drafts from the text itself. What holds for any text: tests/property/test_ngram_drafts.py."""

from __future__ import annotations

import time

import numpy as np
import pytest

from slotd.daemon.spec import ngram
from slotd.daemon.spec.ngram import NgramIndex


def indexed(*ids: int, longest: int = 4, shortest: int = 2) -> NgramIndex:
    index = NgramIndex(longest, shortest)
    index.extend(ids)
    return index


def test_the_continuation_of_what_stood_there_before() -> None:
    assert indexed(1, 2, 3, 4, 5, 9, 1, 2).propose(3) == [3, 4, 5]


@pytest.mark.parametrize("ids", [(), (1,), (1, 2), (1, 2, 3, 4), (2, 1, 3, 1)])
def test_a_new_end_has_no_continuation(ids: tuple[int, ...]) -> None:
    index = indexed(*ids)
    assert index.propose(5) == []
    assert len(index.propose_tree(ids[-1] if ids else 0, 22)) == 1


def test_the_most_recent_of_equal_places() -> None:
    assert indexed(1, 2, 7, 1, 2, 8, 9, 1, 2).propose(1) == [8]


def test_the_place_that_agrees_furthest_back() -> None:
    assert indexed(5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2).propose(1) == [7]


def test_a_longer_n_gram_wins_over_more_recent_ones() -> None:
    """Of the short one only the most recent occurrences are looked at; the long one is far back."""
    index = indexed(3, 4, 1, 2, 7)
    for other in range(20, 20 + 2 * ngram.LOOKED_AT):
        index.extend([other, 1, 2, 8])
    index.extend([3, 4, 1, 2])
    assert index.propose(1) == [7]


def test_a_loop_goes_on() -> None:
    assert indexed(9, 1, 2, 3, 1, 2, 3, 1).propose(7) == [2, 3, 1, 2, 3, 1, 2]
    assert indexed(4, 4, 4).propose(5) == [4, 4, 4, 4, 4]


def test_text_may_come_in_any_pieces() -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    whole, single = indexed(*ids), indexed()
    for token in ids:
        single.extend([token])
        single.propose(1)
    assert len(single) == len(ids)
    assert single.propose(6) == whole.propose(6)


def test_a_tree_of_what_followed_at_several_places() -> None:
    """3 stood behind (6, 1, 2), which is more than the others agree; 5 behind (1, 2)."""
    tree = indexed(6, 1, 2, 3, 9, 1, 2, 5, 7, 6, 1, 2).propose_tree(2, 63)
    assert tree.tokens[0] == 2
    assert tree.tokens[tree.parents == 0].tolist() == [3, 5]
    assert tree.tokens[1:4].tolist() == [3, 9, 1]


def test_a_long_agreement_leaves_little_for_others() -> None:
    long, short = list(range(100, 140)), [138, 139, 7, 6]
    tree = indexed(*short, *long, 50, 51, 52, 53, 54, 55, *long).propose_tree(139, 6)
    assert tree.tokens.tolist() == [139, 50, 51, 52, 53, 54, 55]


@pytest.mark.parametrize("budget", [0, 1, 63])
def test_the_budget_holds(budget: int) -> None:
    tree = indexed(1, 2, 3, 4, 5, 1, 2).propose_tree(2, budget)
    assert len(tree) == budget + 1


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (2, 0)])
def test_sizes_that_make_no_sense(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="n-grams of"):
        NgramIndex(longest, shortest)


def test_a_prompt_of_250_000_tokens_is_taken_in_quickly_and_once() -> None:
    index = NgramIndex()
    index.extend(np.random.default_rng(0).integers(0, 50_000, 250_000).tolist())
    began = time.process_time()
    index.propose(8)
    first = time.process_time()
    assert first - began < 2  # 0.3 s; far more where the work grows faster than the text
    for _ in range(20):
        index.extend([1, 2, 3])
        index.propose_tree(3, 22)
    assert time.process_time() - first < 0.2
