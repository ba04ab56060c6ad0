"""The host tier is full, through the real daemon: slots go to disk and come back, or are dropped honestly."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slotd.protocol.messages import Done, Event
from tests.fakes.daemon_process import DaemonProcess

IDS = random.Random(8).choices(range(3, 259), k=150)
N_GEN = 6
ROOM = "--host-cache=200000"  # for two slots of three pages, 33 KB each


def text(slot: int) -> list[int]:
    return [slot + 3, *IDS]


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def fill(daemon: DaemonProcess, n: int) -> None:
    """Slots 0 .. n-1 straight into host memory, one behind the other as fast as it goes."""
    for slot in range(n):
        daemon.send(f"- 0 ids={joined(text(slot))} id=f{slot} snap=151:{slot} tier=host")
    for slot in range(n):
        assert daemon.wait_done(f"f{slot}").status == "ok"


def answer(daemon: DaemonProcess, line: str, name: str) -> tuple[list[int], Done]:
    daemon.send(f"{line} id={name} ignore_eos=1")
    produced: list[int] = []

    def collect(event: Event) -> bool:
        produced.extend(getattr(event, "ids", ()))
        return isinstance(event, Done) and event.id == name

    done = daemon.wait_event(collect)
    assert isinstance(done, Done)
    return produced, done


def restored(daemon: DaemonProcess, slot: int, name: str) -> tuple[list[int], Done]:
    ids = joined([*text(slot), 7, 8])
    return answer(daemon, f"RESTORE {slot} - {N_GEN} ids={ids}", name)


def listed(daemon: DaemonProcess) -> str:
    daemon.send("LIST_SLOTS")
    return daemon.wait_line("[snap] slots=").removeprefix("[snap] slots=")


def settled(daemon: DaemonProcess, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """STATUS when a condition holds; files are written beside the requests."""
    for _ in range(400):
        status = daemon.wait_json_of("STATUS", "status")
        if condition(status):
            return status
        time.sleep(0.02)
    raise AssertionError(status)


@pytest.fixture
def golden(tiny_llama: Path) -> list[list[int]]:
    with DaemonProcess(tiny_llama, "--exact") as daemon:
        prompts = [[*text(slot), 7, 8] for slot in range(6)]
        return [
            daemon.generate(ids, N_GEN, "ignore_eos=1", f"g{slot}")[0] for slot, ids in enumerate(prompts)
        ]


def tiers(status: dict[str, Any]) -> list[str]:
    return [slot["tier"] for _, slot in sorted(status["slots"].items())]


def test_what_the_host_tier_has_no_room_for_goes_to_disk(
    tiny_llama: Path, tmp_path: Path, golden: list[list[int]]
) -> None:
    with DaemonProcess(tiny_llama, f"--slot-dir={tmp_path}", ROOM, "--exact") as daemon:
        fill(daemon, 6)
        assert listed(daemon) == "0,1,2,3,4,5"
        status = settled(daemon, lambda status: status["host_tier"]["leaving"] == 0)
        assert tiers(status) == ["disk"] * 4 + ["host"] * 2
        assert status["host_tier"]["used"] <= 200_000
        assert (status["host_tier"]["moves_to_disk"], status["host_tier"]["dropped"]) == (4, 0)
        for slot in (3, 0, 5, 1, 2, 4):
            produced, done = restored(daemon, slot, f"r{slot}")
            assert (produced, done.fields["reused"]) == (golden[slot], 151)
        daemon.send("SNAPSHOT 0 held=1 tier=host")
        assert daemon.wait_line("[snap] slot=0") == "[snap] slot=0 cur_pos=151 tier=host"


def test_its_files_outlive_slot_and_daemon(tiny_llama: Path, tmp_path: Path, golden: list[list[int]]) -> None:
    with DaemonProcess(tiny_llama, f"--slot-dir={tmp_path}", ROOM, "--exact") as daemon:
        fill(daemon, 3)
        settled(daemon, lambda status: tiers(status)[0] == "disk")
        daemon.send("FREE_SNAPSHOT 0")
        assert listed(daemon) == "1,2"
    with DaemonProcess(tiny_llama, f"--slot-dir={tmp_path}", "--exact") as daemon:
        daemon.send("STORED")
        (file,) = daemon.wait_json("stored")["files"]
        daemon.send(f"LOAD_SNAPSHOT 4 hash={file['hash']}")
        daemon.wait_line("[snap] loaded slot=4")
        ids = joined([*text(0), 7, 8])
        produced, done = answer(daemon, f"RESTORE 4 - {N_GEN} ids={ids}", "r")
        assert (produced, done.fields["reused"]) == (golden[0], 151)


def test_kill_while_slots_go_to_disk_leaves_only_whole_snapshots(tiny_llama: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(4):
        with DaemonProcess(tiny_llama, f"--slot-dir={tmp_path}", ROOM, "--exact") as daemon:
            fill(daemon, 6)
            time.sleep(rng.uniform(0, 0.02))
            daemon.process.kill()
            daemon.wait_exit()
        with DaemonProcess(tiny_llama, f"--slot-dir={tmp_path}", "--exact") as daemon:
            daemon.send("STORED")
            for file in daemon.wait_json("stored")["files"]:
                daemon.send(f"LOAD_SNAPSHOT 0 hash={file['hash']}")
                daemon.wait_line("[snap] loaded slot=0 cur_pos=151")
            assert not (tmp_path / "bad").exists()
            assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_is_dropped_takes_its_slot_along(tiny_llama: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_llama, f"--slot-dir={tmp_path}", ROOM, "--exact") as daemon:
        fill(daemon, 3)
        settled(daemon, lambda status: tiers(status)[0] == "disk")
        daemon.send("STORED")
        (file,) = daemon.wait_json("stored")["files"]
        daemon.send(f"DROP hash={file['hash']}")
        daemon.wait_line("[snap] dropped")
        assert listed(daemon) == "1,2"
        assert restored(daemon, 0, "r")[1].fields["code"] == "empty_slot"


@pytest.mark.parametrize("disk", ["none", "full"])
def test_without_a_disk_the_oldest_is_dropped_and_named_no_more(
    tiny_llama: Path, tmp_path: Path, golden: list[list[int]], disk: str
) -> None:
    flags = [] if disk == "none" else [f"--slot-dir={tmp_path}"]
    with DaemonProcess(tiny_llama, *flags, ROOM, "--exact", preexec_fn=_little_room) as daemon:
        fill(daemon, 4)
        status = settled(daemon, lambda status: status["host_tier"]["leaving"] == 0)
        assert (listed(daemon), status["host_tier"]["dropped"]) == ("2,3", 2)
        daemon.wait_stderr("slot 1 is dropped: the host tier of 200000 bytes is full")
        for slot in (0, 1):
            done = restored(daemon, slot, f"r{slot}")[1]
            assert (done.fields["code"], done.fields["slot"]) == ("empty_slot", slot)
        for slot in (2, 3):
            assert restored(daemon, slot, f"r{slot}")[0] == golden[slot]


def _little_room() -> None:
    """Longer files are an error of the write, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
