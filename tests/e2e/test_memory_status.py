"""What STATUS and PROPS say about memory, and slots in a pool that is nearly full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slotd.protocol.messages import SnapInlineFailed
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess

IDS = [(7 * i) % 300 + 3 for i in range(400)]


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def asked(daemon: DaemonProcess, verb: str) -> dict[str, Any]:
    daemon.send(verb.upper())
    return daemon.wait_json(verb)


def test_field_report_65_requested_and_effective_are_both_said(tiny_llama: Path) -> None:
    """Eight slots and four requests of the whole context in memory for one segment of pages."""
    with DaemonProcess(tiny_llama, "--memory-limit=1MiB", "--host-cache=0") as daemon:
        effective = asked(daemon, "props")["effective"]
        assert effective["memory"] == {"requested": 1 << 20, "effective": 1 << 20}
        assert effective["host_cache"] == {"requested": 0, "effective": 0}
        assert effective["kv_tokens"] == {"effective": 1024}
        assert effective["parallel"] == {"requested": 4, "effective": 2}
        assert effective["slots"] == {"requested": 8, "effective": 2}
    with DaemonProcess(tiny_llama, "--host-cache=1MiB") as daemon:
        effective = asked(daemon, "props")["effective"]
        assert (effective["slots"], effective["parallel"]) == (
            {"requested": 8, "effective": 8},
            {"requested": 4, "effective": 4},
        )
        assert effective["host_cache"]["effective"] == 1 << 20


def test_status_shows_slots_memory_and_what_was_given_up(tiny_llama: Path) -> None:
    env = {"SLOTD_FAULT": "decode:1"}
    with DaemonProcess(tiny_llama, "--prefill-pool-trim-tokens=128", "--chunk=64", env=env) as daemon:
        props = asked(daemon, "props")
        assert props["pool"] == {"kind": "legacy", "trim_tokens": 128}
        assert props["oom_policy"] == "ladder"
        _, done = daemon.generate(IDS, 3, "snap=200:4 ignore_eos=1", "a")
        assert done.status == "length"
        daemon.send("SNAPSHOT 5 tier=host id=s")
        daemon.wait_done("s")
        status = asked(daemon, "status")
        assert {slot: (held["tokens"], held["tier"]) for slot, held in status["slots"].items()} == {
            "4": (200, "device"), "5": (403, "host"),
        }  # fmt: skip
        page = 64 * props["kv"]["bytes_per_token"]
        assert status["slots"]["4"]["bytes"] == 4 * page + 320 * 4
        assert status["slots"]["4"]["own_bytes"] == page + 320 * 4  # the others are shared
        assert status["slots"]["5"]["bytes"] == status["host_tier"]["used"] == 7 * page + 320 * 4
        assert status["slots"]["5"]["idle_s"] >= 0
        assert status["retained"] == 1
        memory = status["memory"]
        assert (memory["pool"], memory["limit"]) == ("legacy", None)
        assert memory["live"]["kv"] > 0 < memory["live"]["weights"]
        recovery = status["recovery"]
        assert (recovery["oom"], recovery["rungs"]) == ({"decode": 1}, {"trim": 1})
        assert recovery["trims"]["interval"]["count"] == 3
        assert recovery["trims"]["end"]["count"] >= 1
        assert status["host_tier"]["moves_out"] == 1


@pytest.mark.parametrize(("policy", "limit"), [("ladder", 2_500_000), ("seed", 3_500_000)])
def test_field_report_67_restore_into_a_nearly_full_pool_then_prefill(
    tiny_llama: Path, policy: str, limit: int
) -> None:
    flags = (f"--memory-limit={limit}", "--chunk=64", f"--oom-policy={policy}", "--exact")
    with DaemonProcess(tiny_llama, "--chunk=64", "--exact") as daemon:
        expected, _ = daemon.generate(IDS, 4, "ignore_eos=1")
    with DaemonProcess(tiny_llama, *flags) as daemon:
        pid, recovered = daemon.process.pid, 0
        for slot in range(8):  # eight texts: the pool is full of what their slots hold
            daemon.send(f"- 0 ids={joined(IDS[slot : slot + 300])} snap=300:{slot} id=f{slot}")
            recovered += daemon.wait_done(f"f{slot}").status == "err"
        for number in range(3):
            slots = asked(daemon, "status")["slots"]
            if "0" in slots:
                daemon.send(f"RESTORE 0 - 4 ids={joined(IDS)} ignore_eos=1 id=r{number}")
                recovered += daemon.wait_done(f"r{number}").status == "err"
            produced, done = daemon.generate(IDS, 4, "ignore_eos=1", f"p{number}")
            if done.status == "err":
                recovered += 1
                produced, done = daemon.generate(IDS, 4, "ignore_eos=1", f"again{number}")
            assert (done.status, produced) == ("length", expected)
        status = asked(daemon, "status")
        assert sum(status["recovery"]["oom"].values()) > 0
        assert (recovered == 0) is (policy == "ladder")
        assert (daemon.process.pid, daemon.process.poll()) == (pid, None)
        failed = [line for line in daemon.lines if isinstance(parse_event(line), SnapInlineFailed)]
        assert failed == [] or policy == "seed"
