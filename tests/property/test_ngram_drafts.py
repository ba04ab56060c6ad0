"""Drafts from the text itself, against a search through all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.spec import ngram
from slotd.daemon.spec.ngram import NgramIndex

texts = st.lists(st.integers(0, 3), max_size=40)
SIZES = (4, 2)


def occurrences(text: list[int], size: int) -> list[int]:
    """Where the last `size` tokens ended before, the most recent first."""
    gram = text[len(text) - size :]
    return [stop for stop in range(len(text) - 1, size - 1, -1) if text[stop - size : stop] == gram]


def agreed(text: list[int], stop: int) -> int:
    n = 0
    while n < min(stop, ngram.COMPARED) and text[stop - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n


@given(texts, st.integers(0, 12))
def test_the_best_place_of_the_longest_n_gram_that_there_is(text: list[int], n: int) -> None:
    index = NgramIndex(*SIZES)
    index.extend(text)
    found: list[int] = next((places for size in SIZES if (places := occurrences(text, size))), [])
    found = [] if len(text) < SIZES[-1] else found[: ngram.LOOKED_AT]
    if not found:
        assert index.propose(n) == []
        return
    start = max(found, key=lambda stop: (agreed(text, stop), stop))
    expected = text[start:]
    while len(expected) < n:
        expected.append(expected[start - len(text)])
    assert index.propose(n) == expected[:n]


@given(st.lists(texts, max_size=5), st.integers(0, 63))
def test_trees_are_nested_start_with_the_best_and_pieces_do_not_matter(
    pieces: list[list[int]], budget: int
) -> None:
    whole, in_pieces = NgramIndex(*SIZES), NgramIndex(*SIZES)
    for piece in pieces:
        whole.extend(piece)
        in_pieces.extend(piece)
        in_pieces.propose(1)
    large, small = whole.propose_tree(9, 63), in_pieces.propose_tree(9, budget)
    n = len(small)
    assert n == min(len(large), budget + 1)
    assert small.tokens.tolist() == large.tokens[:n].tolist()
    assert small.parents.tolist() == large.parents[:n].tolist()
    assert len(set(zip(small.parents.tolist(), small.tokens.tolist(), strict=True))) == n
    if n > 1:
        assert small.tokens[1] == whole.propose(1)[0]
