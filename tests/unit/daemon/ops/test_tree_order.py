"""A walk over a tree finds each row's parent where it says, in few places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.ops.tree_order import (
    FROM_BEFORE,
    FROM_COMMITTED,
    FROM_PLACE,
    KEEP_SHIFT,
    START_SHIFT,
    places_for,
    walk_order,
)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    n, spread = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    return [draw(st.integers(max(-1, row - spread), row - 1)) for row in range(n)]


def follow(parents: list[int]) -> int:
    """Walks, and returns how many places were used."""
    places: dict[int, int] = {}
    left, seen = -1, set()
    for visit in walk_order(parents):
        row, start, keep = visit & 255, visit >> START_SHIFT & 255, visit >> KEEP_SHIFT
        found = {FROM_BEFORE: left, FROM_COMMITTED: -1}.get(start)
        assert (places[start - FROM_PLACE] if found is None else found) == parents[row]
        if keep:
            places[keep - 1] = row
        left = row
        seen.add(row)
    assert seen == set(range(len(parents)))
    return 1 + max(places, default=-1)


@given(trees())
def test_each_row_starts_from_its_parent(parents: list[int]) -> None:
    assert follow(parents) <= places_for(len(parents))


def test_places() -> None:
    assert [places_for(n) for n in (1, 2, 3, 6, 7, 23, 31, 63, 64)] == [0, 0, 1, 1, 2, 3, 4, 5, 5]
    full = [(row - 1) // 2 for row in range(63)]  # the tree that needs most
    full[0] = -1
    assert follow(full) == 5
    assert follow([row - 1 for row in range(64)]) == 0
    assert follow([-1] * 64) == 0
