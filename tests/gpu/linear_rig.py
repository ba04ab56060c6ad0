"""Weights and rows for tests of linear layers."""

from __future__ import annotations

import cupy
import numpy as np

from slotd.daemon.ops import cuda_linear, cuda_prepare
from slotd.daemon.ops.cuda_weights import WeightLoader
from tests.gpu.blocks import RowsFile, random_rows, values_of


def weights(memory, types, n_rows, n_in) -> tuple:
    tensors = {f"w{i}": (t, random_rows(t, n_rows, n_in, seed=i)) for i, t in enumerate(types)}
    matrix = WeightLoader(memory).matrix(RowsFile(tensors), *tensors)
    return matrix, np.concatenate([values_of(t, rows) for t, rows in tensors.values()])


def product(memory, x, matrix) -> np.ndarray:
    y = memory.empty((len(x), matrix.n_out))
    cuda_linear.multiply(cuda_prepare.prepare(memory, cupy.asarray(x)), matrix, y, add=False)
    return y.get()


def outlier_rows(n, n_in, seed=0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, n_in)).astype(np.float32)
    x[:, 3] *= 1000
    return x
