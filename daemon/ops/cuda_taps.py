"""Features of rows on the GPU: the residual stream behind some layers of a model, side by side, as halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import Ledger, OutOfDeviceMemory
from slotd.daemon.ops.kernels import kernel
from slotd.daemon.rows import MAX_STEP_ROWS

#: Of a block: threads, and numbers that it copies.
THREADS, WIDTH = 256, 1024


def taps(x: Any, features: Any, part: int) -> None:
    """Rows of x become columns part * m .. of the rows of features; what no half holds, the nearest one.

    Args:
        x: float32 [n, m] on the device, m a multiple of four.
        features: float16 [n or more, k * m].
    """
    n, m = x.shape
    target = features.data.ptr + 2 * part * m
    args = (x, m, target, features.strides[0] // 2)
    kernel("taps_store").launch((-(-m // WIDTH), n), THREADS, args, pdl=True)


class CudaTaps:
    """See `models.model.Taps`.

    Args:
        layers: whose output is kept, in the order of the features.
        features: where it goes: float16 [rows or more, len(layers) * n_embd].
    """

    def __init__(self, layers: Sequence[int], features: Any) -> None:
        self._part = {layer: part for part, layer in enumerate(layers)}
        self._features = features

    def after(self, layer: int, x: Any) -> None:
        part = self._part.get(layer)
        if part is not None:
            taps(x, self._features, part)


class CudaFeatures:
    """The features of a model's last call.

    A prompt's are in memory of their own. Steps leave theirs in one of two places that stay, so that the step
    that is foreseen does not write where those of the one before it are still to be read.

    Args:
        memory: the ledger.
        layers: whose output they are.
        n_embd: width of each.

    Attributes:
        of_steps: float16 [2 * MAX_STEP_ROWS, len(layers) * n_embd], both places.

    Raises:
        OutOfDeviceMemory: no room for steps.
    """

    def __init__(self, memory: Ledger, layers: Sequence[int], n_embd: int) -> None:
        self._memory, self._layers, self._width = memory, layers, len(layers) * n_embd
        self.of_steps = memory.empty((2 * MAX_STEP_ROWS, self._width), np.float16, tag="draft")
        self._rows: Any = None
        self._first = 0

    def step_taps(self, place: int) -> CudaTaps:
        """What a step looks at its layers with, place 0 or 1."""
        rows = self.of_steps[place * MAX_STEP_ROWS : (place + 1) * MAX_STEP_ROWS]
        return CudaTaps(self._layers, rows)

    def prompt_taps(self, n: int) -> CudaTaps | None:
        """The same of a prompt call of n rows that begins; None: there is no room for them."""
        try:
            rows = self._memory.empty((n, self._width), np.float16, tag="draft")
        except OutOfDeviceMemory:
            return None
        self._rows, self._first = rows, 0
        return CudaTaps(self._layers, rows)

    def left_by_step(self, place: int) -> None:
        """The last call was a step with the taps of this place."""
        self._rows, self._first = self.of_steps, place * MAX_STEP_ROWS

    def forget(self) -> None:
        """There are none, until a call leaves some."""
        self._rows = None

    def of(self, rows: npt.NDArray[np.int64]) -> tuple[Any, npt.NDArray[np.int32]]:
        """The array where features of rows of the last call are, and which rows of it they are.

        Raises:
            OutOfDeviceMemory: there was no room for them.
        """
        if self._rows is None:
            raise OutOfDeviceMemory(self._memory.current_site, 0, self._memory.free)
        return self._rows, (rows + self._first).astype(np.int32)
