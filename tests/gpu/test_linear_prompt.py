"""kernels/linear_prompt.cu: the sums of linear.cu, for any number of rows."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops import cuda_linear, cuda_prepare
from slotd.daemon.ops.cuda_rows import RowKind
from tests.bench.random_blocks import TYPES
from tests.gpu.linear_rig import outlier_rows, product, weights


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_in", [256, 2304, 5120])
def test_rows_have_the_bits_of_the_kernel_for_few(memory, type_name, n_in) -> None:
    matrix, _ = weights(memory, [type_name], 176, n_in)
    x = outlier_rows(300, n_in)
    few = np.concatenate([product(memory, x[i : i + 60], matrix) for i in range(0, 300, 60)])
    for n in (65, 127, 128, 129, 300):
        assert product(memory, x[:n], matrix).tobytes() == few[:n].tobytes(), n


def test_rows_that_are_not_finite_do_not_touch_the_others(memory) -> None:
    matrix, _ = weights(memory, ["Q4_K"], 64, 1024)
    x = outlier_rows(130, 1024)
    clean = product(memory, x, matrix)
    x[1::2] = np.nan
    dirty = product(memory, x, matrix)
    assert dirty[::2].tobytes() == clean[::2].tobytes()
    assert np.isnan(dirty[1::2]).all()


def test_parts_of_several_types_and_sums(memory) -> None:
    matrix, _ = weights(memory, ["Q4_K", "Q8_0", "Q6_K"], 40, 512)  # 40: the last tile is not full
    x = np.random.default_rng(9).standard_normal((100, 512)).astype(np.float32)
    start = np.random.default_rng(8).standard_normal((100, matrix.n_out)).astype(np.float32)
    y = memory.empty((100, matrix.n_out))
    y.set(start)
    cuda_linear.multiply(cuda_prepare.prepare(memory, cupy.asarray(x)), matrix, y, add=True)
    assert y.get().tobytes() == (start + product(memory, x, matrix)).tobytes()


def test_pairs_are_exact_to_float32_in_any_company(memory) -> None:
    """Weights of 16 bits are exact here, so what is left is what rounding x to 22 bits and the sums cost."""
    matrix, values = weights(memory, ["F16"], 72, 576)
    x = outlier_rows(100, 576)
    all_rows = product(memory, x, matrix, RowKind.PAIRS)
    expected = x.astype(np.float64) @ values.T.astype(np.float64)
    size = np.abs(x.astype(np.float64)) @ np.abs(values.T.astype(np.float64))
    assert (np.abs(all_rows - expected) <= 2e-6 * size).all(), (np.abs(all_rows - expected) / size).max()
    for n in (1, 2, 7, 8, 16, 23, 32, 33, 64):
        assert product(memory, x[:n], matrix, RowKind.PAIRS).tobytes() == all_rows[:n].tobytes(), n
    start = cupy.asarray(x[:, :72].copy())
    cuda_linear.multiply(
        cuda_prepare.prepare(memory, cupy.asarray(x), RowKind.PAIRS), matrix, start, add=True
    )
    assert start.get().tobytes() == (x[:, :72] + all_rows).tobytes()
