"""`--oom-policy seed` as a client of the source daemon sees it, and one-shot runs (S113-S120, S130-S132)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from slotd.protocol.messages import AllCleared
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import PATIENCE, DaemonProcess

#: One piece, three pieces.
SHORT, LONG = [(7 * i) % 250 + 3 for i in range(40)], [(11 * i) % 240 + 5 for i in range(150)]

#: Site of the source -> where the fault hits the long prompt, behind two short ones.
SITES = {
    "A": "prefill_reserve:1",
    "B first": "prefill_build:3", "B second": "prefill_build:4", "B last": "prefill_build:5",
    "C first": "prefill_compute:3", "C second": "prefill_compute:4", "C last": "prefill_compute:5",
}  # fmt: skip


def ids_file(path: Path, ids: list[int]) -> Path:
    path.write_bytes(np.asarray(ids, dtype="<i4").tobytes())
    return path


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return ids_file(tmp_path / "short.bin", SHORT)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    return ids_file(tmp_path / "long.bin", LONG)


def seed_daemon(model: Path, fault: str) -> DaemonProcess:
    return DaemonProcess(
        model, "--chunk=64", "--oom-policy=seed", "--slots=8", "-v", env={"SLOTD_FAULT": fault}
    )


@pytest.mark.parametrize("fault", SITES.values(), ids=SITES)
def test_s113_to_s118_a_failed_prefill_costs_all_slots_and_one_request(
    tiny_llama: Path, short: Path, long: Path, fault: str
) -> None:
    with seed_daemon(tiny_llama, fault) as daemon:
        daemon.send(f"{short} 3 snap=40:0")
        healthy = daemon.read_stream()
        daemon.send(f"{short} 0 snap=20:7", "LIST_SLOTS")
        assert daemon.read_stream() == []
        assert daemon.wait_line("[snap] slots=") == "[snap] slots=0,7"
        seen = len(daemon.lines)
        daemon.send(f"{long} 5 snap=140:3")
        # S117: one -1, no token before or behind it. S116: the line was there first.
        assert daemon.read_stream_value() == -1
        cleared = daemon.wait_line("[snap] all-cleared")
        assert re.fullmatch(r"\[snap\] all-cleared epoch=1 freed=0,7 kept= bytes=\d+", cleared)
        daemon.send("LIST_SLOTS")  # S115, S130
        assert daemon.wait_line("[snap] slots=") == "[snap] slots="
        assert [line for line in daemon.lines[seen:] if "all-cleared" in line] == [cleared]
        # S131: no acknowledgement of a snapshot that its prompt did not live to take.
        assert not [line for line in daemon.lines[seen:] if "inline" in line]
        # S113, S118: the daemon lives, and the next request is as if nothing had been.
        daemon.send(f"{short} 3")
        assert daemon.read_stream() == healthy
        daemon.send(f"RESTORE 0 {short} 3")  # S129 is the client's; the daemon refuses by name
        assert daemon.read_stream() == []
        assert daemon.wait_line("err ") == "err empty_slot slot=0"
        end = time.monotonic() + PATIENCE
        while f"site={fault.partition(':')[0]}" not in daemon.stderr:  # read by a thread of its own
            assert time.monotonic() < end
            time.sleep(0.02)


def test_s120_a_failed_embedding_clears_nothing(tiny_llama: Path, short: Path, long: Path) -> None:
    with seed_daemon(tiny_llama, "prefill_embed:2") as daemon:
        daemon.send(f"{short} 0 snap=40:0")
        assert daemon.read_stream() == []
        daemon.send(f"{long} 5", "LIST_SLOTS")
        assert daemon.read_stream_value() == -1
        assert daemon.wait_line("err ").startswith("err oom site=prefill_embed")
        assert daemon.wait_line("[snap] slots=") == "[snap] slots=0"
        assert not [line for line in daemon.lines if "all-cleared" in line]


@pytest.mark.parametrize("fault", ["decode:2", "commit:5"])
def test_s137_later_failures_are_survived_too(tiny_llama: Path, short: Path, long: Path, fault: str) -> None:
    """Decode and commit, the source's migration, were still fatal there."""
    with seed_daemon(tiny_llama, fault) as daemon:
        daemon.send(f"{short} 0 snap=40:0")
        assert daemon.read_stream() == []
        daemon.send(f"{long} 6")
        before = daemon.read_stream()
        assert 0 < len(before) < 6
        assert isinstance(parse_event(daemon.wait_line("[snap] all-cleared")), AllCleared)
        daemon.send(f"{long} 6")
        whole = daemon.read_stream()
        assert len(whole) == 6
        assert whole[: len(before)] == before


@pytest.mark.parametrize("policy", ["ladder", "seed"])
def test_field_report_1_three_requests_and_the_first_one_fails(
    tiny_llama: Path, long: Path, policy: str
) -> None:
    env = {"SLOTD_FAULT": "prefill_compute:2:99", "SLOTD_OOM_POLICY": policy}
    if policy == "seed":
        env["SLOTD_FAULT"] = "prefill_compute:2"
    with DaemonProcess(tiny_llama, "--chunk=64", env=env) as daemon:
        daemon.send(f"{long} 2")
        assert daemon.read_stream() == []
        pid = daemon.process.pid
        assert len([line for line in daemon.lines if line.startswith("err oom")]) <= 1
        if policy == "seed":
            daemon.wait_line("[snap] all-cleared")  # lines and ids are read by two threads
        cleared = [line for line in daemon.lines if line.startswith("[snap] all-cleared")]
        assert len(cleared) == (policy == "seed")  # the ladder had no slot to clear
        if policy == "seed":
            for _ in range(2):
                daemon.send(f"{long} 2")
                assert len(daemon.read_stream()) == 2
        assert daemon.process.pid == pid
        assert daemon.process.poll() is None


def test_s132_eight_slots(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama) as daemon:
        daemon.send("PROPS")
        assert daemon.wait_json("props")["slots"] == 8


# ----- one-shot


def one_shot(
    model: Path, prompt: Path, out: Path, *flags: str, **env: str
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "slotd.daemon", "daemon", str(model), "none", str(prompt), "4", str(out)]
    return subprocess.run(
        [*argv, "--chunk=64", *flags],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("site", "policy"),
    [("prefill_reserve", "seed"), ("prefill_build", "ladder"), ("prefill_compute", "ladder"),
     ("commit", "ladder"), ("decode", "seed")],
)  # fmt: skip
def test_p15_s119_one_shot_ends_at_the_first_failure(
    tiny_llama: Path, long: Path, tmp_path: Path, site: str, policy: str
) -> None:
    flag = f"--oom-policy={policy}"
    ran = one_shot(tiny_llama, long, tmp_path / "out.bin", flag, SLOTD_FAULT=f"{site}:1")
    assert (ran.returncode, ran.stdout) == (1, "[snap] all-cleared\n")
    assert f"oom site={site}" in ran.stderr
    assert not (tmp_path / "out.bin").exists()


def test_one_shot_says_nothing_when_the_embedding_fails_or_when_all_is_well(
    tiny_llama: Path, long: Path, tmp_path: Path
) -> None:
    ran = one_shot(tiny_llama, long, tmp_path / "out.bin", SLOTD_FAULT="prefill_embed:2")
    assert (ran.returncode, ran.stdout) == (1, "")
    ran = one_shot(tiny_llama, long, tmp_path / "out.bin")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert (tmp_path / "out.bin").stat().st_size % 4 == 0
