"""Turns of a chat: what is kept, what is dropped, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from slotd.client.chat import Chat, Interrupts, Leave
from slotd.client.chat_template import TemplateError
from slotd.client.completion import Completion
from slotd.client.conversation import Conversation
from slotd.protocol.errors import DaemonDiedError, DaemonStartError, RequestError
from tests.fakes.fake_client import FakeClient, completion
from tests.fakes.fake_ui import FakeUi


def new_chat(client: FakeClient, *, interactive: bool = True, **params: Any) -> Chat:
    return Chat(client, Conversation(params, model="m"), FakeUi(interactive=interactive))


def shown(chat: Chat) -> FakeUi:
    assert isinstance(chat.ui, FakeUi)
    return chat.ui


def test_a_turn_is_streamed_and_kept() -> None:
    client = FakeClient()
    chat = new_chat(client, temperature=0.0)
    assert chat.ask("hi")
    assert shown(chat).answers == ["t1 t2 t3 "]
    assert chat.conversation.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "t1 t2 t3 "},
    ]
    assert chat.ask("again")
    request = client.requests[-1]
    assert [message["content"] for message in request["messages"]] == ["hi", "t1 t2 t3 ", "again"]
    assert request["temperature"] == 0.0
    assert (chat.turns, chat.tokens) == (2, 6)


@pytest.mark.parametrize(
    "error",
    [
        TemplateError("roles must alternate"),
        RequestError("oom", {"requested": 70, "free": 64}),
        DaemonDiedError("exit code 1"),
    ],
)
def test_a_turn_that_fails_is_dropped_and_the_next_one_works(error: Exception) -> None:
    answers = iter([error, None])

    def answer(request: dict[str, Any]) -> Completion:
        fault = next(answers)
        if fault is not None:
            raise fault
        return completion()

    client = FakeClient(answer)
    chat = new_chat(client, interactive=False)
    assert not chat.ask("bad")
    assert str(error) in shown(chat).errors[0]
    assert chat.conversation.messages == []
    assert chat.ask("good")
    assert [message["content"] for message in client.requests[-1]["messages"]] == ["good"]


def test_an_overlong_turn_says_what_helps() -> None:
    def answer(request: dict[str, Any]) -> Completion:
        raise RequestError("overflow", {"prompt": 70, "n_gen": 5, "max_ctx": 64})

    chat = new_chat(FakeClient(answer))
    chat.ask("x")
    assert shown(chat).errors == [
        "the prompt has 70 tokens, the context has 64: /reset starts afresh, --max-ctx makes room"
    ]


def test_a_daemon_that_cannot_start_ends_a_piped_chat_only() -> None:
    def answer(request: dict[str, Any]) -> Completion:
        raise DaemonStartError("no memory")

    with pytest.raises(DaemonStartError):
        new_chat(FakeClient(answer), interactive=False).ask("x")
    assert not new_chat(FakeClient(answer)).ask("x")


def test_notices_for_a_person_only() -> None:
    piped, person = new_chat(FakeClient(), interactive=False), new_chat(FakeClient())
    piped.ask("x")
    person.ask("x")
    assert shown(piped).notices == []
    assert shown(person).notices[0] == "cut off at 3 tokens (/params max_tokens=N)"
    assert "tok/s" in shown(person).notices[1]


# ----- Ctrl-C


def test_ctrl_c_cancels_the_answer_and_keeps_what_came() -> None:
    client = FakeClient()

    def step(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the cancel comes from another thread

    client.step = step
    chat = new_chat(client)
    with chat.interrupts.installed():
        assert chat.ask("hi")
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": "t1 "}
    assert "cancelled" in shown(chat).notices


def test_a_turn_cancelled_before_any_text_is_dropped() -> None:
    client = FakeClient()

    def step(index: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    client.step = step
    chat = new_chat(client)
    with chat.interrupts.installed():
        assert not chat.ask("hi")
    assert chat.conversation.messages == []


def test_ctrl_c_before_the_stream_is_there_cancels_it_too() -> None:
    def answer(request: dict[str, Any]) -> Completion:
        os.kill(os.getpid(), signal.SIGINT)
        return completion(tuple(range(100)))

    client = FakeClient(answer)
    client.step = lambda index: time.sleep(0.02)
    chat = new_chat(client)
    with chat.interrupts.installed():
        chat.ask("hi")
    assert len(chat.last.ids if chat.last else ()) < 100


def test_the_second_ctrl_c_within_a_second_leaves() -> None:
    client = FakeClient()

    def step(index: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    client.step = step
    chat = new_chat(client)
    with chat.interrupts.installed(), pytest.raises(Leave):
        chat.ask("hi")


def test_two_ctrl_c_with_a_pause_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.5, 12.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    interrupts = Interrupts()
    assert [interrupts.second_press() for _ in range(3)] == [False, False, True]


def test_the_handler_that_was_there_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts().installed():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_thought_is_shown_and_not_kept() -> None:
    client = FakeClient(lambda request: completion(reasoning="Hm.", reasoning_tokens=1))
    chat = new_chat(client)
    assert chat.ask("hi")
    assert (shown(chat).thought, shown(chat).answers) == ("Hm.", ["t1 t2 t3 "])
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": "t1 t2 t3 "}


def test_a_thought_without_an_answer_is_no_turn() -> None:
    client = FakeClient(lambda request: completion((), text="", reasoning="Hm.", reasoning_tokens=9))
    chat = new_chat(client)
    assert not chat.ask("hi")
    assert "--thinking-budget" in shown(chat).errors[-1]
    assert chat.conversation.messages == []
