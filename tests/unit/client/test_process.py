import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from slotd.client.process import LAST_LINES, DaemonProcess, daemon_argv, exit_hint
from slotd.protocol.errors import DaemonStartError

T = TypeVar("T")

BAD = Path(__file__).parents[2] / "fakes" / "bad_daemons"


def spawn(name: str, **kwargs) -> DaemonProcess:
    return DaemonProcess([sys.executable, str(BAD / f"{name}.py")], **kwargs)


def python(code: str, **kwargs) -> DaemonProcess:
    return DaemonProcess([sys.executable, "-c", code], **kwargs)


def finish(process: DaemonProcess) -> int:
    code = process.shutdown(grace=5, term=1)
    process.stdout.close()
    return code


def wait_for(what: Callable[[], T]) -> T:
    deadline = time.monotonic() + 5
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def gone(pid: int) -> bool:
    """Dead or a zombie that nobody reaps (the orphan of a killed daemon)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_the_argv_runs_this_python_and_not_what_lies_in_the_folder() -> None:
    argv = daemon_argv("m.gguf", ["--max-ctx", "64"])
    assert argv == [sys.executable, "-P", "-m", "slotd.daemon", "daemon", "m.gguf", "--max-ctx", "64"]


def test_it_runs_in_a_session_of_its_own() -> None:
    process = python("import os; print(os.getsid(0), os.getpgid(0))")
    assert process.stdout.readline().split() == [str(process.pid).encode()] * 2
    assert process.pid != os.getsid(0)
    finish(process)


def test_exit_code_and_last_words() -> None:
    process = spawn("dies_at_once")
    assert process.wait(10) == 3
    assert process.last_words() == "tensor blk.0.attn_q.weight is missing"
    assert process.obituary() == (
        "exit code 3 (the model cannot be used); its last words:\ntensor blk.0.attn_q.weight is missing"
    )
    assert finish(process) == 3


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "still running"),
        (0, "exit code 0"),
        (2, "exit code 2 (a flag is wrong)"),
        (-signal.SIGTERM, "signal SIGTERM"),
        (-signal.SIGKILL, "signal SIGKILL (killed from outside, often because memory ran out)"),
    ],
)
def test_exit_hint(code, words) -> None:
    assert exit_hint(code) == words


def test_a_flood_of_stderr_blocks_nobody_and_leaves_a_bounded_tail() -> None:
    seen = []
    process = spawn("floods_stderr", log=seen.append)
    assert process.stdout.readline() == b"[daemon] ready\n"
    assert finish(process) == 0
    lines = process.last_words().split("\n")
    assert lines[-1] == "last words"
    assert len(lines) == LAST_LINES
    assert max(map(len, lines)) <= 2000
    assert seen[0].startswith("noise 0 ")


def test_a_log_callback_that_fails_does_not_stop_the_pump() -> None:
    def log(line: str) -> None:
        raise ValueError(line)

    process = python("import sys; print('a\\nb', file=sys.stderr)", log=log)
    process.wait(10)
    assert process.last_words() == "a\nb"
    finish(process)


def test_quit_is_enough_for_a_good_daemon() -> None:
    process = python("import sys; sys.exit(sys.stdin.read() != 'quit\\n')")
    assert process.shutdown(grace=10) == 0
    assert process.shutdown() == 0  # again
    process.stdout.close()


def test_sigterm_for_one_that_does_not_quit() -> None:
    process = python("import time; print(1, flush=True); time.sleep(600)")
    process.stdout.read(1)
    assert process.shutdown(grace=0.2, term=10) == -signal.SIGTERM
    process.stdout.close()


def test_sigkill_for_one_that_ignores_sigterm_and_for_its_children() -> None:
    process = spawn("ignores_sigterm")
    assert process.stdout.readline() == b"[daemon] ready\n"
    child = int(wait_for(process.last_words).split()[1])
    assert process.shutdown(grace=0.2, term=0.3) == -signal.SIGKILL
    assert wait_for(lambda: gone(child))
    process.stdout.close()


def test_the_stream_descriptor_reaches_the_child() -> None:
    code = "import os, sys; os.write(int(sys.argv[1].split('=')[1]), b'\\xff' * 4)"
    process = python(code, stream=True)
    assert process.stream_fd is not None
    assert os.read(process.stream_fd, 100) == b"\xff" * 4
    assert os.read(process.stream_fd, 100) == b""  # our copy of the write end is closed
    finish(process)
    assert process.stream_fd is None


def test_the_environment_is_added_to_ours(monkeypatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    process = python("import os; print(os.environ['KEPT'], os.environ['NEW'])", env={"NEW": "2"})
    assert process.stdout.readline() == b"1 2\n"
    finish(process)


def test_a_program_that_cannot_be_run() -> None:
    with pytest.raises(DaemonStartError, match=r"cannot run /no/such: No such file"):
        DaemonProcess(["/no/such"], stream=True)
