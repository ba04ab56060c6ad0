"""The qwen golden models on the GPU: logits of a float64 forward over the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.rows import Kind, Rows
from tests.gpu.same_bits import cuda_engine

DATA = Path(__file__).parents[1] / "golden" / "data"


@pytest.mark.parametrize("kind", [Kind.PROMPT, Kind.STEP])
def test_qwen3(kind: Kind) -> None:
    """Its heads have 32 numbers, which only K/V of float32 take."""
    engine = cuda_engine(DATA / "qwen3.gguf", "f32", max_ctx=256)
    with np.load(DATA / "qwen3.npz") as golden:
        tokens, expected = golden["input_ids"].tolist(), golden["logits"]
    sequence, got, piece = engine.open(), [], 64 if kind is Kind.PROMPT else 16
    for start in range(0, len(tokens), piece):
        rows = Rows.chain(sequence, tokens[start : start + piece], logits="all")
        got.append(engine.forward(rows, kind).logits)
        engine.commit(sequence, range(len(rows)))
    error = np.abs(np.concatenate(got) - expected).max(axis=1) / expected.std()
    print(f"{kind}: largest error {error.max():.2e} of the logits' spread, at {error.argmax()}")
    # Rows and weights are multiplied as halves.
    assert error.max() < 2e-2
