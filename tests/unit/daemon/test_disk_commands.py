"""The disk tier beside the scheduler: what happens to slots and pages while a file is written or read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.disk_commands import DiskCommands
from slotd.daemon.engine import Engine
from slotd.daemon.kv.page_transfer import WritePage
from slotd.daemon.kv.save_plan import Image
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.link import Finished, Flags, Line, Submit, ToFront
from slotd.daemon.memory import DeviceMemory, Faults, Policy
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.parking import Parking
from slotd.daemon.recovery import Recovery
from slotd.daemon.retained import Retained, RetainedSequences
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.slot_commands import SlotCommands
from slotd.daemon.weights.reader import open_model
from slotd.protocol.messages import Command, LoadSnapshot, Snapshot

IDS = np.random.default_rng(3).integers(3, 259, 150).tolist()


class SlowStore(SlotStore):
    """A store that waits before it reads pages, or before it hands them out."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, None)
        self.go_on = threading.Event()
        self.go_on.set()
        self.reached = threading.Event()

    def save(self, image: Image) -> str:
        self.reached.set()
        assert self.go_on.wait(10)
        return super().save(image)

    def read(self, name: str, write_page: WritePage) -> tuple[bytes, bytes]:
        self.reached.set()
        assert self.go_on.wait(10)
        return super().read(name, write_page)


class Rig:
    """An engine, a slow store, and the test's thread in the place of the scheduler's."""

    def __init__(self, model: Path, folder: Path, faults: str | None = None) -> None:
        memory = DeviceMemory(None, Faults.parse(faults))
        with open_model(model) as file:
            self.engine = Engine(file, NumpyBackend(memory), n_slots=4)
        self.store = SlowStore(folder)
        self.said: list[ToFront] = []
        self.retained = RetainedSequences(4, self.engine.close)
        self.calls: deque[Callable[[], None]] = deque()
        recovery = Recovery(self.engine, self.retained, self.said.append, lambda: None, Policy.ONCE)
        parking = Parking(self.engine, recovery)
        commands = SlotCommands(self.engine, self.retained, self.said.append, recovery, parking)
        self.disk = DiskCommands(self.engine, self.store, commands, self.said.append, self.calls.append)
        self.run_calls(1)  # the identity

    def fill(self, ids: list[int]) -> Sequence:
        sequence = self.engine.open()
        rows = Rows.chain(sequence, ids, logits="none")
        self.engine.forward(rows, Kind.PROMPT)
        self.engine.commit(sequence, range(len(rows)))
        return sequence

    def end(self, ids: list[int], key: int) -> Sequence:
        """A request that ended with these ids."""
        sequence = self.fill(ids)
        self.retained.add(Retained(key, sequence, pending=()))
        return sequence

    def start(self, command: Command) -> None:
        self.disk.run(Submit(99, command, Flags(), 0.0))

    def run_calls(self, n: int) -> None:
        done = threading.Event()
        while n:
            if self.calls:
                self.calls.popleft()()
                n -= 1
            else:
                done.wait(0.001)

    def bytes_of(self, pages: tuple[int, ...], n: int) -> bytes:
        """The K/V of a snapshot."""
        parts = []
        for index, page in enumerate(pages):
            count = min(64, n - 64 * index)
            buffer = memoryview(bytearray(count * self.engine.store.bytes_per_token))
            self.engine.store.read_page(page, count, buffer)
            parts.append(bytes(buffer))
        return b"".join(parts)

    @property
    def ending(self) -> Finished:
        (finished,) = [message for message in self.said if isinstance(message, Finished)]
        return finished


