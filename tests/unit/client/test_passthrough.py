"""Commands that become the daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from slotd.client import cli, fetch, passthrough


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


INSPECT = [*DAEMON[:-1], "inspect"]


@pytest.mark.parametrize(
    "args",
    [["x", "--json"], ["--ctx", "64", "x"], ["-ctk", "f16", "--json", "x"], ["--ctx=64", "--", "-x"], ["-h"]],
)
def test_inspect(executed: list[list[str]], args: list[str]) -> None:
    passthrough.run_inspect(list(args))
    assert executed == [INSPECT + args]


@pytest.mark.parametrize("args", [[], ["--json"], ["-c", "64"], ["--max-ctx=64"], ["-ctv", "f16"]])
def test_inspect_without_a_file_takes_the_model_that_the_commands_use(
    executed: list[list[str]], args: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetch, "resolve_model", lambda explicit, *, fetch: tmp_path / "m.gguf")
    passthrough.run_inspect(list(args))
    assert executed == [[*INSPECT, str(tmp_path / "m.gguf"), *args]]


def test_convert_draft(executed: list[list[str]]) -> None:
    assert cli.run(["convert-draft", "folder", "-o", "x.gguf", "-h"]) == 0
    assert executed == [[*DAEMON[:-1], "convert-draft", "folder", "-o", "x.gguf", "-h"]]


def test_every_flag_of_inspect_that_takes_a_value_is_known() -> None:
    from slotd.daemon.cli import inspect

    options = [option for option in inspect.params if isinstance(option, click.Option)]
    options = [option for option in options if not option.is_flag and not option.count]
    assert {spelling for option in options for spelling in option.opts} == passthrough.INSPECT_VALUES


# ----- for real


@pytest.mark.parametrize("command", ["inspect", "daemon"])
def test_the_commands_of_the_daemon_call_themselves_by_their_name(command: str) -> None:
    start = [sys.executable, "-m", "slotd.client", command]
    told = subprocess.run([*start, "-h"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith(f"Usage: slotd {command} ")
    wrong = subprocess.run([*start, "x.gguf", "--nope"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(f"Usage: slotd {command} ")
    assert wrong.stderr.splitlines()[-1].startswith("slotd: No such option")


def test_inspect_without_a_file_takes_the_model_of_the_environment(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTD_MODEL", str(tiny_llama))
    for flag in ("-c", "--ctx", "--max-ctx"):
        command = [sys.executable, "-m", "slotd.client", "inspect", flag, "64"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (found.returncode, found.stderr) == (0, "")
        assert str(tiny_llama) in found.stdout
