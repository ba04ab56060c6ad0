"""Random GGUF blocks of every type with sane scales, and what they stand for."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import quants

#: Byte offsets of the float16 fields of a block.
_HALF_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip

TYPES = (*_HALF_FIELDS, "F16", "BF16", "F32")


def random_rows(type_name: str, n_rows: int, n_in: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [n_rows, bytes of a row]."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name in ("F16", "BF16", "F32"):
        values = (rng.standard_normal((n_rows, n_in)) * 0.05).astype(np.float32)
        if type_name == "F32":
            return values.view(np.uint8)
        if type_name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8).reshape(n_rows, -1)
    elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n_rows, n_in // elements, n_bytes), dtype=np.uint8)
    for field in _HALF_FIELDS[type_name]:
        scale = rng.uniform(0.0005, 0.01, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
        scale *= 10.0 ** rng.uniform(-2, 1, (n_rows, 1))  # rows of very different size
        blocks[..., field : field + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


def values_of(type_name: str, rows: np.ndarray) -> np.ndarray:
    """float32 [n_rows, n_in]."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name == "F32":
        return rows.view(np.float32)
    return quants.dequantize(rows, kind).astype(np.float32)


class RowsFile:
    """Looks like an open model file with one matrix for each name."""

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
