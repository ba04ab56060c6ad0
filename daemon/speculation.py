"""What is guessed for a step: which jobs get a tree, from whom, and how large it may be.

Nothing here decides what is said: a tree costs time, or saves it. So whatever goes wrong with a guess, the
step goes on with a smaller one, or without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

import numpy as np

from slotd.daemon.job import Job
from slotd.daemon.rows import MAX_STEP_ROWS
from slotd.daemon.spec.adaptation import (
    PLAIN,
    Adaptation,
    Beside,
    Choice,
    Mode,
    StepCosts,
    UsualAcceptance,
)
from slotd.daemon.spec.tree import DraftTree, cut, root_only
from slotd.daemon.totals import Totals
from slotd.daemon.walk import Walk

#: Once costs are known a plain step is measured every so often: it is the cheap one.
MEASURE_EVERY = 16

log = logging.getLogger(__name__)


class Drafter(Protocol):
    """Guesses what comes next."""

    def most(self, job: Job) -> Mapping[Mode, int]:
        """Rows that a tree of each mode may have now, the root included; below two there is none."""
        ...

    def draft(self, jobs: SequenceOf[Job], choices: SequenceOf[Choice]) -> list[DraftTree | None]:
        """For each job a tree behind its pending token, of one of the modes `most` has named.

        None: no idea. May raise anything: the step then goes without.
        """
        ...


class _Planned(NamedTuple):
    """What a job does in the coming step."""

    drafter: Drafter
    choice: Choice


class Speculation:
    """The guesses of a scheduler's steps.

    Args:
        drafters: the first one that has something is asked, or the one that promises most.
        n_vocab: ids are below this.
        totals: counts.
        adapts: mode and size of a tree follow from what steps cost and what they accept; else it is always
            the largest one of the first mode.
        clock: seconds.

    Attributes:
        adapts: whether it wants to know what steps cost.
    """

    def __init__(
        self, drafters: SequenceOf[Drafter], n_vocab: int, totals: Totals, adapts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.adapts = adapts and bool(drafters)
        self._drafters, self._n_vocab, self._totals, self._clock = drafters, n_vocab, totals, clock
        self._costs, self._usual = StepCosts(), UsualAcceptance()
        self._planned: dict[Job, _Planned] = {}
        self._draft_seconds = 0.0
        self._unmeasured = 0

    # ----- before a step

    def trees(self, jobs: list[Job]) -> list[DraftTree] | None:
        """A tree for each job, all together at most MAX_STEP_ROWS rows; None: plain decoding."""
        if not self._drafters or len(jobs) >= MAX_STEP_ROWS:
            return None
        self._plan(jobs)
        if not self._planned:
            return None
        drafts = self._draft()
        trees = [self._limited(job, drafts.get(job)) for job in jobs]
        return fit(trees, MAX_STEP_ROWS) if any(len(tree) > 1 for tree in trees) else None

    def _plan(self, jobs: list[Job]) -> None:
        self._planned, self._draft_seconds = {}, 0.0
        beside = Beside(rows=len(jobs) - 1, tokens=len(jobs) - 1)
        for job in jobs:
            if job.remaining < 2 or job.drafts.rests():
                continue
            job.account.enter("draft")
            drafters = {
                mode: (drafter, min(rows, job.drafts.most_rows))
                for drafter in self._drafters
                for mode, rows in drafter.most(job).items()
                if rows > 1
            }
            job.account.enter("decode")
            choice = self._choose(
                job, {mode: rows for mode, (_, rows) in drafters.items()}, beside, len(jobs)
            )
            if choice.rows > 1:
                self._planned[job] = _Planned(drafters[choice.mode][0], choice)
                beside = Beside(
                    beside.rows + choice.rows - 1, beside.tokens + choice.tokens - 1,
                    beside.drafted or choice.mode.drafted,
                )  # fmt: skip

    def _choose(self, job: Job, most: dict[Mode, int], beside: Beside, n_jobs: int) -> Choice:
        if not most:
            return PLAIN
        if not self.adapts:
            mode, rows = next(iter(most.items()))
            return Choice(mode, rows, 1.0)
        if job.drafts.adaptation is None:
            job.drafts.adaptation = Adaptation(self._costs, self._usual)
        share = MAX_STEP_ROWS // n_jobs  # so that the last one finds room too
        return job.drafts.adaptation.choose({mode: min(rows, share) for mode, rows in most.items()}, beside)

    def _draft(self) -> dict[Job, DraftTree | None]:
        found: dict[Job, DraftTree | None] = {}
        for drafter in self._drafters:
            jobs = [job for job, planned in self._planned.items() if planned.drafter is drafter]
            if jobs:
                for job in jobs:
                    job.account.enter("draft")
                found.update(zip(jobs, self._draft_by(drafter, jobs), strict=True))
        return found

    def _draft_by(self, drafter: Drafter, jobs: list[Job]) -> SequenceOf[DraftTree | None]:
        choices = [self._planned[job].choice for job in jobs]
        began = self._clock()
        try:
            return drafter.draft(jobs, choices)
        except Exception as error:
            log.warning("drafting failed, the step is done without: %s", error)
            self.failed(jobs)
            return [None] * len(jobs)
        finally:
            if any(choice.mode.drafted for choice in choices):
                self._draft_seconds += self._clock() - began
            for job in jobs:
                job.account.enter("decode")

    def _limited(self, job: Job, tree: DraftTree | None) -> DraftTree:
        """No ids that there are not, no more rows than there was memory for, nothing beyond the answer."""
        if tree is None:
            return root_only(job.produced[-1])
        if tree.tokens.min() < 0 or tree.tokens.max() >= self._n_vocab:
            log.warning("a draft holds an id that is not below %d, the step is done without", self._n_vocab)
            job.drafts.failed()
            return root_only(job.produced[-1])
        return shallow(cut(tree, job.drafts.most_rows), job.remaining - 1)

    # ----- when a step does not work

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

    # ----- behind a step

    def verified(
        self,
        jobs: SequenceOf[Job],
        trees: SequenceOf[DraftTree],
        walks: SequenceOf[Walk],
        seconds: float | None,
    ) -> None:
        """Count what a step has made of its trees. seconds: it took, None: something went wrong meanwhile."""
        for job, tree, found in zip(jobs, trees, walks, strict=True):
            if len(tree) > 1:
                drafted, accepted = len(tree) - 1, len(found.path) - 1
                job.drafts.verified(self._planned[job].choice.mode, drafted, accepted)
                self._totals.drafted_tokens += drafted
                self._totals.accepted_tokens += accepted
        if not self.adapts or seconds is None:
            return
        rows, drafted_by_model = sum(map(len, trees)), self._draft_seconds > 0
        counted = self._costs.note(rows, seconds, self._draft_seconds)
        emitted = sum(len(found.path) for found in walks)
        for job, tree, found in zip(jobs, trees, walks, strict=True):
            adaptation, own = job.drafts.adaptation, len(found.path)
            if adaptation is not None:
                mode = self._planned[job].choice.mode if len(tree) > 1 else Mode.PLAIN
                drafted_beside = drafted_by_model and not mode.drafted
                beside = Beside(rows - len(tree), emitted - own, drafted_beside)
                adaptation.told(mode, len(tree), counted, found.path[1:], beside)

    def stepped(self, jobs: SequenceOf[Job], seconds: float) -> None:
        """A plain step of these jobs took so long."""
        self._unmeasured += 1
        if not self._costs.ready or self._unmeasured >= MEASURE_EVERY:
            self._unmeasured = 0
            self._costs.note(len(jobs), seconds)
        beside = Beside(rows=len(jobs) - 1, tokens=len(jobs) - 1)
        for job in jobs:
            if job.drafts.adaptation is not None:
                job.drafts.adaptation.told(Mode.PLAIN, 1, seconds, (), beside)


def shallow(tree: DraftTree, depth: int) -> DraftTree:
    """A tree without the nodes that lie deeper."""
    keep = tree.depths <= depth
    if keep.all():
        return tree
    places = np.cumsum(keep, dtype=np.int32) - 1
    parents = tree.parents[keep]
    parents = np.where(parents >= 0, places[parents], parents).astype(np.int32)
    return DraftTree(tree.tokens[keep], parents, tree.depths[keep])


def fit(trees: list[DraftTree], most: int) -> list[DraftTree]:
    """The trees with at most so many rows in all, roots included: the largest shrink first."""
    sizes = [len(tree) for tree in trees]
    if sum(sizes) <= most:
        return trees
    level = max(sizes)
    while sum(min(size, level) for size in sizes) > most:
        level -= 1
    return [cut(tree, level) for tree in trees]
