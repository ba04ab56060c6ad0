"""Disks that fail, through the real daemon: full, read-only, from another time, with files that are none.

What is promised each time: the fault is named, nothing in memory changes, the next request is served.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slotd.protocol.messages import Done, Error, Event, Json, SnapLoaded, SnapTaken
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess

IDS = random.Random(4).choices(range(3, 259), k=200)
N_GEN = 6


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a size; what cannot be mounted skips the test with the system's own words."""
    mounted: list[Path] = []

    def mount_tmpfs(size: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount_tmpfs
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def start(model: Path, folder: Path, *flags: str) -> DaemonProcess:
    return DaemonProcess(model, f"--slot-dir={folder}", "--exact", *flags)


def ask(daemon: DaemonProcess, line: str) -> Event:
    daemon.send(line)
    return parse_event(daemon.next_line())


def keep(daemon: DaemonProcess, ids: list[int], slot: int) -> None:
    daemon.send(f"- 0 ids={','.join(map(str, ids))}")
    assert daemon.read_stream() == []
    assert ask(daemon, f"SNAPSHOT {slot}") == SnapTaken(slot=slot, cur_pos=len(ids))


def save(daemon: DaemonProcess, slot: int) -> Event:
    return ask(daemon, f"SNAPSHOT {slot} held=1 tier=disk")


def saved(daemon: DaemonProcess, slot: int) -> str:
    event = save(daemon, slot)
    assert isinstance(event, SnapTaken), event
    assert event.hash
    return event.hash


def stored(daemon: DaemonProcess) -> dict[str, Any]:
    event = ask(daemon, "STORED")
    assert isinstance(event, Json)
    return dict(event.data)


def hashes(daemon: DaemonProcess) -> list[str]:
    return [file["hash"] for file in stored(daemon)["files"]]


def restored(daemon: DaemonProcess, ids: list[int], slot: int) -> list[int]:
    daemon.send(f"RESTORE {slot} - {N_GEN} ids={','.join(map(str, ids))} id=r ignore_eos=1")
    produced: list[int] = []

    def collect(event: Event) -> bool:
        produced.extend(getattr(event, "ids", ()))
        return isinstance(event, Done) and event.id == "r"

    done = daemon.wait_event(collect)
    assert isinstance(done, Done)
    assert done.status == "length"
    assert done.fields["reused"] >= len(ids) - 1
    return produced


def fingerprint(daemon: DaemonProcess) -> dict[str, Any]:
    """What a failed command must leave as it was: slots, pages in use, logits that slots keep."""
    ask(daemon, "LIST_SLOTS")  # its answer comes when STATUS shows what was done before
    status = daemon.wait_json_of("STATUS", "status")
    slots = {number: (slot["tokens"], slot["tier"]) for number, slot in status["slots"].items()}
    memory = status["memory"]
    return {"slots": slots, "pages": memory["pages_used"], "logits": memory["live"]["snapshot"]}


# ----- full


def test_a_disk_that_fills_up_is_named_and_has_room_again_after_a_drop(
    tiny_llama: Path, mount: Callable[[str], Path]
) -> None:
    disk = mount("256k")  # a snapshot of 200 tokens takes 103 KB
    with start(tiny_llama, disk) as daemon:
        texts = [[number, *IDS] for number in range(3, 7)]
        for slot, ids in enumerate(texts):
            keep(daemon, ids, slot)
        expected = [restored(daemon, ids, slot) for slot, ids in enumerate(texts)]
        first, _ = saved(daemon, 0), saved(daemon, 1)
        before, there = fingerprint(daemon), sorted(path.name for path in disk.iterdir())
        for slot in (2, 3):
            event = save(daemon, slot)
            assert isinstance(event, Error), event
            assert (event.code, event.fields["reason"]) == ("write_snapshot", "No space left on device")
        assert fingerprint(daemon) == before
        assert sorted(path.name for path in disk.iterdir()) == there  # nothing half-written takes room
        assert [restored(daemon, ids, slot) for slot, ids in enumerate(texts)] == expected
        ask(daemon, f"DROP hash={first}")
        third = saved(daemon, 2)
    with start(tiny_llama, disk) as daemon:
        assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 5 hash={third}"), SnapLoaded)
        assert restored(daemon, texts[2], 5) == expected[2]


@pytest.mark.parametrize("room", [0, 4096, 8192, 16_384, 61_440, 98_304, 106_496, 114_688])
def test_a_disk_may_be_full_at_any_byte(tiny_llama: Path, mount: Callable[[str], Path], room: int) -> None:
    """Filled up to so many bytes by somebody else: the save is there as a whole or not at all."""
    disk = mount("160k")
    with start(tiny_llama, disk) as daemon:
        keep(daemon, IDS, 0)
        expected = restored(daemon, IDS, 0)
        before = fingerprint(daemon)
        fill_up(disk, room)
        event = save(daemon, 0)
        (disk / "foreign").unlink()
        assert fingerprint(daemon) == before
        assert restored(daemon, IDS, 0) == expected
    with start(tiny_llama, disk) as daemon:
        names = [event.hash] if isinstance(event, SnapTaken) else []
        assert hashes(daemon) == names
        assert {path.suffix for path in disk.iterdir()} == ({"", ".slot", ".pages"} if names else {""})
        for name in names:
            assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 1 hash={name}"), SnapLoaded)
            assert restored(daemon, IDS, 1) == expected
        assert not (disk / "bad").exists()


def fill_up(disk: Path, room: int) -> None:
    """Write a file of somebody else's until only `room` bytes are left."""
    with (disk / "foreign").open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(0, file.tell() - room))


