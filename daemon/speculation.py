"""What is guessed for a step: which jobs get a tree, from whom, and how large it may be.

Nothing here decides what is said: a tree costs time, or saves it. So whatever goes wrong with a guess, the
step goes on with a smaller one, or without.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np

from slotd.daemon.job import Job
from slotd.daemon.rows import MAX_STEP_ROWS
from slotd.daemon.spec.tree import DraftTree, cut, root_only
from slotd.daemon.totals import Totals
from slotd.daemon.walk import Walk

#: Most guessed tokens of a step and request, when nobody says.
DEFAULT_BUDGET = 22

log = logging.getLogger(__name__)


class Drafter(Protocol):
    """Guesses what comes next.

    Attributes:
        mode: what its drafts are counted as.
    """

    @property
    def mode(self) -> str: ...

    def draft(self, jobs: SequenceOf[Job], budget: int) -> list[DraftTree | None]:
        """For each job a tree behind its pending token, None: no idea. budget: most nodes below the root.

        May raise anything: the step then goes without.
        """
        ...


class Speculation:
    """The guesses of a scheduler's steps.

    Args:
        drafter: None: there are none.
        budget: most guessed tokens of a step and job.
        n_vocab: ids are below this.
        totals: counts.
    """

    def __init__(self, drafter: Drafter | None, budget: int, n_vocab: int, totals: Totals) -> None:
        self._drafter, self._budget, self._n_vocab, self._totals = drafter, budget, n_vocab, totals

    def trees(self, jobs: list[Job]) -> list[DraftTree] | None:
        """A tree for each job, all together at most MAX_STEP_ROWS; None: plain decoding."""
        if self._drafter is None or len(jobs) >= MAX_STEP_ROWS:
            return None
        asked = [job for job in jobs if not job.drafts.rests() and job.remaining > 1]
        if not asked:
            return None
        drafts = dict(zip(asked, self._draft(self._drafter, asked), strict=True))
        trees = [drafts.get(job) for job in jobs]
        if not any(trees):
            return None
        limited = [
            root_only(job.produced[-1]) if tree is None else self._limited(job, tree)
            for job, tree in zip(jobs, trees, strict=True)
        ]
        return fit(limited, MAX_STEP_ROWS)

    def smaller(self, jobs: SequenceOf[Job], trees: SequenceOf[DraftTree]) -> list[DraftTree] | None:
        """Trees for a step that had no memory for these; None: try without any."""
        most = max(map(len, trees)) // 2
        for job, tree in zip(jobs, trees, strict=True):
            if len(tree) > max(most, 1):
                job.drafts.shrink(max(most, 2))
        if most < 2:
            self.failed([job for job, tree in zip(jobs, trees, strict=True) if len(tree) > 1])
            return None
        return [cut(tree, most) for tree in trees]

    def failed(self, jobs: SequenceOf[Job]) -> None:
        """Drafts of these jobs came to nothing."""
        for job in jobs:
            job.drafts.failed()

    def walked(self, job: Job, tree: DraftTree, found: Walk) -> None:
        """Count what a step has made of a tree."""
        if len(tree) == 1:
            return
        assert self._drafter is not None
        drafted, accepted = len(tree) - 1, len(found.path) - 1
        job.drafts.verified(self._drafter.mode, drafted, accepted)
        self._totals.drafted_tokens += drafted
        self._totals.accepted_tokens += accepted

    def _draft(self, drafter: Drafter, jobs: list[Job]) -> list[DraftTree | None]:
        for job in jobs:
            job.account.enter("draft")
        found: list[DraftTree | None] = [None] * len(jobs)
        try:
            found = drafter.draft(jobs, min(self._budget, MAX_STEP_ROWS - len(jobs)))
        except Exception as error:
            log.warning("drafting failed, the step is done without: %s", error)
            self.failed(jobs)
        for job in jobs:
            job.account.enter("decode")
        return found

    def _limited(self, job: Job, tree: DraftTree) -> DraftTree:
        """No ids that there are not, no more rows than there was memory for, nothing beyond the answer."""
        if tree.tokens.min() < 0 or tree.tokens.max() >= self._n_vocab:
            log.warning("a draft holds an id that is not below %d, the step is done without", self._n_vocab)
            job.drafts.failed()
            return root_only(job.produced[-1])
        return shallow(cut(tree, job.drafts.most_rows), job.remaining - 1)


def shallow(tree: DraftTree, depth: int) -> DraftTree:
    """A tree without the nodes that lie deeper."""
    keep = tree.depths <= depth
    if keep.all():
        return tree
    places = np.cumsum(keep, dtype=np.int32) - 1
    parents = tree.parents[keep]
    return DraftTree(
        tree.tokens[keep],
        np.where(parents >= 0, places[parents], parents).astype(np.int32),
        tree.depths[keep],
    )


def fit(trees: list[DraftTree], most: int) -> list[DraftTree]:
    """The trees with at most so many rows in all, roots included: the largest shrink first."""
    sizes = [len(tree) for tree in trees]
    if sum(sizes) <= most:
        return trees
    level = max(sizes)
    while sum(min(size, level) for size in sizes) > most:
        level -= 1
    return [cut(tree, level) for tree in trees]
