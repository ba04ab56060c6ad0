"""The llama golden model: logits of a float64 forward over the same weights, whole and in pieces."""

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

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def golden() -> dict[str, npt.NDArray[Any]]:
    with np.load(DATA / "llama.npz") as file:
        return dict(file)


@pytest.fixture(scope="module", params=[False, True], ids=["default", "exact"])
def engine(request: pytest.FixtureRequest) -> Engine:
    with open_model(DATA / "llama.gguf") as file:
        return Engine(file, NumpyBackend(exact=request.param))


def logits_in_pieces(engine: Engine, ids: list[int], piece: int, kind: Kind) -> npt.NDArray[np.float32]:
    sequence = engine.open()
    logits = []
    for start in range(0, len(ids), piece):
        rows = Rows.chain(sequence, ids[start : start + piece], logits="all")
        logits.append(engine.forward(rows, kind).logits)
        engine.commit(sequence, range(len(rows)))
    engine.close(sequence)
    return np.concatenate(logits)


@pytest.mark.parametrize(
    ("piece", "kind"),
    [(150, Kind.PROMPT), (1, Kind.PROMPT), (7, Kind.PROMPT), (64, Kind.PROMPT), (100, Kind.PROMPT)]
    + [(1, Kind.STEP), (16, Kind.STEP)],
)
def test_logits(engine: Engine, golden: dict[str, npt.NDArray[Any]], piece: int, kind: Kind) -> None:
    logits = logits_in_pieces(engine, golden["input_ids"].tolist(), piece, kind)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-3)
    assert (logits.argmax(axis=1) == golden["logits"].argmax(axis=1)).all()


def test_restored_at_every_cut(engine: Engine, golden: dict[str, npt.NDArray[Any]]) -> None:
    """The slot of each length was taken on the way; what it continues with is the golden rest."""
    ids = golden["input_ids"].tolist()
    source = engine.open()
    for cut in range(1, len(ids)):
        rows = Rows.chain(source, ids[cut - 1 : cut])
        logits = engine.forward(rows, Kind.STEP).logits
        engine.commit(source, [0])
        engine.snapshot(0, source, logits[-1])
        restored = engine.restore(0)
        few = ids[cut : cut + 2 if cut % 50 else len(ids)]
        found = engine.forward(Rows.chain(restored, few, logits="all"), Kind.PROMPT).logits
        engine.close(restored)
        expected = golden["logits"][cut : cut + len(few)]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
        assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
    engine.close(source)


def test_greedy(engine: Engine, golden: dict[str, npt.NDArray[Any]]) -> None:
    sequence = engine.open()
    tokens: list[int] = []
    rows = Rows.chain(sequence, golden["input_ids"][:20].tolist())
    while len(tokens) < 24:
        logits = engine.forward(rows, Kind.STEP if tokens else Kind.PROMPT).logits[-1]
        engine.commit(sequence, range(len(rows)))
        tokens.append(int(logits.argmax()))
        rows = Rows.chain(sequence, tokens[-1:])
    assert tokens == golden["greedy"].tolist()
