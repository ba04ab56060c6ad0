"""The engine's process dies, hangs, or loses its device: the daemon goes on, and says what that cost."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slotd.daemon.arena_directory import ArenaDirectory
from slotd.protocol.messages import AllCleared, Done, Tokens
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama

#: For what takes a moment, with allowance for a busy machine.
PROMPTLY = 6.0

#: Far more tokens than a test waits for.
ENDLESS = "ignore_eos=1"


def start(model: Path, *flags: str, **options: Any) -> DaemonProcess:
    return DaemonProcess(model, "--engine=process", "--max-ctx=100000", "--exact", *flags, **options)


def engine_of(daemon: DaemonProcess) -> dict[str, Any]:
    """What STATUS says of the engine's process."""
    engine: dict[str, Any] = daemon.wait_json_of("STATUS", "status")["engine"]
    return engine


def kill_engine(daemon: DaemonProcess, number: int = signal.SIGKILL) -> int:
    pid = int(engine_of(daemon)["pid"])
    os.kill(pid, number)
    return pid


def wait_for(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ----- deaths


def test_several_in_flight_and_a_queue(tiny_llama: Path) -> None:
    """Those that ran end with device_lost behind the announcement; those that waited lose nothing."""
    with start(tiny_llama, "--parallel=2") as daemon:
        expected, _ = daemon.generate([5, 6, 7], 12, ENDLESS, "before")
        daemon.send("- 0 ids=5,6,7,8 snap=3:4 id=s1")
        daemon.wait_done("s1")
        daemon.send(f"- 90000 ids=5,6,7 id=run1 {ENDLESS}", f"- 90000 ids=9,9 id=run2 {ENDLESS}")
        daemon.send(f"- 12 ids=5,6,7 id=wait1 {ENDLESS}", f"- 12 ids=5,6,7 id=wait2 {ENDLESS}")
        daemon.wait_line("[tok] id=run2")
        pid = kill_engine(daemon)
        daemon.send(f"- 12 ids=5,6,7 id=late {ENDLESS}", "RESTORE 4 - 2 ids=5,6,7,8 id=gone")
        seen = len(daemon.lines)
        dones = {name: daemon.wait_done(name) for name in ("run1", "run2", "wait1", "wait2", "late", "gone")}
        for name in ("run1", "run2"):
            assert dones[name].status == "err"
            assert dones[name].fields["code"] == "device_lost"
            assert dones[name].fields["reason"] == "signal SIGKILL"
            assert dones[name].fields["epoch"] == 1
        assert dones["gone"].fields["code"] == "empty_slot"
        events = [parse_event(line) for line in daemon.lines]
        for name in ("wait1", "wait2", "late"):
            assert dones[name].status == "length"
            ids = [token for e in events if isinstance(e, Tokens) and e.id == name for token in e.ids]
            assert ids == expected
        (cleared,) = [event for event in events if isinstance(event, AllCleared)]
        assert (cleared.epoch, cleared.freed, cleared.kept) == (1, (4,), ())
        assert cleared.bytes > 0
        first_lost = next(i for i, e in enumerate(events) if isinstance(e, Done) and e.status == "err")
        assert events.index(cleared) < first_lost
        assert not any(isinstance(e, Tokens) and e.id in ("run1", "run2") for e in events[first_lost:])
        ends = Counter(event.id for event in events if isinstance(event, Done))
        assert all(ends[name] == 1 for name in dones)
        assert seen < len(daemon.lines)
        engine = engine_of(daemon)
        assert engine["pid"] != pid
        assert (engine["phase"], engine["replacements"]) == ("running", 1)
        assert daemon.wait_json_of("PROPS", "props")["epoch"] == 1
        assert daemon.process.poll() is None
        daemon.send("LIST_SLOTS id=l")
        assert daemon.wait_line("[snap] slots=") == "[snap] slots= id=l"


def test_in_the_middle_of_a_prompt(tiny_llama: Path) -> None:
    with start(tiny_llama, "--chunk=64") as daemon:
        daemon.send(f"- 5 ids={','.join(['7'] * 60_000)} id=long")
        daemon.wait_line("[prefill] id=long")
        kill_engine(daemon)
        assert daemon.wait_done("long").fields["code"] == "device_lost"
        assert len(daemon.generate([5, 6, 7], 4, ENDLESS)[0]) == 4


def test_version_1_gets_its_error_and_its_end_and_the_lane_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "p.bin"
    prompt.write_bytes(b"\x05\0\0\0\x06\0\0\0")
    with start(tiny_llama) as daemon:
        daemon.send(f"{prompt} 6 {ENDLESS}")
        expected = daemon.read_stream()
        pid = engine_of(daemon)["pid"]
        daemon.send(f"{prompt} 90000 {ENDLESS}", f"{prompt} 6 {ENDLESS}", "LIST_SLOTS")
        daemon.read_stream_value()
        os.kill(pid, signal.SIGKILL)
        assert daemon.next_line().startswith("[snap] all-cleared epoch=1 freed= kept= bytes=")
        assert daemon.next_line() == 'err device_lost reason="signal SIGKILL"'
        daemon.read_stream()
        assert daemon.read_stream() == expected
        assert daemon.next_line() == "[snap] slots="


def test_a_lost_device_is_reported_by_its_reason(tiny_llama: Path) -> None:
    with start(tiny_llama, env={"SLOTD_FAULT": "device_lost:5"}) as daemon:
        produced, done = daemon.generate([5, 6, 7], 20, ENDLESS, "r1")
        assert len(produced) == 4  # the fifth forward, after the prompt and three steps
        assert done.fields["code"] == "device_lost"
        assert done.fields["reason"] == "DeviceLost: injected by SLOTD_FAULT"
        again, done = daemon.generate([5, 6, 7], 20, ENDLESS, "r2")
        assert again[:4] == produced
        assert (done.status, done.fields["epoch"]) == ("length", 1)


def test_a_process_that_hangs_is_replaced_and_the_front_answers_meanwhile(tiny_llama: Path) -> None:
    with start(tiny_llama, "--engine-timeout=2", "--parallel=1") as daemon:
        daemon.send(f"- 90000 ids=5,6,7 id=run {ENDLESS}", f"- 3 ids=5,6 id=wait {ENDLESS}")
        daemon.wait_line("[tok]")
        pid = kill_engine(daemon, signal.SIGSTOP)
        # More than a socket takes, to somebody who does not read: it must not hold the front.
        daemon.send(f"- 0 ids={','.join(['7'] * 99_000)} id=big")
        began = time.monotonic()
        status = daemon.wait_json_of("STATUS", "status")
        assert time.monotonic() - began < 1.0
        assert [entry["id"] for entry in status["running"]] == ["run"]
        time.sleep(0.5)
        assert daemon.wait_json_of("STATUS", "status")["age_ms"] > 500
        done = daemon.wait_done("run")
        assert done.fields["code"] == "device_lost"
        assert str(done.fields["reason"]).startswith("no sign of life for 2.")
        assert daemon.wait_done("wait").status == "length"
        daemon.send("CANCEL id=big")
        daemon.wait_done("big")
        assert not alive(pid)


def test_an_idle_process_is_not_taken_for_dead(tiny_llama: Path) -> None:
    with start(tiny_llama, "--engine-timeout=0.8") as daemon:
        pid = engine_of(daemon)["pid"]
        time.sleep(3.0)
        assert daemon.wait_json_of("STATUS", "status")["age_ms"] < 800
        engine = engine_of(daemon)
        assert (engine["pid"], engine["replacements"]) == (pid, 0)


def test_one_that_dies_too_often_is_down_and_the_daemon_says_why(tiny_llama: Path) -> None:
    with start(tiny_llama, env={"SLOTD_FAULT": "device_lost:1:9"}) as daemon:
        for number in range(4):
            _, done = daemon.generate([5, 6, 7], 3, ENDLESS, f"r{number}")
            assert (done.fields["code"], done.fields["epoch"]) == ("device_lost", number + 1)
        _, done = daemon.generate([5, 6, 7], 3, ENDLESS, "r5")
        assert done.fields["code"] == "engine_down"
        assert done.fields["reason"] == "DeviceLost: injected by SLOTD_FAULT"
        assert (done.fields["replaced"], done.fields["within_s"]) == (3, 60)
        daemon.send("LIST_SLOTS")
        assert daemon.wait_line("err ").startswith("err engine_down reason=")
        engine = engine_of(daemon)
        assert (engine["phase"], engine["died_of"]) == ("down", "DeviceLost: injected by SLOTD_FAULT")


def test_what_waits_is_refused_when_the_engine_goes_down(tiny_llama: Path, tmp_path: Path) -> None:
    """The model file is another one now: no process can take over."""
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny_llama.read_bytes())
    with start(model, "--parallel=1") as daemon:
        daemon.send(f"- 90000 ids=5,6,7 id=run {ENDLESS}", "- 3 ids=5,6 id=wait")
        daemon.wait_line("[tok]")
        write_tiny_llama(tmp_path / "other.gguf", seed=5)
        (tmp_path / "other.gguf").rename(model)
        kill_engine(daemon)
        assert daemon.wait_done("run").fields["code"] == "device_lost"
        done = daemon.wait_done("wait")
        assert done.fields["code"] == "engine_down"
        assert done.fields["reason"] == "ModelError: the model file has changed since the daemon started"
        assert engine_of(daemon)["phase"] == "down"