@pytest.fixture
def make(tiny_llama: Path, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def rig(**options: Any) -> Rig:
        rigs.append(Rig(tiny_llama, tmp_path / str(len(rigs)), **options))
        return rigs[-1]

    yield rig
    for made in rigs:
        made.store.go_on.set()
        made.disk.close()


def test_a_save_keeps_its_pages_whatever_happens_meanwhile(make: Callable[..., Rig]) -> None:
    rig = make()
    sequence = rig.end(IDS, 1)
    slot = rig.engine.snapshot(0, sequence)
    expected, pages = rig.bytes_of(slot.pages, 150), slot.pages
    rig.store.go_on.clear()
    rig.start(Snapshot(slot=0, tier="disk", held=True))
    assert rig.store.reached.wait(10)
    rig.engine.free_slot(0)
    rig.retained.drop(1)
    for number in range(12):  # asks for every page that is free
        rig.fill([number + 3] * 128)
    rig.store.go_on.set()
    rig.run_calls(1)
    assert rig.ending.code is None
    assert all(rig.engine.store.pages.references(page) == 0 for page in pages)
    (file,) = rig.store.report()["files"]
    rig.said.clear()
    rig.start(LoadSnapshot(slot=2, hash=file["hash"]))
    rig.run_calls(2)
    assert rig.ending.code is None
    assert rig.bytes_of(rig.engine.slots[2].pages, 150) == expected
    assert rig.engine.slots[2].tokens.tolist() == IDS


def test_a_slot_is_filled_only_when_its_file_is_there(make: Callable[..., Rig]) -> None:
    """P16: a save that fails leaves what the slot held; one that waits has not replaced it yet."""
    rig = make()
    old = rig.engine.snapshot(0, rig.end(IDS[:70], 1))
    rig.end(IDS, 2)
    used = rig.engine.store.pages.n_used
    rig.store.go_on.clear()
    rig.start(Snapshot(slot=0, tier="disk"))
    assert rig.store.reached.wait(10)
    assert rig.engine.slots[0] is old
    rig.store.stop()
    rig.store.go_on.set()
    rig.run_calls(1)
    assert rig.ending.code == "shutting_down"
    assert rig.engine.slots[0] is old
    assert rig.engine.store.pages.n_used == used
    assert not [message for message in rig.said if isinstance(message, Line)]


def test_a_load_without_memory_changes_nothing(make: Callable[..., Rig]) -> None:
    rig = make(faults="slot_move:1")
    rig.end(IDS, 1)
    rig.start(Snapshot(slot=0, tier="disk"))
    rig.run_calls(1)
    held, used = rig.engine.slots[0], rig.engine.store.pages.n_used
    (file,) = rig.store.report()["files"]
    rig.said.clear()
    rig.start(LoadSnapshot(slot=0, hash=file["hash"]))
    rig.run_calls(1)
    assert (rig.ending.code, rig.ending.reason["site"]) == ("oom", "slot_move")
    assert rig.engine.slots[0] is held
    assert rig.engine.store.pages.n_used == used
    rig.said.clear()
    rig.start(LoadSnapshot(slot=0, hash=file["hash"]))
    rig.run_calls(2)
    assert rig.ending.code is None
    assert rig.engine.slots[0] is not held
    assert rig.engine.store.pages.n_used == used + 3  # 150 tokens; the old pages are the ended request's too
    assert all(rig.engine.store.pages.references(page) == 1 for page in rig.engine.slots[0].pages)


def test_a_load_that_is_stopped_gives_its_pages_back(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.end(IDS, 1)
    rig.start(Snapshot(slot=0, tier="disk"))
    rig.run_calls(1)
    (file,) = rig.store.report()["files"]
    used = rig.engine.store.pages.n_used
    rig.said.clear()
    rig.store.go_on.clear()
    rig.store.reached.clear()
    rig.start(LoadSnapshot(slot=1, hash=file["hash"]))
    rig.run_calls(1)
    assert rig.store.reached.wait(10)
    assert rig.engine.store.pages.n_used == used + 3
    rig.store.stop()
    rig.store.go_on.set()
    rig.run_calls(1)
    assert rig.ending.code == "shutting_down"
    assert rig.engine.store.pages.n_used == used
    assert 1 not in rig.engine.slots
