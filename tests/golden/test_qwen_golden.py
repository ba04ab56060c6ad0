"""The qwen golden models: logits of a float64 forward over the same weights, in pieces, after restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model
from tests.fakes.changed_gguf import write_changed
from tests.fakes.row_calls import run

DATA = Path(__file__).parent / "data"
Golden = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module", params=["qwen3", "qwen35", "qwen35-mtp"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def golden(name: str) -> Golden:
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture(scope="module", params=[False, True], ids=["default", "exact"])
def engine(request: pytest.FixtureRequest, name: str) -> Engine:
    with open_model(DATA / f"{name}.gguf") as file:
        return Engine(file, NumpyBackend(exact=request.param))


@pytest.fixture(scope="module")
def default_engine(name: str) -> Engine:
    with open_model(DATA / f"{name}.gguf") as file:
        return Engine(file, NumpyBackend())


def assert_golden(logits: npt.NDArray[np.float32], golden: Golden, start: int = 0) -> None:
    expected = golden["logits"][start : start + len(logits)]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize(
    ("piece", "kind"),
    [(150, Kind.PROMPT), (1, Kind.PROMPT), (7, Kind.PROMPT), (64, Kind.PROMPT), (16, Kind.STEP)],
)
def test_logits(engine: Engine, golden: Golden, piece: int, kind: Kind) -> None:
    sequence = engine.open()
    assert_golden(run(engine, sequence, golden["input_ids"].tolist(), kind, piece), golden)
    engine.close(sequence)


def test_restored_at_every_cut(default_engine: Engine, golden: Golden) -> None:
    """The slot of each length was taken on the way; what it continues with is the golden rest."""
    engine, ids = default_engine, golden["input_ids"].tolist()
    source = engine.open()
    for cut in range(1, len(ids)):
        logits = run(engine, source, ids[cut - 1 : cut], kind=Kind.STEP)
        engine.snapshot(0, source, logits[-1])
        restored = engine.restore(0)
        few = ids[cut : cut + 2 if cut % 50 else len(ids)]
        assert_golden(run(engine, restored, few, piece=64), golden, cut)
        engine.close(restored)
    engine.close(source)


def test_the_state_behind_all_tokens(engine: Engine, golden: Golden) -> None:
    """Of the first layer, by pieces and by steps: the inputs of the convolution and the matrices."""
    if "delta_state_l0" not in golden:
        assert engine.recurrence.state_bytes == 0
        return
    for piece, kind in ((150, Kind.PROMPT), (20, Kind.PROMPT), (16, Kind.STEP)):
        sequence = engine.open()
        run(engine, sequence, golden["input_ids"].tolist(), kind, piece)
        state = sequence.state
        np.testing.assert_allclose(state.conv[0], golden["conv_state_l0"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(state.matrices[0], golden["delta_state_l0"], rtol=0, atol=1e-4)
        engine.close(sequence)


def test_fused_query_key_and_value(tmp_path: Path, name: str, golden: Golden) -> None:
    """The same logits where q, k and v are one tensor of the file."""
    with open_model(DATA / f"{name}.gguf") as file:
        layer = file.hyper.attention_layers[0]
        parts = file.hyper.qkv_names(layer)
        rows = np.concatenate([file.dequantise(part) for part in parts])
    changes = {**dict.fromkeys(parts), f"blk.{layer}.attn_qkv.weight": rows}
    with open_model(write_changed(tmp_path / "m.gguf", DATA / f"{name}.gguf", tensors=changes)) as file:
        engine = Engine(file, NumpyBackend())
    assert_golden(run(engine, engine.open(), golden["input_ids"].tolist(), piece=64), golden)


def test_greedy(engine: Engine, golden: Golden) -> None:
    sequence = engine.open()
    tokens: list[int] = []
    rows = Rows.chain(sequence, golden["input_ids"][:20].tolist())
    while len(tokens) < 24:
        logits = engine.forward(rows, Kind.STEP if tokens else Kind.PROMPT).logits[-1]
        engine.commit(sequence, range(len(rows)))
        tokens.append(int(logits.argmax()))
        rows = Rows.chain(sequence, tokens[-1:])
    assert tokens == golden["greedy"].tolist()
    engine.close(sequence)
