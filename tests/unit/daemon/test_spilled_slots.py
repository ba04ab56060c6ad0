"""Slots that the full host tier sends to disk: while they are written, while they come back, and failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.kv.host_tier import OutOfHostMemory
from slotd.daemon.kv.page_transfer import WritePage
from slotd.daemon.kv.save_plan import Image
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.memory import Policy
from slotd.protocol.messages import (
    FreeSnapshot,
    ListSlots,
    Restored,
    SlotList,
    Snap,
    Snapshot,
    SnapshotThin,
    SnapTaken,
)
from tests.fakes.scheduler_rig import SchedulerRig

TEXT = np.random.default_rng(31).integers(3, 320, 300).tolist()
N = 100
SLOT_BYTES = 2 * 64 * 512 + 320 * 4  # two pages and the logits


class GatedStore(SlotStore):
    """A store that waits at a gate before it writes or reads, and can refuse to write."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, options.pop("budget", None), **options)
        self.closed = False
        self.at_gate = 0
        self.failure: Exception | None = None
        self.reads = 0

    def _pass(self) -> None:
        self.at_gate += 1
        while self.closed:
            time.sleep(0.001)
        self.at_gate -= 1

    def save(self, image: Image) -> str:
        self._pass()
        if self.failure is not None:
            raise self.failure
        return super().save(image)

    def read(self, name: str, write_page: WritePage) -> tuple[bytes, bytes]:
        self._pass()
        self.reads += 1
        return super().read(name, write_page)


class Rig(SchedulerRig):
    """Three prompts of two pages, each in a slot of its own, and a host tier with room for one."""

    def __init__(self, model: Path, folder: Path, **options: Any) -> None:
        self.store = GatedStore(folder)
        super().__init__(model, slot_store=self.store, **options)
        self.tier = self.engine.host_tier
        self.tier.budget = SLOT_BYTES

    def fill(self, *slots: int) -> None:
        for slot in slots:
            self.answer(f"fill{slot}", self.text(slot), n_gen=1, snap=Snap(N, slot))
        self.forget()

    @staticmethod
    def text(slot: int) -> list[int]:
        return [slot + 3, *TEXT[1:N]]

    def move_out(self, *slots: int) -> None:
        for slot in slots:
            self.put(f"move{slot}", Snapshot(slot=slot, held=True, tier="host"))
            self.until(f"move{slot}")

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.tiers()
            self.scheduler.turn()
            time.sleep(0.001)

    def wait_for(self, *keys: str) -> None:
        self.wait(lambda: all(self.ended(key) for key in keys))

    def tiers(self) -> dict[int, str]:
        return {number: slot.tier for number, slot in self.engine.slots.items()}

    def restore(self, key: str, slot: int, n_gen: int = 4) -> list[int]:
        self.prompt(key, self.text(slot), n_gen, slot=slot)
        self.wait_for(key)
        return self.tokens(key)

    def listed(self, key: str) -> tuple[int, ...]:
        self.put(key, ListSlots())
        self.until(key)
        (line,) = self.lines(key)
        assert isinstance(line, SlotList)
        return line.slots


