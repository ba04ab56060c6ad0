"""Steps on the disk thread: order, results, failures, and its end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from slotd.daemon.background import Background, Closed, Steps


class Here:
    """The scheduler's thread: calls wait until they are run."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()

    def run_one(self) -> None:
        self.calls.get(timeout=10)()


@pytest.fixture
def here() -> Here:
    return Here()


@pytest.fixture
def background(here: Here) -> Iterator[Background]:
    made = Background(here.calls.put)
    yield made
    made.close()


def test_work_runs_elsewhere_and_everything_else_here(here: Here, background: Background) -> None:
    threads: list[threading.Thread] = []
    ended: list[Exception | None] = []

    def work() -> int:
        threads.append(threading.current_thread())
        return 41

    def steps() -> Steps:
        value = yield work
        threads.append(threading.current_thread())
        assert (yield lambda: value + 1) == 42

    background.start(steps(), ended.append)
    here.run_one()
    here.run_one()
    assert ended == [None]
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


def test_a_failure_is_raised_where_the_work_was_asked_for(here: Here, background: Background) -> None:
    ended: list[Exception | None] = []
    cleaned: list[str] = []

    def steps(catch: bool) -> Steps:
        try:
            yield lambda: 1 // 0
        except ZeroDivisionError:
            if not catch:
                raise
        finally:
            cleaned.append("up")

    for catch in (True, False):
        background.start(steps(catch), ended.append)
        here.run_one()
    assert cleaned == ["up", "up"]
    assert ended[0] is None
    assert isinstance(ended[1], ZeroDivisionError)


def test_a_failure_before_any_work(here: Here, background: Background) -> None:
    ended: list[Exception | None] = []

    def steps() -> Steps:
        raise KeyError("now")
        yield lambda: None

    background.start(steps(), ended.append)
    assert isinstance(ended[0], KeyError)
    assert here.calls.empty()


def test_work_is_done_in_order(here: Here, background: Background) -> None:
    seen: list[int] = []

    def steps(number: int) -> Steps:
        yield lambda: seen.append(number)

    for number in range(20):
        background.start(steps(number), lambda _: None)
    for _ in range(20):
        here.run_one()
    assert seen == list(range(20))


def test_after_the_end_nothing_starts_and_everything_is_answered(here: Here) -> None:
    background = Background(here.calls.put)
    release = threading.Event()
    ended: list[Exception | None] = []
    done: list[str] = []

    def running() -> Steps:
        yield lambda: release.wait(10)
        yield lambda: done.append("more")

    def waiting() -> Steps:
        yield lambda: done.append("waiting")

    background.start(running(), ended.append)
    background.start(waiting(), ended.append)
    threading.Timer(0.05, release.set).start()
    background.close()
    background.start(waiting(), ended.append)
    while not here.calls.empty():
        here.run_one()
    assert done == []
    assert [type(error) for error in ended] == [Closed, Closed, Closed]
