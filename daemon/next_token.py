"""The next tokens of jobs, from the outputs of a call.

A row of logits is read only where its best id, or its best few, do not tell: it may lie far away.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slotd.daemon.backend import Outputs
from slotd.daemon.candidates import Candidates, View
from slotd.daemon.job import Job
from slotd.daemon.sampling import TokenIds, candidate_logprobs, logprobs, logprobs_view
from slotd.protocol.messages import TokenLogprob

Token = tuple[int, tuple[TokenLogprob, ...]]


class NextTokens:
    """The next token of each job. What their rows need of the device is asked for together, when one does.

    Args:
        jobs: they take their tokens in this order; a job that was given a tree stands for each of its rows.
        outputs: a row for each job.
        first_row: of the first job.
        ahead: for each row the tokens of a guessed answer up to it, behind those that the job produced;
            None: there are none anywhere.
    """

    def __init__(
        self, jobs: SequenceOf[Job], outputs: Outputs, first_row: int = 0,
        ahead: SequenceOf[tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self._jobs, self._outputs, self._first_row, self._ahead = jobs, outputs, first_row, ahead
        self._found: dict[int, list[Candidates | None]] = {}
        self._greedy: tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]] | None = None

    def of(self, index: int) -> Token:
        """The id, and its log-probability when the job wants that: () or one entry.

        Raises:
            RequestError: ``nonfinite``.
        """
        job, row, ahead = self._jobs[index], self._first_row + index, self._ahead_of(index)
        if _takes_best(job, ahead):
            ids, finite = self._best()
            if finite[row]:
                return int(ids[row]), ()
        elif not self._outputs.at_hand:
            found = self._from_candidates(index)
            if found is not None:
                return found
        logits = self._outputs.row(row)
        n = len(job.produced) + len(ahead)
        token = job.sampler.sample(logits, _history(job, ahead), n, job.banned_at(n))
        wanted = job.command.logprobs
        return token, (logprobs(logits, token, wanted),) if wanted else ()

    def _ahead_of(self, index: int) -> tuple[int, ...]:
        return () if self._ahead is None else self._ahead[index]

    def _best(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        if self._greedy is None:
            self._greedy = self._outputs.greedy()
        return self._greedy

    def _from_candidates(self, index: int) -> Token | None:
        """None where the row has to be read: the token would be the same, but this does not tell it."""
        job = self._jobs[index]
        if index not in self._found:
            self._ask(index)
        found = self._found[index]
        best, raw = found[0], found[-1]  # the same where one view serves both
        n = len(job.produced) + len(self._ahead_of(index))
        place = None if best is None else job.sampler.pick(best, n)
        if best is None or raw is None or place is None:
            return None
        token, wanted = int(best.ids[place]), job.command.logprobs
        return token, (candidate_logprobs(raw, best.raw[place], wanted),) if wanted else ()

    def _ask(self, first: int) -> None:
        """Have the device look at the rows of all jobs from the first on."""
        views = {
            index: _views(job, self._first_row + index, self._ahead_of(index))
            for index, job in enumerate(self._jobs)
            if index >= first and not _takes_best(job, self._ahead_of(index))
        }
        answers = iter(self._outputs.candidates([view for pair in views.values() for view in pair]))
        self._found = {index: [next(answers) for _ in pair] for index, pair in views.items()}


def _takes_best(job: Job, ahead: tuple[int, ...]) -> bool:
    """Whether the best id of a row is all that the job wants of it."""
    return (
        job.sampler.takes_best
        and not job.command.logprobs
        and not job.banned_at(len(job.produced) + len(ahead))
    )


def _history(job: Job, ahead: tuple[int, ...]) -> TokenIds:
    """Prompt and answer up to a row: as much of it as the sampler looks at."""
    if not ahead:
        return job.history
    window = job.sampler.window
    return [*job.history[-window:], *ahead] if window else ()


def _views(job: Job, row: int, ahead: tuple[int, ...]) -> list[View]:
    """How the row is looked at: for the choice, and for log-probabilities, which are of the raw logits."""
    banned = job.banned_at(len(job.produced) + len(ahead))
    view = job.sampler.view(row, _history(job, ahead), banned)
    if not job.command.logprobs:
        return [view]
    raw = logprobs_view(row, job.command.logprobs)
    if view.adjustments is None and view.temperature in (None, raw.temperature):
        return [replace(raw, most=max(raw.most, view.most))]
    return [view, raw]
