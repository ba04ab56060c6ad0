"""Steps of the jobs that decode, and what comes of them.

A step computes one row for each job, or, where something was guessed, the rows of a tree. What fails there
costs the guess first: a smaller tree, then none, and only then does a failure concern a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import numpy as np

from slotd.daemon.backend import Outputs
from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.link import Emit, ToFront
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.next_token import NextTokens
from slotd.daemon.recovery import Recovery
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.spec.tree import DraftTree
from slotd.daemon.speculation import Speculation
from slotd.daemon.totals import Totals
from slotd.daemon.walk import Walk, paths_of, walk
from slotd.protocol.errors import Value
from slotd.protocol.messages import TokenLogprob

#: No step takes less, in seconds, on whatever clock.
SHORTEST = 1e-9

log = logging.getLogger(__name__)


class Endings(Protocol):
    """Where jobs end."""

    def finish(self, job: Job, status: str, reason: dict[str, Value] | None = None) -> None:
        """End a job that has its answer."""

    def fail(self, job: Job, error: Exception) -> None:
        """End a job with an error."""


class Decoding:
    """Steps.

    Args:
        engine: token ids in, logits out.
        recovery: survives running out of memory.
        speculation: what is guessed.
        totals: counts.
        deliver: takes the tokens.
        endings: of jobs.
        clock: seconds.
    """

    def __init__(
        self, engine: Engine, recovery: Recovery, speculation: Speculation, totals: Totals,
        deliver: Callable[[ToFront], None], endings: Endings, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._engine, self._recovery, self._speculation = engine, recovery, speculation
        self._totals, self._deliver, self._endings, self._clock = totals, deliver, endings, clock
        self._ended: float | None = None  # the last step, when nothing else was done since

    def step(self, jobs: list[Job]) -> None:
        """One step of all jobs, in one call where that works."""
        if self._ended is None and self._speculation.adapts:
            self._ended = self._clock()
        trees = self._speculation.trees(jobs)
        if trees is not None:
            jobs = self._step_trees(jobs, trees)
        alone = self._step_together(jobs) if len(jobs) > 1 else jobs
        for job in alone:
            self._step_alone(job)

    def break_off(self) -> None:
        """Something else is done between two steps: what it takes is no part of the next one."""
        self._ended = None

    def choose(self, job: Job, tokens: NextTokens, index: int) -> None:
        """Sample the next token from its row of logits, hand it out, and end the answer when it says so."""
        job.account.enter("sample")
        token, scores = tokens.of(index)
        self._hand_out(job, (token,), scores)

    # ----- one row each

    def _step_together(self, jobs: list[Job]) -> list[Job]:
        """One step of all jobs in one call. Returns those that have to be stepped alone."""
        n_committed, failure = 0, None
        try:
            tokens = NextTokens(jobs, self._engine.forward(_next_rows(jobs), Kind.STEP))
            for row, job in enumerate(jobs):
                self._engine.commit(job.running_sequence, [row])
                n_committed += 1
        except OutOfDeviceMemory as error:
            failure = error.bare()
        except Exception as error:
            log.info("a step of %d sequences failed, each is stepped alone: %s", len(jobs), error)
        if failure is not None:
            self._recovery.do_less(failure, "split")
        elif n_committed == len(jobs):
            self._note_plain(jobs)
        for row, job in enumerate(jobs[:n_committed]):
            self._choose_or_fail(job, tokens, row)
        return jobs[n_committed:]  # what the others have committed stays

    def _step_alone(self, job: Job) -> None:
        try:
            outputs = self._recovery.attempt(lambda: self._compute_step(job), job.account, job.pinned)
        except Exception as error:
            self._endings.fail(job, error)
        else:
            self._note_plain([job])
            self._choose_or_fail(job, NextTokens([job], outputs), 0)

    def _compute_step(self, job: Job) -> Outputs:
        outputs = self._engine.forward(_next_rows([job]), Kind.STEP)
        self._engine.commit(job.running_sequence, [0])
        return outputs

    def _choose_or_fail(self, job: Job, tokens: NextTokens, index: int) -> None:
        try:
            self.choose(job, tokens, index)
        except Exception as error:
            self._endings.fail(job, error)

    def _note_plain(self, jobs: list[Job]) -> None:
        if self._speculation.adapts:
            self._speculation.stepped(jobs, self._elapsed())

    def _elapsed(self) -> float:
        """Seconds since the last step, whose tokens were handed out meanwhile, or since this one began."""
        now = self._clock()
        began = now if self._ended is None else self._ended
        self._ended = now
        return max(now - began, SHORTEST)

    # ----- trees

    def _step_trees(self, jobs: list[Job], trees: list[DraftTree]) -> list[Job]:
        """One step of all jobs with their trees in one call. Returns those that still need a plain one."""
        for job in jobs:
            job.account.enter("verify")
        verified = self._verify(jobs, trees)
        walks: list[Walk] = []
        if verified is not None:
            outputs, smaller = verified
            walks = self._commit_paths(jobs, smaller, outputs)
            whole = smaller is trees and len(walks) == len(jobs)
            seconds = self._elapsed() if whole and self._speculation.adapts else None
            n = len(walks)
            self._speculation.verified(jobs[:n], smaller[:n], walks, seconds)
        for job, found in zip(jobs, walks, strict=False):
            self._hand_out_or_fail(job, found)
        for job in jobs[len(walks) :]:
            job.account.enter("decode")
        return jobs[len(walks) :]

    def _verify(self, jobs: list[Job], trees: list[DraftTree]) -> tuple[Outputs, list[DraftTree]] | None:
        """Compute trees, or what is left of them when there is little memory; None: not even that works."""
        smaller: list[DraftTree] | None = trees
        while smaller is not None:
            try:
                return self._engine.forward(tree_rows(jobs, smaller), Kind.STEP), smaller
            except OutOfDeviceMemory as error:
                failure = error.bare()
            except Exception as error:
                log.warning("verifying drafts failed, the step is done without: %s", error)
                self._speculation.failed(jobs)
                return None
            self._recovery.do_less(failure, "shrink")
            smaller = self._speculation.smaller(jobs, smaller)
        return None

    def _commit_paths(self, jobs: list[Job], trees: list[DraftTree], outputs: Outputs) -> list[Walk]:
        """What the first jobs get; the rest, where memory runs out, has committed nothing."""
        starts = [0, *accumulate(len(tree) for tree in trees)]
        owners = [job for job, tree in zip(jobs, trees, strict=True) for _ in range(len(tree))]
        tokens = NextTokens(owners, outputs, 0, paths_of(trees))
        walks = []
        for job, tree, start in zip(jobs, trees, starts, strict=False):
            with job.account.inside("sample"):
                walks.append(walk(job, tree, tokens, start))
        n_committed, failure = 0, None
        try:
            for job, found, start in zip(jobs, walks, starts, strict=False):
                self._engine.commit(job.running_sequence, [start + row for row in found.path])
                n_committed += 1
        except OutOfDeviceMemory as error:
            failure = error.bare()
        except Exception as error:
            log.warning("committing drafts failed, the step is done without: %s", error)
        if failure is not None:
            self._recovery.do_less(failure, "split")
        return walks[:n_committed]

    def _hand_out_or_fail(self, job: Job, found: Walk) -> None:
        try:
            if found.tokens:
                self._hand_out(job, found.tokens, found.scores)
        except Exception as error:
            self._endings.fail(job, error)
        else:
            if found.failure is not None:
                self._endings.fail(job, found.failure)

    # ----- what comes of it

    def _hand_out(self, job: Job, tokens: tuple[int, ...], scores: tuple[TokenLogprob, ...]) -> None:
        """Emit the next tokens, and end the answer when the last one says so."""
        at = len(job.produced)
        for token in tokens:
            job.take(token)
        self._totals.generated_tokens += len(tokens)
        job.account.enter("emit")
        self._deliver(Emit(job.key, at, tokens, scores))
        ending = job.ending()
        if ending is not None:
            self._endings.finish(job, *ending)
        else:
            job.account.enter("decode")


def _next_rows(jobs: list[Job]) -> Rows:
    """The tokens that were chosen last and are not computed yet."""
    return Rows.next_tokens([job.running_sequence for job in jobs], [job.produced[-1] for job in jobs])


def tree_rows(jobs: list[Job], trees: list[DraftTree]) -> Rows:
    """The rows of trees side by side, logits wanted everywhere."""
    return Rows.join(
        [
            Rows(
                tree.tokens, (job.running_sequence,), np.zeros(len(tree), dtype=np.int32),
                tree.parents, tree.depths, np.ones(len(tree), dtype=np.bool_),
            )
            for job, tree in zip(jobs, trees, strict=True)
        ]
    )  # fmt: skip
