"""What tests/gpu/device_numbers.py says of halves on the device is near the numbers of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model
from tests.bench.synthetic_gguf import Shape, write_synthetic
from tests.gpu.blocks import random_rows, values_of
from tests.gpu.device_numbers import HeldModel, held_values


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "BF16", "F32"])
def test_held_values_are_halves_near_those_of_the_file(type_name: str) -> None:
    rows = random_rows(type_name, 16, 512)
    exact, held = values_of(type_name, rows), held_values(type_name, rows, 512)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert (np.abs(held - exact) <= 3 * 2.0**-11 * largest).all()
    # Each is a half times a power of two: eleven bits, not more.
    fractions, _ = np.frexp(held)
    assert (np.ldexp(fractions, 11) % 1 == 0).all()
    if type_name in ("F16", "BF16"):
        assert (held == exact).all()


def test_a_model_of_held_weights_answers_nearly_the_same(tmp_path: Path) -> None:
    path = write_synthetic(
        tmp_path / "m.gguf", Shape(2, 256, 512, 4, 2, 64, 512, 128, 1e4, "Q4_1", tied=True)
    )
    with open_model(path) as file:
        plain, held = Engine(file, NumpyBackend()), Engine(HeldModel.of(file), NumpyBackend())
    tokens = list(range(40))
    expected = plain.forward(Rows.chain(plain.open(), tokens), Kind.PROMPT).logits
    got = held.forward(Rows.chain(held.open(), tokens), Kind.PROMPT).logits
    assert 0 < np.abs(got - expected).max() < 0.02
