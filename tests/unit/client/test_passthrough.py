"""Commands that become the daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slotd.client import fetch, passthrough


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that would have replaced this process."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: found.append(argv))
    return found


DAEMON = [sys.executable, "-P", "-m", "slotd.daemon", "daemon"]


@pytest.mark.parametrize(
    "args",
    [
        ["m.gguf"],
        ["model", "draft", "--daemon", "--ddtree-budget=22", "--stream-fd=7"],
        ["--max-ctx", "64", "M.GGUF"],
        ["-m", "model"],
        ["-mmodel"],
        ["--model=model"],
        ["--parallel", "2", "--model", "model"],
        ["-h"],
        ["--chunk", "3", "--help"],
    ],
)
def test_arguments_are_untouched(executed: list[list[str]], args: list[str]) -> None:
    passthrough.run_daemon(list(args))
    assert executed == [DAEMON + args]


@pytest.mark.parametrize(
    "args", [[], ["--max-ctx", "64"], ["--stream-fd=7", "-ctk", "f16"], ["--max-ctx=64"]]
)
def test_without_a_model_the_default_is_fetched_and_put_first(
    executed: list[list[str]], args: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str | None, bool]] = []

    def resolve(explicit: str | None, *, fetch: bool) -> Path:
        asked.append((explicit, fetch))
        return tmp_path / "default.gguf"

    monkeypatch.setattr(fetch, "resolve_model", resolve)
    passthrough.run_daemon(list(args))
    assert executed == [[*DAEMON, str(tmp_path / "default.gguf"), *args]]
    assert asked == [(None, True)]


def test_inspect(executed: list[list[str]]) -> None:
    passthrough.run("inspect", ["x", "--json"])
    assert executed[0][2:] == ["-m", "slotd.daemon", "inspect", "x", "--json"]
