"""kernels/prepare.cu: norm, gate and preparation against NumPy."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops import cuda_prepare

WIDTHS = [64, 576, 1536, 5120, 17408]


def unpack(prepared, width) -> np.ndarray:
    """The prepared rows as float64 [n, width]."""
    segments = -(-width // 256)
    halves = prepared.halves.get().view(np.float16).reshape(segments, 8, prepared.room, 4, 2, 2, 2)
    # [segment][w][row][t][hi][odd][0 or 2] -> column 256 segment + 64 t + 32 hi + 4 w + odd + (0 or 2)
    rows = halves.transpose(2, 0, 3, 4, 1, 6, 5).reshape(prepared.room, segments, 256).astype(np.float64)
    rows *= prepared.scale.get()[:, None, None]
    return rows[: prepared.n].reshape(prepared.n, -1)[:, :width]


def close(got, expected) -> None:
    bound = 2.0**-11 * np.abs(expected) + 2.0**-24 * np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(got - expected) <= 1.2 * bound).all(), np.abs(got - expected).max()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [1, 5, 64, 65, 200])
def test_rows_are_prepared_as_they_are(memory, width, n) -> None:
    x = np.random.default_rng(n).standard_normal((n, width)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(1).uniform(-6, 6, (n, 1)).astype(np.float32)
    close(unpack(cuda_prepare.prepare(memory, cupy.asarray(x)), width), x)


@pytest.mark.parametrize("width", [64, 576, 1536, 5120, 8192, 16000, 20000])
def test_norm(memory, width) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((7, width)).astype(np.float32) * 3
    weight = rng.uniform(0.5, 2, width).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    close(unpack(cuda_prepare.norm(memory, cupy.asarray(x), cupy.asarray(weight), 1e-5), width), expected)
    picked = cuda_prepare.Picked(cupy.asarray(x), cupy.array([6, 0], dtype=cupy.int32))
    close(unpack(cuda_prepare.norm(memory, picked, cupy.asarray(weight), 1e-5), width), expected[[6, 0]])


@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu(memory, width) -> None:
    gate_up = np.random.default_rng(3).standard_normal((5, 2 * width)).astype(np.float32) * 4
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:]
    close(unpack(cuda_prepare.swiglu(memory, cupy.asarray(gate_up)), width), gate / (1 + np.exp(-gate)) * up)


def test_rows_that_are_not_finite_stay_so_and_alone(memory) -> None:
    x = np.ones((3, 576), np.float32)
    x[1, 7] = np.nan
    x[2, 9] = np.inf
    got = unpack(cuda_prepare.prepare(memory, cupy.asarray(x)), 576)
    assert np.isnan(got[1, 7])
    assert not np.isfinite(got[2, 9])
    assert (got[0] == 1).all()


def test_a_row_of_zeros(memory) -> None:
    assert not unpack(cuda_prepare.prepare(memory, cupy.zeros((2, 576), cupy.float32)), 576).any()
