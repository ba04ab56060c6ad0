"""The next token of a job, from a row of a call's outputs."""

from __future__ import annotations

from slotd.daemon.backend import Outputs
from slotd.daemon.job import Job
from slotd.daemon.sampling import logprobs
from slotd.protocol.messages import TokenLogprob


def next_token(job: Job, outputs: Outputs, row: int) -> tuple[int, tuple[TokenLogprob, ...]]:
    """The id, and its log-probability when the job wants that: () or one entry.

    The logits themselves are read only where the best id is not all that matters: they may lie far away.

    Raises:
        RequestError: ``nonfinite``.
    """
    if job.sampler.takes_best and not job.command.logprobs and not job.banned:
        ids, finite = outputs.greedy()
        if finite[row]:
            return int(ids[row]), ()
    logits = outputs.logits[row]
    token = job.sampler.sample(logits, job.history, len(job.produced), job.banned)
    scores = (logprobs(logits, token, job.command.logprobs),) if job.command.logprobs else ()
    return token, scores
