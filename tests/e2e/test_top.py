"""`slotd top` with a real daemon, as text, as JSON, on a terminal; and what a killed daemon leaves."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.daemon_process import DaemonProcess

PATIENCE = 60.0
IDS = [(7 * i) % 300 + 3 for i in range(200)]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slotd.client", "top", *arguments],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def wait_for(path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_process_sees_what_the_daemon_holds(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with DaemonProcess(tiny_llama, f"--state-dir={folder}", env={"SLOTD_FAULT": "decode:1"}) as daemon:
        pid = daemon.process.pid
        assert daemon.generate(IDS, 3, "snap=100:5 ignore_eos=1", "a")[1].status == "length"
        daemon.send("STATUS")
        hash_of_5 = daemon.wait_json("status")["slots"]["5"]["hash"]
        wait_for(folder / f"{pid}.json")
        time.sleep(0.3)  # the file is at most 0.1 s behind
        found = top("--json", "--state-dir", str(folder))
        assert (found.returncode, found.stderr) == (0, "")
        state = json.loads(found.stdout)
        assert state["pid"] == pid == state["props"]["pid"]
        assert state["status"]["slots"]["5"]["hash"] == hash_of_5
        assert state["status"]["totals"]["generated_tokens"] == 3
        text = top(str(pid), "--state-dir", str(folder))  # no terminal: once, as text
        assert text.returncode == 0
        for part in (
            f"slotd {pid}",
            "weights",
            "legacy pool",
            "decode 1",
            "trim 1",
            hash_of_5[:12],
            "5 ",
            "thick",
        ):
            assert part in text.stdout
        by_file = top("--once", "--file", str(folder / f"{pid}.json"))
        assert hash_of_5[:12] in by_file.stdout
        assert all(line.startswith("[") for line in daemon.lines)  # protocol lines, nothing else
    assert list(folder.iterdir()) == []
    ended = top("--state-dir", str(folder))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert (
        ended.stderr
        == f"slotd: no daemon publishes its state in {folder} (--state-dir names another folder)\n"
    )


def test_a_killed_daemon_is_not_shown_and_the_next_one_sweeps(tiny_llama: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_llama, env={"SLOTD_STATE_DIR": str(tmp_path)}) as daemon:
        left = tmp_path / f"{daemon.process.pid}.json"
        wait_for(left)
        daemon.process.kill()
        daemon.wait_exit()
    assert left.exists()
    assert top("--state-dir", str(tmp_path)).returncode == 1
    assert top(left.stem, "--state-dir", str(tmp_path)).stderr == f"slotd: the daemon {left.stem} has ended\n"
    with DaemonProcess(tiny_llama, f"--state-dir={tmp_path}") as daemon:
        wait_for(tmp_path / f"{daemon.process.pid}.json")
        assert not left.exists()


@pytest.mark.parametrize("folder", ["-", "{file}/below"])
def test_without_a_file_the_daemon_works_on(tiny_llama: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with DaemonProcess(tiny_llama, f"--state-dir={folder.format(file=tmp_path / 'file')}") as daemon:
        for number in range(3):
            assert daemon.generate(IDS[:20], 2, "ignore_eos=1", f"r{number}")[1].status == "length"
            time.sleep(0.15)
        assert daemon.stderr.count("WARNING") == (0 if folder == "-" else 1)
    assert daemon.process.returncode == 0


def test_it_lives_on_a_terminal_until_the_daemon_ends_or_ctrl_c(tiny_llama: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_llama, f"--state-dir={tmp_path}") as daemon:
        wait_for(tmp_path / f"{daemon.process.pid}.json")
        assert daemon.generate(IDS, 3, "snap=100:5 ignore_eos=1", "a")[1].status == "length"
        for ending in ("ctrl-c", "end"):
            terminal = subprocess_on_terminal(str(tmp_path))
            read_until(terminal[1], "100")
            if ending == "ctrl-c":
                os.write(terminal[1], b"\x03")
            else:
                daemon.end_input()
                read_until(terminal[1], "has ended")
            assert os.waitstatus_to_exitcode(os.waitpid(terminal[0], 0)[1]) == 0
            os.close(terminal[1])


def subprocess_on_terminal(folder: str) -> tuple[int, int]:
    """`slotd top` in a terminal of its own: pid, and the descriptor of the terminal."""
    pid, descriptor = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
        argv = [sys.executable, "-m", "slotd.client", "top", "--state-dir", folder, "--interval", "0.1"]
        os.execve(sys.executable, argv, environment)
    return pid, descriptor


def read_until(descriptor: int, wanted: str) -> None:
    seen, end = "", time.monotonic() + PATIENCE
    while wanted not in seen:
        assert time.monotonic() < end, seen
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                seen += os.read(descriptor, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the terminal ended before {wanted!r}: {seen}") from None
