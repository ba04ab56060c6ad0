"""The front: files of generate, readers that do not read, cancel, status, and the end of the daemon."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.front import MAX_PENDING
from slotd.daemon.link import State
from slotd.protocol.messages import Done, Error
from slotd.protocol.wire import parse_event
from tests.fakes.front_rig import FrontRig, generate_line

PROMPT = "- 2 ids=5,6,7"


@pytest.fixture
def rig() -> FrontRig:
    """Version 1 with a token stream."""
    return FrontRig()


def terminal_events(written: list[str | int]) -> list[Done | Error]:
    events = [parse_event(line) for line in written if isinstance(line, str)]
    return [event for event in events if isinstance(event, Done | Error)]


# ----- generate


def test_generate_writes_its_file_and_says_so(rig: FrontRig, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    rig.say(generate_line(tmp_path, out))
    assert rig.last().ids is not None
    rig.emit(30)
    rig.emit(31, at=1)
    assert rig.take() == []  # nothing goes to the stream
    assert not out.exists()
    rig.finish("length")
    assert rig.take() == [f"ok N=3 gen=2 prefill_s=0.25 decode_s=0.5 decode_tok_s=4.0 out={out}"]
    assert np.fromfile(out, "<i4").tolist() == [2, 30, 31]


def test_generate_with_an_id_is_done_behind_its_reply(rig: FrontRig, tmp_path: Path) -> None:
    rig.say(f"{generate_line(tmp_path, tmp_path / 'out.bin')} id=g")
    rig.emit(30)
    rig.finish("length", limit="n_gen")
    reply, done = rig.take()
    assert str(reply).startswith("ok N=3 gen=2 ")
    assert str(reply).endswith(" id=g")
    assert str(done).startswith("[done] id=g status=length limit=n_gen")


def test_generate_that_can_not_write_fails_by_name(rig: FrontRig, tmp_path: Path) -> None:
    line = generate_line(tmp_path, tmp_path / "missing" / "out.bin")
    for suffix, start in (
        ("", "err write_out path="),
        (" id=g", "[done] id=g status=err code=write_out path="),
    ):
        rig.say(line + suffix)
        rig.finish("length")
        (said,) = rig.take()
        assert str(said).startswith(start)


@pytest.mark.parametrize(("status", "code"), [("err", "oom"), ("cancelled", None)])
def test_generate_that_did_not_end_well_writes_nothing(
    rig: FrontRig, tmp_path: Path, status: str, code: str | None
) -> None:
    out = tmp_path / "out.bin"
    rig.say(generate_line(tmp_path, out))
    rig.emit(30)
    rig.finish(status, code)
    (event,) = terminal_events(rig.take())  # one err line, and no -1
    assert isinstance(event, Error)
    assert not out.exists()


# ----- readers that do not read


def test_a_request_whose_reader_is_behind_pauses_until_it_has_caught_up_to_half(rig: FrontRig) -> None:
    rig.say(f"{PROMPT} id=slow", f"{PROMPT} id=other")
    flags = rig.submits()[0].flags
    rig.outbox.behind["slow"] = MAX_PENDING
    rig.emit(30, key="slow")
    assert not flags.paused
    rig.outbox.behind["slow"] = MAX_PENDING + 1
    rig.emit(31, key="slow")
    assert flags.paused
    assert not rig.last().flags.paused
    assert rig.front.tick()
    rig.outbox.behind["slow"] = MAX_PENDING // 2 + 1
    assert rig.front.tick()
    assert flags.paused
    rig.outbox.behind["slow"] = MAX_PENDING // 2
    assert not rig.front.tick()
    assert not flags.paused


def test_a_reader_that_takes_nothing_loses_its_request(rig: FrontRig) -> None:
    rig.say(f"{PROMPT} id=slow", f"{PROMPT} id=other")
    rig.outbox.behind["slow"] = MAX_PENDING + 1
    rig.emit(30, key="slow")
    rig.clock.now += 60.0
    assert rig.front.tick()
    rig.clock.now += 0.1
    assert not rig.front.tick()
    assert [submit.flags.cancelled for submit in rig.submits()] == [True, False]


def test_a_reader_that_caught_up_has_the_whole_time_again(rig: FrontRig) -> None:
    rig.say(f"{PROMPT} id=slow")
    for _ in range(3):
        rig.outbox.behind["slow"] = MAX_PENDING + 1
        rig.emit(30, key="slow")
        rig.clock.now += 59.0
        assert rig.front.tick()
        rig.outbox.behind["slow"] = 0
        assert not rig.front.tick()
    assert not rig.last().flags.cancelled


# ----- cancel, status, the end


def test_cancel_finds_what_is_open(rig: FrontRig, tmp_path: Path) -> None:
    assert not rig.front.cancel(None)
    rig.say(f"{PROMPT} id=r", PROMPT)
    assert not rig.front.cancel("nobody")
    assert rig.front.cancel("r")
    assert [submit.flags.cancelled for submit in rig.submits()] == [True, False]
    assert rig.front.cancel(None)
    assert rig.last().flags.cancelled
    rig.say(f"{generate_line(tmp_path, tmp_path / 'out')} id=g")
    assert rig.front.cancel("g")


def test_cancel_leaves_alone_what_is_no_answer(rig: FrontRig) -> None:
    rig.say("LIST_SLOTS", "park id=p")
    assert not rig.front.cancel(None)
    assert not rig.front.cancel("p")


def test_the_end_answers_everything_in_the_order_it_came(rig: FrontRig) -> None:
    rig.say(f"{PROMPT} id=r", PROMPT, "nonsense", "LIST_SLOTS", "compress a 5 b", PROMPT)
    rig.emit(30)
    rig.front.cancel_all()
    assert all(submit.flags.cancelled for submit in rig.submits())
    rig.emit(31, at=1)  # the step in flight
    rig.finish("cancelled")
    rig.finish("cancelled", key="r")
    lane = [value for value in rig.take() if not str(value).startswith("[done] id=r")]
    assert lane[:4] == [30, 31, -1, "err unknown_command verb=nonsense"]
    assert lane.count(-1) == 4  # of two prompts, nonsense and compress
    assert sum(str(value).startswith("err ") for value in lane) >= 2  # nonsense, LIST_SLOTS
    assert len(rig.front.requests) == 0


def test_status_says_what_is_open_and_how_old_the_engines_part_is(rig: FrontRig) -> None:
    rig.front.deliver(State({"epoch": 3, "queued": 1}))
    rig.say(f"{PROMPT} id=r", PROMPT, "LIST_SLOTS", "LIST_SLOTS")
    rig.clock.now += 0.25
    rig.say("STATUS")
    (line,) = rig.take()
    status = json.loads(str(line).removeprefix("[status] "))
    assert status == {
        "epoch": 3, "queued": 1, "open": 2, "lane": 2, "closing": False, "uptime_s": 0.25, "age_ms": 250.0,
    }  # fmt: skip
    assert rig.front.epoch == 3
    rig.front.cancel_all()
    assert rig.front.status()["closing"]
