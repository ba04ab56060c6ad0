"""kernels/linear.cu: right, and the same bits for a row however many stand beside it."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops import cuda_linear, cuda_prepare
from tests.bench.random_blocks import TYPES
from tests.gpu.linear_rig import outlier_rows, product, weights

COUNTS = (1, 2, 7, 8, 9, 16, 23, 24, 32, 33, 64)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n", [1, 9, 23, 64])
def test_product_against_float64(memory, type_name, n) -> None:
    matrix, values = weights(memory, [type_name], 200, 2304)
    x = np.random.default_rng(n).standard_normal((n, 2304)).astype(np.float32)
    expected = x.astype(np.float64) @ values.T.astype(np.float64)
    got = product(memory, x, matrix)
    assert np.isfinite(got).all()
    # Halves of weights, scales and x: each product is off by a few times 2^-11, and sums may cancel.
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(values.astype(np.float64), axis=1)
    wrong = np.abs(got - expected) > 2.0**-10 * size
    assert not wrong.any(), (np.argwhere(wrong)[:4], got[wrong][:4], expected[wrong][:4])


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_in", [256, 2304, 5120])
def test_a_row_has_the_same_bits_in_any_company(memory, type_name, n_in) -> None:
    matrix, _ = weights(memory, [type_name], 176, n_in)
    x = outlier_rows(max(COUNTS), n_in)
    alone = np.concatenate([product(memory, x[i : i + 1], matrix) for i in (0, 1, 6, 22, 63)])
    for n in COUNTS:
        together = product(memory, x[:n], matrix)
        for row, expected in zip((0, 1, 6, 22, 63), alone, strict=True):
            if row < n:
                assert together[row].tobytes() == expected.tobytes(), (n, row)


def test_a_row_has_the_same_bits_for_any_number_of_warps(memory, monkeypatch) -> None:
    matrix, _ = weights(memory, ["Q4_K", "Q6_K", "Q8_0"], 96, 5120)
    for n in (3, 23, 60):
        x = outlier_rows(n, 5120)
        expected = product(memory, x, matrix).tobytes()
        for warps in (4, 5, 6, 7, 8):
            monkeypatch.setattr(cuda_linear, "warps_for", lambda *_, w=warps: w)
            assert product(memory, x, matrix).tobytes() == expected, (n, warps)


def test_rows_that_are_not_finite_do_not_touch_the_others(memory) -> None:
    matrix, _ = weights(memory, ["Q4_K"], 64, 1024)
    for n in (8, 64):
        x = outlier_rows(n, 1024)
        clean = product(memory, x, matrix)
        x[1::2] = np.nan
        dirty = product(memory, x, matrix)
        assert dirty[::2].tobytes() == clean[::2].tobytes()
        assert np.isnan(dirty[1::2]).all()


@pytest.mark.parametrize("n", [3, 64])
def test_parts_of_several_types_and_sums(memory, n) -> None:
    matrix, _ = weights(memory, ["Q4_K", "Q8_0", "Q6_K"], 40, 512)  # 40: the last tile is not full
    x = np.random.default_rng(9).standard_normal((n, 512)).astype(np.float32)
    start = np.random.default_rng(8).standard_normal((n, matrix.n_out)).astype(np.float32)
    y = memory.empty((n, matrix.n_out))
    y.set(start)
    cuda_linear.multiply(cuda_prepare.prepare(memory, cupy.asarray(x)), matrix, y, add=True)
    assert y.get().tobytes() == (start + product(memory, x, matrix)).tobytes()


def test_columns_of_the_tensor_core_are_independent(memory) -> None:
    """What all bit-equality here rests on, for this type of device (design section 3)."""
    matrix, _ = weights(memory, ["F16"], 128, 4096)
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((8, 4096)) * 2.0 ** rng.integers(-12, 8, (8, 4096))).astype(np.float32)
    expected = product(memory, x[:1], matrix)
    for other in (0.0, 65504.0, np.nan, np.inf):
        beside = x.copy()
        beside[1:] = other
        assert product(memory, beside, matrix)[0].tobytes() == expected[0].tobytes()
        moved = np.concatenate([beside[1:], x[:1]])
        assert product(memory, moved, matrix)[7].tobytes() == expected[0].tobytes()
