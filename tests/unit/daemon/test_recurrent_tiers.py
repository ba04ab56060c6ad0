"""Slots with a recurrent state in every tier: the same bits, the right sizes, every byte under a checksum.

Field reports 18 and 24 on such a model: what comes back from a file needs no computing, and the state itself,
inputs of the convolution included, is compared, not only the text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.arena_directory import intact_slots, make_arena
from slotd.daemon.engine import Engine
from slotd.daemon.kv.host_arena import HostArena
from slotd.daemon.kv.host_tier import OutOfHostMemory
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.memory import DeviceMemory, Faults, OutOfDeviceMemory
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from slotd.protocol.messages import Drop, LoadSnapshot, Snap, SnapLoaded, Snapshot, SnapTaken
from tests.fakes.scheduler_rig import SchedulerRig

MODEL = Path(__file__).parents[2] / "golden" / "data" / "qwen35-mtp.gguf"
TEXT = np.random.default_rng(8).integers(3, 310, 300).tolist()
STATE_BYTES = 4 * 3 * (3 * 128 + 4 * 16 * 16)
LOGITS_BYTES = 4 * 320
BUDGET = 1 << 20

State = npt.NDArray[np.float32]


def engine_of(memory: DeviceMemory | None = None, arena: HostArena | None = None) -> Engine:
    with open_model(MODEL) as file:
        return Engine(file, NumpyBackend(memory, exact=True), host_cache=BUDGET, arena=arena)


def filled(engine: Engine, n: int) -> tuple[Sequence, npt.NDArray[np.float32]]:
    sequence = engine.open()
    rows = Rows.chain(sequence, TEXT[:n])
    logits = engine.forward(rows, Kind.PROMPT).logits[-1]
    engine.commit(sequence, range(n))
    return sequence, logits


def kept(engine: Engine, slot: int, n: int, tier: str = "device") -> tuple[bytes, bytes]:
    """Keep n tokens in a slot and end their sequence: (state, logits of one more token)."""
    sequence, logits = filled(engine, n)
    engine.snapshot(slot, sequence, logits, tier=tier)
    facts = facts_of(engine, sequence)
    engine.close(sequence)
    return facts


def facts_of(engine: Engine, sequence: Sequence) -> tuple[bytes, bytes]:
    state: State = sequence.state.flat.copy()
    logits = engine.forward(Rows.chain(sequence, [5]), Kind.STEP).logits.tobytes()
    engine.commit(sequence, [0])  # the slot must not see it
    return state.tobytes(), logits


@pytest.mark.parametrize("n", [1, 63, 64, 65, 150])
def test_out_and_back_bit_exact(n: int) -> None:
    engine = engine_of()
    facts = kept(engine, 0, n)
    assert facts_of(engine, engine.restore(0)) == facts
    engine.host_tier.demote(0)
    assert engine.memory.live("snapshot") == 0
    assert engine.slots[0].state.nbytes == STATE_BYTES
    size = -(-n // 64) * engine.store.page_bytes + STATE_BYTES + LOGITS_BYTES
    assert engine.host_tier.used == engine.host_tier.size(engine.slots[0]) == size
    kept(engine, 1, 200)  # other bytes into the memory it had
    engine.free_slot(1)
    assert facts_of(engine, engine.restore(0)) == facts
    assert (engine.slots[0].tier, engine.host_tier.used) == ("device", 0)
    assert engine.memory.live("snapshot") >= STATE_BYTES + LOGITS_BYTES


def test_a_snapshot_to_host_memory_needs_no_state_on_the_device() -> None:
    engine = engine_of()
    sequence, logits = filled(engine, 100)
    engine.memory.limit = engine.memory.live() + engine.memory.cached
    engine.memory.trim()
    engine.memory.limit = engine.memory.live()
    engine.snapshot(0, sequence, logits, tier="host")
    engine.memory.limit = None
    assert facts_of(engine, engine.restore(0)) == facts_of(engine, sequence)


def test_what_a_slot_holds_alone() -> None:
    """A slot that shares its pages with a running sequence still frees its state when it moves."""
    engine = engine_of()
    sequence, logits = filled(engine, 128)
    slot = engine.snapshot(0, sequence, logits)
    assert engine.host_tier.own_bytes(slot) == STATE_BYTES + LOGITS_BYTES
    engine.close(sequence)
    assert engine.host_tier.own_bytes(slot) == 2 * engine.store.page_bytes + STATE_BYTES + LOGITS_BYTES


@pytest.mark.parametrize("site", ["slot_move", "restore"])
def test_a_move_that_fails_changes_nothing(site: str) -> None:
    engine = engine_of(DeviceMemory(faults=Faults.parse(f"{site}:1")))
    facts = kept(engine, 0, 100)
    if site == "restore":
        engine.host_tier.demote(0)
    with pytest.raises(OutOfDeviceMemory):
        engine.restore(0) if site == "restore" else engine.host_tier.demote(0)
    assert engine.slots[0].tier == ("host" if site == "restore" else "device")
    assert facts_of(engine, engine.restore(0)) == facts


def test_a_slot_that_does_not_fit_counts_its_state() -> None:
    engine = engine_of()
    kept(engine, 0, 64)
    engine.host_tier.budget = engine.host_tier.size(engine.slots[0]) - 1
    with pytest.raises(OutOfHostMemory):
        engine.host_tier.demote(0)
    assert engine.slots[0].tier == "device"


def test_another_process_finds_it_in_the_arena() -> None:
    descriptor = make_arena(BUDGET)
    assert descriptor is not None
    try:
        engine = engine_of(arena=HostArena(descriptor, BUDGET, recorded=True))
        facts = {slot: kept(engine, slot, n, "host") for slot, n in ((3, 64), (5, 101))}
        engine.host_tier.record()
        deadline = time.monotonic() + 30
        while intact_slots(descriptor) != [3, 5]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        after = engine_of(arena=HostArena(descriptor, BUDGET, recorded=True))
        after.host_tier.adopt()
        assert after.host_tier.used == engine.host_tier.used
        assert {slot: facts_of(after, after.restore(slot)) for slot in (3, 5)} == facts
    finally:
        os.close(descriptor)


# ----- files


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], SchedulerRig]]:
    """Schedulers on one folder, one after the other."""
    rigs: list[SchedulerRig] = []

    def rig() -> SchedulerRig:
        if rigs:
            rigs[-1].scheduler._disk.close()
        rigs.append(SchedulerRig(MODEL, slot_store=SlotStore(tmp_path, None)))
        return rigs[-1]

    yield rig
    rigs[-1].scheduler._disk.close()


def wait_for(rig: SchedulerRig, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        rig.scheduler.turn()
        time.sleep(0.001)


def say(rig: SchedulerRig, key: str, command: Snapshot | LoadSnapshot | Drop) -> None:
    rig.put(key, command)
    wait_for(rig, lambda: rig.ended(key))


def saved(rig: SchedulerRig, n: int) -> str:
    """Keep n tokens of the text in slot 0 and in a file; returns its hash."""
    rig.answer(f"take{n}", TEXT[:n], snap=Snap(n, 0))
    say(rig, f"save{n}", Snapshot(slot=0, tier="disk", held=True))
    (line,) = rig.lines(f"save{n}")
    assert isinstance(line, SnapTaken)
    return str(line.hash)


def test_field_report_18_a_file_comes_back_after_a_restart(make: Callable[[], SchedulerRig]) -> None:
    rig = make()
    golden = rig.answer("golden", TEXT[:150])
    names = [saved(rig, n) for n in (64, 100, 150)]
    state = rig.slot(0).state.flat.tobytes()
    rig = make()
    for name, n in zip(names, (64, 100, 150), strict=True):
        say(rig, f"load{n}", LoadSnapshot(slot=1, hash=name))
        assert rig.lines(f"load{n}") == [SnapLoaded(slot=1, cur_pos=n, hash=name)]
        assert rig.slot(1).state.flat.nbytes == STATE_BYTES
        rig.engine.calls.clear()
        assert rig.answer(f"go{n}", TEXT[:150], slot=1) == golden
        assert sum(rig.pieces()) == 150 - n
    assert rig.slot(1).state.flat.tobytes() == state


def test_a_slot_without_tokens_goes_to_a_file_and_back(make: Callable[[], SchedulerRig]) -> None:
    """A prompt that was cancelled in its first piece leaves one."""
    rig = make()
    rig.engine.snapshot(0, rig.engine.open(), None)
    say(rig, "save", Snapshot(slot=0, tier="disk", held=True))
    (line,) = rig.lines("save")
    assert isinstance(line, SnapTaken)
    say(rig, "load", LoadSnapshot(slot=1, hash=str(line.hash)))
    assert rig.lines("load") == [SnapLoaded(slot=1, cur_pos=0, hash=str(line.hash))]
    assert rig.slot(1).state is None


def test_the_full_host_tier_spills_and_a_restore_reads(make: Callable[[], SchedulerRig]) -> None:
    rig = make()
    golden = rig.answer("golden", TEXT[:150])
    rig.answer("take", TEXT[:150], snap=Snap(100, 0))
    rig.answer("other", TEXT[150:250], snap=Snap(100, 1))
    rig.engine.host_tier.budget = rig.engine.host_tier.size(rig.slot(0))
    for slot in (0, 1):
        say(rig, f"host{slot}", Snapshot(slot=slot, held=True, tier="host"))
    wait_for(rig, lambda: rig.slot(0).tier == "disk")
    assert (rig.slot(0).state, rig.slot(1).tier) == (None, "host")
    assert rig.engine.host_tier.size(rig.slot(0)) == 2 * rig.engine.store.page_bytes + STATE_BYTES
    rig.forget()
    rig.prompt("back", TEXT[:150], slot=0)
    wait_for(rig, lambda: rig.ended("back"))
    assert rig.tokens("back") == golden
    assert (rig.done("back").account["reused"], rig.slot(0).tier) == (100, "device")


def test_a_flipped_bit_of_the_state_is_found(make: Callable[[], SchedulerRig], tmp_path: Path) -> None:
    rig = make()
    name = saved(rig, 100)
    path = tmp_path / f"{name}.slot"
    data = bytearray(path.read_bytes())
    data[-STATE_BYTES // 2] ^= 4
    path.write_bytes(data)
    say(rig, "load", LoadSnapshot(slot=2, hash=name))
    assert (rig.done("load").code, dict(rig.done("load").reason)) == (
        "bad_snapshot",
        {"hash": name, "reason": "state_checksum"},
    )
    assert 2 not in rig.engine.slots
    assert rig.engine.memory.live("snapshot") > 0  # slot 0 is what it was


def test_the_folder_counts_the_state(make: Callable[[], SchedulerRig], tmp_path: Path) -> None:
    rig = make()
    saved(rig, 64)
    (manifest,) = tmp_path.glob("*.slot")
    assert manifest.stat().st_size > STATE_BYTES + LOGITS_BYTES
    store = rig.scheduler._disk._store
    (file,) = store.report()["files"]
    assert file["bytes"] == manifest.stat().st_size + 64 * rig.engine.store.bytes_per_token
    assert store.report()["bytes"] == sum(
        path.stat().st_size for path in [manifest, *tmp_path.glob("*.pages")]
    )
