"""How the daemon starts and ends, and what it does when the world around it goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.daemon_process import DaemonProcess

#: "Within 2 s", with allowance for a machine whose cores are busy with other tests.
PROMPTLY = 6.0

LONG = "- 480 ids=5,6,7 id=long ignore_eos=1"


def exits_promptly(daemon: DaemonProcess) -> None:
    began = time.monotonic()
    assert daemon.wait_exit() == 0
    assert time.monotonic() - began < PROMPTLY


def run_daemon(*argv: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "slotd.daemon", "daemon", *argv], input=input, capture_output=True, timeout=60
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_in_order(tiny_llama: Path, number: signal.Signals) -> None:
    with DaemonProcess(tiny_llama) as daemon:
        daemon.send(LONG, "- 400 ids=5,6,7 ignore_eos=1", "LIST_SLOTS")
        daemon.wait_line("[tok] id=long")
        daemon.process.send_signal(number)
        assert daemon.wait_done("long").status == "cancelled"
        while daemon.read_stream_value() != -1:
            pass
        exits_promptly(daemon)


def test_quit_ends_everything_in_order(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama) as daemon:
        daemon.send(LONG)
        daemon.wait_line("[tok]")
        daemon.send("quit id=q")
        assert daemon.wait_done("long").status == "cancelled"
        assert daemon.wait_done("q").status == "ok"
        exits_promptly(daemon)


def test_end_of_input_loses_nothing(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--parallel=1") as daemon:
        for number in range(4):
            daemon.send(f"- 50 ids=5,6,{number} id=r{number} ignore_eos=1")
        daemon.send("- 5 ids=5,6,7 ignore_eos=1", "LIST_SLOTS")
        daemon.end_input()
        for number in range(4):
            assert daemon.wait_done(f"r{number}").fields["gen"] == 50
        assert len(daemon.read_stream()) == 5
        assert "[snap] slots=" in daemon.lines or daemon.wait_line("[snap] slots=") == "[snap] slots="
        exits_promptly(daemon)


def test_end_of_input_after_a_line_without_newline(tiny_llama: Path) -> None:
    done = run_daemon(str(tiny_llama), input=b"LIST_SLOTS")
    assert done.returncode == 0
    assert done.stdout == b"[daemon] ready\n[snap] slots=\n"


def test_nobody_reads_stdout(tiny_llama: Path) -> None:
    read, write = os.pipe()
    argv = [sys.executable, "-m", "slotd.daemon", "daemon", str(tiny_llama)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    assert os.read(read, 100) == b"[daemon] ready\n"
    os.close(read)  # idle, nothing to write: it must notice all the same
    assert process.wait(PROMPTLY) == 0
    assert process.stdin is not None
    process.stdin.close()


def test_a_reader_of_the_stream_that_leaves_ends_its_request_only(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama) as daemon:
        daemon.send("- 480 ids=5,6,7 ignore_eos=1")
        daemon.read_stream_value()
        assert daemon._stream_read is not None
        os.close(daemon._stream_read)
        daemon._stream_read = None
        produced, done = daemon.generate([5, 6], 5, "ignore_eos=1")
        assert len(produced) == 5
        daemon.send("LIST_SLOTS", "- 4 ids=5,6")
        daemon.wait_line("[snap] slots=")
        assert daemon.wait_line("err") == "err no_stream_fd"
        assert done.status == "length"


def test_a_reader_that_stops_reading_delays_nobody_else(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--max-ctx=200000", "--parallel=2") as daemon:
        daemon.send("- 150000 ids=5,6,7 ignore_eos=1")  # nobody reads the token stream
        daemon.read_stream_value()
        for number in range(3):
            produced, _ = daemon.generate([5, 6, number], 10, "ignore_eos=1", f"r{number}")
            assert len(produced) == 10
        daemon.send("CANCEL")
        assert daemon.wait_line("[cancel]") == "[cancel] found=1"
        while daemon.read_stream_value() != -1:
            pass


def test_it_never_outlives_its_parent(tiny_llama: Path, tmp_path: Path) -> None:
    """The parent dies by kill -9 while somebody else still holds the daemon's stdin open."""
    holder_read, holder_write = os.pipe()
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'slotd.daemon', 'daemon', {str(tiny_llama)!r}],"
        f" stdin={holder_read}, stdout=subprocess.PIPE, pass_fds=({holder_read},))\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=(holder_read,))
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + PROMPTLY
    while time.monotonic() < end and _alive(pid):
        time.sleep(0.05)
    assert not _alive(pid)
    os.close(holder_read)
    os.close(holder_write)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ----- starting


