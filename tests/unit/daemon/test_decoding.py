"""A guess that goes wrong costs the guess: when it is drafted, verified or committed, alone and shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.draft_sources import ModelDrafter, NgramDrafter
from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.memory import OutOfDeviceMemory, Policy
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.spec.adaptation import Choice, Mode
from slotd.daemon.spec.tree import DraftTree, chain
from slotd.daemon.speculation import Drafter, fit, shallow
from slotd.protocol.messages import Sampling
from tests.fakes.drafters import ChainDrafter, TreeDrafter, guess_at_random, replay
from tests.fakes.scheduler_rig import SchedulerRig
from tests.fakes.tiny_draft import write_tiny_draft
from tests.fakes.tiny_gguf import write_tiny_llama

TEXTS: list[list[int]] = np.random.default_rng(22).integers(3, 320, (3, 30)).tolist()
N_VOCAB, N_GEN = 320, 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("decoding") / "tiny.gguf")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_draft(tmp_path_factory.mktemp("decoding") / "draft.gguf")


@cache
def plain(model: Path) -> list[list[int]]:
    return [SchedulerRig(model).answer(0, text, N_GEN) for text in TEXTS]


def right(model: Path) -> ChainDrafter:
    return ChainDrafter(replay(dict(enumerate(plain(model))), 7))


def steps(rig: SchedulerRig) -> list[int]:
    """Rows of each step."""
    return [sum(call.rows) for call in rig.engine.calls if call.kind is Kind.STEP]


def answer_all(rig: SchedulerRig) -> list[list[int]]:
    """All of TEXTS at once."""
    for number, text in enumerate(TEXTS):
        rig.prompt(number, text, N_GEN)
    rig.until(0, 1, 2)
    assert all(rig.done(number).status == "length" for number in range(3))
    return [rig.tokens(number) for number in range(3)]


# ----- memory


@pytest.mark.parametrize("policy", [Policy.LADDER, Policy.SEED])
@pytest.mark.parametrize(
    ("fault", "rows"), [("verify:1", [8, 4]), ("verify:1:2", [8, 4, 2]), ("verify:1:3", [8, 4, 2, 1])]
)
def test_a_tree_without_room_shrinks_and_then_goes(
    model: Path, fault: str, rows: list[int], policy: Policy
) -> None:
    rig = SchedulerRig(model, fault=fault, policy=policy, drafters=[right(model)])
    rig.answer(9, TEXTS[1], 2, snap=None)
    rig.engine.calls.clear()
    assert rig.answer(0, TEXTS[0], N_GEN) == plain(model)[0]
    assert steps(rig)[: len(rows)] == rows
    recovery = rig.states()[-1]["recovery"]
    assert recovery["oom"] == {"verify": len(rows) - 1}
    assert recovery["rungs"] == {"shrink": len(rows) - 1}
    assert recovery["all_cleared"] == 0


def test_memory_that_is_short_for_ever_leaves_plain_decoding(model: Path) -> None:
    """And it is tried ever more rarely."""
    rig = SchedulerRig(model, fault="verify:1:1000", drafters=[right(model)])
    assert rig.answer(0, TEXTS[0], 60) == SchedulerRig(model).answer(0, TEXTS[0], 60)
    account = rig.done(0).account
    assert (account["drafted"], account["mode"]) == (0, "plain")
    tried = [step for step, rows in enumerate(n for n in steps(rig)) if rows > 1]
    assert len(tried) < 12


def test_trees_that_shrank_grow_again(model: Path) -> None:
    rig = SchedulerRig(model, drafters=[ChainDrafter(guess_at_random(N_VOCAB, 7, 1))])
    failures = [OutOfDeviceMemory("verify", 100, 0)]

    def fails_once(rows: Rows, kind: Kind) -> None:
        if len(rows) == 8 and failures:
            raise failures.pop()

    rig.engine.before_forward = fails_once
    rig.answer(0, TEXTS[0], 60)
    sizes = [rows for rows in steps(rig) if rows > 1]
    assert sizes[:4] == [8, 4, 4, 4]
    assert sizes[-8] == 8


@pytest.mark.parametrize("nth", range(1, 4))
@pytest.mark.parametrize("policy", [Policy.LADDER, Policy.SEED])
def test_a_commit_without_room_says_nothing_twice(model: Path, nth: int, policy: Policy) -> None:
    """What was committed is said; the others, and the one that failed, do a plain step."""
    rig = SchedulerRig(model, drafters=[right(model)], policy=policy)
    left = [6 + nth]  # prompts and steps on the way to the first step of all three

    def fails(sequence: Sequence) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OutOfDeviceMemory("commit", 100, 0)

    rig.engine.before_commit = fails
    assert answer_all(rig) == plain(model)
    assert rig.states()[-1]["recovery"]["all_cleared"] == 0


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), MemoryError("host")], ids=repr)
def test_an_error_of_a_shared_tree_is_a_plain_step(model: Path, error: Exception) -> None:
    rig = SchedulerRig(model, drafters=[right(model)])

    def fails(rows: Rows, kind: Kind) -> None:
        if kind is Kind.STEP and len(rows) > 3:
            raise error

    rig.engine.before_forward = fails
    assert answer_all(rig) == plain(model)


@pytest.mark.parametrize("fault", ["draft:1", "draft:2:3", "draft:1:1000", "draft_load:1"])
@pytest.mark.parametrize("modes", [(Mode.TREE,), (Mode.CHAIN,)], ids=str)
def test_a_draft_model_without_room_is_done_without(
    model: Path, draft: Path, fault: str, modes: tuple[Mode, ...]
) -> None:
    def drafters(engine: Engine) -> list[Drafter]:
        return [ModelDrafter(engine, modes, 6)]

    rig = SchedulerRig(model, draft=draft, fault=fault, drafters=drafters)
    assert answer_all(rig) == plain(model)
    assert (rig.states()[-1]["totals"]["drafted_tokens"] > 0) == (
        not fault.endswith("000") and "load" not in fault
    )
    assert bool(rig.engine.drafting.refusal) == ("load" in fault)


# ----- drafts that are wrong in themselves


class Broken:
    """A drafter with a fault. make: the tree, from the pending token."""

    def __init__(self, make: Callable[[int], DraftTree | None]) -> None:
        self._make = make

    def most(self, job: Job) -> Mapping[Mode, int]:
        return {Mode.CHAIN: 8}

    def draft(self, jobs: SequenceOf[Job], choices: SequenceOf[Choice]) -> list[DraftTree | None]:
        return [self._make(job.produced[-1]) for job in jobs]


def fails(root: int) -> DraftTree:
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    "make",
    [
        lambda root: chain(root, [-1, 5]),
        lambda root: chain(root, [5, N_VOCAB]),
        lambda root: chain(root, [2**31 - 1]),
        lambda root: chain(root, list(range(3, 100))),
        lambda root: None,
        fails,
    ],
)
def test_field_report_47_a_draft_of_nonsense_is_plain_decoding(
    model: Path, make: Callable[[int], DraftTree | None]
) -> None:
    rig = SchedulerRig(model, drafters=[Broken(make)])
    assert answer_all(rig) == plain(model)
    assert max(steps(rig)) <= 64


def test_log_probabilities_that_are_no_numbers_are_no_draft(
    model: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SchedulerRig(model, draft=draft, drafters=lambda engine: [ModelDrafter(engine, (Mode.TREE,), 6)])
    propose = rig.engine.propose

    def nothing(*args: Any) -> Any:
        found = propose(*args)
        assert found is not None
        found.logprobs[...] = np.nan
        return found

    monkeypatch.setattr(rig.engine, "propose", nothing)
    assert rig.answer(0, TEXTS[0], N_GEN) == plain(model)[0]
    assert rig.done(0).account["drafted"] == 0


# ----- beside everything else


def test_nonfinite_logits_behind_accepted_tokens_end_the_request_where_plain_decoding_would(
    model: Path,
) -> None:
    """What comes before the bad row is said."""
    answer = plain(model)[0]

    def spoil(rows: Rows, logits: Any) -> None:
        for row, (token, depth) in enumerate(zip(rows.tokens, rows.depths, strict=True)):
            at = len(rows.sequences[rows.owner[row]]) + depth - len(TEXTS[0])
            if rows.tokens is not None and len(logits) == len(rows) and at == 9 and token == answer[9]:
                logits[row] = np.nan

    found = []
    for drafters in ([], [right(model)]):
        rig = SchedulerRig(model, drafters=drafters)
        rig.engine.change_logits = spoil
        rig.answer(0, TEXTS[0], N_GEN)
        done = rig.done(0)
        found.append((rig.tokens(0), done.status, done.code, dict(done.reason)))
    assert found[0] == found[1]
    assert found[0][:3] == (answer[:10], "err", "nonfinite")


def test_a_cancel_while_drafting_ends_the_request_behind_the_step(model: Path) -> None:
    rig = SchedulerRig(model)
    drafter = right(model)

    class Cancelling:
        most = drafter.most

        def draft(self, jobs: SequenceOf[Job], choices: SequenceOf[Choice]) -> list[DraftTree | None]:
            if len(jobs[0].produced) > 8:
                rig.flags[0].cancelled = True
            return drafter.draft(jobs, choices)

    rig = SchedulerRig(model, drafters=[Cancelling()])
    for number in (0, 1):
        rig.prompt(number, TEXTS[number], N_GEN)
    rig.until(0, 1)
    assert (rig.done(0).status, rig.tokens(1)) == ("cancelled", plain(model)[1])
    assert rig.tokens(0) == plain(model)[0][: len(rig.tokens(0))]
    again = rig.answer(2, [*TEXTS[0], *rig.tokens(0)], 3)
    assert again == SchedulerRig(model).answer(2, [*TEXTS[0], *rig.tokens(0)], 3)


def test_a_paused_answer_takes_no_part_in_trees(model: Path) -> None:
    rig = SchedulerRig(model, drafters=[right(model)])
    for number in (0, 1):
        rig.prompt(number, TEXTS[number], N_GEN)
    rig.until_true(lambda: bool(rig.tokens(1)))
    said = rig.tokens(0)
    rig.flags[0].paused = True
    rig.until(1)
    assert rig.tokens(0) == said
    rig.flags[0].paused = False
    rig.until(0)
    assert [rig.tokens(number) for number in (0, 1)] == plain(model)[:2]


def test_draft_and_n_grams_side_by_side_for_one_that_samples(model: Path, draft: Path) -> None:
    """Mixed: a draft model that knows nothing, n-grams of a text that repeats, and requests of each kind."""
    repeated = [*TEXTS[0][:9]] * 4
    fields: list[dict[str, Any]] = [
        {},
        {"sampling": Sampling(temperature=0.8, seed=3)},
        {"sampling": Sampling(temperature=0.0), "logprobs": 2},
    ]
    expected = [SchedulerRig(model).answer(n, repeated, 30, **extra) for n, extra in enumerate(fields)]
    for adapts in (False, True):
        rig = SchedulerRig(
            model, draft=draft, adapts=adapts,
            drafters=lambda engine: [NgramDrafter(9), ModelDrafter(engine, (Mode.CHAIN, Mode.TREE), 9)],
        )  # fmt: skip
        for number, extra in enumerate(fields):
            rig.prompt(number, repeated, 30, **extra)
        rig.until(0, 1, 2)
        assert [rig.tokens(number) for number in range(3)] == expected
        if not adapts:
            assert rig.states()[-1]["totals"]["drafted_tokens"] > 0


# ----- adaptation, on costs that the test sets


@pytest.mark.parametrize(("per_row", "pays"), [(0.0, True), (0.02, True), (1.0, False)])
def test_it_drafts_where_it_pays(model: Path, per_row: float, pays: bool) -> None:
    answer = SchedulerRig(model).answer(0, TEXTS[0], 120)
    rig = SchedulerRig(model, adapts=True, drafters=[ChainDrafter(replay({0: answer}, 7))])
    took: list[float] = []

    def takes_time(rows: Rows, kind: Kind) -> None:
        if kind is Kind.STEP:
            took.append(1.0 + per_row * (len(rows) - 1))
            rig.clock.now += took[-1]

    rig.engine.before_forward = takes_time
    assert rig.answer(0, TEXTS[0], 120) == answer
    assert sum(took) < (60 if pays else 119 * 1.05)
    assert rig.done(0).account["mode"] == ("chain" if pays else rig.done(0).account["mode"])


def test_drafts_that_miss_cost_little(model: Path) -> None:
    rig = SchedulerRig(model, adapts=True, drafters=[TreeDrafter(guess_at_random(N_VOCAB, 6, 1), N_VOCAB, 2)])
    took: list[float] = []

    def takes_time(rows: Rows, kind: Kind) -> None:
        if kind is Kind.STEP:
            took.append(1.0 + 0.3 * (len(rows) - 1))
            rig.clock.now += took[-1]

    rig.engine.before_forward = takes_time
    rig.answer(0, TEXTS[0], 256)
    assert sum(took) < 255 * 1.03


# ----- trees


def test_a_shallower_tree_keeps_its_order() -> None:
    tree = DraftTree(
        np.array([1, 2, 3, 4, 5, 6], np.int32), np.array([-1, 0, 1, 2, 0, 4], np.int32),
        np.array([0, 1, 2, 3, 1, 2], np.int32),
    )  # fmt: skip
    assert shallow(tree, 3) is tree
    found = shallow(tree, 1)
    assert (found.tokens.tolist(), found.parents.tolist()) == ([1, 2, 5], [-1, 0, 0])
    found = shallow(tree, 2)
    assert (found.tokens.tolist(), found.parents.tolist()) == ([1, 2, 3, 5, 6], [-1, 0, 1, 0, 3])
    assert shallow(tree, 0).tokens.tolist() == [1]


def test_the_largest_trees_shrink_first() -> None:
    trees = [chain(1, list(range(n))) for n in (0, 4, 30, 40)]
    assert [len(tree) for tree in fit(trees, 64)] == [1, 5, 29, 29]
    assert fit(trees, 100) == trees
