"""The loop on pipes that the test fills before it runs: no process, no thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from slotd.daemon import loop as loop_module
from slotd.daemon.link import Finished, ToEngine
from slotd.daemon.loop import Loop, end_process
from tests.fakes.front_rig import FrontRig


class FakeHost:
    """An engine side that is only asked to stop."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def stop(self, timeout: float) -> bool:
        assert 0 < timeout < 2
        self.events.append("host stopped")
        return True


class LoopRig:
    """A loop whose front answers everything at once, unless `answers` is cleared."""

    def __init__(self) -> None:
        self.front_rig = FrontRig()
        self.front = self.front_rig.front
        self.events: list[str] = []
        self.answers = True
        self.front._send = self._engine_side
        self.stdin, self.client = os.pipe()
        self.reader, self.stdout = os.pipe()
        self.loop = Loop(
            self.stdin, self.stdout, self.front_rig.connection, self.front,
            self.front_rig.outbox, FakeHost(self.events), stall_timeout=5.0,  # type: ignore[arg-type]
        )  # fmt: skip

    def _engine_side(self, message: ToEngine) -> None:
        self.front_rig.sent.append(message)
        if self.answers:
            self.front.deliver(Finished(self.front_rig.last().key, "ok"))

    def run(self, input: bytes, *, eof: bool = True) -> list[str | int]:
        """Run on this input to the end; what was written."""
        os.write(self.client, input)
        if eof:
            os.close(self.client)
            self.client = -1
        assert self.loop.run() == 0
        return self.front_rig.take()

    def close(self) -> None:
        for descriptor in (self.stdin, self.client, self.reader, self.stdout):
            if descriptor >= 0:
                os.close(descriptor)
        os.close(self.loop._wake_read)
        os.close(self.loop._wake_write)


@pytest.fixture
def rig() -> Iterator[LoopRig]:
    made = LoopRig()
    yield made
    made.close()


def test_end_of_input_answers_everything_and_ends_in_order(rig: LoopRig) -> None:
    assert rig.run(b"park\nnonsense\nPARK id=r") == [
        -1, "err unknown_command verb=nonsense", -1, "[done] id=r status=err code=unknown_command verb=PARK",
    ]  # fmt: skip
    assert rig.events == ["host stopped"]
    assert rig.front_rig.outbox.flushed == 1
    assert rig.front.closing


def test_end_of_input_waits_for_what_was_accepted(rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.answers = False
    ticks = 0

    def tick() -> bool:
        nonlocal ticks
        ticks += 1
        if ticks == 5:
            rig.front_rig.finish("ok")
        return False

    monkeypatch.setattr(rig.front, "tick", tick)
    monkeypatch.setattr(loop_module, "PAUSED_INTERVAL", 0.001)
    assert rig.run(b"park\n") == [-1]
    assert ticks >= 5
    assert not rig.front_rig.last().flags.cancelled


def test_quit_cancels_what_is_open_and_answers_it_before_itself(rig: LoopRig) -> None:
    rig.answers = False
    written = rig.run(b"- 2 ids=5 id=r\nquit id=q\n", eof=False)
    assert written == ["[done] id=r status=cancelled reason=shutting_down", "[done] id=q status=ok epoch=0"]
    assert rig.front_rig.last().flags.cancelled


def test_quit_without_an_id_is_answered_in_version_2_only(rig: LoopRig) -> None:
    assert rig.run(b"quit\n", eof=False) == []
    other = LoopRig()
    assert other.run(b"HELLO\nquit\n", eof=False)[1:] == ["[done] status=ok epoch=0"]
    other.close()


def test_what_stands_behind_quit_is_refused(rig: LoopRig) -> None:
    written = rig.run(
        b"quit id=q\n- 2 ids=5 id=r\nLIST_SLOTS\npark\nSTATUS id=s\nCANCEL id=r\n"
        b"quit id=again\nnonsense\ncompress\n",
        eof=False,
    )
    assert written == [
        "[done] id=r status=err code=shutting_down",
        "err shutting_down", "err shutting_down", -1,
        "[done] id=s status=err code=shutting_down",
        "err shutting_down",  # CANCEL has no id of its own
        "[done] id=again status=err code=shutting_down",
        "err unknown_command verb=nonsense", -1, "err shutting_down", -1,
        "[done] id=q status=ok epoch=0",
    ]  # fmt: skip
    assert rig.front_rig.sent == []


def test_a_request_to_end_stops_it_whatever_comes(rig: LoopRig) -> None:
    rig.answers = False
    rig.loop.request_end("first")
    for _ in range(100_000):  # more than the wake-up pipe holds: it must not block
        rig.loop.request_end("later")
    assert rig.run(b"", eof=False) == []
    assert rig.loop._reason == "first"


def test_the_first_reason_decides_about_the_exit_code(rig: LoopRig) -> None:
    rig.answers = False
    rig.loop.request_end("the scheduler died", exit_code=1)
    rig.loop.request_end("quit")
    assert rig.loop.run() == 1


def test_a_reader_of_stdout_that_left_ends_it(rig: LoopRig) -> None:
    os.close(rig.reader)
    rig.reader = -1
    rig.run(b"", eof=False)
    assert rig.loop._reason == "nobody reads stdout"


def test_the_death_of_the_parent_ends_it(rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "WATCH_INTERVAL", 0.001)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    rig.run(b"", eof=False)
    assert rig.loop._reason == "the parent died"


def test_an_end_of_input_can_be_cut_short(rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.answers = False
    monkeypatch.setattr(rig.front, "tick", end_after(3, rig.loop))
    monkeypatch.setattr(loop_module, "PAUSED_INTERVAL", 0.001)
    assert rig.run(b"park\n") == [-1]
    assert rig.front_rig.last().flags.cancelled


def end_after(ticks: int, loop: Loop) -> Callable[[], bool]:
    left = iter(range(ticks))

    def tick() -> bool:
        if next(left, None) is None:
            loop.request_end("enough")
        return False

    return tick


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_a_request_to_end(rig: LoopRig, number: signal.Signals) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
    before = {each: signal.getsignal(each) for each in numbers}
    try:
        rig.loop.install_signals()
        os.kill(os.getpid(), number)
        rig.run(b"", eof=False)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert rig.loop._reason == number.name


def test_the_process_leaves_without_waiting_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    end_process(3)
    assert codes == [3]
