"""kernels/taps.cu, and rows of features on their way into a product (prepare_taken)."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops import cuda_prepare
from slotd.daemon.ops.cuda_taps import CudaTaps
from tests.gpu.test_prepare import close, unpack


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("n", "width"), [(1, 576), (23, 576), (64, 5120), (2048, 1028)])
def test_outputs_of_layers_side_by_side(memory, n: int, width: int, elsewhere: bool) -> None:
    rng = np.random.default_rng(n)
    layers = {layer: (rng.standard_normal((n, width)) * 100).astype(np.float32) for layer in range(6)}
    layers[4][0, :5] = 24_891.0, 1e6, -1e6, np.nan, 3e-8
    features = memory.empty((n + 2, 3 * width), "float16")
    taps = CudaTaps((4, 0, 2), features)
    places = np.arange(n, dtype=np.int32)[::-1].copy()
    if elsewhere:
        places[::3] = -1
        taps = CudaTaps((4, 0, 2), features, cupy.asarray(places))
    for layer, x in layers.items():
        taps.after(layer, cupy.asarray(x))
    got = features.get()
    if elsewhere:
        there = places >= 0
        others = np.setdiff1d(np.arange(n), places[there])
        assert (got[others].view(np.uint16) == 0xFFFF).all(), "rows that nothing goes to were written"
        layers = {layer: x[there] for layer, x in layers.items()}
        got = np.concatenate([got[places[there]], got[n:]])
        n = int(there.sum())
    assert (got[n:].view(np.uint16) == 0xFFFF).all(), "rows behind were written"
    for part, layer in enumerate((4, 0, 2)):
        expected = np.clip(layers[layer], -65504, 65504).astype(np.float16)
        columns = got[:n, part * width : (part + 1) * width]
        differing = np.argwhere(columns.view(np.uint16) != expected.view(np.uint16))
        differing = differing[~np.isnan(expected[tuple(differing.T)])]  # any NaN will do
        assert not len(differing), f"layer {layer}: {len(differing)} differ, at {differing[:5].tolist()}"
        assert (np.isnan(columns) == np.isnan(expected)).all()


@pytest.mark.parametrize("width", [64, 2880, 8192, 10_244, 20_480, 25_600, 32_768])
def test_picked_rows_are_prepared_as_they_are(memory, width: int) -> None:
    x = np.random.default_rng(width).standard_normal((9, width)).astype(np.float16)
    x[3] *= 1000
    x[3, -1] = 24_891
    for rows in ([5], [3, 3, 0, 8], list(range(9)) * 12):
        source = cupy.asarray(np.array(rows, np.int32))
        prepared = cuda_prepare.taken(memory, cuda_prepare.Picked(cupy.asarray(x), source))
        close(unpack(prepared, width), x[rows].astype(np.float64))
