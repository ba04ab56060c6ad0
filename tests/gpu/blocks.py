"""Random matrices of every GGUF type as a model file would have them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import quants

from tests.bench import random_blocks


def random_rows(type_name: str, n_rows: int, n_in: int, seed: int = 0) -> np.ndarray:
    """uint8 [n_rows, bytes of a row]."""
    rows = random_blocks.random_rows(type_name, n_rows, n_in, 0.05, seed)
    return np.ascontiguousarray(rows).view(np.uint8)


def values_of(type_name: str, rows: np.ndarray) -> np.ndarray:
    """float32 [n_rows, n_in]."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name == "F16":
        return rows.view(np.float16).astype(np.float32)
    if type_name == "F32":
        return rows.view(np.float32)
    return quants.dequantize(rows, kind).astype(np.float32)


class RowsFile:
    """Looks like an open model file with one matrix for each name."""

    memory_tag = "weights"

    def __init__(self, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        from types import SimpleNamespace

        from slotd.daemon.weights.block_types import block_type

        self._tensors = tensors
        self._kinds = {n: block_type(int(gguf.GGMLQuantizationType[t])) for n, (t, _) in tensors.items()}
        shapes = {}
        for name, (type_name, rows) in tensors.items():
            elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
            shapes[name] = SimpleNamespace(shape=(rows.shape[1] // n_bytes * elements, len(rows)))
        self.header = SimpleNamespace(tensors=shapes)

    def block_type(self, name: str) -> Any:
        return self._kinds[name]

    def n_bytes(self, name: str) -> int:
        return self._tensors[name][1].nbytes

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name][1]

    def dequantise(self, name: str) -> np.ndarray:
        return values_of(*self._tensors[name])
