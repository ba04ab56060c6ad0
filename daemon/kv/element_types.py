"""The types that K and V can be stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvType:
    """One storage type.

    Attributes:
        name: as `-ctk` and `-ctv` take it.
        dtype: of one stored element.
    """

    name: str
    dtype: np.dtype[Any]

    def bytes_per_token(self, n_layer: int, n_head_kv: int, dim: int) -> int:
        """Bytes that one token takes in one plane (K or V), all layers together."""
        return n_layer * n_head_kv * dim * self.dtype.itemsize


KV_TYPES = {
    "f32": KvType("f32", np.dtype(np.float32)),
    "f16": KvType("f16", np.dtype(np.float16)),
}

#: Names of the design that are not implemented yet.
NOT_YET = ("bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq3_0")


def kv_type(name: str) -> KvType:
    """The type of this name.

    Raises:
        ConfigError: not a K/V type, or one that this build does not have.
    """
    if name in KV_TYPES:
        return KV_TYPES[name]
    available = ", ".join(KV_TYPES)
    if name in NOT_YET:
        raise ConfigError(f"K/V type {name} is not supported yet (supported: {available})")
    raise ConfigError(f"{name!r} is not a K/V type (supported: {available})")
