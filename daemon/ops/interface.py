"""The operations a model is written with. One model code, several backends.

n = rows of the call, H = query heads, G = key/value heads, D = width of a query and key head, E = width of a
value head. Arrays are float32 in the backend's memory. An op returns a new array unless it says "in place".
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.batch import Array, Batch
from slotd.daemon.ops.rope import RopeTable

#: Which dimensions of a head turn together: interleaved = (2i, 2i+1), half = (i, i + dims/2).
RopeStyle = Literal["interleaved", "half"]


class Ops(Protocol):
    """A backend. Every op may raise OutOfDeviceMemory."""

    def embed(self, tokens: npt.NDArray[np.int32], table: Array) -> Array:
        """Rows of `table` [n_vocab, n_embd] for `tokens` [n] -> [n, n_embd]."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis. x [n, m], weight [m] -> [n, m]."""
        ...

    def linear(self, x: Array, weight: Array) -> Array:
        """x weight^T. x [n, n_in], weight [n_out, n_in] -> [n, n_out]."""
        ...

    def rope_table(self, base: float, dims: int, divisors: Array | None) -> RopeTable:
        """The angles of a model: position * base^(-2i/dims) / divisors[i], i = 0 .. dims/2 - 1."""
        ...

    def rotations(self, table: RopeTable, positions: npt.NDArray[np.int64]) -> Array:
        """cos + i sin of the angles at `positions` [n] -> complex64 [n, dims/2]."""
        ...

    def rope(self, x: Array, rotations: Array, style: RopeStyle) -> None:
        """Rotate the first `dims` of every head, in place. x [n, heads, D], rotations [n, dims/2]."""
        ...

    def kv_write(self, layer: int, k: Array, v: Array, batch: Batch) -> None:
        """Store K and V of all rows at their places, in the stored type. k [n, G, D], v [n, G, E]."""
        ...

    def attend(self, layer: int, q: Array, batch: Batch, scale: float) -> Array:
        """softmax(scale q K^T) V over what each row may see, itself included. q [n, H, D] -> [n, H * E].

        Head h reads key/value head h // (H / G). K and V are read back through the stored type. Uses up q.
        """
        ...

    def kv_move(self, sources: list[tuple[Array, Array]], targets: list[tuple[Array, Array]]) -> None:
        """Move the stored bytes of tokens, (K, V) views each [n_layer, G, items].

        All sources are read before any write.
        """
        ...

    def swiglu(self, gate_up: Array) -> Array:
        """silu(gate) * up. gate_up [n, 2 n_ff], gate in the first half -> [n, n_ff]."""
        ...

    def add(self, x: Array, y: Array) -> None:
        """x += y, in place."""
        ...
