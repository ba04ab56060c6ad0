"""What a driver is told of a long stretch of memory, with a driver that refuses what a real one does."""

from __future__ import annotations

import gc
import os
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from slotd.daemon.arena_directory import make_arena
from slotd.daemon.kv import host_arena
from slotd.daemon.kv.host_arena import HostArena
from slotd.daemon.memory import pinned_stretch
from slotd.daemon.memory.pinned_stretch import PinnedStretch
from slotd.daemon.ops.page_layout import Bytes

BASE, MIB = 1 << 30, 1 << 20


class FakeStretch:
    """Addresses without memory."""

    def __init__(self, size: int = 1000 * MIB, taken: int = 1000 * MIB) -> None:
        self.address, self.size, self.taken = BASE, size, taken
        self.on_release: Callable[[int], None] = lambda address: None


class FakeDriver:
    """Notes what it knows. Registrations must not overlap; a copy lies within one or outside of all."""

    def __init__(self, refuse_after: int = 1000) -> None:
        self.known: dict[int, int] = {}
        self.calls = 0
        self.refuse_after = refuse_after

    def register(self, address: int, n_bytes: int) -> None:
        self.calls += 1
        if self.calls > self.refuse_after:
            raise RuntimeError("cudaErrorNotSupported: operation not supported")
        end = address + n_bytes
        assert n_bytes > 0
        assert address % 4096 == end % 4096 == 0
        assert all(end <= start or address >= stop for start, stop in self.known.items())
        self.known[address] = end

    def unregister(self, address: int) -> None:
        del self.known[address]

    def check(self, address: int, n_bytes: int) -> bool:
        """Whether a copy is of memory that it knows; AssertionError when it is so in part."""
        end = address + n_bytes
        touched = [(start, stop) for start, stop in self.known.items() if start < end and address < stop]
        assert touched == [] or any(start <= address and end <= stop for start, stop in touched)
        return bool(touched)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def copied(pinned: PinnedStretch, driver: FakeDriver, address: int, size: int) -> list[bool]:
    """Copy some memory: for each part whether it is fast. The parts are all of it, in order."""
    parts = pinned.parts(address, size)
    assert [start for start, _ in parts] == [address, *(start + n for start, n in parts[:-1])]
    assert sum(n for _, n in parts) == size
    return [driver.check(start, n) for start, n in parts]


def test_pieces_are_told_of_when_they_are_used(driver: FakeDriver) -> None:
    pinned = PinnedStretch(FakeStretch(), driver.register, driver.unregister)
    assert driver.calls == 0
    assert copied(pinned, driver, BASE + 40 * MIB, MIB) == [True]
    assert driver.known == {BASE + 32 * MIB: BASE + 64 * MIB}
    assert copied(pinned, driver, BASE + 33 * MIB, 30 * MIB) == [True]
    assert driver.calls == 1
    assert copied(pinned, driver, BASE + 20 * MIB, 100 * MIB) == [True] * 4
    assert pinned.known == 128 * MIB
    assert driver.calls == 4


def test_what_lies_elsewhere_is_left_alone(driver: FakeDriver) -> None:
    pinned = PinnedStretch(FakeStretch(), driver.register, driver.unregister)
    for address in (BASE - MIB, BASE + 1000 * MIB):
        assert pinned.parts(address, 4096) == [(address, 4096)]
    assert driver.calls == 0


def test_no_more_than_the_memory_that_is_there(driver: FakeDriver) -> None:
    stretch = FakeStretch(taken=5 * MIB + 100)
    pinned = PinnedStretch(stretch, driver.register, driver.unregister)
    assert copied(pinned, driver, BASE + 4 * MIB, MIB + 100) == [True]
    assert driver.known == {BASE: BASE + 5 * MIB + 4096}
    stretch.taken = 80 * MIB
    assert copied(pinned, driver, BASE + 5 * MIB, 40 * MIB) == [True] * 3  # two registrations in one piece
    assert pinned.known == 64 * MIB


def test_a_driver_that_refuses_is_named_once_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(refuse_after=1)
    pinned = PinnedStretch(FakeStretch(), driver.register, driver.unregister)
    assert copied(pinned, driver, BASE + 20 * MIB, 100 * MIB) == [True, False, False, False]
    assert copied(pinned, driver, BASE + 500 * MIB, MIB) == [False]
    assert driver.calls == 2
    (record,) = caplog.records
    assert "cannot be page-locked (cudaErrorNotSupported" in record.message


def test_everything_is_forgotten_at_the_end(driver: FakeDriver) -> None:
    stretch = FakeStretch()
    pinned = PinnedStretch(stretch, driver.register, driver.unregister)
    copied(pinned, driver, BASE, 100 * MIB)
    assert len(driver.known) == 4
    del pinned
    gc.collect()
    assert driver.known == {}
    stretch.on_release(BASE)  # nobody is left to be told


def test_any_order_of_uses_and_releases(driver: FakeDriver) -> None:
    rng = np.random.default_rng(5)
    stretch = FakeStretch(taken=0)
    pinned = PinnedStretch(stretch, driver.register, driver.unregister)
    for _ in range(500):
        if rng.random() < 0.2:
            stretch.taken = int(rng.integers(0, stretch.taken + 1))
            stretch.on_release(BASE + stretch.taken)
            edge = BASE - (-stretch.taken // 4096) * 4096
            assert all(end <= edge for end in driver.known.values())
        start = int(rng.integers(0, 300 * MIB)) // 4096 * 4096
        size = int(rng.integers(1, 90 * MIB))
        stretch.taken = max(stretch.taken, start + size)
        assert all(copied(pinned, driver, BASE + start, size))


# ----- with an arena


@pytest.fixture
def arena() -> Iterator[HostArena]:
    descriptor = make_arena(64 * MIB)
    assert descriptor is not None
    yield HostArena(descriptor, 64 * MIB, recorded=False)
    os.close(descriptor)


def images_in(arena: HostArena, n_pages: int) -> Bytes:
    room = arena.room(n_pages, 10_000, {}, array("i", [1]), None)
    assert room is not None
    return room.images


def test_an_arena_gives_no_memory_back_that_a_driver_knows(
    arena: HostArena, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_arena, "PIECE", 4 * MIB)
    monkeypatch.setattr(pinned_stretch, "PIECE", 8 * MIB)
    pinned = PinnedStretch(arena, driver.register, driver.unregister)
    held = []
    for n_pages in (3, 100, 700, 1200):
        held.append(images_in(arena, n_pages))
        assert all(copied(pinned, driver, int(held[-1].ctypes.data), held[-1].nbytes))
    known = pinned.known
    assert 19 * MIB < known <= arena.taken + 4096
    del held[1:]
    images = images_in(arena, 1)
    assert arena.taken < known
    assert all(end <= arena.address + arena.taken + 4096 for end in driver.known.values())
    assert all(copied(pinned, driver, int(images.ctypes.data), images.nbytes))
