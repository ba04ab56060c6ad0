"""In which order the rows of a step are walked when a row needs what its parent left.

Depth first, the largest subtree last: a parent's state has to be kept while its smaller subtrees are walked
only, so five places are enough for 64 rows. The order decides nothing about a row's result.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Where a visit starts: what the visit before it left, the committed state, or FROM_PLACE + place.
FROM_BEFORE, FROM_COMMITTED, FROM_PLACE = range(3)

#: A visit is row | start << START_SHIFT | keep << KEEP_SHIFT; keep: 0, or 1 + the place for what it leaves.
START_SHIFT, KEEP_SHIFT = 8, 16


def places_for(n_rows: int) -> int:
    """Places that any tree of up to n_rows rows needs at most."""
    return 0 if n_rows < 3 else 1 + places_for((n_rows - 1) // 2)


def walk_order(parents: Sequence[int]) -> list[int]:
    """A visit for each row of one sequence.

    parents: of each row an earlier one, or -1: the committed end.
    """
    if len(parents) == 1:
        return [0]
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last one: of the committed end
    sizes = [1] * (len(parents) + 1)
    for row in range(len(parents) - 1, -1, -1):
        sizes[parents[row]] += sizes[row]
        children[parents[row]].append(row)
    for below in children:
        below.sort(key=lambda row: (sizes[row], row))
    order: list[int] = []
    free = list(range(places_for(len(parents)) - 1, -1, -1))
    stack = [(row, FROM_COMMITTED) for row in reversed(children[-1])]
    taken: dict[int, int] = {}  # row -> children that have yet to read its place
    while stack:
        row, start = stack.pop()
        if start >= FROM_PLACE:
            taken[start - FROM_PLACE] -= 1
            if not taken[start - FROM_PLACE]:
                free.append(start - FROM_PLACE)
        elif not order:
            start = FROM_BEFORE
        keep = 0
        if len(children[row]) > 1:
            place = free.pop()
            keep, taken[place] = 1 + place, len(children[row]) - 1
        stack += [(child, FROM_PLACE + keep - 1) for child in reversed(children[row][1:])]
        stack += [(child, FROM_BEFORE) for child in children[row][:1]]
        order.append(row | start << START_SHIFT | keep << KEEP_SHIFT)
    return order
