"""What the engine needs of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from slotd.daemon.ops.interface import Array, CallBatch, Matrix, Tokens
from slotd.daemon.weights.architectures import HyperParameters
from slotd.protocol.errors import SlotdError

#: Asked between layers: whether the call is to be given up.
Interrupt = Callable[[], bool]


class Interrupted(SlotdError):
    """A call was given up between two layers, because its interrupt said so."""


class Taps(Protocol):
    """Looks at the residual stream on its way through a model."""

    def after(self, layer: int, x: Array) -> None:
        """Called behind each layer; what is to be kept of x, [n, n_embd], has to be copied."""
        ...


class Model(Protocol):
    """One architecture, loaded."""

    @property
    def hyper(self) -> HyperParameters:
        """Of the file it was read from."""
        ...

    @property
    def output(self) -> Matrix:
        """The matrix of the output head, [n_vocab, n_embd]."""
        ...

    def embed(self, tokens: Tokens) -> Array:
        """[n] -> residual stream before the first layer, [n, n_embd]."""
        ...

    def forward(
        self, x: Array, batch: CallBatch, interrupt: Interrupt | None, taps: Taps | None = None
    ) -> Array:
        """Residual stream behind the last layer, [n, n_embd]. Uses up x; writes K/V of the rows.

        Raises:
            Interrupted: interrupt() said so.
            OutOfDeviceMemory: no scratch left.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """[m, n_embd] -> [m, n_vocab]."""
        ...

    def linear_weights(self) -> Iterable[Matrix]:
        """Every matrix that rows are multiplied with."""
        ...
