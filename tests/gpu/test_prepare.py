"""kernels/prepare.cu: norm, gate and preparation against NumPy."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops import cuda_prepare
from slotd.daemon.ops.cuda_rows import RowKind
from tests.gpu.linear_rig import outlier_rows, rounded

WIDTHS = [64, 576, 1536, 5120, 17408]


def unpack(prepared, width) -> np.ndarray:
    """The prepared rows as float64 [n, width]; paired ones are two each."""
    segments = -(-width // 256)
    halves = prepared.halves.get().view(np.float16).reshape(segments, 8, prepared.room, 4, 2, 2, 2)
    # [segment][w][row][t][hi][odd][0 or 2] -> column 256 segment + 64 t + 32 hi + 4 w + odd + (0 or 2)
    rows = halves.transpose(2, 0, 3, 4, 1, 6, 5).reshape(prepared.room, segments, 256).astype(np.float64)
    rows *= prepared.scale.get()[:, None, None]
    return rows[: prepared.columns].reshape(prepared.columns, -1)[:, :width]


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


@pytest.mark.parametrize("width", [*WIDTHS, 25600, 32768])
def test_swiglu(memory, width) -> None:
    gate_up = np.random.default_rng(3).standard_normal((5, 2 * width)).astype(np.float32) * 4
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:]
    close(unpack(cuda_prepare.swiglu(memory, cupy.asarray(gate_up)), width), gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize(("heads", "dim"), [(8, 256), (24, 256), (9, 64)])
def test_gate(memory, heads, dim) -> None:
    rng = np.random.default_rng(4)
    y = rng.standard_normal((5, heads * dim)).astype(np.float32)
    qkv = rng.standard_normal((5, 2 * heads * dim + 4 * dim)).astype(np.float32) * 4
    qkv[1, dim : 2 * dim] = np.linspace(-200, 200, dim)
    gates = qkv[:, : 2 * heads * dim].reshape(5, heads, 2, dim)[:, :, 1].reshape(5, -1).astype(np.float64)
    close(
        unpack(cuda_prepare.gate(memory, cupy.asarray(y), cupy.asarray(qkv), dim), heads * dim),
        y / (1 + np.exp(-gates)),
    )


@pytest.mark.parametrize(("heads", "size"), [(6, 16), (17, 32), (5, 64), (2, 128), (48, 128), (70, 128)])
def test_head_norm(memory, heads, size) -> None:
    """What the delta rule gives: norm of each head, then the gate."""
    rng = np.random.default_rng(5)
    o = rng.standard_normal((5, heads, size)).astype(np.float32)
    o *= 10.0 ** rng.uniform(-2, 1, (5, heads, 1)).astype(np.float32)
    projected = rng.standard_normal((5, 20 + heads * size + 12)).astype(np.float32) * 4
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    normed = o / np.sqrt((o.astype(np.float64) ** 2).mean(axis=2, keepdims=True) + 1e-6) * weight
    z = projected[:, 20 : 20 + heads * size].astype(np.float64)
    expected = normed.reshape(5, -1) * z / (1 + np.exp(-z))
    args = (cupy.asarray(o.reshape(5, -1)), cupy.asarray(projected), 20, cupy.asarray(weight), 1e-6)
    close(unpack(cuda_prepare.head_norm(memory, *args), heads * size), expected)
    codes, scales = unpack_integers(cuda_prepare.head_norm(memory, *args, RowKind.INTEGERS), heads * size)
    assert (np.abs(codes * scales - expected) <= 0.501 * scales).all()


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


def unpack_integers(rows, width) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of the prepared rows, float64 [n, width] each."""
    codes = rows.codes.get().view(np.int8).transpose(1, 0, 2).reshape(rows.n, -1).astype(np.float64)
    pairs = rows.scale.get().transpose(1, 0, 2, 3).reshape(rows.n, -1, 2)  # of each 32 columns
    scale, with_sum = pairs[..., 0], pairs[..., 1]
    sums = codes.reshape(rows.n, -1, 32).sum(axis=2).astype(np.float32)
    finite = np.isfinite(scale)
    assert np.array_equal(with_sum[finite], (scale * sums)[finite])
    sums16 = rows.sums16.get().transpose(1, 0, 2, 3).reshape(rows.n, -1)
    assert np.array_equal(sums16, codes.reshape(rows.n, -1, 16).sum(axis=2))
    return codes[:, :width], np.repeat(scale.astype(np.float64), 32, axis=1)[:, :width]


def test_pairs_keep_22_bits(memory) -> None:
    x = outlier_rows(5, 576)
    rows = cuda_prepare.prepare(memory, cupy.asarray(x), RowKind.PAIRS)
    assert (rows.n, rows.columns) == (5, 10)
    both = unpack(rows, 576)
    largest = np.abs(x).max(axis=1, keepdims=True)
    assert np.array_equal(both[::2], unpack(cuda_prepare.prepare(memory, cupy.asarray(x)), 576))
    off = np.abs(both[::2].astype(np.float64) + both[1::2] - x)
    assert (off <= np.maximum(2.0**-22 * np.abs(x), 2.0**-36 * largest)).all(), off.max()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [1, 5, 64, 65, 200])
def test_rows_of_whole_numbers(memory, width, n) -> None:
    x = np.random.default_rng(n).standard_normal((n, width)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(1).uniform(-6, 6, (n, 1)).astype(np.float32)
    codes, scales = unpack_integers(cuda_prepare.prepare(memory, cupy.asarray(x), RowKind.INTEGERS), width)
    expected_codes, expected_scales = rounded(x)
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(scales, expected_scales)
    assert np.abs(codes).max() == 127


@pytest.mark.parametrize("width", [64, 576, 5120, 17408])
def test_norm_and_gate_of_whole_numbers_are_those_of_the_rows(memory, width) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, width)).astype(np.float32) * 3
    weight = rng.uniform(0.5, 2, width).astype(np.float32)
    picked = cuda_prepare.Picked(cupy.asarray(x), cupy.array([4, 0], dtype=cupy.int32))
    rows = cuda_prepare.norm(memory, picked, cupy.asarray(weight), 1e-5, RowKind.INTEGERS)
    codes, scales = unpack_integers(rows, width)
    expected = (x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight)[[4, 0]]
    assert (np.abs(codes * scales - expected) <= 0.501 * scales).all()
    gate_up = rng.standard_normal((5, 2 * width)).astype(np.float32) * 4
    codes, scales = unpack_integers(
        cuda_prepare.swiglu(memory, cupy.asarray(gate_up), RowKind.INTEGERS), width
    )
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:]
    assert (np.abs(codes * scales - gate / (1 + np.exp(-gate)) * up) <= 0.501 * scales).all()


def test_groups_that_are_not_finite_or_tiny(memory) -> None:
    x = np.ones((3, 576), np.float32)
    x[1, 40], x[1, 70] = np.nan, np.inf
    x[2, :32], x[2, 32:64] = 1e-37, 0
    rows = cuda_prepare.prepare(memory, cupy.asarray(x), RowKind.INTEGERS)
    codes, scales = unpack_integers(rows, 576)
    assert np.isnan(scales[1, [40, 70]]).all()
    assert not codes[1, 32:64].any()
    assert np.isfinite(scales[1, [0, 100, 575]]).all()
    assert not codes[2, :64].any()
    assert (codes[0] == 127).all()
