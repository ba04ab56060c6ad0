from __future__ import annotations

import logging
import threading

import pytest

from slotd.daemon.host import EngineHost
from slotd.daemon.link import Stop, ToEngine

PATIENCE = 30


class FakeScheduler:
    """Runs until it is told to stop; what it does before that is the test's."""

    def __init__(self, error: Exception | None = None) -> None:
        self.messages: list[ToEngine] = []
        self.thread: threading.Thread | None = None
        self.error = error
        self.stopped = threading.Event()
        self.release = threading.Event()  # for one that does not look at its messages

    def put(self, message: ToEngine) -> None:
        self.messages.append(message)
        if isinstance(message, Stop):
            self.stopped.set()

    def run(self) -> None:
        self.thread = threading.current_thread()
        if self.error is not None:
            raise self.error
        assert self.stopped.wait(PATIENCE)


class HangingScheduler(FakeScheduler):
    def run(self) -> None:
        assert self.release.wait(PATIENCE)


@pytest.fixture
def deaths() -> threading.Event:
    return threading.Event()


def test_it_runs_the_scheduler_on_a_thread_of_its_own(deaths: threading.Event) -> None:
    scheduler = FakeScheduler()
    host = EngineHost(scheduler, deaths.set)  # type: ignore[arg-type]
    host.start()
    assert host.stop(PATIENCE)
    assert scheduler.thread not in (None, threading.current_thread())
    assert scheduler.thread.daemon  # a hang in a matrix product must not hold the process
    assert not deaths.is_set()


def test_messages_reach_it_in_order(deaths: threading.Event) -> None:
    scheduler = FakeScheduler()
    host = EngineHost(scheduler, deaths.set)  # type: ignore[arg-type]
    host.send("first")  # type: ignore[arg-type]
    host.send("second")  # type: ignore[arg-type]
    host.start()
    host.stop(PATIENCE)
    assert scheduler.messages == ["first", "second", Stop()]


def test_stopping_one_that_hangs_is_bounded(deaths: threading.Event) -> None:
    scheduler = HangingScheduler()
    host = EngineHost(scheduler, deaths.set)  # type: ignore[arg-type]
    host.start()
    assert not host.stop(0.02)
    scheduler.release.set()
    assert host.stop(PATIENCE)


def test_its_death_is_logged_and_told_once(deaths: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    host = EngineHost(FakeScheduler(RuntimeError("broken")), deaths.set)  # type: ignore[arg-type]
    with caplog.at_level(logging.CRITICAL):
        host.start()
        assert deaths.wait(PATIENCE)
        assert host.stop(PATIENCE)
    assert [record.message for record in caplog.records] == ["the scheduler died"]
    assert caplog.records[0].exc_info is not None
