"""kernels/linear_q8.cu: right, and the same bits for a row however many stand beside it."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops import cuda_linear_q8, cuda_prepare
from slotd.daemon.ops.cuda_rows import RowKind, multiply, row_kind
from tests.bench.random_blocks import TYPES
from tests.gpu.linear_rig import outlier_rows, product_q8, rounded, weights

COUNTS = (1, 2, 7, 8, 9, 16, 23, 24, 25, 32, 33, 64)

WHOLE = [name for name in TYPES if name not in ("F32", "F16", "BF16")]

#: Types whose scales fit halves as they are; of the others they are products, rounded to halves.
EXACT_SCALES = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}


def check(got, x, values, type_name) -> None:
    """Against float64 with the same whole numbers: what is left is the rounding of the sums."""
    codes, scales = rounded(x)
    expected = (codes * scales) @ values.T.astype(np.float64)
    assert np.isfinite(got).all()
    size = np.linalg.norm(codes * scales, axis=1)[:, None] * np.linalg.norm(values.astype(np.float64), axis=1)
    off = np.abs(got - expected) / size
    # Tiles keep d and minima of a row with small ones beside large ones as subnormal halves.
    bound = 2e-5 if type_name in EXACT_SCALES else 2.0**-11
    assert off.max() < bound, (off.max(), np.argwhere(off > bound)[:4])


@pytest.mark.parametrize("type_name", WHOLE)
@pytest.mark.parametrize("n", [1, 9, 23, 64])
def test_product_against_float64(memory, type_name, n) -> None:
    matrix, values = weights(memory, [type_name], 200, 2304)
    x = np.random.default_rng(n).standard_normal((n, 2304)).astype(np.float32)
    check(product_q8(memory, x, matrix), x, values, type_name)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
@pytest.mark.parametrize("n_in", [32, 96, 576, 1536])
def test_widths_that_fill_no_segment(memory, type_name, n_in) -> None:
    matrix, values = weights(memory, [type_name], 21, n_in)
    x = np.random.default_rng(n_in).standard_normal((3, n_in)).astype(np.float32)
    check(product_q8(memory, x, matrix), x, values, type_name)


@pytest.mark.parametrize("type_name", WHOLE)
@pytest.mark.parametrize("n_in", [256, 2304, 5120])
def test_a_row_has_the_same_bits_in_any_company(memory, type_name, n_in) -> None:
    matrix, _ = weights(memory, [type_name], 176, n_in)
    x = outlier_rows(max(COUNTS), n_in)
    rows = (0, 1, 6, 22, 63)
    alone = np.concatenate([product_q8(memory, x[i : i + 1], matrix) for i in rows])
    for n in COUNTS:
        together = product_q8(memory, x[:n], matrix)
        for row, expected in zip(rows, alone, strict=True):
            if row < n:
                assert together[row].tobytes() == expected.tobytes(), (n, row)


def test_a_row_has_the_same_bits_for_any_number_of_warps(memory, monkeypatch) -> None:
    matrix, _ = weights(memory, ["Q4_K", "Q6_K", "Q8_0"], 96, 5120)
    x = outlier_rows(23, 5120)
    expected = product_q8(memory, x, matrix).tobytes()
    for warps in (4, 5, 6, 7, 8):
        monkeypatch.setattr(cuda_linear_q8, "warps_for", lambda *_, w=warps: w)
        assert product_q8(memory, x, matrix).tobytes() == expected


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q2_K", "Q4_0"])
def test_rows_that_are_not_finite_do_not_touch_the_others(memory, type_name) -> None:
    matrix, _ = weights(memory, [type_name], 64, 1024)
    for n in (8, 64):
        x = outlier_rows(n, 1024)
        clean = product_q8(memory, x, matrix)
        for wrong in (np.nan, np.inf):
            x[1::2, 700] = wrong
            dirty = product_q8(memory, x, matrix)
            assert dirty[::2].tobytes() == clean[::2].tobytes()
            assert np.isnan(dirty[1::2]).all(), wrong


def test_rows_of_zeros_and_of_tiny_numbers(memory) -> None:
    matrix, _ = weights(memory, ["Q4_K", "Q6_K", "Q2_K"], 32, 512)
    x = np.zeros((3, 512), np.float32)
    x[1] = 1e-38
    x[2] = 1e-20
    got = product_q8(memory, x, matrix)
    assert not got[:2].any()
    assert got[2].any()


@pytest.mark.parametrize("n", [3, 64])
def test_parts_of_several_types_and_sums(memory, n) -> None:
    matrix, _ = weights(memory, ["Q4_K", "Q8_0", "Q6_K"], 40, 512)  # 40: the last tile is not full
    x = np.random.default_rng(9).standard_normal((n, 512)).astype(np.float32)
    start = np.random.default_rng(8).standard_normal((n, matrix.n_out)).astype(np.float32)
    y = memory.empty((n, matrix.n_out))
    y.set(start)
    multiply(cuda_prepare.prepare(memory, cupy.asarray(x), RowKind.INTEGERS), matrix, y, add=True)
    assert y.get().tobytes() == (start + product_q8(memory, x, matrix)).tobytes()


def test_what_rows_a_weight_wants(memory) -> None:
    plain, _ = weights(memory, ["Q4_K", "F16"], 16, 4096)
    whole, _ = weights(memory, ["Q4_K", "Q2_K"], 16, 4096)
    narrow, _ = weights(memory, ["Q4_K", "Q2_K"], 16, 2048)
    assert row_kind(whole, "q8", of_step=True) is RowKind.INTEGERS
    assert row_kind(narrow, "q8", of_step=True) is RowKind.INTEGERS
    assert row_kind(plain, "q8", of_step=True) is RowKind.HALVES
    assert row_kind(whole, "q8", of_step=False) is RowKind.HALVES
    assert row_kind(whole, "exact", of_step=True) is RowKind.HALVES
    assert row_kind(narrow, "exact", of_step=True) is RowKind.PAIRS
    assert row_kind(narrow, "fast", of_step=True) is RowKind.HALVES
