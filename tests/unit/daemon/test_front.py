"""The front: exactly one terminal event for every command, in order, on the channel it is due on."""

from __future__ import annotations

import logging
import threading

import pytest

from slotd.daemon import open_requests
from slotd.daemon.link import Emit, Finished, Line, Progress, Submit
from slotd.protocol.errors import CODES
from slotd.protocol.messages import Done, Error, SlotList, SnapInline, SnapInlineFailed, TokenLogprob
from slotd.protocol.wire import parse_event
from tests.fakes.front_rig import FrontRig

PROMPT = "- 2 ids=5,6,7"

#: Line -> whether a -1 ends it.
VERBS = {
    PROMPT: True, "RESTORE 0 - 2 ids=5,6,7": True, "SNAPSHOT 0": False, "FREE_SNAPSHOT 0": False,
    "LIST_SLOTS": False, "park": True, "unpark target": True, "free drafter": True,
}  # fmt: skip

#: Lines that the front refuses itself -> whether a -1 ends them.
REFUSED = {
    "nonsense": True, "": True, "- 2 ids=": True, "- 2 ids=5,999": True, "RESTORE 9 - 2 ids=5": True,
    "- 2 ids=5 top_p=7": True, "SNAPSHOT 8": False, "SNAPSHOT": False, "park everything": True,
    "compress a 5 b": True, "SNAPSHOT_THIN 8 0 1": False, "RESTORE_CHAIN 1 - x 5": True,
    "generate /no 1 o": False, "STORED": False, "DROP": False,
}  # fmt: skip


@pytest.fixture(params=[("fd", 1), ("fd", 2), ("lines", 1), (None, 1), (None, 2)], ids=str)
def rig(request: pytest.FixtureRequest) -> FrontRig:
    return FrontRig(*request.param)


@pytest.fixture
def plain() -> FrontRig:
    """Version 1 with a token stream."""
    return FrontRig()


def terminal_events(written: list[str | int]) -> list[Done | Error]:
    events = [parse_event(line) for line in written if isinstance(line, str)]
    return [event for event in events if isinstance(event, Done | Error)]


# ----- one terminal event, on the right channel


@pytest.mark.parametrize("status", ["ok", "err", "cancelled"])
@pytest.mark.parametrize("line", VERBS)
def test_a_command_with_an_id_ends_with_one_done_line_and_no_minus_one(
    rig: FrontRig, line: str, status: str
) -> None:
    rig.say(f"{line} id=r")
    assert rig.take() == []
    rig.finish(status, "oom" if status == "err" else None)
    (line,) = rig.take()
    (event,) = terminal_events([line])
    assert isinstance(event, Done)
    assert (event.id, event.status) == ("r", status)
    assert event.fields.get("code") == ("oom" if status == "err" else None)
    rig.finish(status)
    assert rig.take() == []  # a second end of the same key counts for nothing
    assert len(rig.front.requests) == 0


@pytest.mark.parametrize("status", ["ok", "err", "cancelled"])
@pytest.mark.parametrize("line", VERBS)
def test_a_command_without_an_id_ends_as_its_version_says(rig: FrontRig, line: str, status: str) -> None:
    rig.say(line)
    if rig.front.stream is None and "ids=" in line:
        (refusal,) = rig.take()
        assert "no_stream_fd" in str(refusal)
        return
    rig.finish(status, "oom" if status == "err" else None)
    owed = VERBS[line] and rig.outbox.has_stream
    written = rig.take()
    lines = written[: len(written) - owed]
    assert written[len(lines) :] == [-1] * owed
    assert -1 not in lines
    if rig.front.version_2:
        (event,) = terminal_events(lines)
        assert isinstance(event, Done)
        assert (event.id, event.status) == (None, status)
    elif status == "err":
        assert lines == ["err oom"]
    elif VERBS[line]:
        assert lines == []  # the -1 says it
    elif status == "cancelled":  # nothing else would say it
        (event,) = terminal_events(lines)
        assert isinstance(event, Error)


@pytest.mark.parametrize("line", REFUSED)
def test_a_refused_line_is_answered_at_once(rig: FrontRig, line: str) -> None:
    rig.say(line)
    written = rig.take()
    assert [value for value in written if value == -1] == [-1] * (REFUSED[line] and rig.outbox.has_stream)
    (event,) = terminal_events(written)
    assert isinstance(event, Done if rig.front.version_2 else Error)
    assert isinstance(written[0], str)  # the line is first, the -1 behind it
    assert rig.sent == []
    assert len(rig.front.requests) == 0


