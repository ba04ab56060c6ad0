"""kernels/unpack.cu and the products of cuBLAS behind it (--math fast)."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops import cuda_prepare, cuda_unpack
from slotd.daemon.ops.cuda_unpack import Cublas
from tests.bench.random_blocks import TYPES
from tests.gpu.linear_rig import outlier_rows, product, weights


def fast_product(memory, x, matrix) -> np.ndarray:
    y = memory.empty((len(x), matrix.n_out))
    Cublas(memory).multiply(cuda_prepare.prepare(memory, cupy.asarray(x)), matrix, y, add=False)
    return y.get()


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_as_the_exact_product_but_for_rounding(memory, type_name, monkeypatch) -> None:
    monkeypatch.setattr(
        cuda_unpack, "SLICE_BYTES", 5 * 16 * 2304 * 2
    )  # five row tiles: slices do not come out even
    matrix, values = weights(memory, [type_name], 200, 2304)
    x = outlier_rows(300, 2304)
    got, exact = fast_product(memory, x, matrix), product(memory, x, matrix)
    size = np.abs(x.astype(np.float64)) @ np.abs(values.T.astype(np.float64))
    assert (np.abs(got - exact) <= 1e-5 * size).all(), np.max(np.abs(got - exact) / size)


def test_parts_of_several_types_and_sums(memory) -> None:
    matrix, _ = weights(memory, ["Q4_K", "Q8_0", "Q6_K"], 40, 512)  # 40: the last tile is not full
    x = np.random.default_rng(9).standard_normal((257, 512)).astype(np.float32)
    x[5] = 0  # its power of two is the largest of all
    start = np.random.default_rng(8).standard_normal((257, matrix.n_out)).astype(np.float32)
    y = memory.empty(start.shape)
    y.set(start)
    Cublas(memory).multiply(cuda_prepare.prepare(memory, cupy.asarray(x)), matrix, y, add=True)
    exact = product(memory, x, matrix)
    assert np.max(np.abs(y.get() - start - exact)) < 2e-4 * np.max(np.abs(exact))


def test_rows_of_very_different_size(memory) -> None:
    matrix, values = weights(memory, ["Q4_1"], 64, 256)
    x = np.random.default_rng(3).standard_normal((256, 256)).astype(np.float32)
    x *= np.float32(2.0) ** np.repeat(np.arange(-6, 10), 16)[:, None].astype(np.float32)
    got = fast_product(memory, x, matrix)
    wanted = x.astype(np.float64) @ values.T.astype(np.float64)
    error = np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
    assert error.max() < 1e-3, error
