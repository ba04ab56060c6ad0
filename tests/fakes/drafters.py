"""Drafters that know the answer, or miss it on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from slotd.daemon.job import Job
from slotd.daemon.link import Key
from slotd.daemon.spec.adaptation import Choice, Mode
from slotd.daemon.spec.tree import DraftTree, build_tree, chain

BUDGET = 22

#: From a job to the ids that are guessed behind its pending token.
Guess = Callable[[Job], SequenceOf[int]]


class ChainDrafter:
    """Chains of guessed ids.

    Attributes:
        drafted: how many trees were asked for.
    """

    def __init__(self, guess: Guess, budget: int = BUDGET) -> None:
        self._guess, self._budget = guess, budget
        self.drafted = 0

    def most(self, job: Job) -> Mapping[Mode, int]:
        return {Mode.CHAIN: self._budget + 1}

    def draft(self, jobs: SequenceOf[Job], choices: SequenceOf[Choice]) -> list[DraftTree | None]:
        self.drafted += len(jobs)
        return [
            chain(job.produced[-1], list(self._guess(job))[: choice.rows - 1])
            for job, choice in zip(jobs, choices, strict=True)
        ]


class TreeDrafter:
    """Trees of random candidates with the guessed id among those of each position, where it is known.

    Args:
        guess: as ChainDrafter's.
        rank: of the guessed id among the candidates, 0 = the best.
    """

    def __init__(
        self, guess: Guess, n_vocab: int, seed: int, rank: int = 1, width: int = 4, budget: int = BUDGET
    ) -> None:
        self._budget = budget
        self._guess, self._n_vocab, self._rank, self._width = guess, n_vocab, rank, width
        self._rng = np.random.default_rng(seed)

    def most(self, job: Job) -> Mapping[Mode, int]:
        return {Mode.TREE: self._budget + 1}

    def draft(self, jobs: SequenceOf[Job], choices: SequenceOf[Choice]) -> list[DraftTree | None]:
        return [self._tree(job, choice.rows - 1) for job, choice in zip(jobs, choices, strict=True)]

    def _tree(self, job: Job, budget: int) -> DraftTree | None:
        guessed = list(self._guess(job))[:budget]
        if not guessed:
            return None
        ids = np.stack([self._candidates(token) for token in guessed]).astype(np.int32)
        logits = np.sort(self._rng.normal(0, 1, ids.shape), axis=1)[:, ::-1]
        logprobs = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float32)
        return build_tree(job.produced[-1], ids, logprobs, budget, chain_seed=bool(self._rng.integers(2)))

    def _candidates(self, token: int) -> list[int]:
        others = self._rng.permutation(self._n_vocab)[: self._width].tolist()
        others = [other for other in others if other != token][: self._width - 1]
        return [*others[: self._rank], token, *others[self._rank :]]


def replay(texts: Mapping[Key, SequenceOf[int]], n: int, wrong_from: int | None = None) -> Guess:
    """The next n ids of recorded answers: always right. wrong_from: from this id of a guess on, never."""

    def guess(job: Job) -> list[int]:
        at = len(job.produced)
        ids = list(texts[job.key][at : at + n])
        right = len(ids) if wrong_from is None else min(wrong_from, len(ids))
        return [*ids[:right], *((token + 1) % 250 + 3 for token in ids[right:])]

    return guess


def guess_at_random(n_vocab: int, n: int, seed: int) -> Guess:
    """Nobody knows."""
    rng = np.random.default_rng(seed)
    return lambda job: rng.integers(0, n_vocab, n).tolist()
