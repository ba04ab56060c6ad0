"""The next tokens of jobs, from the outputs of a call.

A row of logits is read only where its best id, or its best few, do not tell: it may lie far away.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from slotd.daemon.backend import Outputs
from slotd.daemon.candidates import Candidates, View
from slotd.daemon.job import Job
from slotd.daemon.sampling import candidate_logprobs, logprobs, logprobs_view
from slotd.protocol.messages import TokenLogprob

Token = tuple[int, tuple[TokenLogprob, ...]]


class NextTokens:
    """The next token of each job. What their rows need of the device is asked for together, when one does.

    Args:
        jobs: they take their tokens in this order.
        outputs: a row for each job.
        first_row: of the first job.
    """

    def __init__(self, jobs: SequenceOf[Job], outputs: Outputs, first_row: int = 0) -> None:
        self._jobs, self._outputs, self._first_row = jobs, outputs, first_row
        self._found: dict[int, list[Candidates | None]] = {}

    def of(self, index: int) -> Token:
        """The id, and its log-probability when the job wants that: () or one entry.

        Raises:
            RequestError: ``nonfinite``.
        """
        job, row = self._jobs[index], self._first_row + index
        if _takes_best(job):
            ids, finite = self._outputs.greedy()
            if finite[row]:
                return int(ids[row]), ()
        elif not self._outputs.at_hand:
            found = self._from_candidates(index)
            if found is not None:
                return found
        logits = self._outputs.row(row)
        token = job.sampler.sample(logits, job.history, len(job.produced), job.banned)
        wanted = job.command.logprobs
        return token, (logprobs(logits, token, wanted),) if wanted else ()

    def _from_candidates(self, index: int) -> Token | None:
        """None where the row has to be read: the token would be the same, but this does not tell it."""
        job = self._jobs[index]
        if index not in self._found:
            self._ask(index)
        found = self._found[index]
        best, raw = found[0], found[-1]  # the same where one view serves both
        place = None if best is None else job.sampler.pick(best, len(job.produced))
        if best is None or raw is None or place is None:
            return None
        token, wanted = int(best.ids[place]), job.command.logprobs
        return token, (candidate_logprobs(raw, best.raw[place], wanted),) if wanted else ()

    def _ask(self, first: int) -> None:
        """Have the device look at the rows of all jobs from the first on."""
        views = {
            index: _views(job, self._first_row + index)
            for index, job in enumerate(self._jobs)
            if index >= first and not _takes_best(job)
        }
        answers = iter(self._outputs.candidates([view for pair in views.values() for view in pair]))
        self._found = {index: [next(answers) for _ in pair] for index, pair in views.items()}


def _takes_best(job: Job) -> bool:
    """Whether the best id of a row is all that the job wants of it."""
    return job.sampler.takes_best and not job.command.logprobs and not job.banned


def _views(job: Job, row: int) -> list[View]:
    """How the row is looked at: for the choice, and for log-probabilities, which are of the raw logits."""
    view = job.sampler.view(row, job.history, job.banned)
    if not job.command.logprobs:
        return [view]
    raw = logprobs_view(row, job.command.logprobs)
    if view.adjustments is None and view.temperature in (None, raw.temperature):
        return [replace(raw, most=max(raw.most, view.most))]
    return [view, raw]
