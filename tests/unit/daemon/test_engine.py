"""The engine: life of sequences and slots, atomic failure, memory. Numbers are in golden/ and property/."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.kv.pages import SEGMENT_PAGES
from slotd.daemon.memory import DeviceMemory, Faults, OutOfDeviceMemory
from slotd.daemon.models.model import Interrupted
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.ops import numpy_ops
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ConfigError, ModelError

TOKENS = np.random.default_rng(3).integers(0, 320, 200).tolist()


@pytest.fixture
def make(tiny_llama: Path) -> Callable[..., Engine]:
    def engine(*, memory: DeviceMemory | None = None, exact: bool = False, **options: object) -> Engine:
        with open_model(tiny_llama) as file:
            return Engine(file, NumpyBackend(memory, exact), **options)  # type: ignore[arg-type]

    return engine


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    return make(exact=True)


def fill(engine: Engine, n: int, sequence: Sequence | None = None) -> Sequence:
    """Prefill until the sequence has the first n of TOKENS."""
    sequence = engine.open() if sequence is None else sequence
    rows = Rows.chain(sequence, TOKENS[len(sequence) : n], logits="none")
    engine.forward(rows, Kind.PROMPT)
    engine.commit(sequence, range(len(rows)))
    return sequence


def next_logits(engine: Engine, sequence: Sequence, token: int = 5) -> bytes:
    """Logits of one more token, which is not kept."""
    logits = engine.forward(Rows.chain(sequence, [token]), Kind.STEP).logits
    engine.drop(sequence)
    return logits.tobytes()


# ----- forward and commit


def test_logits_come_for_the_rows_that_want_them(engine: Engine) -> None:
    sequence = engine.open()
    assert engine.forward(Rows.chain(sequence, TOKENS[:7]), Kind.PROMPT).rows.tolist() == [6]
    outputs = engine.forward(Rows.chain(sequence, TOKENS[:7], logits="all"), Kind.PROMPT)
    assert (outputs.logits.shape, outputs.logits.dtype) == ((7, 320), np.float32)
    outputs = engine.forward(Rows.chain(sequence, TOKENS[:7], logits="none"), Kind.PROMPT)
    assert outputs.logits.shape == (0, 320)


def test_open_rows_are_not_committed(engine: Engine) -> None:
    sequence = fill(engine, 10)
    engine.forward(Rows.chain(sequence, [1, 2, 3]), Kind.STEP)
    assert (len(sequence), sequence.open_rows) == (10, 3)
    engine.commit(sequence, [0, 1])
    assert (sequence.tokens.tolist(), sequence.open_rows) == (TOKENS[:10] + [1, 2], 0)
    with pytest.raises(ValueError, match="no forward is open"):
        engine.commit(sequence, [2])


def test_a_second_forward_drops_the_first(engine: Engine) -> None:
    sequence = fill(engine, 10)
    engine.forward(Rows.chain(sequence, [1, 2, 3]), Kind.STEP)
    engine.forward(Rows.chain(sequence, [4]), Kind.STEP)
    with pytest.raises(ValueError, match="row 1 is not an open row"):
        engine.commit(sequence, [0, 1])
    engine.commit(sequence, [0])
    assert sequence.tokens[-1] == 4


def test_a_bad_path_leaves_the_rows_open(engine: Engine) -> None:
    sequence = fill(engine, 10)
    engine.forward(Rows.tree(sequence, [1, 2, 3], [-1, 0, 0]), Kind.STEP)
    with pytest.raises(ValueError, match="row 2 does not follow row 1"):
        engine.commit(sequence, [0, 1, 2])
    engine.commit(sequence, [0, 2])
    assert sequence.tokens[-2:].tolist() == [1, 3]


def test_rows_of_several_sequences_commit_by_call_number(engine: Engine) -> None:
    first, second = fill(engine, 3), fill(engine, 70)
    rows = Rows.join([Rows.chain(first, [1, 2]), Rows.tree(second, [3, 4, 5], [-1, -1, 1])])
    assert engine.forward(rows, Kind.STEP).rows.tolist() == [1, 2, 3, 4]
    engine.commit(second, [3, 4])
    engine.commit(first, [0])
    assert (first.tokens[-1], second.tokens[-2:].tolist()) == (1, [4, 5])


def test_malformed_rows_are_refused(engine: Engine) -> None:
    sequence = engine.open()
    with pytest.raises(ValueError, match="token id is not below 320"):
        engine.forward(Rows.chain(sequence, [320]), Kind.STEP)
    with pytest.raises(ValueError, match="not an open sequence"):
        engine.forward(Rows.chain(Sequence(), [1]), Kind.STEP)


def test_max_ctx(make: Callable[..., Engine]) -> None:
    engine = make(max_ctx=20)
    sequence = fill(engine, 20)
    with pytest.raises(ValueError, match="max_ctx, 20"):
        engine.forward(Rows.chain(sequence, [1]), Kind.STEP)
    assert make().max_ctx == 512


def test_an_interrupt_gives_up_between_layers(engine: Engine) -> None:
    sequence = fill(engine, 10)
    expected = next_logits(engine, sequence)
    answers = iter([False, True])
    with pytest.raises(Interrupted):
        engine.forward(Rows.chain(sequence, TOKENS[10:100]), Kind.PROMPT, lambda: next(answers))
    assert list(answers) == []
    assert (len(sequence), sequence.open_rows) == (10, 0)
    assert next_logits(engine, sequence) == expected


@pytest.mark.parametrize(
    ("site", "n_rows"),
    [("prefill_embed", 3), ("prefill_build", 3), ("prefill_compute", 3), ("decode", 1), ("verify", 3)],
)
def test_a_failed_forward_changes_nothing(make: Callable[..., Engine], site: str, n_rows: int) -> None:
    kind = Kind.PROMPT if site.startswith("prefill") else Kind.STEP
    engine = make(exact=True, memory=DeviceMemory(faults=Faults(site, 2)))
    sequence = fill(engine, 70)
    rows = Rows.chain(sequence, TOKENS[:n_rows])
    if kind is Kind.STEP:
        engine.forward(rows, kind)
    with pytest.raises(OutOfDeviceMemory, match=f"site={site}"):
        engine.forward(rows, kind)
    assert (sequence.tokens.tolist(), sequence.open_rows) == (TOKENS[:70], 0)
    plain = make(exact=True)
    assert next_logits(engine, sequence) == next_logits(plain, fill(plain, 70))


def test_a_failed_commit_leaves_the_rows_open(make: Callable[..., Engine]) -> None:
    engine = make(memory=DeviceMemory(faults=Faults("commit", 2)))
    sequence = fill(engine, 70)
    engine.forward(Rows.chain(sequence, [1, 2]), Kind.STEP)
    with pytest.raises(OutOfDeviceMemory, match="site=commit"):
        engine.commit(sequence, [0, 1])
    assert (sequence.tokens.tolist(), sequence.open_rows) == (TOKENS[:70], 2)
    engine.commit(sequence, [0, 1])
    assert len(sequence) == 72


def test_a_real_shortage_changes_nothing(make: Callable[..., Engine]) -> None:
    engine = make(exact=True)
    sequence = fill(engine, 70)
    expected = next_logits(engine, sequence)
    engine.trim()
    engine.memory.limit = engine.memory.live() + 100_000
    with pytest.raises(OutOfDeviceMemory, match="site=prefill_compute"):
        engine.forward(Rows.chain(sequence, TOKENS[70:190]), Kind.PROMPT)
    engine.memory.limit = None
    assert sequence.tokens.tolist() == TOKENS[:70]
    assert next_logits(engine, sequence) == expected


def test_values_that_are_not_finite_stay_in_their_sequence(make: Callable[..., Engine]) -> None:
    """Another sequence gets the same pages afterwards; a masked NaN in one would still be a NaN."""
    engine = make(exact=True)
    expected = next_logits(engine, fill(engine, 70))
    sick = engine.open()
    table = engine._runner.model.token_embd  # type: ignore[attr-defined]
    healthy = table[TOKENS[0]].copy()
    table[TOKENS[0]] = np.nan
    fill(engine, 130, sick)
    assert np.isnan(engine.forward(Rows.chain(sick, [1]), Kind.STEP).logits).all()
    table[TOKENS[0]] = healthy
    pages = sick.pages
    engine.close(sick)
    sequence = fill(engine, 70)
    assert set(sequence.pages) & set(pages)
    assert next_logits(engine, sequence) == expected


# ----- sequences


def test_close_gives_pages_back(engine: Engine) -> None:
    sequence = fill(engine, 70)
    assert engine.memory_report()["pages_used"] == 2
    engine.close(sequence)
    assert engine.memory_report()["pages_used"] == 0
    with pytest.raises(ValueError, match="not an open sequence"):
        engine.drop(sequence)


def test_reserve_is_all_or_nothing(make: Callable[..., Engine]) -> None:
    engine = make()
    sequence = engine.open()
    engine.reserve(sequence, 65)
    assert len(sequence.pages) == 2
    engine.reserve(sequence, 30)
    assert len(sequence.pages) == 2
    engine.memory.limit = engine.memory.live() + 1000
    with pytest.raises(OutOfDeviceMemory) as caught:
        engine.reserve(sequence, 64 * (SEGMENT_PAGES + 1), "prefill_reserve")
    assert caught.value.site == "prefill_reserve"
    assert len(sequence.pages) == 2


def test_reserved_pages_are_used(engine: Engine) -> None:
    sequence = engine.open()
    engine.reserve(sequence, 200)
    pages = list(sequence.pages)
    fill(engine, 200, sequence)
    assert sequence.pages == pages == [0, 1, 2, 3]


def test_fork_shares_pages_until_one_is_written(engine: Engine) -> None:
    source = fill(engine, 100)
    whole, part = engine.fork(source), engine.fork(source, 80)
    assert whole.pages == part.pages == source.pages
    expected = next_logits(engine, source, 9)
    assert source.pages[0] == whole.pages[0]
    assert next_logits(engine, whole, 9) == expected
    fill(engine, 100, part)
    assert part.pages[0] == source.pages[0]
    assert len({source.pages[1], whole.pages[1], part.pages[1]}) == 3
    assert next_logits(engine, part, 9) == expected


def test_fork_at_a_page_edge_copies_nothing(engine: Engine) -> None:
    source = fill(engine, 128)
    fork = engine.fork(source, 64)
    fill(engine, 128, fork)
    assert fork.pages[0] == source.pages[0]
    assert engine.store.pages.references(source.pages[1]) == 1
    assert next_logits(engine, fork) == next_logits(engine, source)


def test_fork_of_more_than_there_is(engine: Engine) -> None:
    with pytest.raises(ValueError, match="cannot fork 11 of 10 tokens"):
        engine.fork(fill(engine, 10), 11)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100])
def test_truncate(engine: Engine, length: int) -> None:
    sequence = fill(engine, 150)
    engine.truncate(sequence, length)
    assert sequence.tokens.tolist() == TOKENS[:length]
    assert engine.memory_report()["pages_used"] == -(-length // 64)
    alone = fill(engine, length) if length else engine.open()
    assert next_logits(engine, sequence) == next_logits(engine, alone)
    with pytest.raises(ValueError, match="cannot truncate"):
        engine.truncate(sequence, length + 1)


def test_truncate_does_not_touch_what_a_slot_holds(engine: Engine) -> None:
    sequence = fill(engine, 150)
    expected = next_logits(engine, sequence)
    engine.snapshot(0, sequence)
    engine.truncate(sequence, 70)
    engine.forward(Rows.chain(sequence, TOKENS[:80]), Kind.PROMPT)
    engine.commit(sequence, range(80))
    assert next_logits(engine, engine.restore(0)) == expected


# ----- slots


def test_snapshot_and_restore(engine: Engine) -> None:
    sequence = fill(engine, 100)
    logits = engine.forward(Rows.chain(sequence, [7]), Kind.STEP).logits[0]
    engine.commit(sequence, [0])
    slot = engine.snapshot(3, sequence, logits)
    assert list(engine.slots) == [3]
    assert engine.slots[3] is slot
    assert engine.memory.live("snapshot") >= logits.nbytes
    assert slot.logits is not None
    assert slot.logits.tobytes() == logits.tobytes()
    expected = next_logits(engine, sequence)
    engine.close(sequence)
    restored = engine.restore(3)
    assert restored.tokens.tolist() == TOKENS[:100] + [7]
    assert next_logits(engine, restored) == expected


def test_the_source_goes_on_without_changing_the_slot(engine: Engine) -> None:
    sequence = fill(engine, 70)
    expected = next_logits(engine, sequence)
    engine.snapshot(0, sequence)
    fill(engine, 190, sequence)
    assert next_logits(engine, engine.restore(0)) == expected


def test_a_shorter_snapshot(engine: Engine) -> None:
    engine.snapshot(0, fill(engine, 150), length=70)
    assert len(engine.slots[0].pages) == 2
    assert next_logits(engine, engine.restore(0)) == next_logits(engine, fill(engine, 70))


def test_a_failed_snapshot_keeps_the_old_one(make: Callable[..., Engine]) -> None:
    engine = make(memory=DeviceMemory(faults=Faults("snapshot", 2)))
    sequence = fill(engine, 10)
    old = engine.snapshot(0, sequence)
    with pytest.raises(OutOfDeviceMemory, match="site=snapshot"):
        engine.snapshot(0, sequence, np.zeros(320, np.float32), length=5)
    assert engine.slots[0] is old
    with pytest.raises(ValueError, match="slot 8 is not below 8"):
        engine.snapshot(8, sequence)


def test_empty_slots(engine: Engine) -> None:
    with pytest.raises(KeyError):
        engine.restore(0)
    assert engine.free_slot(0) is False
    engine.snapshot(0, fill(engine, 3))
    assert engine.free_slot(0) is True


# ----- memory


def test_everything_comes_back(make: Callable[..., Engine]) -> None:
    engine = make()
    weights = engine.memory.live("weights")
    for _ in range(3):
        sequence = fill(engine, 150)
        engine.snapshot(0, sequence, engine.forward(Rows.chain(sequence, [1]), Kind.STEP).logits[0])
        engine.close(engine.restore(0))
        engine.close(sequence)
    assert engine.free_slot(0)
    report = engine.memory_report()
    assert (report["pages_used"], report["pages_free"]) == (0, SEGMENT_PAGES)
    assert report["live"]["scratch"] == report["live"]["snapshot"] == 0
    cached, kv = engine.memory.cached, engine.memory.live("kv")
    assert engine.trim() == cached + kv
    assert engine.memory.live() == engine.memory.live("weights")
    # The first positions have made the table of rotary angles, which stays.
    assert engine.memory.live("weights") - weights == 1024 * 8 * 8


def test_a_copy_takes_the_spare_page_when_there_is_no_other(make: Callable[..., Engine]) -> None:
    """Admission reserves one page more than prompt and output need: a snapshot must not end the request."""
    engine = make(exact=True)
    sequence = engine.open()
    engine.reserve(sequence, 64 * SEGMENT_PAGES)  # the whole segment
    fill(engine, 70, sequence)
    expected = next_logits(engine, sequence)
    engine.snapshot(0, sequence)
    engine.memory.limit = engine.memory.live() + engine.memory.cached + 1000
    assert next_logits(engine, sequence) == expected
    assert len(sequence.pages) == SEGMENT_PAGES - 1


def test_the_model_does_not_fit(make: Callable[..., Engine]) -> None:
    with pytest.raises(OutOfDeviceMemory, match="site=start"):
        make(memory=DeviceMemory(limit=100_000))


def test_parking_gives_the_weights_back(engine: Engine) -> None:
    sequence = fill(engine, 70)
    expected = next_logits(engine, sequence)
    assert engine.park()
    assert engine.memory.live("weights") == engine.memory.cached == 0
    assert engine.unpark()
    assert next_logits(engine, sequence) == expected


def test_a_file_that_was_written_to_is_not_loaded_again(
    make: Callable[..., Engine], tiny_llama: Path, tmp_path: Path
) -> None:
    """Its identity is of samples: what was written may lie between them."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama.read_bytes())
    with open_model(path) as file:
        engine = Engine(file, NumpyBackend())
    engine.park()
    data = bytearray(path.read_bytes())
    data[-5] ^= 128
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="the file has changed since the daemon started"):
        engine.unpark()
    assert engine.parked


def test_kv_types_that_cannot_be_are_refused(make: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match="V type tq3_0 needs heads of a multiple of 128"):
        make(v_type="tq3_0")
    with pytest.raises(ConfigError, match=r"K type q8_0 .* 32 numbers: llama.attention.key_length is 16"):
        make(k_type="q8_0")


def test_exact_checks_the_blas_at_start(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotd.daemon.numpy_backend.BIG_WEIGHT", 1)
    monkeypatch.setattr(numpy_ops, "BIG_WEIGHT", 1)
    monkeypatch.setattr(numpy_ops, "LEAST_ROWS", 1)  # a lone row is multiplied alone: its bits differ
    with pytest.raises(ConfigError, match="--exact cannot be kept with this BLAS"):
        make(exact=True)
