"""Trees of draft tokens: P24, P25, P26 and the pure part of P29 of the reference, for any candidates."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.spec.tree import DraftTree, build_tree, chain, cut, grow

Candidates = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]

ROOT = 99
LEVELS, BEST = 4, 3
#: Eighths: sums of them are exact, so that ties are ties.
LOGPROBS = st.one_of(st.integers(-24, 0).map(lambda n: n / 8), st.sampled_from([-math.inf, -80.0]))
budgets = st.one_of(st.integers(0, 63), st.sampled_from([0, 1, 63]))


@st.composite
def candidates(draw: st.DrawFn, wild: bool = False) -> Candidates:
    """A draft's answer; a wild one keeps no promise: repeated ids, no order, values that are no numbers."""
    n, k = draw(st.integers(0, LEVELS)), draw(st.integers(1, BEST))
    ids = draw(st.lists(st.permutations(range(5)), min_size=n, max_size=n))
    values = draw(st.lists(st.lists(LOGPROBS, min_size=k, max_size=k), min_size=n, max_size=n))
    logprobs = np.sort(np.array(values, np.float32).reshape(n, k), axis=1)[:, ::-1]
    chosen = np.array(ids, np.int32).reshape(n, 5)[:, :k]
    if wild and n:
        strange = st.one_of(LOGPROBS, st.sampled_from([math.nan, math.inf, -math.inf, 0.5]))
        logprobs = np.array(draw(st.lists(strange, min_size=n * k, max_size=n * k)), np.float32).reshape(n, k)
        chosen = np.array(draw(st.lists(st.integers(0, 2), min_size=n * k, max_size=n * k)), np.int32)
        chosen = chosen.reshape(n, k)
    return chosen, logprobs


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from behind the root to each row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


def brute_force(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], n: int) -> list[float]:
    """The n highest weights of all paths."""
    finite = [[float(value) for value in row if np.isfinite(value)] for row in logprobs]
    weights = [sum(path) for depth in range(1, len(finite) + 1) for path in product(*finite[:depth])]
    return sorted(weights, reverse=True)[:n]


def weights_of(tree: DraftTree, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> list[float]:
    """Of each row but the root; a KeyError where a token is none of its position's finite candidates."""
    tables: list[dict[int, float]] = []
    for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True):
        pairs = [(value, token) for token, value in zip(row, values, strict=True) if math.isfinite(value)]
        tables.append({token: value for value, token in sorted(pairs)})
    return [sum(tables[depth][token] for depth, token in enumerate(path)) for path in paths_of(tree)[1:]]


def walked(tree: DraftTree, answer: list[int]) -> int:
    row = 0
    for taken, token in enumerate(answer):
        below = tree.child(row, token)
        if below is None:
            return taken
        row = below
    return len(answer)


def assert_well_formed(tree: DraftTree, budget: int) -> None:
    n = len(tree)
    assert 1 <= n <= budget + 1
    assert tree.tokens.dtype == tree.parents.dtype == tree.depths.dtype == np.int32
    assert (tree.tokens[0], tree.parents[0], tree.depths[0]) == (ROOT, -1, 0)
    assert all(0 <= parent < row for row, parent in enumerate(tree.parents[1:].tolist(), 1))
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert len(set(paths_of(tree))) == n  # siblings are distinct
    for row in range(1, n):
        assert tree.child(int(tree.parents[row]), int(tree.tokens[row])) == row


@given(candidates(), st.booleans())
def test_p24_a_budget_of_l_with_chain_seed_is_the_chain(found: Candidates, bare: bool) -> None:
    ids, logprobs = found
    finite = np.isfinite(logprobs[:, 0])
    length = len(finite) if finite.all() else int(np.argmin(finite))
    tree = build_tree(ROOT, ids[:, :1] if bare else ids, logprobs[:, :1] if bare else logprobs, length, True)
    expected = chain(ROOT, ids[:length, 0].tolist())
    for name in ("parents", "depths"):
        assert getattr(tree, name).tolist() == getattr(expected, name).tolist()
    assert weights_of(tree, ids, logprobs) == weights_of(expected, ids, logprobs)


@given(candidates(), budgets)
def test_p25_weights_never_increase_and_are_the_highest_there_are(found: Candidates, budget: int) -> None:
    ids, logprobs = found
    if not np.isfinite(logprobs).all():
        return
    tree = build_tree(ROOT, ids, logprobs, budget)
    weights = weights_of(tree, ids, logprobs)
    assert weights == sorted(weights, reverse=True)
    assert weights == brute_force(ids, logprobs, budget)


@given(candidates(), budgets)
def test_p25_without_a_chain_seed_ties_go_by_depth_then_token(found: Candidates, budget: int) -> None:
    ids, logprobs = found
    tree = build_tree(ROOT, ids, logprobs, budget)
    weights, depths, tokens = weights_of(tree, ids, logprobs), tree.depths[1:], tree.tokens[1:]
    ordered = list(zip([-weight for weight in weights], depths.tolist(), tokens.tolist(), strict=True))
    assert ordered == sorted(ordered)


@given(candidates(wild=True), budgets, st.booleans())
def test_p26_any_answer_makes_a_tree(found: Candidates, budget: int, chain_seed: bool) -> None:
    ids, logprobs = found
    tree = build_tree(ROOT, ids, logprobs, budget, chain_seed)
    assert_well_formed(tree, budget)
    weights_of(tree, ids, logprobs)


@given(candidates(), st.booleans(), st.lists(st.integers(0, 4), min_size=LEVELS, max_size=LEVELS))
def test_p29_trees_are_nested_and_a_larger_one_never_accepts_less(
    found: Candidates, chain_seed: bool, answer: list[int]
) -> None:
    ids, logprobs = found
    whole = build_tree(ROOT, ids, logprobs, 63, chain_seed)
    accepted = -1
    for budget in range(64):
        tree = build_tree(ROOT, ids, logprobs, budget, chain_seed)
        smaller = cut(whole, budget + 1)
        assert paths_of(tree) == paths_of(smaller)
        assert smaller.parents.tolist() == tree.parents.tolist()
        assert walked(smaller, answer) == walked(tree, answer) >= accepted
        accepted = walked(tree, answer)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=20), budgets)
def test_continuations_make_the_tree_of_their_distinct_prefixes(
    steps: list[tuple[int, int]], budget: int
) -> None:
    tree = grow(ROOT, steps, budget)
    assert_well_formed(tree, budget)
    so_far: dict[int, tuple[int, ...]] = {}
    prefixes: dict[tuple[int, ...], None] = {}
    for number, token in steps:
        so_far[number] = (*so_far.get(number, ()), token)
        prefixes[so_far[number]] = None
    assert paths_of(tree)[1:] == list(prefixes)[:budget]