@pytest.mark.parametrize("line", [line for line in REFUSED if line])
def test_a_refused_line_with_an_id_gets_a_done_line(rig: FrontRig, line: str) -> None:
    rig.say(f"{line} id=r")
    (event,) = terminal_events(rig.take())
    assert isinstance(event, Done)
    assert (event.id, event.status, event.fields["code"] in CODES) == ("r", "err", True)


def test_an_unforeseen_fault_at_the_start_ends_the_command(
    plain: FrontRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotd.daemon.handlers.admit_prompt", lambda *_: 1 / 0)
    plain.say(PROMPT, "LIST_SLOTS")
    assert plain.take() == ['err internal reason="ZeroDivisionError: division by zero"', -1]
    assert plain.last().command.verb == "LIST_SLOTS"


def test_only_the_first_end_of_a_request_counts(plain: FrontRig) -> None:
    """At the end of the daemon the loop ends what the engine side may be ending just now."""
    plain.say(PROMPT)
    request = plain.front.requests.lane_current
    assert request is not None
    plain.finish("length")
    plain.front.finish(request, "cancelled")
    assert plain.take() == [-1]


def test_messages_for_nobody_change_nothing(plain: FrontRig) -> None:
    plain.front.deliver(Emit("gone", 0, (5,)))
    plain.front.deliver(Finished("gone", "ok"))
    assert plain.take() == []


# ----- what is written before the end


def test_ids_without_an_id_go_to_the_stream(plain: FrontRig) -> None:
    plain.say(PROMPT)
    plain.emit(30)
    plain.emit(31, at=1)
    plain.finish("length")
    assert plain.take() == [30, 31, -1]


def test_ids_of_a_request_go_to_lines() -> None:
    for rig in (FrontRig("fd"), FrontRig(None)):
        rig.say(f"{PROMPT} id=r logprobs=1")
        rig.front.deliver(Emit("r", 4, (30,), (TokenLogprob(-0.5, ((30, -0.5),)),)))
        assert rig.take() == ["[tok] id=r at=4 ids=30 logprobs=[[-0.5,[[30,-0.5]]]]"]


def test_lines_stand_in_for_the_stream() -> None:
    rig = FrontRig("lines")
    rig.say(PROMPT)
    rig.emit(30, at=7)
    rig.finish("length")
    first, end = rig.take()
    assert first == "[tok] at=7 ids=30"
    assert str(end).startswith("[done] status=length")


def test_only_a_request_with_an_id_sees_progress(plain: FrontRig) -> None:
    plain.say(PROMPT)
    plain.front.deliver(Progress(plain.last().key, 2, 3))
    assert plain.take() == []
    plain.say(f"{PROMPT} id=r")
    plain.front.deliver(Progress("r", 2, 3))
    assert plain.take() == ["[prefill] id=r at=2/3"]


def test_a_line_of_the_engine_side_gets_the_id_of_its_request(plain: FrontRig) -> None:
    plain.say("LIST_SLOTS id=r")
    plain.front.deliver(Line(SlotList(slots=(1, 4)), "r"))
    plain.finish()
    line, end = plain.take()
    assert line == "[snap] slots=1,4 id=r"
    assert str(end).startswith("[done] id=r status=ok")
    plain.say("LIST_SLOTS")
    plain.front.deliver(Line(SlotList(slots=(1, 4)), plain.last().key))
    plain.finish()
    assert plain.take() == ["[snap] slots=1,4"]


def test_a_failed_inline_snapshot_is_said_in_version_2_only(
    plain: FrontRig, caplog: pytest.LogCaptureFixture
) -> None:
    for rig, said in ((plain, []), (FrontRig("fd", 2), ["[snap] inline-failed slot=3 reason=oom"])):
        rig.say(PROMPT)
        with caplog.at_level(logging.WARNING):
            rig.front.deliver(Line(SnapInlineFailed(slot=3, reason="oom"), rig.last().key))
        assert rig.take() == said
    assert [record.message for record in caplog.records] == [
        "the inline snapshot of slot 3 was not taken: oom"
    ]
    plain.front.deliver(Line(SnapInline(slot=3, cur_pos=2), plain.last().key))
    assert plain.take() == ["[snap] inline slot=3 cur_pos=2"]


def test_hello_changes_only_what_comes_behind_it(plain: FrontRig) -> None:
    plain.say("SNAPSHOT 0", "HELLO", "SNAPSHOT 1")
    (hello,) = plain.take()
    assert str(hello).startswith("[hello] {")
    plain.finish("err", "oom")
    assert plain.take() == ["err oom"]
    plain.finish("err", "oom")
    assert str(plain.take()[0]).startswith("[done] status=err code=oom")


# ----- the lane


def test_commands_without_an_id_run_one_after_the_other(plain: FrontRig) -> None:
    plain.say(PROMPT, "nonsense", "LIST_SLOTS", "- 2 ids=999", "park")
    assert len(plain.sent) == 1
    assert plain.take() == []  # refusals wait for their turn
    plain.emit(30)
    plain.finish("length")
    assert plain.take() == [30, -1, "err unknown_command verb=nonsense", -1]
    assert [submit.command.verb for submit in plain.submits()] == [
        "PROMPT",
        "LIST_SLOTS",
    ]
    plain.finish()
    assert plain.take() == ["err bad_token at=0 token=999 vocab=320", -1]
    assert plain.last().command.verb == "park"
    plain.finish()
    assert plain.take() == [-1]
    assert len(plain.front.requests) == 0


def test_a_request_with_an_id_passes_the_lane_by(plain: FrontRig) -> None:
    plain.say(PROMPT, "LIST_SLOTS", f"{PROMPT} id=r", "nonsense id=n")
    assert [submit.key for submit in plain.submits()] == [1, "r"]
    assert plain.take() == ["[done] id=n status=err code=unknown_command verb=nonsense"]


def test_a_long_lane_of_commands_that_fail_at_once_needs_no_deep_stack(plain: FrontRig) -> None:
    plain.say(PROMPT, *["RESTORE 9 - 2 ids=5"] * 5000, *["nonsense"] * 5000)
    plain.finish("length")
    written = plain.take()
    assert written.count(-1) == 10_001
    assert written.count("err bad_slot slot=9 slots=8") == 5000
    assert written.count("err unknown_command verb=nonsense") == 5000
    assert len(plain.front.requests) == 0


def test_an_engine_that_answers_at_once_needs_no_deep_stack(plain: FrontRig) -> None:
    plain.front._send = lambda submit: plain.front.deliver(Finished(submit.key, "ok"))  # type: ignore[union-attr, assignment]
    plain.say(*["park"] * 5000)
    assert plain.take() == [-1] * 5000


def test_the_lane_keeps_its_order_when_two_threads_feed_it(plain: FrontRig) -> None:
    """Commands come on one thread while the engine side ends them on another."""
    ended = threading.Event()
    pending: list[Submit] = []
    ready = threading.Semaphore(0)

    def send(submit: Submit) -> None:
        pending.append(submit)
        ready.release()

    def engine_side() -> None:
        for _ in range(500):
            assert ready.acquire(timeout=30)
            submit = pending.pop(0)
            plain.front.deliver(Line(SlotList(slots=(int(submit.key),)), submit.key))
            plain.front.deliver(Finished(submit.key, "ok"))
        ended.set()

    plain.front._send = send  # type: ignore[assignment]
    thread = threading.Thread(target=engine_side)
    thread.start()
    for _ in range(500):
        plain.say("LIST_SLOTS")
    assert ended.wait(30)
    thread.join()
    assert plain.take() == [f"[snap] slots={number}" for number in range(1, 501)]


# ----- ids in use


@pytest.mark.parametrize("line", [PROMPT, "LIST_SLOTS", "STATUS", "HELLO", "nonsense", "- x", "SNAPSHOT 9"])
def test_an_id_in_use_is_refused_with_an_err_line(rig: FrontRig, line: str) -> None:
    rig.say(f"{PROMPT} id=r")
    rig.say(f"{line} id=r")
    (event,) = terminal_events(rig.take())
    assert isinstance(event, Error)
    assert event.id == "r"
    assert len(rig.sent) == 1
    rig.finish("length")
    (event,) = terminal_events(rig.take())
    assert (isinstance(event, Done), event.id) == (True, "r")
    rig.say(f"{PROMPT} id=r")  # free again
    assert len(rig.sent) == 2


def test_a_command_that_finds_the_lane_full_is_refused_in_its_turn(
    plain: FrontRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "MAX_OPEN", 2)
    plain.say("LIST_SLOTS", PROMPT, PROMPT)
    assert plain.take() == []
    plain.finish()
    plain.finish("length")
    assert plain.take() == [-1, "err busy open=2 limit=2", -1]


def test_too_many_open_requests_end_with_a_done_line(
    plain: FrontRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "MAX_OPEN", 2)
    plain.say(f"{PROMPT} id=a", f"{PROMPT} id=b", f"{PROMPT} id=c")
    assert plain.take() == ["[done] id=c status=err code=busy open=2 limit=2"]
    assert len(plain.sent) == 2
