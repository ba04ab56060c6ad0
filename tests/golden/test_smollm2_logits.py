"""The default model against an independent float32 implementation: first logits and greedy answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model

pytestmark = pytest.mark.model

DATA = Path(__file__).parent / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "smollm2_greedy.json").read_text("utf-8"))["cases"]
#: Whose whole answer is computed: one that ends by itself, and the one with the widest margin.
ANSWERED = (CASES[0], max(CASES, key=lambda case: float(case["min_margin"])))


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Engine:
    with open_model(default_model) as file:
        return Engine(file, NumpyBackend(), max_ctx=1024)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_first_logits(engine: Engine, case: dict[str, Any]) -> None:
    sequence = engine.open()
    logits = engine.forward(Rows.chain(sequence, case["ids"]), Kind.PROMPT).logits[0]
    engine.close(sequence)
    best = np.argsort(-logits)[:5]
    assert best.tolist() == case["first_top5_ids"]
    np.testing.assert_allclose(logits[best], case["first_top5_logits"], rtol=0, atol=2e-3)


def test_first_logits_with_q8_0(default_model: Path) -> None:
    """K and V of 8.5 bits move the best logits a little and none of the best tokens."""
    with open_model(default_model) as file:
        engine = Engine(file, NumpyBackend(), max_ctx=1024, k_type="q8_0", v_type="q8_0")
    for case in CASES:
        logits = engine.forward(Rows.chain(engine.open(), case["ids"]), Kind.PROMPT).logits[0]
        assert logits.argmax() == case["first_top5_ids"][0]
        np.testing.assert_allclose(
            logits[case["first_top5_ids"]], case["first_top5_logits"], rtol=0, atol=0.3
        )


@pytest.mark.parametrize("case", ANSWERED, ids=lambda case: case["prompt"][:20])
def test_greedy_answer(engine: Engine, case: dict[str, Any]) -> None:
    sequence = engine.open()
    tokens: list[int] = []
    rows = Rows.chain(sequence, case["ids"])
    while len(tokens) < len(case["greedy"]):
        logits = engine.forward(rows, Kind.STEP if tokens else Kind.PROMPT).logits[-1]
        engine.commit(sequence, range(len(rows)))
        tokens.append(int(logits.argmax()))
        rows = Rows.chain(sequence, tokens[-1:])
    engine.close(sequence)
    assert tokens == case["greedy"]