# ----- slots in host memory


def keep_in_host(daemon: DaemonProcess, slot: int, ids: str) -> None:
    daemon.send(f"- 0 ids={ids} snap={ids.count(',') + 1}:{slot} tier=host id=keep{slot}")
    daemon.wait_done(f"keep{slot}")


def test_slots_in_host_memory_survive_and_are_exact(tiny_llama: Path) -> None:
    ids = ",".join(str(5 + n % 250) for n in range(200))
    with start(tiny_llama, "-ctk=f16", "-ctv=bf16") as daemon:
        expected, _ = daemon.generate([int(token) for token in ids.split(",")] + [9], 12, ENDLESS, "whole")
        for slot in (1, 3, 6):
            keep_in_host(daemon, slot, ids)
        daemon.send(f"- 0 ids={ids} snap=100:2 id=device", "FREE_SNAPSHOT 3 id=free")
        daemon.wait_done("free")
        time.sleep(0.5)  # checksums are made behind the answers
        for epoch in (1, 2):  # the second time out of an arena that was adopted
            kill_engine(daemon)
            cleared = daemon.wait_event(lambda event: isinstance(event, AllCleared))
            assert isinstance(cleared, AllCleared)
            assert (cleared.epoch, cleared.kept) == (epoch, (1, 6))
            assert cleared.freed == ((2,) if epoch == 1 else ())
            daemon.send("LIST_SLOTS")
            assert daemon.wait_line("[snap] slots=") == "[snap] slots=1,6"
        daemon.send(f"RESTORE 1 - 12 ids={ids},9 id=r {ENDLESS}")
        produced: list[int] = []

        def collect(event: object) -> bool:
            if isinstance(event, Tokens) and event.id == "r":
                produced.extend(event.ids)
            return isinstance(event, Done) and event.id == "r"

        done = daemon.wait_event(collect)
        assert isinstance(done, Done)
        assert done.fields["reused"] == 200
        assert produced == expected
        # Slot 1 is in the device now and goes with it, slot 6 is as it was.
        kill_engine(daemon)
        cleared = daemon.wait_event(lambda event: isinstance(event, AllCleared))
        assert isinstance(cleared, AllCleared)
        assert (cleared.freed, cleared.kept) == ((1,), (6,))


