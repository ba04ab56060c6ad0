"""Trees of draft tokens: what a step lets the target check behind a pending token.

Row 0 is the pending token itself. The rows of a tree are in the order in which they were worth adding, so
the first n rows of a tree are the tree of a smaller budget: `cut` is how trees shrink.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

#: Parent of row 0.
NO_PARENT = -1


@dataclass(frozen=True, eq=False)
class DraftTree:
    """The root and its candidates, parents before children, siblings with distinct tokens.

    Attributes:
        tokens: int32 [n], the pending token first.
        parents: int32 [n], NO_PARENT for row 0, else an earlier row.
        depths: int32 [n], 0 for row 0.
    """

    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, row: int, token: int) -> int | None:
        """The row behind this one that holds the token."""
        return self._children.get((row, token))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        keys = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {key: row for row, key in enumerate(keys)}


def root_only(token: int) -> DraftTree:
    """No candidates: plain decoding."""
    return _tree([token], [NO_PARENT], [0])


def chain(root: int, tokens: Sequence[int]) -> DraftTree:
    """One candidate behind the other."""
    n = len(tokens) + 1
    return _tree([root, *tokens], list(range(NO_PARENT, n - 1)), list(range(n)))


def cut(tree: DraftTree, n: int) -> DraftTree:
    """The first n rows, at least the root."""
    n = max(n, 1)
    return tree if n >= len(tree) else DraftTree(tree.tokens[:n], tree.parents[:n], tree.depths[:n])


def grow(root: int, steps: Iterable[tuple[int, int]], budget: int) -> DraftTree:
    """The first `budget` nodes of several continuations that share what they have in common.

    Args:
        steps: (number of a continuation, its next token), in the order in which nodes are worth adding.
    """
    tokens, parents, depths = [root], [NO_PARENT], [0]
    ends: dict[int, int] = {}  # continuation -> its row so far
    children: dict[tuple[int, int], int] = {}
    for number, token in steps:
        above = ends.get(number, 0)
        row = children.get((above, token))
        if row is None:
            if len(tokens) > budget:
                break
            row = children[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
            depths.append(depths[above] + 1)
        ends[number] = row
    return _tree(tokens, parents, depths)


def build_tree(
    root: int,
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    budget: int,
    chain_seed: bool = False,
) -> DraftTree:
    """The `budget` paths of the highest weight, best first; a path's weight is the sum along it.

    Positions are taken for independent: any candidate may follow any other. Equal weights go by depth, then
    by token id. Candidates whose log-probability is not finite do not exist.

    Args:
        ids: int32 [L, K], the candidates for each of the L positions behind the root.
        logprobs: float32 [L, K], of the ids.
        budget: most nodes besides the root.
        chain_seed: start with the best candidate of every position, one behind the other.
    """
    levels = _levels(ids, logprobs)
    tokens, parents, depths = [root], [NO_PARENT], [0]
    spine = min(len(levels), budget) if chain_seed else 0
    # An entry: the negative weight, depth, token, parent, rank, the parent's negative weight.
    heap: list[tuple[float, int, int, int, int, float]] = []
    weight = 0.0
    for depth in range(spine):
        level = levels[depth]
        tokens.append(level[0][1])
        parents.append(depth)
        depths.append(depth + 1)
        if len(level) > 1:
            heap.append((weight + level[1][0], depth + 1, level[1][1], depth, 1, weight))
        weight += level[0][0]
    if spine < len(levels):
        heap.append((weight + levels[spine][0][0], spine + 1, levels[spine][0][1], spine, 0, weight))
    heapq.heapify(heap)
    deepest = len(levels)
    while heap and len(tokens) <= budget:
        cost, depth, token, parent, rank, above = heapq.heappop(heap)
        row = len(tokens)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        siblings = levels[depth - 1]
        if rank + 1 < len(siblings):
            more, token = siblings[rank + 1]
            heapq.heappush(heap, (above + more, depth, token, parent, rank + 1, above))
        if depth < deepest:
            more, token = levels[depth][0]
            heapq.heappush(heap, (cost + more, depth + 1, token, row, 0, cost))
    return _tree(tokens, parents, depths)


def _levels(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> list[list[tuple[float, int]]]:
    """(negative log-probability, id) of each position, best first, each id once, up to the first without."""
    levels = []
    for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True):
        level = [(-value, token) for token, value in zip(row, values, strict=True) if -inf < value < inf]
        if not level:
            break
        level.sort()
        if len(set(row)) < len(row):
            best = {token: cost for cost, token in reversed(level)}
            level = sorted((cost, token) for token, cost in best.items())
        levels.append(level)
    return levels


def _tree(tokens: list[int], parents: list[int], depths: list[int]) -> DraftTree:
    return DraftTree(*(np.array(values, dtype=np.int32) for values in (tokens, parents, depths)))
