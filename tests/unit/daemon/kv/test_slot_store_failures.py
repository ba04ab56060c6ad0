"""The store of snapshots on disk when writing fails: full disks, read-only folders, kill -9."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slotd.daemon.kv.slot_store import Stopped
from slotd.protocol.errors import ConfigError
from tests.fakes.slot_images import (
    IDENTITY,
    IDS,
    LOGITS,
    PAGE,
    Sink,
    files,
    hashes,
    id_bytes,
    image,
    kv_bytes,
    load,
    refused,
    store_of,
)


class FullDisk:
    """os.pwrite of a disk with this many bytes left."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.pwrite

    def __call__(self, descriptor: int, data: Any, offset: int) -> int:
        n = min(len(data), self.room)
        if not n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= n
        return self.write(descriptor, data[:n], offset)


@pytest.mark.parametrize("share", [0, 0.1, 0.2, 0.4, 0.8, 0.999])
def test_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    whole = store_of(tmp_path / "whole")
    whole.save(image(IDS, LOGITS))
    room, tmp_path = int(share * whole.report()["bytes"]), tmp_path / "full"
    store = store_of(tmp_path)
    kept = store.save(image(range(7)))
    before = sorted(file.name for file in tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", FullDisk(room))
        code, fields = refused(lambda: store.save(image(IDS, LOGITS)))
    assert (code, fields["reason"]) == ("write_snapshot", "No space left on device")
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    assert hashes(store) == [kept]
    name = store.save(image(IDS, LOGITS))
    assert load(store, name) == (kv_bytes(id_bytes(IDS)), LOGITS)


def test_a_folder_that_cannot_be_written_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = store_of(tmp_path).save(image(IDS, LOGITS))
    really_open = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    store = store_of(tmp_path)
    assert store.read_only == "Read-only file system"
    assert load(store, name) == (kv_bytes(id_bytes(IDS)), LOGITS)
    reason = {"reason": "Read-only file system"}
    assert refused(lambda: store.save(image(range(3)))) == ("read_only_slot_dir", reason)
    assert refused(lambda: store.drop(name)) == ("read_only_slot_dir", reason)


def test_one_writer_the_second_only_reads_what_the_first_writes(tmp_path: Path) -> None:
    first, second = store_of(tmp_path), store_of(tmp_path)
    assert (first.read_only, second.read_only) == ("", f"another daemon writes it (pid {os.getpid()})")
    name = first.save(image(IDS, LOGITS))
    assert hashes(second) == [name]
    assert load(second, name) == (kv_bytes(id_bytes(IDS)), LOGITS)
    first.drop(name)
    assert refused(lambda: second.find(name, IDENTITY))[0] == "unknown_snapshot"
    (tmp_path / f"{name}.slot").write_bytes(b"damaged")
    assert hashes(second) == []
    assert (tmp_path / f"{name}.slot").exists()  # it is the writer's to move
    first.close()
    assert store_of(tmp_path).read_only == ""


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--slot-dir .*file/folder: Not a directory"):
        store_of(tmp_path / "file" / "folder")
    with pytest.raises(ConfigError, match=r"--slot-dir .*file: "):
        store_of(tmp_path / "file")


def test_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    name = store.save(image(IDS))
    before = sorted(file.name for file in tmp_path.iterdir())
    store.stop()
    with pytest.raises(Stopped):
        store.save(image(range(5 * PAGE)))
    with pytest.raises(Stopped):
        store.read(name, Sink())
    assert sorted(file.name for file in tmp_path.iterdir()) == before


KILLED = """
import os, sys
from pathlib import Path
from slotd.daemon.kv.slot_store import SlotStore
from tests.fakes.slot_images import image

def counted(function, last):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == last:
            if function.__name__ == "pwrite":
                function(args[0], bytes(args[1])[:9], args[2])  # a part of it
            os._exit(9)
        return function(*args, **kwargs)
    return call

def work(path, last):
    store = SlotStore(path, None)
    for name in ("open", "pwrite", "fsync", "rename", "utime", "unlink"):
        setattr(os, name, counted(getattr(os, name), last))
    store.save(image(range(30), b"abcd"))
    store.drop(store.save(image(range(40))))

calls = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if not child:
        work(path, int(path.name))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_is_killed_at_any_call_leaves_only_whole_snapshots(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[4]
    paths = [tmp_path / f"{last:02}" for last in range(1, 60)]
    for path in paths:
        store = store_of(path)
        kept = store.save(image(range(12), LOGITS))
        store.close()
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    codes = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    assert set(codes) == {"9", "0"}
    assert codes.count("9") > 20
    for path in paths:
        again = store_of(path)
        assert kept in hashes(again)
        assert again.report()["moved_aside"] == 0
        for name in hashes(again):
            ids = again.find(name, IDENTITY).ids
            assert load(again, name)[0] == kv_bytes(ids)
        assert not files(path, ".tmp")
        needed = {part.name for name in hashes(again) for part in again.find(name, IDENTITY).parts}
        assert {file.stem for file in files(path, ".pages")} == needed
        again.close()
