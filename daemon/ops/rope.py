"""Rotary angles by position, worked out in float64 and kept as float32 pairs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import Array

#: Positions worked out at a time. Always whole blocks, so that a table never depends on how it grew.
BLOCK = 1024


class RopeTable:
    """cos + i sin of position * base^(-2i/dims) / divisors[i] for i = 0 .. dims/2 - 1.

    Args:
        memory: where the table is kept.
        base: base of the frequencies.
        dims: rotated dimensions of a head, even.
        divisors: float32 [dims/2], the model's `rope_freqs`, or None.
    """

    def __init__(self, memory: DeviceMemory, base: float, dims: int, divisors: Array | None = None) -> None:
        self.dims = dims
        self._memory = memory
        self._frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        if divisors is not None:
            self._frequencies /= divisors.astype(np.float64)
        self._table = memory.empty((0, dims // 2), np.complex64, tag="weights")

    def at(self, positions: npt.NDArray[np.int64]) -> Array:
        """complex64 [n, dims/2] for positions [n]."""
        top = int(positions.max(initial=-1))
        if top >= len(self._table):
            self._grow(max(top + 1, 2 * len(self._table)))
        return self._table[positions]

    def _grow(self, n: int) -> None:
        table = self._memory.empty((-(-n // BLOCK) * BLOCK, self.dims // 2), np.complex64, tag="weights")
        table[: len(self._table)] = self._table
        for start in range(len(self._table), len(table), BLOCK):
            angles = np.arange(start, start + BLOCK, dtype=np.float64)[:, None] * self._frequencies
            block = table[start : start + BLOCK]
            block.real = np.cos(angles)
            block.imag = np.sin(angles)
        self._table = table
