from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.arena_directory import intact_slots, make_arena
from slotd.daemon.engine import Engine
from slotd.daemon.kv import host_arena
from slotd.daemon.kv.host_arena import HostArena
from slotd.daemon.kv.host_tier import OutOfHostMemory
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model

BUDGET = 64 << 20
PAGE_BYTES = 10_000


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = make_arena(BUDGET)
    assert made is not None
    yield made
    os.close(made)


def room(arena: HostArena, n_pages: int, fill: int = 1, **about: Any) -> Any:
    found = arena.room(n_pages, PAGE_BYTES, about, array("i", [1, 2, 3]), np.arange(5, dtype=np.float32))
    if found is None:
        return None
    found.images[...] = fill
    return found.images


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# ----- room


def test_holes_are_used_again_and_no_two_overlap(descriptor: int) -> None:
    arena = HostArena(descriptor, BUDGET, recorded=False)
    held = {n: room(arena, 5 + n % 3, fill=n) for n in range(1, 60)}
    first = {images.ctypes.data for images in held.values()}
    assert all((images == n).all() for n, images in held.items())
    for n in range(1, 60, 2):
        del held[n]
    again = {n: room(arena, 5, fill=n) for n in range(100, 120)}
    assert all(images.ctypes.data in first for images in again.values())
    assert all((images == n).all() for n, images in [*held.items(), *again.items()])


def test_a_view_keeps_its_room(descriptor: int) -> None:
    arena = HostArena(descriptor, BUDGET, recorded=False)
    view = room(arena, 4, fill=7)[2:, :100]
    other = room(arena, 4, fill=9)
    assert (view == 7).all()
    assert (other == 9).all()


def test_memory_is_taken_as_it_is_needed_and_given_back(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_arena, "PIECE", 4 << 20)
    arena = HostArena(descriptor, BUDGET, recorded=False)
    small = room(arena, 1)
    assert arena.taken <= 3 << 20
    large = room(arena, 2000)
    assert 19 << 20 <= arena.taken <= 26 << 20
    assert os.fstat(descriptor).st_blocks * 512 >= 19 << 20
    del large
    assert room(arena, 1) is not None
    assert arena.taken <= 8 << 20  # one piece stays
    assert os.fstat(descriptor).st_blocks * 512 <= 9 << 20
    assert (small == 1).all()


def test_a_slot_that_is_filled_again_asks_for_no_memory(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_arena, "PIECE", 1 << 20)
    arena = HostArena(descriptor, BUDGET, recorded=False)
    released: list[int] = []
    held = room(arena, 2000)
    for n_pages in (2000, 2000):
        held = room(arena, n_pages, fill=n_pages % 7)  # the old one goes when the new one is there
    arena.on_release = released.append
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: 1 / 0)
    for n_pages in (2000, 2000, 2000):
        held = room(arena, n_pages, fill=n_pages % 7)
    assert released == []
    assert (held == 2000 % 7).all()


