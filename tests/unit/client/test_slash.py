"""Slash commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotd.client import slash
from slotd.client.chat import Chat
from slotd.client.conversation import Conversation
from slotd.client.params import DEFAULTS
from slotd.protocol.errors import DaemonDiedError
from tests.fakes.fake_client import FakeClient
from tests.fakes.fake_ui import FakeUi


@pytest.fixture
def ui() -> FakeUi:
    return FakeUi(interactive=True)


@pytest.fixture
def chat(ui: FakeUi) -> Chat:
    return Chat(FakeClient(), Conversation(dict(DEFAULTS), model="m.gguf"), ui)


def test_help_lists_every_command(chat: Chat, ui: FakeUi) -> None:
    assert slash.run(chat, "/help")
    listed = [usage.split()[0] for usage, _ in ui.tables[0]]
    assert listed == list(slash.COMMANDS)
    needed = {"/help", "/system", "/reset", "/save", "/load", "/params", "/stats", "/slots", "/quit"}
    assert needed == set(listed)


@pytest.mark.parametrize("text", ["/nope", "/Help", "/", "/etc/hosts is a file", "/quit!"])
def test_an_unknown_command_is_an_error_and_no_prompt(chat: Chat, ui: FakeUi, text: str) -> None:
    assert slash.is_command(text)
    assert not slash.run(chat, text)
    assert ui.errors[0].startswith(f"unknown command {text.split()[0]}")
    assert isinstance(chat.client, FakeClient)
    assert chat.client.requests == []


@pytest.mark.parametrize(
    ("text", "words"), [("/reset now", "takes no argument"), ("/save", "usage: /save FILE")]
)
def test_wrong_arguments(chat: Chat, ui: FakeUi, text: str, words: str) -> None:
    assert not slash.run(chat, text)
    assert words in ui.errors[0]


def test_system_and_reset(chat: Chat) -> None:
    chat.ask("hi")
    assert slash.run(chat, "/system  be brief ")
    assert chat.conversation.messages[0] == {"role": "system", "content": "be brief"}
    assert len(chat.conversation.messages) == 3
    assert slash.run(chat, "/reset")
    assert len(chat.conversation.messages) == 1
    assert slash.run(chat, "/system -")
    assert chat.conversation.messages == []
    assert slash.run(chat, "/system")


def test_save_and_load(chat: Chat, ui: FakeUi, tmp_path: Path) -> None:
    chat.ask("hi")
    path = tmp_path / "a talk.json"
    assert slash.run(chat, f"/save {path}")
    before = chat.conversation
    assert slash.run(chat, "/reset")
    assert slash.run(chat, "/params temperature=0")
    assert slash.run(chat, f"/load {path}")
    assert len(chat.conversation.messages) == 2
    assert chat.conversation.params == before.params | {"temperature": 0.8}
    assert not any("was made with" in notice for notice in ui.notices)


def test_load_says_when_another_model_wrote_it(chat: Chat, ui: FakeUi, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"model": "other", "params": {}, "messages": []}))
    assert slash.run(chat, f"/load {path}")
    assert any("was made with other" in notice for notice in ui.notices)
    assert chat.conversation.model == "m.gguf"


@pytest.mark.parametrize("argument", ["nowhere/x.json", "."])
@pytest.mark.parametrize("command", ["/save", "/load"])
def test_files_that_cannot_be(chat: Chat, ui: FakeUi, tmp_path: Path, command: str, argument: str) -> None:
    chat.ask("hi")
    kept = chat.conversation
    assert not slash.run(chat, f"{command} {tmp_path / argument}")
    assert str(tmp_path) in ui.errors[0]
    assert chat.conversation is kept


def test_a_bad_file_leaves_the_conversation(chat: Chat, ui: FakeUi, tmp_path: Path) -> None:
    chat.ask("hi")
    path = tmp_path / "bad.json"
    path.write_text("{")
    assert not slash.run(chat, f"/load {path}")
    assert len(chat.conversation.messages) == 2


def test_params(chat: Chat, ui: FakeUi) -> None:
    assert slash.run(chat, "/params top_p=0.5")
    assert slash.run(chat, "/params stop=THE END")
    assert chat.conversation.params["top_p"] == 0.5
    assert chat.conversation.params["stop"] == ["THE END"]
    assert ("top_p", "0.5") in ui.tables[-1]
    assert {("max_tokens", "no limit"), ("seed", "random")} <= set(ui.tables[-1])
    chat.ask("x")
    assert isinstance(chat.client, FakeClient)
    assert chat.client.requests[-1]["top_p"] == 0.5


def test_several_params_at_once_by_the_names_of_the_flags(chat: Chat) -> None:
    assert slash.run(chat, "/params temp=0 repeat-penalty=1.5 max_tokens=-1")
    changed = {"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": None}
    assert chat.conversation.params == DEFAULTS | changed


@pytest.mark.parametrize("typed", ["top_p=2", "warmth=1", "top_p", "temp=1 top_p=2"])
def test_wrong_params_change_nothing(chat: Chat, ui: FakeUi, typed: str) -> None:
    assert not slash.run(chat, f"/params {typed}")
    assert ui.errors
    assert chat.conversation.params == DEFAULTS


def test_stats(chat: Chat, ui: FakeUi) -> None:
    assert slash.run(chat, "/stats")
    assert ui.notices == ["no answer yet"]
    chat.ask("x")
    assert slash.run(chat, "/stats")
    assert ("prefill_s", "0.5000") in ui.tables[-1]
    assert ("tokens generated", "3") in ui.tables[-1]


def test_slots(chat: Chat, ui: FakeUi) -> None:
    assert slash.run(chat, "/slots")
    assert ui.notices == ["slots in use: 0, 3 (of 8)", "prefix cache: 2 of 4 slots, 96 tokens"]
    (head, first, second), counts = ui.tables
    assert (head[0], first[0], second[0]) == ("slot", "0", "3")
    spaced = [" ".join(row[1].split()) for row in (head, first, second)]
    assert spaced == [
        "tokens kind tier size own last use hash in the cache",
        "96 thin host 2.00 KiB 0 B 1.5 min ago",
        f"96 thick host 2.00 KiB 0 B 1.5 min ago {'ab' * 6} prefix, 96 tokens, 2 hits",
    ]
    assert counts[0] == ("prompts started from a slot", "0")
    assert len(counts) == len(slash.CACHE_COUNTS)
    assert isinstance(chat.client, FakeClient)
    chat.client.caching = False
    assert slash.run(chat, "/slots")
    assert ui.notices[-1] == "the prefix cache is off"


def test_a_dead_daemon_is_an_error_line(chat: Chat, ui: FakeUi, monkeypatch: pytest.MonkeyPatch) -> None:
    def slots() -> Any:
        raise DaemonDiedError("it died")

    monkeypatch.setattr(chat.client, "status", slots)
    assert not slash.run(chat, "/slots")
    assert ui.errors == ["it died"]


def test_quit(chat: Chat) -> None:
    with pytest.raises(slash.Quit):
        slash.run(chat, "/quit")
