"""Features of rows on the GPU: the residual stream behind some layers of a model, side by side, as halves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import Ledger, OutOfDeviceMemory
from slotd.daemon.ops.kernels import kernel

#: Of a block: threads, and numbers that it copies.
THREADS, WIDTH = 256, 1024

#: Rows of steps whose features are kept.
RING = 512


def taps(x: Any, features: Any, part: int, to: Any = None) -> None:
    """Rows of x become columns part * m .. of rows of features; what no half holds, the nearest one.

    Args:
        x: float32 [n, m] on the device, m a multiple of four.
        features: float16 [rows, k * m].
        to: int32 [n] on the device, which row each becomes, a negative one none; default: its own number.
    """
    n, m = x.shape
    target = features.data.ptr + 2 * part * m
    args = (x, m, target, features.strides[0] // 2, to)
    kernel("taps_store").launch((-(-m // WIDTH), n), THREADS, args, pdl=True)


class CudaTaps:
    """See `models.model.Taps`.

    Args:
        layers: whose output is kept, in the order of the features.
        features, to: as of `taps`.
    """

    def __init__(self, layers: Sequence[int], features: Any, to: Any = None) -> None:
        self._part = {layer: part for part, layer in enumerate(layers)}
        self._features, self._to = features, to

    def after(self, layer: int, x: Any) -> None:
        part = self._part.get(layer)
        if part is not None:
            taps(x, self._features, part, self._to)


class CudaFeatures:
    """The features of a model's last call, and those of steps before it that somebody holds.

    A prompt's are in memory of their own. Steps leave theirs in a ring: numbers of its rows only grow, row
    number r is at r % RING.

    Args:
        memory: the ledger.
        layers: whose output they are.
        n_embd: width of each.

    Attributes:
        of_steps: float16 [RING, len(layers) * n_embd], the ring.

    Raises:
        OutOfDeviceMemory: no room for the ring.
    """

    def __init__(self, memory: Ledger, layers: Sequence[int], n_embd: int) -> None:
        self._memory, self._layers, self._width = memory, layers, len(layers) * n_embd
        self.of_steps = memory.empty((RING, self._width), np.float16, tag="draft")
        self._rows: Any = None
        self._first = self._next = 0
        self._held: int | None = None  # the lowest number that is held
        self._release: weakref.WeakMethod[Callable[[], None]] | None = None

    def step_taps(self, to: Any) -> CudaTaps:
        """What a step looks at its layers with. to: int32 [rows], where `places` goes on the device."""
        return CudaTaps(self._layers, self.of_steps, to)

    def places(self, places: npt.NDArray[np.int32], n: int) -> int:
        """Choose where in the ring a step of n rows that is about to run leaves its features.

        Args:
            places: int32 [rows of the bucket], filled.

        Returns:
            The number of the first row.
        """
        first = self._next
        if first % RING + n > RING:
            first += RING - first % RING
        if self._held is not None and first + n > self._held + RING and self._release is not None:
            release = self._release()
            if release is not None:
                release()
        self._next = first + n
        places[:n] = np.arange(first % RING, first % RING + n)
        places[n:] = -1
        return first

    def prompt_taps(self, n: int) -> CudaTaps | None:
        """What a prompt call of n rows that begins looks with; None: there is no room for its features."""
        try:
            rows = self._memory.empty((n, self._width), np.float16, tag="draft")
        except OutOfDeviceMemory:
            return None
        self._rows, self._first = rows, 0
        return CudaTaps(self._layers, rows)

    def left_by_step(self, first: int) -> None:
        """The last call was a step whose first row had this number."""
        self._rows, self._first = self.of_steps, first

    def forget(self) -> None:
        """The last call left none, until it does."""
        self._rows = None

    def of(self, rows: npt.NDArray[np.int64]) -> tuple[Any, npt.NDArray[np.int32]]:
        """The array where features of rows of the last call are, and which rows of it they are.

        Raises:
            OutOfDeviceMemory: there was no room for them.
        """
        if self._rows is None:
            raise OutOfDeviceMemory(self._memory.current_site, 0, self._memory.free)
        index = rows + self._first
        return self._rows, (index % RING if self._rows is self.of_steps else index).astype(np.int32)

    def hold(self, release: Callable[[], None]) -> None:
        """The rows of the last step are still to be read. release: a method that reads what is held."""
        if self._held is None:
            self._held = self._first
            self._release = weakref.WeakMethod(release)

    def held_no_more(self) -> None:
        """All reads of what was held are enqueued."""
        self._held = None
