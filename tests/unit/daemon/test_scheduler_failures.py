"""What fails fails alone: shared steps, every memory site, snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.link import Stop
from slotd.daemon.memory import OutOfDeviceMemory, Policy
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import Sampling, Snap, SnapInline, SnapInlineFailed
from tests.fakes.scheduler_rig import SchedulerRig, ids_of

TEXTS = np.random.default_rng(21).integers(3, 320, (3, 40)).tolist()
N_GEN = 8

Make = Callable[..., SchedulerRig]


@pytest.fixture
def make(tiny_llama: Path) -> Make:
    return lambda **options: SchedulerRig(tiny_llama, **options)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers to TEXTS, each alone on a daemon of its own."""
    from tests.fakes.tiny_gguf import write_tiny_llama

    model = write_tiny_llama(tmp_path_factory.mktemp("golden") / "tiny.gguf")
    return [SchedulerRig(model).answer("a", text, N_GEN) for text in TEXTS]


def start_all(rig: SchedulerRig) -> None:
    """All of TEXTS decode together, two tokens each, at least."""
    for number, text in enumerate(TEXTS):
        rig.prompt(number, text, N_GEN)
    rig.until_true(lambda: all(len(rig.tokens(number)) >= 2 for number in range(3)))


def is_of(rows_or_tokens: list[int], number: int) -> bool:
    return rows_or_tokens[:40] == TEXTS[number]


def check_the_others(rig: SchedulerRig, sick: int, golden: list[list[int]]) -> None:
    """All end once, the sick one by its error, the others with what they would have said alone."""
    rig.until(0, 1, 2)
    rig.turns(3)
    assert sorted(rig.order()) == [0, 1, 2]
    for number in range(3):
        if number == sick:
            assert rig.done(number).status == "err"
            assert rig.tokens(number) == golden[number][: len(rig.tokens(number))]
        else:
            assert (rig.done(number).status, rig.tokens(number)) == ("length", golden[number])


# ----- a shared step


@pytest.mark.parametrize("sick", range(3))
def test_a_sequence_that_breaks_a_shared_step_fails_alone(
    make: Make, golden: list[list[int]], sick: int
) -> None:
    rig = make()
    start_all(rig)

    def breaks(rows: Rows, kind: Kind) -> None:
        if any(is_of(text, sick) for text in ids_of(rows)):
            raise RuntimeError("bad rows")

    rig.engine.before_forward = breaks
    check_the_others(rig, sick, golden)
    assert rig.done(sick).code == "internal"
    assert rig.done(sick).reason == {"reason": "RuntimeError: bad rows"}


def test_a_failed_step_is_tried_again_alone_before_anything_fails(
    make: Make, golden: list[list[int]]
) -> None:
    """Memory that is short for three together may do for each of them."""
    rig = make()
    start_all(rig)

    def too_many(rows: Rows, kind: Kind) -> None:
        if len(rows) > 1:
            raise OutOfDeviceMemory("decode", 100, 0)

    rig.engine.before_forward = too_many
    rig.until(0, 1, 2)
    assert [rig.tokens(number) for number in range(3)] == golden


@pytest.mark.parametrize("sick", range(3))
def test_a_commit_that_fails_in_a_shared_step_costs_one_request(
    make: Make, golden: list[list[int]], sick: int
) -> None:
    """The others have committed their rows already: they must not be computed a second time."""
    rig = make()
    start_all(rig)

    def fails(sequence: Sequence) -> None:
        if is_of(sequence.tokens.tolist(), sick):
            raise OutOfDeviceMemory("commit", 100, 0)

    rig.engine.before_commit = fails
    check_the_others(rig, sick, golden)
    assert (rig.done(sick).code, rig.done(sick).reason["site"]) == ("oom", "commit")


def test_a_commit_that_fails_once_makes_no_answer_wrong(make: Make, golden: list[list[int]]) -> None:
    rig = make()
    start_all(rig)
    left = [2]

    def fails_at_the_second(sequence: Sequence) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OutOfDeviceMemory("commit", 100, 0)

    rig.engine.before_commit = fails_at_the_second
    rig.until(0, 1, 2)
    for number in range(3):
        assert rig.tokens(number) == golden[number][: len(rig.tokens(number))]
        assert rig.done(number).status in ("length", "err")


@pytest.mark.parametrize("error", [RequestError("nonfinite"), MemoryError("no room to sort")], ids=repr)
@pytest.mark.parametrize("sick", range(3))
def test_a_choice_that_fails_in_a_shared_step_costs_one_request(
    make: Make, golden: list[list[int]], sick: int, error: Exception
) -> None:
    rig = make()
    start_all(rig)
    job = rig.scheduler._running[sick]

    def fails(*_: object) -> int:
        raise error

    job.sampler.sample = fails  # type: ignore[method-assign]
    job.sampler.takes_best = False
    check_the_others(rig, sick, golden)


def test_a_choice_that_fails_in_the_step_that_ends_another_answer(
    make: Make, golden: list[list[int]]
) -> None:
    rig = make()
    for number, text in enumerate(TEXTS):
        rig.prompt(number, text, N_GEN if number else 6)
    rig.until_true(lambda: len(rig.tokens(0)) == 5)
    sampler = rig.scheduler._running[1].sampler
    sampler.sample = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    sampler.takes_best = False
    rig.until(0, 1, 2)
    rig.turns(3)
    assert sorted(rig.order()) == [0, 1, 2]
    assert [rig.done(number).status for number in range(3)] == ["length", "err", "length"]
    assert (rig.tokens(0), rig.tokens(2)) == (golden[0][:6], golden[2])