def test_a_slot_with_a_wrong_byte_is_not_kept(tiny_llama: Path) -> None:
    with start(tiny_llama) as daemon:
        keep_in_host(daemon, 1, "5,6,7,8")
        keep_in_host(daemon, 2, "5,6,7,8")
        time.sleep(0.5)
        pid = kill_engine(daemon, signal.SIGSTOP)
        descriptors = Path(f"/proc/{pid}/fd").iterdir()
        arena = next(path for path in descriptors if "slotd-host-cache" in os.readlink(path))
        with arena.open("r+b") as file, mmap.mmap(file.fileno(), 1 << 20) as cells:
            (first,) = [entry for entry in ArenaDirectory(cells).entries().values() if entry.slot == 1]
            cells[first.offset + first.length - 1] ^= 1
        os.kill(pid, signal.SIGKILL)
        cleared = daemon.wait_event(lambda event: isinstance(event, AllCleared))
        assert isinstance(cleared, AllCleared)
        assert (cleared.freed, cleared.kept) == ((1,), (2,))
        daemon.send("LIST_SLOTS")
        assert daemon.wait_line("[snap] slots=") == "[snap] slots=2"


def test_without_a_host_tier_nothing_is_kept(tiny_llama: Path) -> None:
    with start(tiny_llama, "--host-cache=0") as daemon:
        daemon.send("- 0 ids=5,6,7,8 snap=4:1 id=k")
        daemon.wait_done("k")
        kill_engine(daemon)
        line = daemon.wait_line("[snap] all-cleared")
        assert line.startswith("[snap] all-cleared epoch=1 freed=1 kept= bytes=")


