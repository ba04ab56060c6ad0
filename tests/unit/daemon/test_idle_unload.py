"""When weights go by themselves and come back: the rule alone, then a scheduler and a host that follow it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slotd.daemon.account import PARTS
from slotd.daemon.config import Config
from slotd.daemon.engine_process import SharedMemory
from slotd.daemon.idle_unload import IdleUnload, Target
from slotd.daemon.process_host import ProcessHost
from slotd.daemon.scheduler import PAUSED_WAIT
from slotd.daemon.shared_state import SharedState
from slotd.protocol.messages import FreeSnapshot, ListSlots, Park, Parked, Snap, Snapshot, Unpark, Unparked
from tests.fakes.front_rig import Clock
from tests.fakes.scheduler_rig import SchedulerRig
from tests.fakes.tiny_gguf import write_tiny_llama

TEXT = np.random.default_rng(61).integers(3, 320, 300).tolist()
OTHER = np.random.default_rng(62).integers(3, 320, 300).tolist()


# ----- the rule


def test_loaded_weights_go_when_they_were_not_used_for_so_long() -> None:
    idle = IdleUnload(2.0, now=100.0)
    assert idle.remaining(100.0) == 2.0
    assert idle.remaining(101.5) == 0.5
    idle.used(101.5)
    assert idle.remaining(103.0) == 0.5
    assert idle.remaining(103.5) == 0.0
    assert idle.remaining(1000.0) == 0.0


@pytest.mark.parametrize("target", [Target.LOADING, Target.UNLOADED, Target.PARKED])
def test_weights_that_are_away_do_not_go(target: Target) -> None:
    idle = IdleUnload(2.0, now=100.0)
    idle.move(target, 110.0)
    assert idle.remaining(1000.0) is None
    idle.move(Target.LOADED, 1000.0)
    assert idle.remaining(1001.0) == 1.0


def test_without_a_time_they_never_go() -> None:
    assert IdleUnload(None, now=0.0).remaining(1e9) is None


# ----- the scheduler


@pytest.fixture
def rig(tiny_llama: Path) -> SchedulerRig:
    return SchedulerRig(tiny_llama, idle_unload=2.0)


def idle_until_unloaded(rig: SchedulerRig) -> None:
    """Let the time pass in which nothing happens."""
    while rig.scheduler.turn():
        pass
    wait = rig.scheduler.rest()
    assert wait is not None
    rig.clock.now += wait
    assert not rig.scheduler.turn()
    assert rig.scheduler.rest() is None
    assert rig.states()[-1]["target"] == "unloaded"
    assert rig.engine.memory.live("weights") == 0


def test_memory_drops_and_the_next_request_loads_first(
    rig: SchedulerRig, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rig.answer("first", TEXT, snap=Snap(200, 3))
    other = rig.answer("other", OTHER)
    idle_until_unloaded(rig)
    assert [record.message for record in caplog.records if "idle:" in record.message] == [
        record.message for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert (rig.states()[-1]["parked"], rig.engine.memory.cached) == (True, 0)
    targets = len(rig.states())
    assert rig.answer("again", OTHER) == other
    account = rig.done("again").account
    assert sum(float(account[f"{part}_s"]) for part in PARTS) == pytest.approx(float(account["wall_s"]))
    assert [state["target"] for state in rig.states()[targets:]][:2] == ["loading", "loaded"]
    assert rig.answer("restored", TEXT, slot=3) == expected
    idle_until_unloaded(rig)
    assert rig.answer("restored again", TEXT, slot=3) == expected  # a slot outlives it, exact


def test_loading_has_its_own_place_in_the_account(rig: SchedulerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    unpark = rig.engine.unpark

    def slow() -> bool:
        rig.clock.now += 3.0
        return unpark()

    monkeypatch.setattr(rig.engine, "unpark", slow)
    idle_until_unloaded(rig)
    rig.answer("a", TEXT[:20])
    assert (rig.done("a").account["load_s"], rig.done("a").account["wall_s"]) == (3.0, 3.0)
    rig.answer("b", TEXT[:20])
    assert rig.done("b").account["load_s"] == 0


def test_what_runs_or_waits_keeps_them(rig: SchedulerRig) -> None:
    flags = rig.prompt("a", TEXT[:20], n_gen=20)
    rig.turns(3)
    flags.paused = True
    rig.clock.now += 100
    rig.turns(1)
    assert rig.scheduler.rest() == PAUSED_WAIT
    rig.put("p", Park())  # waits for the paused answer
    rig.turns(1)
    assert rig.scheduler.rest() == PAUSED_WAIT
    assert not rig.engine.parked
    flags.paused = False
    rig.until("a", "p")
    assert rig.done("a").status == "length"


def test_the_time_begins_anew_with_every_command(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:20])
    assert not rig.scheduler.turn()
    rig.clock.now += 1.5
    rig.put("l", ListSlots())
    while rig.scheduler.turn():
        pass
    assert rig.scheduler.rest() == 2.0
    rig.clock.now += 1.5
    rig.scheduler.put(None)  # a sign of life is asked for: that is no use
    assert not rig.scheduler.turn()
    assert rig.scheduler.rest() == 0.5


def test_commands_that_need_no_weights_load_none(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(64, 1))
    idle_until_unloaded(rig)
    rig.put("l", ListSlots())
    rig.put("f", FreeSnapshot(slot=1))
    rig.until("l", "f")
    assert rig.engine.parked
    rig.put("s", Snapshot(slot=2, of="a"))  # the last token of the answer is computed for it
    rig.until("s")
    assert rig.done("s").status == "ok"
    assert len(rig.slot(2)) == 104
    assert not rig.engine.parked


def test_park_and_unpark_mean_what_they_say(rig: SchedulerRig) -> None:
    idle_until_unloaded(rig)
    rig.put("p", Park())
    rig.until("p")
    assert rig.lines("p") == [Parked(what="target")]  # from now on nobody has them loaded
    assert rig.answer("a", TEXT[:20]) == []
    assert rig.done("a").code == "target_parked"
    rig.clock.now += 100
    rig.turns(1)
    assert (rig.scheduler.rest(), rig.states()[-1]["target"]) == (None, "parked")
    rig.put("u", Unpark())
    rig.until("u")
    assert rig.lines("u") == [Unparked(what="target")]
    idle_until_unloaded(rig)
    rig.put("v", Unpark())
    rig.until("v")
    assert rig.lines("v") == [Unparked(what="target")]


def test_no_room_for_the_weights_fails_the_request_and_the_next_one_tries_again(rig: SchedulerRig) -> None:
    expected = rig.answer("a", TEXT[:20])
    rig.answer("kept", TEXT[:100], snap=Snap(100, 1))
    idle_until_unloaded(rig)
    memory = rig.engine.memory
    memory.limit = memory.live() + 1000
    for key in ("b", "c"):
        assert rig.answer(key, TEXT[:20], slot=1) == []
        assert (rig.done(key).code, rig.done(key).reason["site"]) == ("oom", "start")
        assert rig.states()[-1]["target"] == "unloaded"
        assert 1 in rig.engine.slots  # what the request starts from is not given up for it
    memory.limit = None
    assert rig.answer("d", TEXT[:20]) == expected


def test_a_file_that_has_changed_fails_the_request(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf")
    rig = SchedulerRig(model, idle_unload=2.0)
    expected = rig.answer("a", TEXT[:20])
    idle_until_unloaded(rig)
    kept = model.rename(tmp_path / "kept.gguf")
    write_tiny_llama(model, seed=2)
    rig.answer("b", TEXT[:20])
    assert rig.done("b").code == "internal"
    assert "changed" in str(rig.done("b").reason["reason"])
    write_tiny_llama(model)  # the same content, as far as samples say: it cannot be told from a changed one
    rig.answer("c", TEXT[:20])
    assert rig.done("c").code == "internal"
    kept.replace(model)
    assert rig.answer("d", TEXT[:20]) == expected


def test_requests_that_wait_together_load_once(rig: SchedulerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [rig.answer("first", TEXT[:50]), rig.answer("second", OTHER[:50])]
    idle_until_unloaded(rig)
    loads = []
    unpark = rig.engine.unpark
    monkeypatch.setattr(rig.engine, "unpark", lambda: loads.append(1) or unpark())
    rig.prompt("a", TEXT[:50])
    rig.prompt("b", OTHER[:50])
    rig.until("a", "b")
    assert [rig.tokens("a"), rig.tokens("b")] == alone
    assert len(loads) == 1


def test_the_loop_sleeps_until_it_is_time_and_is_woken_by_a_request(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SchedulerRig(tiny_llama, idle_unload=0.2)
    real = SchedulerRig(tiny_llama)
    rig.clock.__class__ = RealClock
    turns: list[float] = []
    turn = rig.scheduler.turn
    monkeypatch.setattr(rig.scheduler, "turn", lambda: turns.append(time.monotonic()) or turn())
    rig.scheduler._parking.used()
    thread = threading.Thread(target=rig.scheduler.run)
    thread.start()
    wait_for(lambda: rig.engine.parked)
    assert len(turns) <= 4  # asleep between the first and the one that unloads
    rig.prompt("a", TEXT[:50])
    wait_for(lambda: rig.ended("a"))
    assert rig.tokens("a") == real.answer("a", TEXT[:50])
    wait_for(lambda: rig.engine.parked)
    rig.scheduler._stopping = True
    rig.scheduler.put(None)
    thread.join(10)
    assert not thread.is_alive()


class RealClock(Clock):
    """The clock of the machine."""

    def __call__(self) -> float:
        return time.monotonic()


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# ----- the host of an engine process


def test_a_process_that_loads_has_five_times_as_long() -> None:
    clock, shared = Clock(), SharedState()
    shared.write({"epoch": 0, "target": "loaded"})
    clock.now = shared.last_sign()
    host = ProcessHost(
        Config(model=Path("m.gguf"), engine_timeout=2.0), shared, SharedMemory(shared.descriptor),
        SimpleNamespace(pid=1), clock,  # type: ignore[arg-type]
    )  # fmt: skip
    host._life.opened(clock.now)
    clock.now += 3
    assert host._silence() == pytest.approx(3.0)
    shared.write({"epoch": 0, "target": "loading"})
    clock.now = shared.last_sign() + 9
    assert host._silence() is None
    clock.now += 2
    assert host._silence() == pytest.approx(11.0)
    host._state_from = clock.now  # it was replaced: the state is of the one before
    assert host._is_loading() is False
    shared.close()
