from __future__ import annotations

import pytest

from slotd.daemon.engine_life import EngineLife, Phase


def running(timeout: float = 60.0) -> EngineLife:
    life = EngineLife(0.0, timeout)
    life.opened(2.0)
    return life


def die(life: EngineLife, now: float, epoch: int = 0) -> bool:
    """A death, and the start of the next process when there may be one."""
    again = life.died(now, f"at {now:g}", epoch)
    if again:
        life.started(now)
        life.opened(now + 1)
    return again


def test_each_death_raises_the_epoch_that_the_process_knew() -> None:
    life = running()
    assert die(life, 10)
    assert life.epoch == 1
    assert die(life, 200, epoch=7)  # the process had cleared slots by itself
    assert life.epoch == 8
    assert die(life, 400, epoch=3)  # and the next one died before it could say what it knew
    assert life.epoch == 9
    assert life.report() == {"phase": "running", "replacements": 3, "died_of": "at 400"}


def test_nothing_is_running_between_a_death_and_the_next_model() -> None:
    """A message that is written in between, to the process that has died, is lost."""
    life = running()
    assert life.died(10.0, "signal SIGKILL", 0)
    assert life.phase is Phase.STARTING
    life.started(11.0)
    assert life.phase is Phase.STARTING
    life.opened(12.0)
    assert life.phase is Phase.RUNNING


def test_three_replacements_within_a_minute_are_the_most() -> None:
    life = running()
    assert [die(life, now) for now in (10, 20, 30, 69.9)] == [True, True, True, False]
    assert life.phase is Phase.DOWN
    assert life.refusal() == {"reason": "at 69.9", "replaced": 3, "within_s": 60}
    assert life.epoch == 4
    assert not life.may_start(69.9)
    assert life.may_start(70.0)  # the first of the three is a minute ago


def test_deaths_that_are_far_apart_are_replaced_for_ever() -> None:
    life = running()
    assert all(die(life, 21.0 * n) for n in range(1, 50))
    assert life.replacements == 49


def test_a_death_at_the_end_of_the_daemon_is_none() -> None:
    life = running()
    life.ending()
    assert not life.died(5.0, "exit code 0", 0)
    assert (life.phase, life.epoch) == (Phase.ENDING, 0)


def test_a_silent_process_is_overdue() -> None:
    life = running()
    assert life.overdue(62.0, last_sign=0.0) is None  # counted from when it was ready
    assert life.overdue(62.5, last_sign=0.0) == pytest.approx(60.5)
    assert life.overdue(62.5, last_sign=30.0) is None
    assert life.overdue(90.1, last_sign=30.0) == pytest.approx(60.1)


def test_loading_may_take_five_times_as_long() -> None:
    life = EngineLife(0.0, 60.0)
    assert life.overdue(300.0, last_sign=0.0) is None
    assert life.overdue(300.5, last_sign=0.0) is not None
    life.opened(10.0)
    assert life.overdue(100.0, last_sign=10.0) is not None
    assert life.overdue(100.0, last_sign=10.0, loading=True) is None
    die(life, 101.0)
    life.started(101.0)
    assert life.overdue(401.0, last_sign=10.0) is None  # the sign of the one before does not count


def test_each_silence_is_asked_about_once() -> None:
    life = EngineLife(0.0, 60.0)
    assert not life.wants_ping(50.0, last_sign=0.0)  # it loads, and does not listen
    life.opened(50.0)
    assert not life.wants_ping(60.0, last_sign=49.0)
    assert life.wants_ping(66.0, last_sign=49.0)
    assert not life.wants_ping(70.0, last_sign=49.0)
    assert not life.wants_ping(75.0, last_sign=70.1)  # it answered
    assert life.wants_ping(86.0, last_sign=70.1)
