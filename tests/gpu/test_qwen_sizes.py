"""qwen models on the GPU: each published size, the golden ones from a slot at every cut, and the daemon."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.rows import Kind
from slotd.daemon.sequence import Sequence
from tests.bench.model_shapes import PRESETS, Q4_K_M, UNEVEN
from tests.bench.synthetic_gguf import write_synthetic
from tests.fakes.recurrent_story import Story, tell
from tests.gpu.same_bits import cuda_engine, decode
from tests.gpu.test_qwen import DATA, cut_model, run

QWEN = [name for name in PRESETS if name.startswith("qwen")]
UNEVEN_TOO = ["qwen3-0.6b", "qwen35-0.8b", "qwen35-27b"]


def state_of(engine: Engine, sequence: Sequence) -> bytes:
    """The convolution's inputs and the matrices, or nothing."""
    store = engine.recurrence.store
    if store is None:
        return b""
    data = np.zeros(store.n_bytes, np.uint8)
    store.read(sequence.state, data)
    return data.tobytes()


@pytest.mark.parametrize(
    ("name", "mix"), [*((name, Q4_K_M) for name in QWEN), *((name, UNEVEN) for name in UNEVEN_TOO)]
)
def test_each_published_size(tmp_path: Path, name: str, mix: str) -> None:
    """Four layers of it at full width, with a block for further tokens; K/V in tq3_0 and in q8_0."""
    preset = PRESETS[name]
    shape = dataclasses.replace(
        preset, n_layer=4, n_vocab=4096, weight_type=mix, n_mtp=1 if preset.arch == "qwen35" else 0
    )
    path = write_synthetic(tmp_path / "m.gguf", shape, seed=1)
    tokens = np.random.default_rng(1).integers(300, 4000, 200).tolist()
    behind = tokens[150:160]
    for kv in ("tq3_0", "q8_0"):
        engine = cuda_engine(path, kv, max_ctx=1024)
        whole = run(engine, engine.open(), tokens, 200, Kind.PROMPT)
        assert np.isfinite(whole).all(), (name, mix, kv)
        sequence = engine.open()
        pieces = run(engine, sequence, tokens[:150], 64, Kind.PROMPT)
        engine.snapshot(0, sequence, None)
        steps = run(engine, engine.fork(sequence), tokens[150:], 16, Kind.STEP)
        # tq3_0 makes a step of what was rounding: the spread of the difference counts, not its largest.
        difference = (np.concatenate([pieces, steps]) - whole) / whole.std()
        largest, spread = float(np.abs(difference).max()), float(np.sqrt(np.square(difference).mean()))
        print(
            f"{name} {mix} {kv}: spread {whole.std():.2f}, steps beside a prompt {spread:.4f} {largest:.4f}"
        )
        assert 1 < whole.std() < 5, (name, mix, kv)
        assert pieces[:128].tobytes() == whole[:128].tobytes(), (name, mix, kv)  # cut at multiples of 64
        assert spread < 0.05, (name, mix, kv)
        restored, kept = engine.restore(0), state_of(engine, sequence)
        assert state_of(engine, restored) == kept
        engine.host_tier.budget = 1 << 30
        engine.host_tier.demote(0)
        from_host = engine.restore(0)
        assert state_of(engine, from_host) == kept
        expected = decode(engine, sequence, behind)
        assert decode(engine, restored, behind) == expected, (name, mix, kv)
        assert decode(engine, from_host, behind) == expected, (name, mix, kv)


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "qwen35-mtp"])
def test_restored_at_every_cut(name: str) -> None:
    """P19: state and the bits of what follows, from device memory; through host memory at every tenth."""
    with np.load(DATA / f"{name}.npz") as file:
        tokens = file["input_ids"].tolist()
    engine = cuda_engine(DATA / f"{name}.gguf", "f32", max_ctx=256)
    engine.host_tier.budget = 64 << 20
    plain = decode(engine, engine.open(), tokens)
    source = engine.open()
    for cut in range(1, len(tokens)):
        decode(engine, source, tokens[cut - 1 : cut])
        engine.snapshot(0, source, None)
        kept = state_of(engine, source)
        if cut % 10 == 0:
            engine.host_tier.demote(0)
        restored = engine.restore(0)
        assert state_of(engine, restored) == kept, (name, cut)
        few = tokens[cut : cut + 2 if cut % 50 else len(tokens)]
        assert decode(engine, restored, few) == plain[cut : cut + len(few)], (name, cut)
        engine.close(restored)


def test_field_reports_18_24_25_34(tmp_path: Path) -> None:
    """The story of tests/e2e/test_recurrent_daemon.py, with heads as published."""
    model = cut_model(tmp_path / "cut.gguf")
    (tmp_path / "slots").mkdir()
    tell(Story(model, tmp_path / "slots", "--device=0", "-ctk=q8_0", "-ctv=q8_0", n_vocab=4000))