@pytest.fixture
def make(tiny_llama: Path, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def rig(**options: Any) -> Rig:
        rigs.append(Rig(tiny_llama, tmp_path / str(len(rigs)), **options))
        return rigs[-1]

    yield rig
    for made in rigs:
        made.store.closed = False
        made.scheduler._disk.close()


@pytest.fixture
def golden(tiny_llama: Path) -> dict[int, list[int]]:
    rig = SchedulerRig(tiny_llama)
    return {slot: rig.answer(f"g{slot}", Rig.text(slot)) for slot in range(3)}


def test_the_oldest_host_slot_goes_to_disk_and_comes_back(
    make: Callable[..., Rig], golden: dict[int, list[int]]
) -> None:
    rig = make()
    rig.fill(0, 1, 2)
    rig.move_out(0, 1, 2)  # at once: nothing is lost because the disk is slow
    rig.wait(lambda: rig.tiers() == {0: "disk", 1: "disk", 2: "host"})
    assert (rig.tier.used, rig.tier.leaving) == (SLOT_BYTES, 0)
    assert rig.engine.memory.live("snapshot") == rig.engine.memory_report()["pages_used"] - 4 == 0
    assert rig.listed("list") == (0, 1, 2)
    for slot in (1, 0, 2):
        assert rig.restore(f"r{slot}", slot) == golden[slot]
        assert rig.done(f"r{slot}").account["reused"] == N  # the logits came back too
        assert rig.lines(f"r{slot}") == [Restored(slot=slot, cur_pos=N)]
    assert rig.tiers() == dict.fromkeys(range(3), "device")
    assert (rig.tier.counts.moves_to_disk, rig.tier.counts.moves_from_disk) == (2, 2)
    assert rig.tier.counts.dropped == 0


def test_a_slot_on_its_way_to_disk_is_restored_from_memory(
    make: Callable[..., Rig], golden: dict[int, list[int]]
) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.store.closed = True
    rig.move_out(0, 1)
    assert (rig.tier.leaving, rig.tiers()) == (SLOT_BYTES, {0: "host", 1: "host"})
    assert rig.restore("r", 0) == golden[0]
    rig.store.closed = False
    rig.wait(lambda: rig.tier.leaving == 0)
    assert rig.tiers() == {0: "device", 1: "host"}
    assert (rig.store.reads, rig.tier.counts.moves_to_disk) == (0, 0)
    assert rig.restore("again", 0) == golden[0]


def test_a_slot_that_is_freed_or_filled_on_its_way_is_not_touched_by_its_end(
    make: Callable[..., Rig], golden: dict[int, list[int]]
) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.store.closed = True
    rig.move_out(0, 1)
    rig.put("free", FreeSnapshot(slot=0))
    rig.until("free")
    rig.answer("new", TEXT[:70], n_gen=0, snap=Snap(70, 0))
    rig.store.closed = False
    rig.wait(lambda: rig.tier.leaving == 0)
    assert rig.tiers() == {0: "device", 1: "host"}
    assert len(rig.slot(0)) == 70


def test_bytes_on_their_way_are_bounded_too(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotd.daemon.kv.host_tier.LEAVING_BYTES", 0)
    rig = make()
    rig.fill(0, 1, 2)
    rig.store.closed = True
    rig.move_out(0, 1, 2)
    assert rig.tiers() == {0: "host", 2: "host"}  # 1 would have been a second one on its way
    assert rig.tier.counts.dropped == 1
    rig.prompt("lost", Rig.text(1), slot=1)
    rig.until("lost")
    assert (rig.done("lost").code, rig.done("lost").reason) == ("empty_slot", {"slot": 1})


@pytest.mark.parametrize("room", [False, True])
def test_a_slot_that_cannot_be_written_stays_where_there_is_room_and_else_goes(
    make: Callable[..., Rig], golden: dict[int, list[int]], room: bool
) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.store.failure = OSError(28, "No space left on device")
    rig.store.closed = True
    rig.move_out(0, 1)
    if room:
        rig.put("free", FreeSnapshot(slot=1))
        rig.until("free")
    rig.store.closed = False
    rig.wait(lambda: rig.tier.leaving == 0)
    assert rig.tiers() == ({0: "host"} if room else {1: "host"})
    assert rig.restore("r", 0 if room else 1) == golden[0 if room else 1]


def test_without_a_way_to_write_the_oldest_is_dropped(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    rig.fill(0, 1)
    monkeypatch.setattr(GatedStore, "read_only", "another daemon writes it (pid 1)")
    rig.move_out(0, 1)
    assert (rig.tiers(), rig.tier.counts.dropped) == ({1: "host"}, 1)


def test_a_span_is_dropped_because_files_hold_prefixes(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.answer("a", TEXT[:N], n_gen=0)
    rig.put("thin", SnapshotThin(slot=0, kv_start=10, kv_end=90))
    rig.until("thin")
    rig.tier.demote(0)
    rig.fill(1)
    rig.tier.demote(1)
    assert rig.tiers() == {1: "host"}


def test_two_restores_of_one_slot_read_it_once_and_others_do_not_wait(
    make: Callable[..., Rig], golden: dict[int, list[int]]
) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    rig.store.closed = True
    rig.prompt("a", Rig.text(0), slot=0)
    rig.prompt("b", Rig.text(0), slot=0)
    rig.prompt("other", [5, 6, 7])
    rig.until("other")
    assert not rig.ended("a")
    rig.store.closed = False
    rig.wait_for("a", "b")
    assert rig.tokens("a") == rig.tokens("b") == golden[0]
    assert rig.store.reads == 1


def test_a_restore_that_is_cancelled_while_its_slot_is_read_ends_at_once(
    make: Callable[..., Rig], golden: dict[int, list[int]]
) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    rig.store.closed = True
    flags = rig.prompt("a", Rig.text(0), slot=0)
    rig.wait(lambda: rig.store.at_gate == 1)
    flags.cancelled = True
    rig.until("a")
    assert rig.done("a").status == "cancelled"
    rig.store.closed = False
    rig.wait(lambda: rig.tiers()[0] == "device")
    assert rig.restore("b", 0) == golden[0]


def test_a_slot_is_freed_while_it_is_read(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    pages = rig.engine.memory_report()["pages_used"]
    rig.store.closed = True
    rig.prompt("a", Rig.text(0), slot=0)
    rig.wait(lambda: rig.store.at_gate == 1)
    rig.put("free", FreeSnapshot(slot=0))
    rig.until("free")
    rig.store.closed = False
    rig.wait_for("a")
    assert rig.done("a").code == "empty_slot"
    assert rig.engine.memory_report()["pages_used"] == pages


@pytest.mark.parametrize("damage", ["cut", "gone", "dropped"])
def test_a_slot_whose_file_is_gone_is_empty(make: Callable[..., Rig], damage: str) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    name = rig.slot(0).stored
    assert name is not None
    if damage == "dropped":
        rig.store.drop(name)
        rig.turns(1)
        assert rig.listed("list") == (1,)
    for path in rig.store._folder.path.glob("*.pages"):
        path.write_bytes(path.read_bytes()[:-9]) if damage == "cut" else path.unlink()
    rig.prompt("a", Rig.text(0), slot=0)
    rig.wait_for("a")
    assert (rig.done("a").code, rig.done("a").reason) == ("empty_slot", {"slot": 0})
    assert rig.tiers() == {1: "host"}
    assert rig.tier.counts.dropped == 1


def test_a_prompt_that_does_not_start_with_the_slot_reads_nothing(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    rig.prompt("a", [9, 9, 9], slot=0)
    rig.until("a")
    assert rig.done("a").code == "prefix_shorter"
    assert (rig.store.reads, rig.tiers()[0]) == (0, "disk")


def test_no_memory_for_a_slot_on_disk_ends_the_request_and_costs_nothing(
    make: Callable[..., Rig], golden: dict[int, list[int]]
) -> None:
    rig = make(fault="slot_move:3", policy=Policy.ONCE)  # after two moves out
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    rig.prompt("a", Rig.text(0), slot=0)
    rig.wait_for("a")
    assert (rig.done("a").code, rig.done("a").reason["site"]) == ("oom", "slot_move")
    assert rig.tiers()[0] == "disk"
    assert rig.restore("b", 0) == golden[0]


def test_the_verb_that_moves_a_held_slot_finds_it_on_disk(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    name = rig.slot(0).stored
    for number, (tier, after) in enumerate(
        [("disk", "disk"), ("device", "device"), ("host", "host"), ("disk", "host")]
    ):
        rig.put(f"t{number}", Snapshot(slot=0, held=True, tier=tier))
        rig.wait_for(f"t{number}")
        expected = SnapTaken(slot=0, cur_pos=N, tier=tier, hash=name if tier == "disk" else None)
        assert rig.lines(f"t{number}") == [expected]
        assert rig.tiers()[0] == after
    rig.wait(lambda: rig.tiers()[1] == "disk")  # it made room for slot 0
    rig.store.drop(rig.slot(1).stored or "")
    rig.put("gone", Snapshot(slot=1, held=True, tier="disk"))
    rig.wait_for("gone")
    assert rig.done("gone").code == "empty_slot"


def test_a_slot_on_disk_is_not_moved_by_those_who_move_pages(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fill(0, 1)
    rig.move_out(0, 1)
    rig.wait(lambda: rig.tiers()[0] == "disk")
    with pytest.raises(ValueError, match="slot 0 is on disk"):
        rig.tier.promote(0)
    with pytest.raises(ValueError, match="slot 0 is on disk"):
        rig.tier.demote(0)
    rig.fill(2)
    with pytest.raises(OutOfHostMemory):  # a slot on disk is no room
        rig.tier.demote(2, keep={1})
