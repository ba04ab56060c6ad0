"""Weights and rows for tests of linear layers."""

from __future__ import annotations

import cupy
import numpy as np

from slotd.daemon.ops import cuda_prepare
from slotd.daemon.ops.cuda_rows import RowKind, multiply
from slotd.daemon.ops.cuda_weights import WeightLoader
from tests.gpu.blocks import RowsFile, random_rows, values_of


def weights(memory, types, n_rows, n_in) -> tuple:
    tensors = {f"w{i}": (t, random_rows(t, n_rows, n_in, seed=i)) for i, t in enumerate(types)}
    matrix = WeightLoader(memory).matrix(RowsFile(tensors), *tensors)
    return matrix, np.concatenate([values_of(t, rows) for t, rows in tensors.values()])


def product(memory, x, matrix, kind=RowKind.HALVES) -> np.ndarray:
    y = memory.empty((len(x), matrix.n_out))
    multiply(cuda_prepare.prepare(memory, cupy.asarray(x), kind), matrix, y, add=False)
    return y.get()


def product_q8(memory, x, matrix) -> np.ndarray:
    return product(memory, x, matrix, RowKind.INTEGERS)


def outlier_rows(n, n_in, seed=0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, n_in)).astype(np.float32)
    x[:, 3] *= 1000
    return x


def rounded(x) -> tuple[np.ndarray, np.ndarray]:
    """Rows as whole numbers: codes float64 [n, width], and the scale of each of them.

    The largest magnitude of each 32 columns becomes 127.
    """
    n, width = x.shape
    groups = np.zeros((n, -(-width // 32), 32), np.float32)
    groups.reshape(n, -1)[:, :width] = x
    peak = np.abs(groups).max(axis=2, keepdims=True)
    scale = peak / np.float32(127)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.rint(groups * inverse).astype(np.float64)
    scales = np.broadcast_to(scale.astype(np.float64), codes.shape)
    return codes.reshape(n, -1)[:, :width], scales.reshape(n, -1)[:, :width]
