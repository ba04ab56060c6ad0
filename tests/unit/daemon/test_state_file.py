"""The file in which a daemon shows itself: whole or not there, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slotd.daemon.state_file import StateFile, choose_folder, remove_stale
from slotd.protocol.errors import ConfigError

PATIENCE = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def read(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / f"{os.getpid()}.json").read_text())
    assert isinstance(found, dict)
    return found


def test_it_follows_the_state_and_goes_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "slotd"
    state = {"n": 1}
    file = StateFile(folder, {"slots": 8}, lambda: state)
    file.start()
    wait_until((folder / f"{os.getpid()}.json").exists)
    first = read(folder)
    assert (first["format"], first["pid"], first["props"], first["status"]) == (
        1,
        os.getpid(),
        {"slots": 8},
        state,
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"{os.getpid()}.json").stat().st_mode & 0o777 == 0o600
    state = {"n": 2}
    file.changed()
    wait_until(lambda: read(folder)["status"] == {"n": 2})
    file.close()
    assert list(folder.iterdir()) == []
    file.changed()
    time.sleep(0.25)
    assert list(folder.iterdir()) == []  # nothing writes it again


def test_at_most_ten_times_a_second_and_never_when_nothing_changes(tmp_path: Path) -> None:
    written: list[float] = []

    def status() -> dict[str, Any]:
        written.append(time.monotonic())
        return {}

    file = StateFile(tmp_path, {}, status)
    file.start()
    end = time.monotonic() + 0.55
    while time.monotonic() < end:
        file.changed()
        time.sleep(0.001)
    assert 1 <= len(written) <= 7
    time.sleep(0.25)
    quiet = len(written)
    time.sleep(0.25)
    assert len(written) == quiet
    file.close()


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    tries: list[int] = []

    def status() -> dict[str, Any]:
        tries.append(1)
        return {}

    file = StateFile(tmp_path / "file" / "below", {}, status)
    with caplog.at_level(logging.WARNING):
        file.start()
        for n in (1, 2, 3):
            wait_until(lambda n=n: len(tries) >= n)
            file.changed()
        file.close()
    assert len([record for record in caplog.records if "state file" in record.message]) == 1


def test_a_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    file = StateFile(folder, {}, dict)
    with caplog.at_level(logging.WARNING):
        file.start()
        wait_until(lambda: "not ours alone" in caplog.text)
        file.close()
    assert list(folder.iterdir()) == []


def test_files_of_dead_daemons_are_swept_and_no_others(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = [f"{gone.pid}.json", f".{gone.pid}.tmp"]
    kept = [f"{os.getppid()}.json", f"{os.getpid()}.json", "notes.json", "12.txt"]
    for name in (*stale, *kept):
        (tmp_path / name).write_text("{}")
    remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_which_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_folder("-") is None
    assert choose_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="--state-dir ''"):
        choose_folder("")
    default = choose_folder(None)
    assert default is not None
    assert default.name == "slotd"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert choose_folder(None) is not None  # and no warning, which would be an error here