# ----- read-only


def test_a_read_only_mount_is_read_and_never_written(tiny_llama: Path, mount: Callable[[str], Path]) -> None:
    disk = mount("1m")
    with start(tiny_llama, disk) as daemon:
        keep(daemon, IDS, 0)
        expected = restored(daemon, IDS, 0)
        name = saved(daemon, 0)
    (disk / f"{'7' * 32}.slot").write_bytes(b"foreign")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        with start(tiny_llama, disk) as daemon:
            daemon.wait_stderr("is only read: Read-only file system")
            assert stored(daemon)["read_only"] == "Read-only file system"
            assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 3 hash={name}"), SnapLoaded)
            assert restored(daemon, IDS, 3) == expected
            before = fingerprint(daemon)
            for event in (save(daemon, 3), ask(daemon, f"DROP hash={name}")):
                assert isinstance(event, Error)
                assert (event.code, event.fields) == (
                    "read_only_slot_dir", {"reason": "Read-only file system"},
                )  # fmt: skip
            assert fingerprint(daemon) == before
            assert hashes(daemon) == [name]
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert (disk / f"{'7' * 32}.slot").exists()  # what cannot be moved aside is left alone


def test_a_mount_that_turns_read_only_meanwhile_costs_the_save_only(
    tiny_llama: Path, mount: Callable[[str], Path]
) -> None:
    disk = mount("1m")
    with start(tiny_llama, disk) as daemon:
        keep(daemon, IDS, 0)
        expected = restored(daemon, IDS, 0)
        name = saved(daemon, 0)
        keep(daemon, [5, *IDS], 1)
        before = fingerprint(daemon)
        # A remount is refused while the daemon holds its lock file open for writing: the kernel's read-only
        # bind mount over it is not.
        subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
            event = save(daemon, 1)
            assert isinstance(event, Error)
            assert (event.code, event.fields["reason"]) == ("write_snapshot", "Read-only file system")
            assert fingerprint(daemon) == before
            assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 2 hash={name}"), SnapLoaded)
            assert restored(daemon, IDS, 2) == expected
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        assert isinstance(save(daemon, 1), SnapTaken)  # and works again


# ----- time


