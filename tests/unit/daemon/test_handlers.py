from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotd.daemon.handlers import AT_ONCE, IN_TURN
from slotd.daemon.link import State
from slotd.protocol.grammar import VERBS
from slotd.protocol.messages import Generate, Prompt, Quit, Restore
from tests.fakes.front_rig import FrontRig, generate_line


@pytest.fixture
def rig() -> FrontRig:
    return FrontRig()


def data_of(line: str | int, kind: str) -> dict[str, Any]:
    assert str(line).startswith(f"[{kind}] ")
    return dict(json.loads(str(line).removeprefix(f"[{kind}] ")))


def test_every_verb_has_its_handler() -> None:
    """quit is the loop's."""
    assert set(AT_ONCE) == {verb.message for verb in VERBS if verb.at_once} - {Quit}
    assert set(IN_TURN) == {verb.message for verb in VERBS if not verb.at_once}


# ----- answered at once


def test_hello_and_props_say_the_same(rig: FrontRig) -> None:
    rig.front.deliver(State({"epoch": 4}))
    rig.say("PROPS", "HELLO")
    props, hello = rig.take()
    assert data_of(props, "props") == data_of(hello, "hello")
    data = data_of(hello, "hello")
    assert (data["slots"], data["epoch"], len(data["boot"])) == (8, 4, 16)


def test_boot_is_new_in_each_process() -> None:
    assert FrontRig().front.props["boot"] != FrontRig().front.props["boot"]


@pytest.mark.parametrize("verb", ["HELLO", "PROPS", "STATUS"])
def test_a_report_is_its_own_end_in_version_1(rig: FrontRig, verb: str) -> None:
    rig.say(verb)
    (line,) = rig.take()
    assert "id" not in data_of(line, verb.lower())


@pytest.mark.parametrize("verb", ["HELLO", "PROPS", "STATUS"])
def test_a_report_with_an_id_is_followed_by_its_done_line(rig: FrontRig, verb: str) -> None:
    rig.say(f"{verb} id=r")
    line, done = rig.take()
    assert data_of(line, verb.lower())["id"] == "r"
    assert done == "[done] id=r status=ok epoch=0"


@pytest.mark.parametrize("verb", ["PROPS", "STATUS"])
def test_a_report_in_version_2_is_followed_by_a_done_line(verb: str) -> None:
    rig = FrontRig(version=2)
    rig.say(verb)
    assert rig.take()[1:] == ["[done] status=ok epoch=0"]


def test_reports_do_not_wait_in_the_lane(rig: FrontRig) -> None:
    rig.say("park", "STATUS", "PROPS")
    assert [str(line).split()[0] for line in rig.take()] == ["[status]", "[props]"]


def test_cancel_answers_with_one_line(rig: FrontRig) -> None:
    rig.say("CANCEL", "CANCEL id=r", "- 2 ids=5 id=r", "CANCEL id=r", "- 2 ids=5", "CANCEL")
    assert rig.take() == [
        "[cancel] found=0", "[cancel] id=r found=0", "[cancel] id=r found=1", "[cancel] found=1",
    ]  # fmt: skip
    assert all(submit.flags.cancelled for submit in rig.submits())


# ----- in turn


def test_a_prompt_reaches_the_engine_side_with_its_ids(rig: FrontRig) -> None:
    rig.clock.now = 123.0
    rig.say("- 2 ids=5,6,7 id=r min_p=0.5")
    submit = rig.last()
    assert isinstance(submit.command, Prompt)
    assert submit.ids is not None
    assert (submit.key, submit.ids.tolist(), submit.submitted_at) == ("r", [5, 6, 7], 123.0)
    assert submit.command.sampling.min_p == 0.5
    rig.say("RESTORE 3 - 2 ids=5,6,7")
    assert isinstance(rig.last().command, Restore)
    assert rig.last().key == 1


def test_a_prompt_without_an_id_needs_a_stream() -> None:
    rig = FrontRig(stream=None)
    rig.say("- 2 ids=5", "- 2 ids=5 id=r")
    assert rig.take() == ["err no_stream_fd"]
    assert [submit.key for submit in rig.submits()] == ["r"]


def test_a_stream_that_lost_its_reader_is_none(rig: FrontRig) -> None:
    rig.outbox.has_stream = False
    rig.say("- 2 ids=5")
    assert rig.take() == ["err no_stream_fd"]


def test_the_token_stream_carries_no_logprobs(rig: FrontRig) -> None:
    rig.say("- 2 ids=5 logprobs=2")
    assert rig.take() == ['err bad_args field=logprobs reason="the token stream carries ids only"', -1]
    rig.say("- 2 ids=5 logprobs=2 id=r")
    lines = FrontRig(stream="lines")
    lines.say("- 2 ids=5 logprobs=2")
    assert len(rig.sent) == len(lines.sent) == 1


def test_generate_reaches_the_engine_side_as_a_prompt(rig: FrontRig, tmp_path: Path) -> None:
    rig = FrontRig(stream=None)  # it needs no stream
    rig.say(f"{generate_line(tmp_path, tmp_path / 'out.bin', n_gen=4)} temperature=0.5")
    submit = rig.last()
    assert type(submit.command) is Prompt
    assert (submit.command.n_gen, submit.command.sampling.temperature) == (4, 0.5)
    request = rig.front.requests.get(submit.key)
    assert request is not None
    assert isinstance(request.command, Generate)


@pytest.mark.parametrize(
    "line", ["SNAPSHOT 7", "FREE_SNAPSHOT 7", "LIST_SLOTS", "park", "unpark draft", "free drafter"]
)
def test_slot_commands_reach_the_engine_side_as_they_are(rig: FrontRig, line: str) -> None:
    rig.say(line)
    assert rig.last().command == rig.front.requests.lane_current.command  # type: ignore[union-attr]
    assert rig.last().ids is None


def test_a_verb_that_is_not_here_is_named(rig: FrontRig) -> None:
    rig.say("compress 1 2 3 id=r")
    assert rig.take() == ["[done] id=r status=err code=unsupported verb=compress"]


@pytest.mark.parametrize("line", ["STORED", f"LOAD_SNAPSHOT 1 hash={'0' * 32}", "SNAPSHOT 1 tier=disk"])
def test_the_disk_tier_needs_a_folder(rig: FrontRig, line: str) -> None:
    rig.say(f"{line} id=r")
    assert rig.take() == ["[done] id=r status=err code=no_slot_dir"]