# ----- life


def test_it_never_outlives_the_daemon(tiny_llama: Path) -> None:
    """Not even when it is stopped and the daemon is killed."""
    for stopped in (False, True):
        with start(tiny_llama) as daemon:
            pid = int(engine_of(daemon)["pid"])
            if stopped:
                os.kill(pid, signal.SIGSTOP)
            daemon.process.kill()
            wait_for(lambda pid=pid: not alive(pid), PROMPTLY)  # type: ignore[misc]


def test_its_descriptor_1_is_stderr_and_signals_to_all_do_not_end_it(tiny_llama: Path) -> None:
    with start(tiny_llama) as daemon:
        pid = int(engine_of(daemon)["pid"])
        assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2")
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        assert len(daemon.generate([5, 6], 3, ENDLESS)[0]) == 3
        assert engine_of(daemon)["replacements"] == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_the_end_is_in_order_and_prompt(tiny_llama: Path, stopped: bool) -> None:
    with start(tiny_llama) as daemon:
        daemon.send(f"- 90000 ids=5,6,7 id=run {ENDLESS}")
        daemon.wait_line("[tok]")
        pid = kill_engine(daemon, signal.SIGSTOP if stopped else 0)
        daemon.send("quit id=q")
        began = time.monotonic()
        assert daemon.wait_done("run").status == "cancelled"
        assert daemon.wait_done("q").status == "ok"
        assert daemon.wait_exit() == 0
        assert time.monotonic() - began < PROMPTLY
        assert not any("all-cleared" in line for line in daemon.lines)
        wait_for(lambda: not alive(pid), PROMPTLY)


def test_end_of_input_while_a_new_one_starts_loses_nothing_that_waited(tiny_llama: Path) -> None:
    with start(tiny_llama, "--parallel=1") as daemon:
        daemon.send(f"- 90000 ids=5,6,7 id=run {ENDLESS}", f"- 5 ids=5,6 id=wait {ENDLESS}")
        daemon.wait_line("[tok]")
        kill_engine(daemon)
        daemon.end_input()
        assert daemon.wait_done("wait").fields["gen"] == 5
        assert daemon.wait_exit() == 0


# ----- starting


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--memory-limit=100K"], 2, "the weights do not fit"),
        (["-ctk", "q8_0"], 2, "K type q8_0 needs heads of a multiple of 32 numbers"),
        (["--engine-timeout=0"], 2, "--engine-timeout 0 s: must be 0.1 to 86400"),
        (["--engine=fork"], 2, "--engine 'fork': must be thread or process"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(
    tiny_llama: Path, flags: list[str], code: int, said: str
) -> None:
    argv = [sys.executable, "-m", "slotd.daemon", "daemon", str(tiny_llama), "--engine=process", *flags]
    done = subprocess.run(argv, input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, b"")
    assert said in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_a_model_that_can_not_be_used_is_exit_code_3(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\0" * 50)
    argv = [sys.executable, "-m", "slotd.daemon", "daemon", str(bad), "--engine=process"]
    done = subprocess.run(argv, input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, b"")
    assert str(bad) in done.stderr.decode()


# ----- and with a thread


def test_with_a_thread_a_lost_device_ends_the_daemon(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--engine=thread", env={"SLOTD_FAULT": "device_lost:3"}) as daemon:
        daemon.send(f"- 20 ids=5,6,7 id=r {ENDLESS}")
        assert daemon.wait_done("r").status == "cancelled"
        assert daemon.wait_exit() == 1
        daemon.wait_stderr("injected by SLOTD_FAULT")
