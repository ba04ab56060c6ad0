"""The examples of PROTOCOL.md, played against the real daemon.

``C:`` is sent, ``S:`` must be the next line, ``S*:`` stands for any number of such lines (several in a
row: mixed), ``T:`` is what the token stream carries up to its -1, ``D:`` gives daemon flags. In expected
text ``<n>`` is a number, ``<ids>`` ids, ``<...>`` anything.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.config import ENGINE_HOSTS
from tests.fakes.daemon_process import DaemonProcess

TEXT = (files("slotd.protocol") / "PROTOCOL.md").read_text()
TRANSCRIPTS = re.findall(r"^```transcript\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)

WILDCARDS = {"<n>": r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", "<ids>": r"\d+(?: \d+)*", "<...>": ".*"}


def pattern_of(text: str) -> re.Pattern[str]:
    parts = re.split("(" + "|".join(map(re.escape, WILDCARDS)) + ")", text)
    return re.compile("".join(WILDCARDS.get(part, re.escape(part)) for part in parts))


class Player:
    """Plays one transcript."""

    def __init__(self, daemon: DaemonProcess, names: dict[str, Path]) -> None:
        self._daemon = daemon
        self._names = names
        self._optional: list[re.Pattern[str]] = []

    def play(self, line: str) -> None:
        kind, _, text = line.partition(": ")
        text = re.sub(r"\{([\w.]+)\}", lambda match: str(self._names.get(match[1], match[0])), text)
        if kind == "C":
            self._optional = []
            self._daemon.send(text)
        elif kind == "S*":
            self._optional.append(pattern_of(text))
        elif kind == "S":
            self._expect(pattern_of(text))
        elif kind == "T":
            got = " ".join(map(str, [*self._daemon.read_stream(), -1]))
            assert pattern_of(text).fullmatch(got), got
        else:
            raise AssertionError(f"not a transcript line: {line}")

    def _expect(self, wanted: re.Pattern[str]) -> None:
        while not wanted.fullmatch(got := self._daemon.next_line()):
            assert any(optional.fullmatch(got) for optional in self._optional), (wanted.pattern, got)
        self._optional = []


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 10


@pytest.mark.parametrize("engine", ENGINE_HOSTS)
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=range(len(TRANSCRIPTS)))
def test_transcript(tiny_llama: Path, tmp_path: Path, transcript: str, engine: str) -> None:
    names = {name: tmp_path / name for name in ("prompt.bin", "prompt.counted", "out.counted")}
    names["prompt.bin"].write_bytes(np.asarray([5, 6, 7], "<i4").tobytes())
    names["prompt.counted"].write_bytes(np.asarray([3, 5, 6, 7], "<i4").tobytes())
    lines = transcript.splitlines()
    flags = lines.pop(0).removeprefix("D: ").split() if lines[0].startswith("D: ") else []
    flags = [flag.replace("{slots}", str(tmp_path / "slots")) for flag in flags]
    flags.append(f"--engine={engine}")
    stream = not any(flag.startswith("--stream-fd") for flag in flags)
    with DaemonProcess(tiny_llama, *flags, stream=stream) as daemon:
        player = Player(daemon, names)
        for line in lines:
            player.play(line)
        assert daemon.quiet(0.2) == []  # nothing was said that the example leaves out