def test_one_shot(tiny_llama: Path, tmp_path: Path) -> None:
    prompt, out = tmp_path / "p.bin", tmp_path / "o.bin"
    prompt.write_bytes(np.asarray([5, 6, 7], "<i4").tobytes())
    done = run_daemon(str(tiny_llama), "no-draft", str(prompt), "6", str(out))
    assert done.returncode == 0, done.stderr
    once = np.fromfile(out, "<i4").tolist()
    with DaemonProcess(tiny_llama) as daemon:
        assert daemon.generate([5, 6, 7], 6)[0] == once


@pytest.mark.parametrize(
    ("prompt", "n_gen", "out", "said"),
    [
        ("missing.bin", "5", "o.bin", "empty_prompt"),
        ("p.bin", "5000000", "o.bin", "overflow"),
        ("p.bin", "5", "no/such/dir/o.bin", "write_out"),
    ],
)
def test_one_shot_fails_with_code_1(
    tiny_llama: Path, tmp_path: Path, prompt: str, n_gen: str, out: str, said: str
) -> None:
    (tmp_path / "p.bin").write_bytes(np.asarray([5, 6, 7], "<i4").tobytes())
    done = run_daemon(str(tiny_llama), "d", str(tmp_path / prompt), n_gen, str(tmp_path / out))
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-ctx=0"], "--max-ctx 0"),
        (["--max-ctx=-5"], "--max-ctx -5"),
        (["--max-ctx=2147483648"], "--max-ctx 2147483648"),
        (["--max-ctx=1"], "--max-ctx 1"),
        (["--slots=0"], "--slots 0"),
        (["--slots=65"], "--slots 65"),
        (["--parallel=0"], "--parallel 0"),
        (["--chunk=0"], "--chunk 0"),
        (["-ctk", "q8_0"], "K type q8_0 needs heads of a multiple of 32 numbers"),
        (["-ctv", "tq3_0"], "V type tq3_0 needs heads of a multiple of 128 numbers"),
        (["-ctv", "int3"], "int3"),
        (["--memory-limit=lots"], "--memory-limit"),
        (["--memory-limit=0"], "--memory-limit"),
        (["--stream-fd=1"], "--stream-fd"),
        (["--stream-fd=99"], "--stream-fd"),
        (["--backend=opencl"], "--backend"),
        (["--device=9999"], "--device 9999: no such CUDA device"),
        (["--device=cpu", "--pool=vmm"], "--pool vmm is for CUDA devices"),
        (["--ddtree-budget=x"], "--ddtree-budget"),
        (["--no-such-flag"], "--no-such-flag"),
        (["a", "b", "c"], "arguments"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(tiny_llama: Path, flags: list[str], named: str) -> None:
    done = run_daemon(str(tiny_llama), *flags)
    assert done.returncode == 2
    assert named in done.stderr.decode()
    assert done.stdout == b""


def test_a_context_beyond_the_model_is_one_warning(tiny_llama: Path) -> None:
    done = run_daemon(str(tiny_llama), "--max-ctx=100000")
    assert done.returncode == 0
    assert len([line for line in done.stderr.decode().splitlines() if "--max-ctx" in line]) == 1


def test_a_model_that_can_not_be_used_is_exit_code_3(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\0" * 50)
    done = run_daemon(str(bad))
    assert done.returncode == 3
    assert str(bad) in done.stderr.decode()
    done = run_daemon(str(tmp_path / "missing.gguf"))
    assert done.returncode == 3
    assert "missing.gguf" in done.stderr.decode()


def test_no_model_at_all_is_named_and_nothing_is_fetched() -> None:
    done = run_daemon()
    assert done.returncode == 2
    assert "slotd fetch" in done.stderr.decode()


def test_stdout_carries_protocol_lines_only_at_the_noisiest_log_level(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """A library that prints at import, and -vv: neither reaches stdout."""
    (tmp_path / "psutil.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, sys\n"
        "real = builtins.__import__\n"
        "def noisy(name, *args, **kwargs):\n"
        "    if name == 'numpy':\n"
        "        print('a library says hello')\n"
        "    return real(name, *args, **kwargs)\n"
        "builtins.__import__ = noisy\n"
    )
    with DaemonProcess(tiny_llama, "-vv", env={"PYTHONPATH": str(tmp_path)}) as daemon:
        daemon.generate([5, 6, 7], 3)
        daemon.send("LIST_SLOTS")
        daemon.wait_line("[snap] slots=")
        assert not [line for line in daemon.lines if "hello" in line]
        daemon.wait_stderr("a library says hello")


def test_a_limit_that_the_weights_do_not_fit_is_named(tiny_llama: Path) -> None:
    done = run_daemon(str(tiny_llama), "--memory-limit=100K")
    assert done.returncode == 2
    said = done.stderr.decode()
    assert "the weights do not fit" in said
    assert "102400" in said


def test_end_of_input_waits_for_a_reader_that_is_only_slow(tiny_llama: Path) -> None:
    """The answers fill far more than the pipe before anybody reads; none of them may be cut off."""
    argv = [sys.executable, "-m", "slotd.daemon", "daemon", str(tiny_llama)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"[daemon] ready\n"
    for number in range(4):
        process.stdin.write(f"- 300 ids=5,6,{number} id=r{number} ignore_eos=1 logprobs=20\n".encode())
    process.stdin.close()
    time.sleep(3)
    output = process.stdout.read()
    process.stdout.close()
    assert process.wait(PROMPTLY) == 0
    assert output.count(b"[done]") == 4
    assert output.count(b"[tok]") == 1200


def test_a_descriptor_that_was_not_inherited_is_refused_before_ours_take_its_number(tiny_llama: Path) -> None:
    done = run_daemon(str(tiny_llama), "--stream-fd=3", input=b"- 3 ids=5,6,7\n")
    assert done.returncode == 2
    assert b"--stream-fd 3" in done.stderr
    assert done.stdout == b""


@pytest.mark.parametrize(("closing", "code"), [("<&-", 0), (">&-", 0), ("2>&-", 0)])
def test_closed_standard_descriptors_are_harmless(tiny_llama: Path, closing: str, code: int) -> None:
    command = f"exec '{sys.executable}' -m slotd.daemon daemon '{tiny_llama}' {closing}"
    done = subprocess.run(["sh", "-c", command], input=b"LIST_SLOTS\n", capture_output=True, timeout=60)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def test_a_pipe_that_does_not_block_is_waited_for(tiny_llama: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    argv = [sys.executable, "-m", "slotd.daemon", "daemon", str(tiny_llama)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    assert process.stdin is not None
    process.stdin.write(b"- 400 ids=5,6,7 id=r ignore_eos=1 logprobs=20\n")
    process.stdin.close()
    time.sleep(3)
    with os.fdopen(read, "rb") as output:
        assert output.read().count(b"[tok]") == 400
    assert process.wait(PROMPTLY) == 0


def test_an_output_file_that_could_block_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "in.bin").write_bytes(np.asarray([2, 5, 6], "<i4").tobytes())
    with DaemonProcess(tiny_llama) as daemon:
        daemon.send(f"generate {tmp_path / 'in.bin'} 2 {tmp_path / 'pipe'} id=g")
        assert daemon.wait_done("g").fields["code"] == "write_out"
        assert len(daemon.generate([5, 6], 3, "ignore_eos=1")[0]) == 3


def test_an_answer_that_the_end_cut_off_is_told_from_a_whole_one(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama) as daemon:
        daemon.send(LONG, "- 400 ids=5,6,7 id=asked ignore_eos=1")
        daemon.wait_line("[tok] id=asked")
        daemon.send("CANCEL id=asked")
        assert "reason" not in daemon.wait_done("asked").fields
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_done("long").fields["reason"] == "shutting_down"
        exits_promptly(daemon)