def test_without_memory_it_is_an_error_and_without_a_hole_there_is_none(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = HostArena(descriptor, BUDGET, recorded=False)
    assert room(arena, 10**6) is None

    def no_memory(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(MemoryError, match="No space left on device"):
        room(arena, 100)
    monkeypatch.undo()
    assert room(arena, 100) is not None


# ----- from one process to the next


def test_slots_are_found_again_with_everything(descriptor: int) -> None:
    arena = HostArena(descriptor, BUDGET, recorded=True)
    first, second = room(arena, 3, fill=5, name="a"), room(arena, 4, fill=6, name="b")
    dropped = room(arena, 2, fill=9)
    arena.record({7: first, 2: second})
    wait_for(lambda: intact_slots(descriptor) == [2, 7])
    assert (dropped == 9).all()
    found = HostArena(descriptor, BUDGET, recorded=True).survivors()
    assert sorted(found) == [2, 7]
    assert found[7].about["name"] == "a"
    assert found[7].tokens == array("i", [1, 2, 3])
    assert found[7].logits is not None
    assert found[7].logits.tolist() == [0, 1, 2, 3, 4]
    assert found[7].room.images.shape == (3, PAGE_BYTES)
    assert (found[7].room.images == 5).all()
    assert (found[2].room.images == 6).all()


def test_a_slot_that_changes_is_found_as_it_is(descriptor: int) -> None:
    arena = HostArena(descriptor, BUDGET, recorded=True)
    old, moved, gone = room(arena, 3, fill=1), room(arena, 3, fill=2), room(arena, 3, fill=3)
    arena.record({0: old, 1: moved, 2: gone})
    wait_for(lambda: intact_slots(descriptor) == [0, 1, 2])
    new = room(arena, 3, fill=4)
    arena.record({0: new, 5: moved})
    assert set(intact_slots(descriptor)) <= {0, 5}  # at once: what is not said any more is gone
    wait_for(lambda: intact_slots(descriptor) == [0, 5])
    next_one = HostArena(descriptor, BUDGET, recorded=True)
    found = next_one.survivors()
    assert (found[0].room.images == 4).all()
    assert (found[5].room.images == 2).all()
    taken = room(next_one, 3, fill=8)  # room beside those that were found
    assert (found[0].room.images == 4).all()
    assert (taken == 8).all()
    next_one.record({0: found[0].room.images})
    assert intact_slots(descriptor) == [0]


def test_a_directory_that_nobody_reads_is_not_kept(descriptor: int) -> None:
    arena = HostArena(descriptor, BUDGET, recorded=False)
    images = room(arena, 3)
    arena.record({1: images})
    time.sleep(0.05)
    assert intact_slots(descriptor) == []


# ----- in the tier


def engine_on(model: Path, descriptor: int, **options: Any) -> Engine:
    with open_model(model) as file:
        arena = HostArena(descriptor, BUDGET, recorded=True)
        backend = NumpyBackend(DeviceMemory(), exact=True)
        return Engine(file, backend, host_cache=BUDGET, arena=arena, **options)


def fill(engine: Engine, number: int, ids: list[int], tier: str = "host") -> None:
    sequence = engine.open()
    outputs = engine.forward(Rows.chain(sequence, ids, logits="last"), Kind.PROMPT)
    engine.commit(sequence, range(len(ids)))
    engine.snapshot(number, sequence, outputs.logits[-1], tier=tier)
    engine.close(sequence)


def continued(engine: Engine, number: int) -> Any:
    """Logits behind three more tokens."""
    sequence = engine.restore(number)
    return engine.forward(Rows.chain(sequence, [9, 8, 7], logits="last"), Kind.PROMPT).logits[-1].copy()


def test_an_engine_goes_on_with_the_slots_of_another(tiny_llama: Path, descriptor: int) -> None:
    first = engine_on(tiny_llama, descriptor)
    ids = [5 + n % 250 for n in range(150)]
    fill(first, 3, ids)
    first.host_tier.record()
    wait_for(lambda: intact_slots(descriptor) == [3])
    logits = first.slots[3].logits
    expected = continued(first, 3)
    second = engine_on(tiny_llama, descriptor)
    second.host_tier.adopt()
    assert list(second.slots) == [3]
    slot = second.slots[3]
    assert (slot.tier, slot.tokens.tolist()) == ("host", ids)
    assert np.array_equal(slot.logits, logits)
    assert np.array_equal(continued(second, 3), expected)
    assert second.slots[3].tier == "device"
    second.host_tier.record()
    assert intact_slots(descriptor) == []  # it is in the device now, and would go with it


@pytest.mark.parametrize("options", [{"k_type": "f16"}, {"v_type": "bf16"}, {"n_slots": 2}])
def test_slots_of_another_kind_are_dropped(
    tiny_llama: Path, descriptor: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = engine_on(tiny_llama, descriptor)
    fill(first, 3, [5, 6, 7, 8])
    first.host_tier.record()
    wait_for(lambda: intact_slots(descriptor) == [3])
    second = engine_on(tiny_llama, descriptor, **options)
    second.host_tier.adopt()
    assert list(second.slots) == []
    assert "slot 3" in caplog.text
    assert intact_slots(descriptor) == []


def test_a_failed_allocation_leaves_the_slot_and_says_so(
    tiny_llama: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(tiny_llama, descriptor)
    fill(engine, 3, [5, 6, 7, 8], tier="device")

    def no_memory(fd: int, offset: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(OutOfHostMemory):
        engine.host_tier.demote(3)
    assert (engine.slots[3].tier, len(engine.slots[3])) == ("device", 4)
