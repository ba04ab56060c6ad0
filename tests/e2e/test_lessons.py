"""Lessons and field reports about slots and memory that need the real daemon and belong to no other file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.protocol.messages import Tokens
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import PATIENCE, DaemonProcess

#: Bytes that may stay cached behind a request: the logits of two calls, four rows each under `--exact`.
LAST_LOGITS = 2 * 4 * 320 * 4

IDS = [(7 * i) % 250 + 3 for i in range(100)]


def asked(daemon: DaemonProcess, verb: str) -> dict[str, Any]:
    return daemon.wait_json_of(verb.upper(), verb)


def test_1b5e0d1_a_second_hello_forgets_nothing(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama) as daemon:
        boot = daemon.wait_json_of("HELLO id=a", "hello")["boot"]
        daemon.generate(IDS, 1, "snap=100:2")
        assert daemon.wait_json_of("HELLO id=b", "hello")["boot"] == boot
        daemon.send("LIST_SLOTS id=l")
        assert daemon.wait_line("[snap] slots=") == "[snap] slots=2 id=l"


def test_a86b1cd_a_prompt_file_may_go_while_its_request_waits(tiny_llama: Path, tmp_path: Path) -> None:
    """It is read whole before anything behind its line is answered."""
    path = tmp_path / "prompt.bin"
    path.write_bytes(np.asarray(IDS, "<i4").tobytes())
    with DaemonProcess(tiny_llama, "--parallel=1") as daemon:
        expected, _ = daemon.generate(IDS, 4, "ignore_eos=1")
        daemon.send("- 400 ids=5,6,7 id=first ignore_eos=1")
        daemon.wait_line("[tok] id=first")
        daemon.send(f"{path} 4 id=second ignore_eos=1")
        assert asked(daemon, "status")["open"] == 2
        path.unlink()
        daemon.send("CANCEL id=first")
        seen = len(daemon.lines)
        assert daemon.wait_done("second").fields["prompt"] == len(IDS)
        lines = [line for line in daemon.lines[seen:] if line.startswith("[tok] id=second")]
        said = [int(i) for line in lines for i in line.split("ids=")[1].split()[0].split(",")]
        assert said == expected


def test_field_report_33_the_flags_of_slots_and_memory_change_what_is_seen(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """None of them is accepted and ignored."""
    flags = ("--slots=3", f"--slot-dir={tmp_path}", "--slot-bytes=5MiB", "--host-cache=3MiB",
             "--oom-policy=seed", "--prefill-pool-trim-tokens=300", "--memory-limit=64MiB")  # fmt: skip
    with DaemonProcess(tiny_llama) as plain, DaemonProcess(tiny_llama, *flags) as daemon:
        seen = []
        for each in (plain, daemon):
            props = asked(each, "props")
            seen.append((
                props["slots"], (props.get("slot_dir") or {}).get("path"),
                (props.get("slot_dir") or {}).get("budget"), props["effective"]["host_cache"]["requested"],
                props["oom_policy"], props["pool"]["trim_tokens"], props["limits"]["memory"],
            ))  # fmt: skip
        assert seen[1] == (3, str(tmp_path), 5 << 20, 3 << 20, "seed", 300, 64 << 20)
        assert not set(zip(range(7), seen[0], strict=True)) & set(zip(range(7), seen[1], strict=True))


def test_field_report_66_parked_weights_are_given_back_and_slots_survive(tiny_llama: Path) -> None:
    """What is cached goes by itself when nothing runs; the weights go when they are told to (`park`)."""
    with DaemonProcess(tiny_llama, "--exact") as daemon:
        expected, _ = daemon.generate([*IDS, 9], 4, "ignore_eos=1")
        daemon.generate(IDS, 1, "snap=100:0", "kept")
        end = time.monotonic() + PATIENCE
        while asked(daemon, "status")["memory"]["cached"] > LAST_LOGITS:
            assert time.monotonic() < end
            time.sleep(0.02)
        daemon.send("park target id=p")
        assert daemon.wait_done("p").status == "ok"
        assert asked(daemon, "status")["memory"]["live"]["weights"] == 0
        daemon.send("unpark target id=u")
        assert daemon.wait_done("u").status == "ok"
        seen = len(daemon.lines)
        daemon.send(f"RESTORE 0 - 4 ids={','.join(map(str, [*IDS, 9]))} id=r ignore_eos=1")
        assert daemon.wait_done("r").fields["reused"] == len(IDS)
        lines = [line for line in daemon.lines[seen:] if line.startswith("[tok] id=r")]
        assert [int(i) for line in lines for i in line.split("ids=")[1].split()[0].split(",")] == expected


@pytest.mark.parametrize("host", ["thread", "process"])
def test_field_report_66_weights_go_when_nothing_runs_and_the_next_request_works(
    tiny_llama: Path, host: str
) -> None:
    """Memory drops without a command; a slot, and a request that comes meanwhile, are as if it had not."""
    with DaemonProcess(tiny_llama, "--exact", "--idle-unload=0.3", f"--engine={host}") as daemon:
        assert asked(daemon, "props")["idle_unload_s"] == 0.3
        expected, _ = daemon.generate([*IDS, 9], 4, "ignore_eos=1")
        daemon.generate(IDS, 1, "snap=100:0", "kept")
        for number in range(2):
            status = unloaded(daemon)
            assert (status["parked"], status["memory"]["live"]["weights"]) == (True, 0)
            assert status["memory"]["live"]["kv"] > 0
            daemon.send(f"RESTORE 0 - 4 ids={','.join(map(str, [*IDS, 9]))} id=r{number} ignore_eos=1")
            done = daemon.wait_done(f"r{number}")
            assert done.fields["reused"] == len(IDS)
            assert float(done.fields["load_s"]) > 0
        said = [event for line in daemon.lines if isinstance(event := parse_event(line), Tokens)]
        for request in ("t", "r0", "r1"):
            assert [i for event in said if event.id == request for i in event.ids] == expected
        daemon.wait_stderr("idle: the weights are unloaded")
        unloaded(daemon)
        daemon.send("park id=p")
        daemon.wait_done("p")
        assert daemon.generate(IDS, 1, request_id="no")[1].fields["code"] == "target_parked"
        assert asked(daemon, "status")["target"] == "parked"


def unloaded(daemon: DaemonProcess) -> dict[str, Any]:
    """The state once the weights have gone by themselves."""
    end = time.monotonic() + PATIENCE
    while (status := asked(daemon, "status"))["target"] != "unloaded":
        assert time.monotonic() < end, status
        time.sleep(0.02)
    return status
