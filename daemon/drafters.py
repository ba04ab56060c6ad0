"""Who guesses: the text itself, by its n-grams."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

from slotd.daemon.job import Job
from slotd.daemon.spec.ngram import NgramIndex
from slotd.daemon.spec.tree import DraftTree


class NgramDrafter:
    """What followed the last tokens of a prompt and its answer when they stood there before."""

    mode = "ngram"

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Job, NgramIndex] = WeakKeyDictionary()

    def draft(self, jobs: SequenceOf[Job], budget: int) -> list[DraftTree | None]:
        """See `speculation.Drafter`."""
        return [self._tree(job, budget) for job in jobs]

    def _tree(self, job: Job, budget: int) -> DraftTree | None:
        index = self._indices.get(job)
        if index is None:
            index = self._indices[job] = NgramIndex()
        new: array[int] = job.history[len(index) :]
        index.extend(new)
        tree = index.propose_tree(job.produced[-1], min(budget, job.remaining - 1))
        return tree if len(tree) > 1 else None
