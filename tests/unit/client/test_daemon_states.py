"""Which daemons run, by the files that they publish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slotd.client.daemon_states import NoStateError, read_state, running_daemons, state_folder
from slotd.protocol.errors import ConfigError


def start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def publish(folder: Path, pid: int, **changes: Any) -> Path:
    facts = {"format": 1, "pid": pid, "proc_start": start_of(os.getpid()), "started": 1.0, "written": 2.0,
             "props": {"slots": 8}, "status": {"epoch": 0}} | changes  # fmt: skip
    path = folder / f"{pid}.json"
    path.write_text(json.dumps(facts))
    return path


def test_a_running_daemon_is_found(tmp_path: Path) -> None:
    publish(tmp_path, os.getpid())
    [state] = running_daemons(tmp_path)
    assert (state.pid, state.props, state.status) == (os.getpid(), {"slots": 8}, {"epoch": 0})
    assert state.as_dict()["age_s"] > 0


def test_the_dead_and_the_broken_are_passed_over(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped: a zombie
    publish(tmp_path, gone.pid, proc_start="")
    assert running_daemons(tmp_path) == []
    gone.wait()
    assert running_daemons(tmp_path) == []
    publish(tmp_path, os.getppid(), proc_start="1")  # another process has this number now
    (tmp_path / "7.json").write_text("{")
    (tmp_path / "8.json").write_text('{"format": 1}')
    assert running_daemons(tmp_path) == []


def test_the_one_started_last_is_the_last(tmp_path: Path) -> None:
    publish(tmp_path, os.getpid(), started=5.0)
    publish(tmp_path, os.getppid(), started=9.0, proc_start=start_of(os.getppid()))
    assert [state.pid for state in running_daemons(tmp_path)] == [os.getpid(), os.getppid()]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2}', '{"format": 1, "pid": "x"}', '{"format": 1, "pid": 4}']
)
def test_what_is_no_state_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "5.json"
    path.write_text(text)
    with pytest.raises(NoStateError, match=r"5\.json is no state file"):
        read_state(path)
    with pytest.raises(NoStateError, match="no such file"):
        read_state(tmp_path / "6.json")


def test_a_pipe_or_a_device_is_not_read(tmp_path: Path) -> None:
    """It could go on for ever; the daemons beside it are still found."""
    os.mkfifo(tmp_path / "7.json")
    (tmp_path / "8.json").symlink_to("/dev/zero")
    for name in ("7.json", "8.json"):
        with pytest.raises(NoStateError, match="it is no regular file"):
            read_state(tmp_path / name)
    publish(tmp_path, os.getpid())
    assert [state.pid for state in running_daemons(tmp_path)] == [os.getpid()]


def test_a_file_that_is_far_too_long_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "9.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NoStateError, match="longer than"):
        read_state(tmp_path / "9.json")


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotd.daemon.state_file import choose_folder

    assert state_folder(None) == choose_folder(None)  # both sides come to the same
    assert state_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("SLOTD_STATE_DIR", "-")
    with pytest.raises(ConfigError, match="SLOTD_STATE_DIR '-': names no folder"):
        state_folder(None)
    assert state_folder(str(tmp_path)) == tmp_path
    monkeypatch.delenv("SLOTD_STATE_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert state_folder(None) == choose_folder(None)


@pytest.mark.parametrize("interval", ["nan", "0", "inf"])
def test_an_interval_that_is_none_is_refused(interval: str) -> None:
    from click.testing import CliRunner

    from slotd.client.cli import slotd

    done = CliRunner().invoke(slotd, ["top", "--interval", interval])
    assert done.exit_code == 2
    assert "is not in the range" in done.output
