"""The walk through a tree that was verified: which guesses were right, and what comes behind them.

Each node that is visited draws the next token from the target's own distribution, once, as plain decoding
would have drawn it there: the draw of the n-th token is a function of (seed, n), and penalties count the path
up to the node. A child that holds this token is visited next. So the text does not depend on the tree, and
with it not on the draft, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from slotd.daemon.job import Job
from slotd.daemon.next_token import NextTokens
from slotd.daemon.spec.tree import DraftTree
from slotd.protocol.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Walk:
    """What a step gives a job.

    Attributes:
        path: rows of the tree, the root first, each the child of the one before: they become permanent.
        tokens: the token that was drawn behind each of them; the last one is not computed yet.
        scores: their log-probabilities, where the job wants them.
        failure: why there is no token behind the last row.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: tuple[TokenLogprob, ...]
    failure: Exception | None = None


def walk(job: Job, tree: DraftTree, tokens: NextTokens, first: int) -> Walk:
    """Follow the target through a tree; changes nothing.

    first: index of the tree's root among `tokens`.
    """
    row: int | None = 0
    path: list[int] = []
    drawn: list[int] = []
    scores: list[TokenLogprob] = []
    while row is not None:
        path.append(row)
        try:
            token, found = tokens.of(first + row)
        except Exception as error:
            return Walk(tuple(path), tuple(drawn), tuple(scores), error)
        drawn.append(token)
        scores += found
        row = None if job.ends_with(token, len(job.produced) + len(drawn)) else tree.child(row, token)
    return Walk(tuple(path), tuple(drawn), tuple(scores))


def paths_of(trees: SequenceOf[DraftTree]) -> list[tuple[int, ...]]:
    """For each row of trees side by side the tokens from below its root down to it."""
    found: list[tuple[int, ...]] = []
    for tree in trees:
        first = len(found)
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            found.append((*found[first + parent], token) if parent >= 0 else ())
    return found
