"""The types that K and V can be stored in: a format of blocks, and how the pages hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.ops import kv_blocks
from slotd.daemon.ops.tq3_blocks import TQ3_0
from slotd.daemon.weights.block_types import BlockType
from slotd.daemon.weights.kv_formats import KV_FORMATS, kv_format


@dataclass(frozen=True, slots=True)
class KvType:
    """One storage type.

    Attributes:
        name: as `-ctk` and `-ctv` take it.
        format: the format; its bytes are the ones stored.
        dtype: of one item in the pages, a number or a block of them. It is what the ops tell formats by.
    """

    name: str
    format: BlockType
    dtype: np.dtype[Any]

    def items(self, dim: int) -> int:
        """Items in a row of `dim` numbers."""
        return dim // self.format.block_elements

    def bytes_per_token(self, n_layer: int, n_head_kv: int, dim: int) -> int:
        """Bytes that one token takes in one plane (K or V), all layers together."""
        return n_layer * n_head_kv * self.format.row_bytes(dim)


_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": kv_blocks.F32,
    "f16": kv_blocks.F16,
    "bf16": kv_blocks.BF16,
    "q8_0": kv_blocks.Q8_0,
    "q4_0": kv_blocks.Q4_0,
    "q4_1": kv_blocks.Q4_1,
    "q5_0": kv_blocks.Q5_0,
    "q5_1": kv_blocks.Q5_1,
    "tq3_0": TQ3_0,
}

KV_TYPES = {name: KvType(name, kind, _DTYPES[name]) for name, kind in KV_FORMATS.items()}


def kv_type(name: str) -> KvType:
    """The type of this name.

    Raises:
        ConfigError: not a K/V type.
    """
    kv_format(name)
    return KV_TYPES[name]
