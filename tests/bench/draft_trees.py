"""Time of the host's part of a speculative step: ``python -m tests.bench.draft_trees``.

Chooses mode and size, builds the tree of a draft's candidates, walks a path of it and tells what came of it;
and drafts from the text itself. The limit is 150 us at 22 nodes, 7 positions and 8 candidates each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from slotd.daemon.spec.adaptation import Adaptation, Mode, StepCosts, UsualAcceptance
from slotd.daemon.spec.ngram import NgramIndex
from slotd.daemon.spec.tree import DraftTree, build_tree

Given, Made = TypeVar("Given"), TypeVar("Made")

POSITIONS, CANDIDATES, ROUNDS = 7, 8, 2000


def walk(tree: DraftTree) -> int:
    """Rows of the path that takes the last child at every node, and one miss at its end."""
    last = {int(parent): row for row, parent in enumerate(tree.parents)}
    row = 0
    while row in last:
        row = tree.child(row, int(tree.tokens[last[row]])) or 0
    tree.child(row, -1)
    return int(tree.depths[row]) + 1


def timed(work: Callable[[Given], Made], inputs: list[Given]) -> tuple[float, list[Made]]:
    """Median microseconds of one call, and what the calls returned."""
    times, made = [], []
    for given in inputs:
        start = time.perf_counter_ns()
        made.append(work(given))
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times)) / 1000, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=22)
    budget = parser.parse_args().budget
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (ROUNDS, POSITIONS, 64)).astype(np.float32)
    logprobs = np.sort(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True), axis=-1)[..., ::-1]
    logprobs = np.ascontiguousarray(logprobs[..., :CANDIDATES])
    ids = rng.permuted(np.broadcast_to(np.arange(64, dtype=np.int32), logits.shape), axis=-1)
    ids = np.ascontiguousarray(ids[..., :CANDIDATES])
    for seed in (False, True):
        arguments = [(0, ids[i], logprobs[i], budget, seed) for i in range(ROUNDS)]
        build, trees = timed(lambda given: build_tree(*given), arguments)
        walked, _ = timed(walk, trees)
        print(f"budget {budget}, chain seed {seed}: build {build:.1f} us, walk {walked:.1f} us")
    costs = StepCosts()
    adaptation = Adaptation(costs, UsualAcceptance())
    for rows in (1, 1, 1, budget + 1):
        costs.note(rows, 1.0, 0.2 if rows > 1 else 0.0)
    most = {Mode.CHAIN: POSITIONS + 1, Mode.TREE: budget + 1, Mode.NGRAM: budget + 1}
    chosen, _ = timed(adaptation.choose, [most] * ROUNDS)
    told, _ = timed(
        lambda accepted: adaptation.told(
            Mode.TREE, budget + 1, costs.note(budget + 1, 1.2, 0.2), range(1, accepted)
        ),
        [1, 2, 3, 4] * (ROUNDS // 4),
    )
    print(f"choice {chosen:.1f} us, what came of it {told:.1f} us")
    index = NgramIndex()
    index.extend(rng.integers(0, 1000, 50_000).tolist())
    index.extend(range(1000))
    found, _ = timed(lambda token: (index.extend([token]), index.propose_tree(token, budget)), [*range(1000)])
    print(f"n-grams of 50,000 tokens: a token and a tree {found:.1f} us")


if __name__ == "__main__":
    main()