@pytest.mark.parametrize("sick", range(3))
def test_logits_that_are_not_finite_end_one_request(make: Make, golden: list[list[int]], sick: int) -> None:
    rig = make()
    start_all(rig)

    def poison(rows: Rows, logits: np.ndarray) -> None:
        for row, text in enumerate(ids_of(rows)):
            if is_of(text, sick):
                logits[row] = np.nan

    rig.engine.change_logits = poison
    check_the_others(rig, sick, golden)
    assert rig.done(sick).code == "nonfinite"


def test_a_bias_far_outside_breaks_nothing_but_its_request(make: Make, golden: list[list[int]]) -> None:
    """The door refuses it; should one get by, it is an error of this request."""
    rig = make()
    rig.prompt("bad", TEXTS[0], N_GEN, sampling=Sampling(logit_bias=((10**6, 1.0),)))
    rig.prompt("good", TEXTS[1], N_GEN)
    rig.until("bad", "good")
    assert rig.done("bad").code == "internal"
    assert rig.tokens("good") == golden[1]


def test_nothing_of_a_failed_request_is_used_again(make: Make, golden: list[list[int]]) -> None:
    rig = make()
    rig.prompt("a", TEXTS[0], N_GEN)
    rig.turns(3)
    rig.engine.before_forward = lambda rows, kind: 1 / 0
    rig.until("a")
    rig.engine.before_forward = lambda rows, kind: None
    assert rig.engine.memory_report()["pages_used"] == 0
    assert rig.answer("b", TEXTS[0], N_GEN) == golden[0]
    assert rig.done("b").account["reused"] == 0


# ----- memory


@pytest.mark.parametrize(
    ("site", "produced"),
    [("prefill_reserve", 0), ("prefill_embed", 0), ("prefill_build", 0), ("prefill_compute", 0),
     ("commit", 0), ("decode", 1), ("commit:2", 1), ("decode:3", 3), ("commit:4", 3)],
)  # fmt: skip
def test_memory_that_runs_out_at_any_site_ends_one_request(
    make: Make, golden: list[list[int]], site: str, produced: int
) -> None:
    chunk = 16 if site == "prefill_reserve" else 128  # only a prompt of several pieces passes it
    rig = make(fault=site if ":" in site else f"{site}:1", chunk=chunk, policy=Policy.ONCE)
    rig.prompt("sick", TEXTS[0], N_GEN)
    rig.until("sick")
    done = rig.done("sick")
    assert (done.status, done.code) == ("err", "oom")
    assert (done.reason["site"], list(done.reason)) == (site.split(":")[0], ["site", "requested", "free"])
    assert len(rig.tokens("sick")) == produced
    assert rig.engine.memory_report()["pages_used"] == 0
    assert rig.answer("next", TEXTS[0], N_GEN) == golden[0]


def test_memory_that_runs_out_at_a_restore_ends_one_request(make: Make, golden: list[list[int]]) -> None:
    rig = make(fault="restore:1", policy=Policy.ONCE)
    rig.answer("a", TEXTS[0], N_GEN, snap=Snap(30, 2))
    rig.prompt("sick", TEXTS[0], N_GEN, slot=2)
    rig.until("sick")
    assert (rig.done("sick").code, rig.done("sick").reason.get("site")) == ("oom", "restore")
    assert rig.answer("next", TEXTS[0], N_GEN, slot=2) == golden[0]


def test_a_restore_without_room_for_its_answer_holds_no_pages(make: Make) -> None:
    rig = make(fault="prefill_reserve:2", chunk=16, policy=Policy.ONCE)
    rig.answer("a", TEXTS[0], 1, snap=Snap(30, 2))
    (page,) = rig.slot(2).pages
    rig.answer("sick", TEXTS[0], N_GEN, slot=2)
    assert rig.done("sick").reason["site"] == "prefill_reserve"
    assert rig.engine.store.pages.references(page) == 1  # the slot's own


def test_memory_that_runs_out_while_others_decode_ends_one_request(
    make: Make, golden: list[list[int]]
) -> None:
    """The fault hits the prefill of the second; the first one does not notice."""
    rig = make(fault="prefill_compute:2", policy=Policy.ONCE)
    rig.prompt(0, TEXTS[0], N_GEN)
    rig.turns(2)
    rig.prompt(1, TEXTS[1], N_GEN)
    rig.prompt(2, TEXTS[2], N_GEN)
    check_the_others(rig, 1, golden)
    assert rig.done(1).reason["site"] == "prefill_compute"


def test_an_inline_snapshot_that_fails_costs_the_snapshot_only(make: Make, golden: list[list[int]]) -> None:
    rig = make(fault="snapshot:2", policy=Policy.ONCE)
    rig.answer("first", TEXTS[1], 1, snap=Snap(20, 2))
    held = rig.slot(2)
    assert rig.answer("a", TEXTS[0], N_GEN, snap=Snap(30, 2)) == golden[0]
    assert rig.lines("a") == [SnapInlineFailed(slot=2, reason="oom")]
    assert rig.slot(2) is held
    assert rig.answer("b", TEXTS[2], N_GEN, snap=Snap(30, 2)) == golden[2]
    assert rig.lines("b") == [SnapInline(slot=2, cur_pos=30)]


# ----- the end of it all


def test_a_scheduler_that_is_told_to_stop_in_a_failure_still_answers(make: Make) -> None:
    rig = make()
    start_all(rig)
    rig.engine.before_forward = lambda rows, kind: 1 / 0
    rig.scheduler.put(Stop())
    rig.scheduler.run()
    assert sorted(rig.order()) == [0, 1, 2]
    assert rig.engine.memory_report()["pages_used"] == 0
