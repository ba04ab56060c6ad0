"""What the engine needs of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.batch import Array, Batch
from slotd.protocol.errors import SlotdError

#: Asked between layers: whether the call is to be given up.
Interrupt = Callable[[], bool]


class Interrupted(SlotdError):
    """A call was given up between two layers, because its interrupt said so."""


class Model(Protocol):
    """One architecture, loaded."""

    def embed(self, tokens: npt.NDArray[np.int32]) -> Array:
        """[n] -> residual stream before the first layer, [n, n_embd]."""
        ...

    def forward(self, x: Array, batch: Batch, interrupt: Interrupt | None) -> Array:
        """Residual stream behind the last layer, [n, n_embd]. Uses up x; writes K/V of the rows.

        Raises:
            Interrupted: interrupt() said so.
            OutOfDeviceMemory: no scratch left.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """[m, n_embd] -> [m, n_vocab]."""
        ...

    def linear_weights(self) -> Iterable[Array]:
        """Every matrix that `linear` multiplies with."""
        ...
