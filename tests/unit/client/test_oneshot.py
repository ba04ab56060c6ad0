"""One prompt, one answer."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slotd.client.oneshot import BUILT_IN, Question, read_prompt, run
from slotd.client.params import DEFAULTS
from slotd.protocol.errors import ConfigError
from tests.fakes.fake_client import FakeClient, completion


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, *, terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_prompt_from_argument_file_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_prompt(" hi\n", None) == " hi\n"
    path = tmp_path / "p.txt"
    path.write_bytes(b"two\r\nlines\r\n")
    assert read_prompt(None, str(path)) == "two\r\nlines"
    for file in (None, "-"):
        give_stdin(monkeypatch, "grüße\n\n".encode())
        assert read_prompt(None, file) == "grüße\n"


@pytest.mark.parametrize("content", [b"", b"\n", b" \t\n\n"])
def test_empty_prompts_are_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, content)
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    for argument, file in ((None, None), (content.decode(), None), (None, str(path))):
        with pytest.raises(ConfigError, match="the prompt is empty"):
            read_prompt(argument, file)
        give_stdin(monkeypatch, content)


def test_what_is_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not both"):
        read_prompt("a", "b")
    give_stdin(monkeypatch, b"", terminal=True)
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompt(None, None)
    path = tmp_path / "p"
    path.write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"p is not UTF-8 at byte 2"):
        read_prompt(None, str(path))
    with pytest.raises(ConfigError, match=r"^-f .*nope: No such file or directory$"):
        read_prompt(None, str(tmp_path / "nope"))


def test_text_is_streamed_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert run(client, Question("hi", system="s"), {"top_k": 3}, as_json=False, show_rates=True) == 0
    captured = capsys.readouterr()
    assert captured.out == "t1 t2 t3 \n"
    assert "tok/s" in captured.err
    assert client.requests[0]["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
    ]
    assert client.requests[0]["top_k"] == 3


def test_raw_and_models_without_a_template_get_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    run(client, Question("hi", raw=True), {}, as_json=False, show_rates=False)
    client.tokenizer = SimpleNamespace(chat_template=None)
    run(client, BUILT_IN, {}, as_json=False, show_rates=False)
    assert [request["prompt"] for request in client.requests] == ["hi", BUILT_IN.text]
    assert [request["messages"] for request in client.requests] == [None, None]
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="--system does not go with a model without chat template"):
        run(client, Question("hi", system="s"), {}, as_json=False, show_rates=False)
    with pytest.raises(ConfigError, match="--system does not go with --raw"):
        run(client, Question("hi", system="s", raw=True), {}, as_json=False, show_rates=False)


def test_json_is_one_object_with_the_effective_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    run(FakeClient(), Question("hi"), DEFAULTS, as_json=True, show_rates=False)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    found = json.loads(printed)
    assert found["text"] == "t1 t2 t3 "
    assert found["ids"] == [1, 2, 3]
    assert found["sampling"] == {**DEFAULTS, "seed": 7}
    assert {"finish_reason", "prompt_tokens", "cached_tokens", "seed", "timings", "stop"} <= set(found)


@pytest.mark.parametrize(("wanted", "there"), [(None, True), (True, True), (False, False)])
def test_json_has_the_thought_unless_it_is_hidden(
    capsys: pytest.CaptureFixture[str], wanted: bool | None, there: bool
) -> None:
    client = FakeClient(lambda request: completion(reasoning="Hm.", reasoning_tokens=2))
    run(client, Question("hi"), {}, as_json=True, show_rates=False, reasoning=wanted)
    captured = capsys.readouterr()
    assert json.loads(captured.out).get("reasoning") == ("Hm." if there else None)
    assert captured.err == ""


@pytest.mark.parametrize("wanted", [None, True, False])
def test_text_has_no_thought_and_stderr_only_when_it_is_wanted(
    capsys: pytest.CaptureFixture[str], wanted: bool | None
) -> None:
    client = FakeClient(lambda request: completion(reasoning="Hm.", reasoning_tokens=2))
    run(client, Question("hi"), {}, as_json=False, show_rates=False, reasoning=wanted)
    captured = capsys.readouterr()
    assert captured.out == "t1 t2 t3 \n"
    assert ("Hm." in captured.err) is (wanted is True)