def test_files_from_the_future_do_not_stay_newest_for_ever(tiny_llama: Path, tmp_path: Path) -> None:
    """The clock of this machine has been moved back: what is used now is used last."""
    with start(tiny_llama, tmp_path) as daemon:
        for slot, ids in enumerate((IDS, [5, *IDS], [6, *IDS])):
            keep(daemon, ids, slot)
        a, b, c = (saved(daemon, slot) for slot in range(3))
    future = time.time_ns() + 400 * 86400 * 10**9
    for number, name in enumerate((a, b, c)):
        os.utime(tmp_path / f"{name}.slot", ns=(future + number, future + number))
    with start(tiny_llama, tmp_path) as daemon:
        assert hashes(daemon) == [a, b, c]
        assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 0 hash={a}"), SnapLoaded)
        assert hashes(daemon) == [b, c, a]
        keep(daemon, [7, *IDS], 1)
        d = saved(daemon, 1)
        assert hashes(daemon) == [b, c, a, d]
        size = stored(daemon)["bytes"]
    with start(tiny_llama, tmp_path, f"--slot-bytes={size - 1}") as daemon:
        assert hashes(daemon) == [c, a, d]  # the budget takes the one that was used least recently


def test_times_that_a_file_system_can_hold_but_nobody_can_mean(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path) as daemon:
        keep(daemon, IDS, 0)
        keep(daemon, [5, *IDS], 1)
        expected = restored(daemon, IDS, 0)
        a, b = saved(daemon, 0), saved(daemon, 1)
    os.utime(tmp_path / f"{a}.slot", ns=(-(10**18), -(10**18)))  # before 1970
    os.utime(tmp_path / f"{b}.slot", ns=(9 * 10**18, 9 * 10**18))  # 2255
    with start(tiny_llama, tmp_path) as daemon:
        assert hashes(daemon) == [a, b]
        assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 3 hash={a}"), SnapLoaded)
        assert restored(daemon, IDS, 3) == expected
        assert hashes(daemon) == [b, a]
    with start(tiny_llama, tmp_path) as daemon:
        assert sorted(hashes(daemon)) == sorted([a, b])


# ----- foreign files and flipped bits


def test_foreign_files_that_appear_while_the_daemon_runs_harm_nothing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with start(tiny_llama, tmp_path) as daemon:
        keep(daemon, IDS, 0)
        expected = restored(daemon, IDS, 0)
        name = saved(daemon, 0)
        (tmp_path / f"{'1' * 32}.slot").write_bytes(os.urandom(5000))
        (tmp_path / f"{'2' * 32}.pages").write_bytes(b"")
        (tmp_path / "photo.jpg").write_bytes(os.urandom(100))
        (tmp_path / f"{'3' * 32}.slot.tmp").write_bytes(b"half")
        assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 1 hash={name}"), SnapLoaded)
        assert restored(daemon, IDS, 1) == expected
        event = ask(daemon, f"LOAD_SNAPSHOT 2 hash={'1' * 32}")
        assert isinstance(event, Error)
        assert event.code == "unknown_snapshot"
        keep(daemon, [5, *IDS], 3)
        other = saved(daemon, 3)
    with start(tiny_llama, tmp_path) as daemon:
        assert hashes(daemon) == [name, other]
        assert stored(daemon)["moved_aside"] == 2
        assert (tmp_path / "photo.jpg").exists()  # no name of ours: not ours to touch
        assert not list(tmp_path.glob("*.tmp"))


def test_a_bit_that_flips_between_two_loads_is_refused_and_the_slot_stays(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rng = random.Random(7)
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        with start(tiny_llama, folder) as daemon:
            keep(daemon, IDS, 0)
            keep(daemon, [5, *IDS], 1)
            expected = restored(daemon, [5, *IDS], 1)
            name = saved(daemon, 0)
            assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 2 hash={name}"), SnapLoaded)
            (path,) = folder.glob("*.pages")
            data = bytearray(path.read_bytes())
            at = rng.randrange(len(data) - 90_000, len(data))
            data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            before = fingerprint(daemon)
            event = ask(daemon, f"LOAD_SNAPSHOT 1 hash={name}")
            assert isinstance(event, Error)
            assert (event.code, event.fields["reason"]) == ("bad_snapshot", "page_checksum")
            assert fingerprint(daemon) == before
            assert restored(daemon, [5, *IDS], 1) == expected
            assert {each.name for each in (folder / "bad").iterdir()} == {path.name, f"{name}.slot"}
            assert saved(daemon, 0) == name  # what is still in memory can be stored anew
