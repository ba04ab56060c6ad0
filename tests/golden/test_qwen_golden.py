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
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model

DATA = Path(__file__).parent / "data"
Golden = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module", params=["qwen3"])
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


def run(
    engine: Engine, sequence: Sequence, ids: list[int], piece: int = 64, kind: Kind = Kind.PROMPT
) -> npt.NDArray[np.float32]:
    """Commit ids in pieces; logits of all of them."""
    logits = []
    for start in range(0, len(ids), piece):
        rows = Rows.chain(sequence, ids[start : start + piece], logits="all")
        logits.append(engine.forward(rows, kind).logits)
        engine.commit(sequence, range(len(rows)))
    return np.concatenate(logits)


def assert_golden(logits: npt.NDArray[np.float32], golden: Golden, start: int = 0) -> None:
    expected = golden["logits"][start : start + len(logits)]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize(
    ("piece", "kind"),
    [(150, Kind.PROMPT), (1, Kind.PROMPT), (7, Kind.PROMPT), (64, Kind.PROMPT), (100, Kind.PROMPT)]
    + [(1, Kind.STEP), (16, Kind.STEP)],
)
def test_logits(engine: Engine, golden: Golden, piece: int, kind: Kind) -> None:
    sequence = engine.open()
    assert_golden(run(engine, sequence, golden["input_ids"].tolist(), piece, kind), golden)
    engine.close(sequence)


def test_restored_at_every_cut(engine: Engine, golden: Golden) -> None:
    """The slot of each length was taken on the way; what it continues with is the golden rest."""
    ids = golden["input_ids"].tolist()
    source = engine.open()
    for cut in range(1, len(ids)):
        logits = run(engine, source, ids[cut - 1 : cut], kind=Kind.STEP)
        engine.snapshot(0, source, logits[-1])
        restored = engine.restore(0)
        assert_golden(run(engine, restored, ids[cut : cut + 3]), golden, cut)
        if cut % 50 == 14:  # all the rest, which starts inside of a page
            rest = engine.restore(0)
            assert_golden(run(engine, rest, ids[cut:]), golden, cut)
            engine.close(rest)
        engine.close(restored)
    engine.close(source)


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
