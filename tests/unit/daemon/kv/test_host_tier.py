"""Slots out of the pages and back: the same bytes, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.arena_directory import default_budget
from slotd.daemon.engine import Engine
from slotd.daemon.kv.host_tier import OutOfHostMemory
from slotd.daemon.memory import DeviceMemory, Faults, OutOfDeviceMemory
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from tests.fakes.tiny_gguf import write_tiny_llama

TOKENS = np.random.default_rng(3).integers(0, 320, 300).tolist()
PAGE_BYTES = 64 * 512
LOGITS_BYTES = 320 * 4


@pytest.fixture
def make(tiny_llama: Path) -> Callable[..., Engine]:
    def engine(*, memory: DeviceMemory | None = None, **options: object) -> Engine:
        with open_model(tiny_llama) as file:
            return Engine(file, NumpyBackend(memory, exact=True), **({"host_cache": 1 << 20} | options))  # type: ignore[arg-type]

    return engine


def kept(engine: Engine, slot: int, n: int, shift: int = 0) -> bytes:
    """Keep n tokens in a slot and end their sequence. Returns the logits of one more token."""
    sequence = engine.open()
    rows = Rows.chain(sequence, TOKENS[shift : shift + n])
    logits = engine.forward(rows, Kind.PROMPT).logits[-1]
    engine.commit(sequence, range(n))
    engine.snapshot(slot, sequence, logits)
    after = one_more(engine, sequence)
    engine.close(sequence)
    return after


def one_more(engine: Engine, sequence: Sequence) -> bytes:
    logits = engine.forward(Rows.chain(sequence, [5]), Kind.STEP).logits.tobytes()
    engine.drop(sequence)
    return logits


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 numbers: a block of the quantised types."""
    return write_tiny_llama(tmp_path_factory.mktemp("wide") / "wide.gguf", n_head=2)


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "bf16"), ("q8_0", "q4_0"), ("q5_1", "f16")])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_p52_a_slot_comes_back_bit_exact(wide_heads: Path, n: int, types: tuple[str, str]) -> None:
    with open_model(wide_heads) as file:
        engine = Engine(file, NumpyBackend(exact=True), host_cache=1 << 20, k_type=types[0], v_type=types[1])
    expected = kept(engine, 0, n)
    logits = engine.slots[0].logits.tobytes()
    engine.host_tier.demote(0)
    assert engine.memory_report()["pages_used"] == engine.memory.live("snapshot") == 0
    assert engine.host_tier.used == -(-n // 64) * engine.store.page_bytes + LOGITS_BYTES
    kept(engine, 1, 300)  # other bytes into the pages it had
    engine.free_slot(1)
    sequence = engine.restore(0)
    assert one_more(engine, sequence) == expected
    assert (engine.slots[0].tier, engine.host_tier.used) == ("device", 0)
    assert engine.slots[0].logits.tobytes() == logits
    again = engine.restore(0, n - 1)
    rows = Rows.chain(again, [TOKENS[n - 1], 5])
    engine.forward(rows, Kind.PROMPT)  # behind the cut: into a page of its own
    engine.drop(again)
    assert one_more(engine, sequence) == expected


def test_a_snapshot_can_go_to_host_memory_at_once(make: Callable[..., Engine]) -> None:
    engine = make()
    sequence = engine.open()
    engine.forward(Rows.chain(sequence, TOKENS[:100], logits="none"), Kind.PROMPT)
    engine.commit(sequence, range(100))
    expected = one_more(engine, sequence)
    slot = engine.snapshot(2, sequence, length=70, tier="host")
    assert (slot.tier, slot.pages, len(slot)) == ("host", (), 70)
    engine.snapshot(3, sequence, tier="host")
    engine.close(sequence)
    assert engine.memory_report()["pages_used"] == 0
    assert one_more(engine, engine.restore(3)) == expected


def test_what_a_running_sequence_shares_is_not_its_own(make: Callable[..., Engine]) -> None:
    engine = make()
    kept(engine, 0, 100)
    assert engine.host_tier.own_bytes(engine.slots[0]) == 2 * PAGE_BYTES + LOGITS_BYTES
    sequence = engine.restore(0)
    assert engine.host_tier.own_bytes(engine.slots[0]) == LOGITS_BYTES
    engine.host_tier.demote(0)
    assert engine.host_tier.own_bytes(engine.slots[0]) == 0
    assert len(one_more(engine, sequence)) == LOGITS_BYTES  # the sequence kept its pages


def test_over_the_budget_the_least_recently_used_is_dropped(make: Callable[..., Engine]) -> None:
    size = PAGE_BYTES + LOGITS_BYTES
    engine = make(host_cache=2 * size + 100)
    for slot in range(3):
        kept(engine, slot, 50, shift=slot)
        engine.host_tier.demote(slot)
        if slot == 1:
            engine.restore(0)
            engine.host_tier.demote(0)  # used after slot 1
    assert set(engine.slots) == {0, 2}
    assert engine.host_tier.used == 2 * size
    counts = engine.host_tier.counts
    assert (counts.moves_out, counts.moves_in, counts.dropped) == (4, 1, 1)
    assert (counts.bytes_out, counts.bytes_in) == (4 * size, size)


def test_a_slot_that_must_stay_is_not_dropped(make: Callable[..., Engine]) -> None:
    engine = make(host_cache=PAGE_BYTES + LOGITS_BYTES)
    kept(engine, 0, 50)
    engine.host_tier.demote(0)
    kept(engine, 1, 50, shift=9)
    with pytest.raises(OutOfHostMemory):
        engine.host_tier.demote(1, keep={0})
    assert {slot: held.tier for slot, held in engine.slots.items()} == {0: "host", 1: "device"}


@pytest.mark.parametrize("budget", [0, 2 * PAGE_BYTES])
def test_what_is_larger_than_the_tier_is_refused_and_costs_nothing(
    make: Callable[..., Engine], budget: int
) -> None:
    engine = make(host_cache=budget)
    expected = kept(engine, 0, 100)
    with pytest.raises(OutOfHostMemory, match=f"{2 * PAGE_BYTES + LOGITS_BYTES} bytes .* {budget} bytes"):
        engine.host_tier.demote(0)
    assert one_more(engine, engine.restore(0)) == expected


def test_a_failed_move_changes_nothing(make: Callable[..., Engine]) -> None:
    engine = make(memory=DeviceMemory(faults=Faults("slot_move", 2, 2)))
    expected = kept(engine, 0, 100)
    engine.host_tier.demote(0)
    with pytest.raises(OutOfDeviceMemory, match="site=slot_move"):
        engine.restore(0)
    assert engine.slots[0].tier == "host"
    with pytest.raises(OutOfDeviceMemory, match="site=slot_move"):
        engine.restore(0)
    assert one_more(engine, engine.restore(0)) == expected
    engine.memory.limit = engine.memory.live()
    engine.host_tier.demote(0)
    engine.trim()
    kept_pages = engine.memory.live()
    engine.memory.limit = kept_pages + 100
    with pytest.raises(OutOfDeviceMemory, match="site=slot_move"):
        engine.restore(0)
    assert (engine.slots[0].tier, engine.memory.live()) == ("host", kept_pages)


def test_the_default_budget_is_a_share_of_what_is_there() -> None:
    assert 0 < default_budget() < 2**48


# ----- pages moved together


def test_compaction_gives_segments_back_and_changes_no_bit(make: Callable[..., Engine]) -> None:
    engine = make()
    sequences, expected = [], []
    for number in range(40):  # 40 sequences of a page each: 3 segments
        sequence = engine.open()
        engine.forward(Rows.chain(sequence, TOKENS[number : number + 50], logits="none"), Kind.PROMPT)
        engine.commit(sequence, range(50))
        sequences.append(sequence)
    for number, sequence in enumerate(sequences):
        if number % 8:
            engine.close(sequence)
    left = sequences[::8]
    engine.snapshot(0, left[0], length=40)
    expected = [one_more(engine, sequence) for sequence in left]
    engine.trim()
    before = engine.memory.live("kv")
    engine.compact()
    assert engine.memory.live("kv") == engine.store.segment_bytes < before
    assert [one_more(engine, sequence) for sequence in left] == expected
    restored = engine.restore(0)
    engine.forward(Rows.chain(restored, TOKENS[40:50], logits="none"), Kind.PROMPT)
    engine.commit(restored, range(10))
    assert one_more(engine, restored) == expected[0]


def test_a_page_that_somebody_reads_beside_stays_where_it_is(make: Callable[..., Engine]) -> None:
    """The disk thread holds pages of its own, and knows them by number."""
    engine = make()
    kept(engine, 0, 300)
    kept(engine, 1, 300)
    kept(engine, 2, 300)
    kept(engine, 3, 300)  # two segments
    held = engine.slots[3].pages
    engine.store.pages.share(held)
    engine.free_slot(0)
    engine.free_slot(2)
    engine.free_slot(3)
    before = [engine.store.place(page, 5)[0].tobytes() for page in held]
    engine.compact()
    assert [engine.store.place(page, 5)[0].tobytes() for page in held] == before
    engine.store.pages.release(held)
    engine.compact()
    assert engine.memory_report()["pages_used"] == 5
    assert engine.memory.live("kv") == engine.store.segment_bytes


def test_a_host_slot_can_be_written_to_a_file_as_it_is(make: Callable[..., Engine]) -> None:
    engine = make()
    kept(engine, 0, 100)
    pages = engine.slots[0].pages
    expected = [bytearray(PAGE_BYTES), bytearray(36 * 512)]
    for index, buffer in enumerate(expected):
        engine.store.read_page(pages[index], 64 if index == 0 else 36, memoryview(buffer))
    engine.host_tier.demote(0)
    host = engine.slots[0].host
    assert host is not None
    for index, buffer in enumerate(expected):
        read = bytearray(len(buffer))
        host.read_page(index, 64 if index == 0 else 36, memoryview(read))
        assert read == buffer


def test_a_page_that_was_written_back_is_known_to_be_unclean(make: Callable[..., Engine]) -> None:
    """What stands behind the committed end is zeroed before a call reads it: a NaN there would spread."""
    engine = make()
    kept(engine, 0, 64)
    (page,) = engine.slots[0].pages
    stored = engine.store.read((page,), 64)
    engine.store.prepare(page, 0, 5)
    engine.store.write((page,), stored)
    engine.store.prepare(page, 3, 4)
    assert not any(engine.store.place(page, offset)[0].any() for offset in range(3, 64))
    assert engine.store.place(page, 2)[0].any()
