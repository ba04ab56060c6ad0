"""The loops of the chat: from a pipe, and from a terminal whose reading is scripted."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.history import FileHistory, InMemoryHistory

from slotd.client.chat import Chat
from slotd.client.completion import Completion
from slotd.client.conversation import Conversation
from slotd.client.repl import history_path, open_history, run_pipe, run_terminal
from slotd.protocol.errors import RequestError
from tests.fakes.fake_client import FakeClient, completion
from tests.fakes.fake_ui import FakeUi


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def new_chat(client: FakeClient, *, interactive: bool) -> tuple[Chat, FakeUi]:
    ui = FakeUi(interactive=interactive)
    return Chat(client, Conversation({}, model="m"), ui), ui


def asked(client: FakeClient) -> list[str]:
    return [request["messages"][-1]["content"] for request in client.requests]


# ----- from a pipe


def pipe(client: FakeClient, *lines: bytes, code: int = 0) -> FakeUi:
    chat, ui = new_chat(client, interactive=False)
    assert run_pipe(chat, lines) == code
    return ui


def test_one_line_is_one_answer_and_the_end_asks_nothing(client: FakeClient) -> None:
    ui = pipe(client, b"hi\n")
    assert ui.answers == ["t1 t2 t3 "]
    assert (ui.notices, ui.errors, ui.tables) == ([], [], [])


def test_no_input_is_no_answer(client: FakeClient) -> None:
    assert pipe(client).answers == []
    assert pipe(client, b"\n", b"  \n").answers == []
    assert client.requests == []


def test_lines_are_turns_of_one_conversation(client: FakeClient) -> None:
    pipe(client, b"a\n", b"b")
    assert asked(client) == ["a", "b"]
    assert [message["content"] for message in client.requests[1]["messages"]] == ["a", "t1 t2 t3 ", "b"]


def test_blocks(client: FakeClient) -> None:
    pipe(client, b'"""\n', b"a\n", b"/quit\n", b'"""\n', b'"""/x"""\n')
    assert asked(client) == ["a\n/quit", "/x"]


def test_an_unclosed_block_is_not_asked(client: FakeClient) -> None:
    ui = pipe(client, b'"""\n', b"a\n", code=1)
    assert client.requests == []
    assert "never closed" in ui.errors[0]


def test_unknown_commands_are_errors_and_the_next_line_is_answered(client: FakeClient) -> None:
    ui = pipe(client, b"/nope\n", b"hi\n", code=1)
    assert asked(client) == ["hi"]
    assert len(ui.errors) == 1


def test_quit_ends_before_the_rest(client: FakeClient) -> None:
    pipe(client, b"/quit\n", b"hi\n")
    assert client.requests == []
    pipe(client, b"/nope\n", b"/quit\n", code=1)


def test_a_turn_that_fails_is_exit_code_1_after_the_others(client: FakeClient) -> None:
    def answer(request: dict[str, Any]) -> Completion:
        if request["messages"][-1]["content"] == "bad":
            raise RequestError("oom")
        return completion()

    client.answer = answer
    ui = pipe(client, b"a\n", b"bad\n", b"b\n", code=1)
    assert asked(client) == ["a", "bad", "b"]
    assert len(ui.answers) == 2


def test_bytes_that_are_no_text(client: FakeClient) -> None:
    ui = pipe(client, b"\xff\n", "grüße\r\n".encode(), code=1)
    assert asked(client) == ["grüße"]
    assert ui.errors == ["line 1 is not UTF-8 at byte 0"]


# ----- from a terminal


def script(*steps: object) -> Callable[[str], str]:
    """A reader that gives texts, raises exceptions, and ends like Ctrl-D."""
    left = list(steps)

    def read(prompt: str) -> str:
        step = left.pop(0) if left else EOFError()
        if isinstance(step, BaseException):
            raise step
        return str(step)

    return read


def test_ctrl_d_leaves_with_0(client: FakeClient) -> None:
    chat, _ = new_chat(client, interactive=True)
    assert run_terminal(chat, script("hi", "", "  ")) == 0
    assert asked(client) == ["hi"]


def test_quit_leaves_with_0(client: FakeClient) -> None:
    chat, _ = new_chat(client, interactive=True)
    assert run_terminal(chat, script("/quit", "hi")) == 0
    assert client.requests == []


def test_one_ctrl_c_at_the_prompt_only_says_how_to_leave(client: FakeClient) -> None:
    chat, ui = new_chat(client, interactive=True)
    assert run_terminal(chat, script(KeyboardInterrupt(), "hi")) == 0
    assert asked(client) == ["hi"]
    assert "Ctrl-C again" in ui.notices[1]


def test_two_ctrl_c_at_the_prompt_leave_with_130(client: FakeClient) -> None:
    chat, _ = new_chat(client, interactive=True)
    assert run_terminal(chat, script(KeyboardInterrupt(), KeyboardInterrupt(), "hi")) == 130
    assert client.requests == []


def test_ctrl_c_drops_an_open_block(client: FakeClient) -> None:
    chat, _ = new_chat(client, interactive=True)
    assert run_terminal(chat, script('"""', "a", KeyboardInterrupt(), "hi")) == 0
    assert asked(client) == ["hi"]


def test_ctrl_c_during_an_answer_and_at_the_prompt_leaves(client: FakeClient) -> None:
    client.step = lambda index: os.kill(os.getpid(), signal.SIGINT) if index == 0 else time.sleep(0.1)
    chat, _ = new_chat(client, interactive=True)
    assert run_terminal(chat, script("hi", KeyboardInterrupt(), "more")) == 130
    assert asked(client) == ["hi"]


def test_the_prompt_shows_an_open_block(client: FakeClient) -> None:
    prompts = []
    lines = iter(['"""', "a", '"""'])

    def read(prompt: str) -> str:
        prompts.append(prompt)
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    chat, _ = new_chat(client, interactive=True)
    run_terminal(chat, read)
    assert prompts == ["> ", "... ", "... ", "> "]


# ----- history


def test_history_is_private_and_follows_slotd_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTD_HOME", str(tmp_path / "new" / "home"))
    assert isinstance(open_history(pytest.fail), FileHistory)
    assert history_path().parent == tmp_path / "new" / "home"
    assert stat.S_IMODE(history_path().stat().st_mode) == 0o600
    history_path().chmod(0o644)
    open_history(pytest.fail)
    assert stat.S_IMODE(history_path().stat().st_mode) == 0o600


def test_without_slotd_home_history_is_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOTD_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "slotd" / "chat_history"


def test_no_history_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTD_HOME", str(tmp_path))
    monkeypatch.setenv("SLOTD_NOHISTORY", "1")
    assert isinstance(open_history(pytest.fail), InMemoryHistory)
    assert list(tmp_path.iterdir()) == []


def test_no_history_where_none_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLOTD_HOME", str(tmp_path / "file"))
    said: list[str] = []
    assert isinstance(open_history(said.append), InMemoryHistory)
    assert said
    assert said[0].startswith("no history:")
