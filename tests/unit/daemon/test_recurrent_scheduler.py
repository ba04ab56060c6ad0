"""Requests on a model with recurrent layers: what they may start from, and that answers are fresh ones'.

Field reports 16, 18, 25 and 34 on such a model: caches never change an answer, a prefix that is shared
in part never gives the state of more than itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.link import Finished
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.protocol.errors import Value
from slotd.protocol.messages import (
    RestoreChain,
    Sampling,
    Snap,
    SnapInline,
    SnapInlineFailed,
    Snapshot,
    SnapshotThin,
)
from tests.fakes.scheduler_rig import SchedulerRig

MODEL = Path(__file__).parents[2] / "golden" / "data" / "qwen35-mtp.gguf"
TEXT = np.random.default_rng(31).integers(3, 310, 300).tolist()

Make = Callable[..., SchedulerRig]


@pytest.fixture
def make() -> Make:
    return lambda **options: SchedulerRig(MODEL, **options)


@pytest.fixture
def rig(make: Make) -> SchedulerRig:
    return make()


def reused(rig: SchedulerRig, key: str) -> Value:
    return rig.done(key).account["reused"]


def failure(rig: SchedulerRig, key: str) -> tuple[str | None, dict[str, Value]]:
    done: Finished = rig.done(key)
    return done.code, dict(done.reason)


def test_a_longer_text_goes_on_where_the_last_one_ended(rig: SchedulerRig, make: Make) -> None:
    answer = rig.answer("a", TEXT[:100], n_gen=10)
    longer = [*TEXT[:100], *answer, 5, 6]
    assert rig.answer("b", longer) == make().answer("golden", longer)
    assert reused(rig, "b") == 109  # the last token was never computed


def test_field_report_25_a_shorter_shared_prefix_is_computed_again(rig: SchedulerRig, make: Make) -> None:
    rig.answer("a", TEXT[:200])
    for key, turn in (("b", [*TEXT[:100], 7, 8, 9]), ("c", TEXT[:200]), ("d", TEXT[:64])):
        assert rig.answer(key, turn) == make().answer("golden", turn)
        assert reused(rig, key) == 0


def test_field_report_34_three_identical_sends(rig: SchedulerRig, make: Make) -> None:
    golden = make().answer("golden", TEXT[:150], n_gen=8)
    assert [rig.answer(f"send{n}", TEXT[:150], n_gen=8) for n in range(3)] == [golden] * 3


@pytest.mark.parametrize("at", [1, 64, 99, 149])
def test_a_slot_is_exact_where_it_was_taken(rig: SchedulerRig, make: Make, at: int) -> None:
    rig.answer("a", TEXT[:150], snap=Snap(at=at, slot=2))
    assert rig.lines("a") == [SnapInline(slot=2, cur_pos=at)]
    rig.forget()
    other = [*TEXT[:at], *TEXT[200:220]]
    # Cut at the same place a fresh request has the same bits.
    expected = make().answer("golden", other, snap=Snap(at=at, slot=0), sampling=Sampling())
    assert rig.answer("b", other, slot=2, sampling=Sampling()) == expected
    assert reused(rig, "b") == at


def test_a_whole_prompt_restored_computes_nothing(rig: SchedulerRig) -> None:
    golden = rig.answer("a", TEXT[:100], snap=Snap(at=100, slot=0))
    rig.forget()
    rig.engine.calls.clear()
    assert rig.answer("b", TEXT[:100], slot=0) == golden
    assert rig.pieces() == []


def test_a_slot_without_logits_is_not_taken_back_by_one_token(rig: SchedulerRig, make: Make) -> None:
    rig.answer("a", TEXT[:100], n_gen=0)
    rig.put("s", Snapshot(slot=0))
    rig.until("s")
    assert rig.slot(0).logits is None
    rig.forget()
    assert rig.answer("b", TEXT[:100], slot=0) == make().answer("golden", TEXT[:100])
    assert reused(rig, "b") == 0


def test_a_snapshot_behind_which_the_request_starts(rig: SchedulerRig) -> None:
    answer = rig.answer("a", TEXT[:100], n_gen=10)
    rig.answer("b", [*TEXT[:100], *answer, 5], snap=Snap(at=50, slot=3))
    assert rig.lines("b") == [SnapInlineFailed(slot=3, reason="no_state")]
    assert 3 not in rig.engine.slots


def test_snapshot_of_an_ended_sequence(rig: SchedulerRig, make: Make) -> None:
    answer = rig.answer("a", TEXT[:70], n_gen=5)
    rig.put("s", Snapshot(slot=1))
    rig.until("s")
    rig.forget()
    longer = [*TEXT[:70], *answer, 9, 9]
    assert rig.answer("b", longer, slot=1) == make().answer("golden", longer)
    assert reused(rig, "b") == 75


def test_spans_are_refused_by_name(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(at=64, slot=0))
    rig.put("thin", SnapshotThin(slot=4, kv_start=0, kv_end=64))
    rig.put("chain", RestoreChain(ids=TEXT[:100], n_gen=2, thick=0, thins=()))
    rig.until("thin", "chain")
    assert failure(rig, "thin") == ("unsupported", {"verb": "SNAPSHOT_THIN", "arch": "qwen35"})
    assert failure(rig, "chain") == ("unsupported", {"verb": "RESTORE_CHAIN", "arch": "qwen35"})


def test_several_at_once_are_each_alone(rig: SchedulerRig, make: Make) -> None:
    texts = {f"r{n}": TEXT[n * 20 : n * 20 + 50 + 30 * n] for n in range(4)}
    for key, ids in texts.items():
        rig.prompt(key, ids, 8)
    rig.until(*texts)
    assert {key: rig.tokens(key) for key in texts} == {
        key: make().answer("golden", ids, 8) for key, ids in texts.items()
    }


def test_a_cancelled_prompt_resumes_where_it_stood(rig: SchedulerRig, make: Make) -> None:
    flags = rig.prompt("a", TEXT)
    rig.until_true(lambda: rig.engine.calls != [])
    flags.cancelled = True
    rig.until("a")
    assert rig.answer("b", TEXT) == make().answer("golden", TEXT)
    assert reused(rig, "b") == 128


def test_a_step_that_fails_leaves_the_state(make: Make) -> None:
    """Each site once, in turn: the ladder tries again, and the answer is that of a rig without a fault."""
    golden = make().answer("golden", TEXT[:150], 6)
    for site in ("prefill_build", "prefill_compute", "decode", "commit"):
        for nth in (1, 2, 3):
            rig = make(fault=f"{site}:{nth}")
            assert rig.answer("a", TEXT[:150], 6) == golden, (site, nth)


def test_everything_is_given_back(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(at=64, slot=0))
    assert rig.engine.memory.live("snapshot") > rig.engine.recurrence.state_bytes
    rig.engine.free_slot(0)
    assert rig.engine.memory.live("snapshot") == 0
    rig.forget()
    states = len(rig.scheduler._retained)
    assert rig.engine.memory.live("state") <= states * 2 * rig.engine.recurrence.state_bytes


# ----- checkpoints


def checkpoints(rig: SchedulerRig) -> list[list[int]]:
    return [sorted(entry.sequence.checkpoints) for entry in rig.scheduler._retained]


def test_a_diverging_prompt_resumes_from_the_last_checkpoint_in_front(rig: SchedulerRig, make: Make) -> None:
    rig.engine.recurrence.every = 128
    rig.answer("a", TEXT)
    assert checkpoints(rig) == [[128, 256]]
    turns = {
        "b": ([*TEXT[:280], 5, 6], 256),
        "c": ([*TEXT[:255], 7], 128),
        "d": (TEXT, 256),
        "e": (TEXT[:128], 0),
    }
    for key, (turn, start) in turns.items():
        assert rig.answer(key, turn) == make().answer("golden", turn)
        assert reused(rig, key) == start
    assert checkpoints(rig)[1:] == [[128, 256], [128, 256], [128]]  # they go with the text, and are no copies
    assert rig.engine.memory.live("snapshot") < 4 * 2 * rig.engine.recurrence.state_bytes


def test_answers_have_checkpoints_too_and_only_the_last_ones_are_kept(rig: SchedulerRig) -> None:
    rig.engine.recurrence.every = 20
    rig.answer("a", TEXT[:50], n_gen=101)
    assert checkpoints(rig) == [[90, 110, 130, 150]]


def test_no_checkpoints_by_wish(rig: SchedulerRig) -> None:
    rig.engine.recurrence.every = 0
    rig.answer("a", TEXT)
    assert checkpoints(rig) == [[]]
    assert rig.engine.memory.live("snapshot") == 0


def break_copies(rig: SchedulerRig, n: int) -> None:
    """The next n copies of a state find no memory."""
    store = rig.engine.recurrence.store
    assert store is not None
    copy, left = store.copy, [n]

    def maybe(state: Any, tag: str) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OutOfDeviceMemory(rig.engine.memory.current_site, 1, 0)
        return copy(state, tag)

    store.copy = maybe  # type: ignore[method-assign]


def test_checkpoints_are_the_first_to_go_when_memory_runs_out(rig: SchedulerRig, make: Make) -> None:
    """A prompt has no room for the state that it starts with: one try later it starts from nothing."""
    rig.engine.recurrence.every = 64
    rig.answer("a", TEXT, snap=Snap(at=300, slot=0))
    break_copies(rig, 1)
    turn = [*TEXT[:200], 9]
    assert rig.answer("b", turn) == make().answer("golden", turn)
    assert (reused(rig, "b"), checkpoints(rig)[0]) == (0, [])
    assert rig.slot(0).tier == "device"
    assert rig.states()[-1]["recovery"]["rungs"] == {"trim": 1}


def test_a_checkpoint_that_does_not_fit_is_not_kept(rig: SchedulerRig, make: Make) -> None:
    rig.engine.recurrence.every = 64
    golden = make().answer("golden", TEXT[:150], n_gen=80)
    break_copies(rig, 100)
    assert rig.answer("a", TEXT[:150], n_gen=80) == golden
    assert (checkpoints(rig), rig.engine.memory.live("snapshot")) == ([[]], 0)
