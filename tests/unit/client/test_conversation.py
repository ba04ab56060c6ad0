"""A conversation and its file."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from slotd.client.conversation import Conversation
from slotd.protocol.errors import ConfigError


def test_turns_system_and_reset() -> None:
    talk = Conversation({})
    assert talk.asking("a") == [{"role": "user", "content": "a"}]
    assert talk.messages == []
    talk.add_turn("a", "b")
    talk.set_system("be brief")
    talk.set_system("be kind")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    assert talk.system == "be kind"
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be kind"}]
    talk.set_system("")
    assert talk.messages == []
    assert talk.system is None


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    talk = Conversation(
        {"temperature": 0.5, "seed": None, "stop": ["x"], "logit_bias": {7: -1.0}}, model="m.gguf"
    )
    talk.add_turn("grüße 🙂", "a\nb")
    path = tmp_path / "talk.json"
    talk.save(path)
    assert Conversation.load(path) == talk
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text("old")
    talk = Conversation({"seed": object()})
    with pytest.raises(TypeError):
        talk.save(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]


GOOD: dict[str, Any] = {"model": "m", "params": {}, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not a saved conversation"),
        (b"{", "not a saved conversation"),
        (b"\xff", "not a saved conversation"),
        (b"[" * 100_000, "not a saved conversation"),
        (b"[]", "it has model, params and messages"),
        ({**GOOD, "extra": 1}, "it has model, params and messages"),
        ({**GOOD, "model": 1}, "model is not a text"),
        ({**GOOD, "params": {"temperature": 900}}, "temperature is 900; allowed is"),
        ({**GOOD, "params": {"nope": 1}}, "'nope' is not supported"),
        ({**GOOD, "messages": {}}, "messages is not a list"),
        ({**GOOD, "messages": ["x"]}, r"messages\[0\] is not an object"),
        ({**GOOD, "messages": [{"role": "usr", "content": "x"}]}, r"messages\[0\].role is 'usr'; allowed is"),
        ({**GOOD, "messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content is not a text"),
        ({**GOOD, "messages": [{"role": "user", "content": "x", "name": "y"}]}, "name is not supported"),
        ({**GOOD, "messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_fault(tmp_path: Path, content: Any, fault: str) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ConfigError, match=fault) as caught:
        Conversation.load(path)
    assert str(caught.value).startswith(str(path))


def test_set_params_checks_against_the_others() -> None:
    talk = Conversation({"max_tokens": 4})
    with pytest.raises(ConfigError):
        talk.set_params({"top_k": 9, "min_tokens": 5})
    talk.set_params({"top_k": 3})
    assert talk.params == {"max_tokens": 4, "top_k": 3}
