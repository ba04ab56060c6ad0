"""Who guesses: the text itself, by its n-grams, or the draft model of the engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.rows import MAX_STEP_ROWS
from slotd.daemon.spec.adaptation import Choice, Mode
from slotd.daemon.spec.ngram import NgramIndex
from slotd.daemon.spec.tree import DraftTree, build_tree, chain, cut

#: Candidates of a position that a tree is built from.
WIDTH = 8


class NgramDrafter:
    """What followed the last tokens of a prompt and its answer when they stood there before.

    budget: most nodes of a tree below its root.
    """

    def __init__(self, budget: int) -> None:
        self._budget = min(budget, MAX_STEP_ROWS - 1)
        self._indices: WeakKeyDictionary[Job, NgramIndex] = WeakKeyDictionary()
        self._found: WeakKeyDictionary[Job, DraftTree] = WeakKeyDictionary()  # of the coming step

    def most(self, job: Job) -> Mapping[Mode, int]:
        """See `speculation.Drafter`."""
        index = self._indices.get(job)
        if index is None:
            index = self._indices[job] = NgramIndex()
        new: array[int] = job.history[len(index) :]
        index.extend(new)
        tree = self._found[job] = index.propose_tree(job.produced[-1], self._budget)
        return {Mode.NGRAM: len(tree)}

    def draft(self, jobs: SequenceOf[Job], choices: SequenceOf[Choice]) -> list[DraftTree | None]:
        """See `speculation.Drafter`."""
        return [cut(self._found[job], choice.rows) for job, choice in zip(jobs, choices, strict=True)]


class ModelDrafter:
    """The engine's draft model, as chains or trees.

    Args:
        engine: it may have none for a while, when it did not fit.
        modes: CHAIN, TREE or both.
        budget: most nodes of a tree below its root.
        block: rows that the draft is given, its own number when None; at most that.
        temperature: log-probabilities are those of logits divided by it.
        chain_seed: trees begin with the best candidate of every position.
    """

    def __init__(
        self, engine: Engine, modes: SequenceOf[Mode], budget: int, *, block: int | None = None,
        temperature: float = 1.0, chain_seed: bool = False,
    ) -> None:  # fmt: skip
        self._engine, self._modes, self._block = engine, modes, block
        self._budget = min(budget, MAX_STEP_ROWS - 1)
        self._temperature, self._chain_seed = temperature, chain_seed

    @property
    def depth(self) -> int:
        """Positions that are drafted."""
        block = self._engine.drafting.block_size
        return (block if self._block is None else min(block, self._block)) - 1

    def most(self, job: Job) -> Mapping[Mode, int]:
        """See `speculation.Drafter`."""
        if not self._engine.drafts:
            return {}
        rows = {Mode.CHAIN: min(self.depth, self._budget, job.remaining - 1) + 1, Mode.TREE: self._budget + 1}
        return {mode: rows[mode] for mode in self._modes}

    def draft(self, jobs: SequenceOf[Job], choices: SequenceOf[Choice]) -> list[DraftTree | None]:
        """See `speculation.Drafter`."""
        is_tree = any(choice.mode is Mode.TREE for choice in choices)
        depth = min(self.depth, max(job.remaining for job in jobs) - 1)
        if not is_tree:
            depth = min(depth, max(choice.rows for choice in choices) - 1)
        found = self._engine.propose(
            [job.running_sequence for job in jobs], [job.produced[-1] for job in jobs], depth,
            WIDTH if is_tree else 1, self._temperature,
        )  # fmt: skip
        if found is None:
            return [None] * len(jobs)
        trees: list[DraftTree | None] = []
        for number, (job, choice) in enumerate(zip(jobs, choices, strict=True)):
            root, budget = job.produced[-1], choice.rows - 1
            if choice.mode is Mode.CHAIN:
                trees.append(chain(root, found.ids[number, :budget, 0].tolist()))
            else:
                ids, logprobs = found.ids[number], found.logprobs[number]
                trees.append(build_tree(root, ids, logprobs, budget, self._chain_seed))
        return trees
