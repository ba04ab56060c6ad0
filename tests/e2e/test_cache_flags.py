"""Flags of the client's commands that reach the daemon: what was computed in one run is there in the next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_gguf import write_tiny_llama

PROMPT = (
    "A prompt that is longer than a page of sixty-four tokens, because a shorter one is not worth a slot. "
    * 2
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=512)


def slotd(command: str, model: Path, *flags: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "slotd.client", command, "-m", str(model), "--temp=0", "-n", "3", *flags]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def answer(model: Path, *flags: str) -> dict[str, Any]:
    done = slotd("generate", model, "--raw", "--exact", "--json", *flags, PROMPT)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_later_run_starts_from_what_an_earlier_one_left(model: Path, tmp_path: Path) -> None:
    plain = answer(model)
    cache = f"--cache-dir={tmp_path / 'cache'}"
    first, second = answer(model, cache), answer(model, cache)
    assert first["ids"] == second["ids"] == plain["ids"]
    assert (plain["cached_tokens"], first["cached_tokens"]) == (0, 0)
    assert second["cached_tokens"] >= 64
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["ids", "slots"]


def test_a_piped_chat_goes_on_too(model: Path, tmp_path: Path) -> None:
    cache = f"--cache-dir={tmp_path}"
    for _ in range(2):
        done = slotd("chat", model, cache, "--system", PROMPT, stdin="hello\n/slots\n")
        assert done.returncode == 0, done.stderr
    assert "1 hits" in done.stderr  # of the second run: its first turn began from the file


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--oom-policy=once", "--oom-policy 'once': must be ladder or seed"),
        ("--host-cache=much", "--host-cache 'much'"),
        ("--prefill-pool-trim-tokens=-1", "--prefill-pool-trim-tokens -1: must be 0 to"),
        ("--slots=65", "--slots 65: must be 1 to 64"),
        ("--slot-bytes=1GiB", "--slot-bytes limits --slot-dir (or --cache-dir), which is not given"),
    ],
)
def test_a_wrong_value_is_refused_by_the_daemon_in_its_words(model: Path, flag: str, words: str) -> None:
    done = slotd("generate", model, flag, "hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
