"""The state of recurrent layers, and what a step keeps of its rows until one of its paths is committed.

A state is float32 numbers in one piece, the same in the memory of every device, in host memory and in files:
for each layer the last K-1 inputs of the short convolution, oldest first, then for each layer the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.weights.delta_net import DeltaNet

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Of one sequence, behind its committed end or behind the rows of a prompt call.

    Attributes:
        flat: float32 [state bytes / 4], all of it.
        conv: [n_layer, K - 1, channels] view; inputs before the activation, oldest first.
        matrices: [n_layer, value heads, S, S] view, key x value.
    """

    flat: Array
    conv: Array
    matrices: Array

    @classmethod
    def of(cls, net: DeltaNet, flat: Array) -> RecurrentState:
        """Views of these numbers."""
        n_layer, size = len(net.layers), net.state_size
        conv_shape = (n_layer, net.conv_kernel - 1, net.channels)
        n_conv = n_layer * (net.conv_kernel - 1) * net.channels
        return cls(
            flat=flat,
            conv=flat[:n_conv].reshape(conv_shape),
            matrices=flat[n_conv:].reshape(n_layer, net.n_value_heads, size, size),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the rows of a step put into the recurrence; a commit replays those of its path.

    Attributes:
        u: [n_layer, n, channels], inputs of the convolution.
        k: [n_layer, n, key heads, S], of length 1.
        v: [n_layer, n, value heads, S].
        g: [n_layer, n, value heads], logarithm of the decay.
        beta: [n_layer, n, value heads], share that is written.
    """

    u: Array
    k: Array
    v: Array
    g: Array
    beta: Array

    @staticmethod
    def size(net: DeltaNet, n: int) -> int:
        """Numbers for n rows."""
        row = net.channels + net.key_width + net.value_width + 2 * net.n_value_heads
        return len(net.layers) * n * row

    @classmethod
    def of(cls, net: DeltaNet, n: int, flat: Array) -> StepInputs:
        """Views of these numbers, float32 [size(net, n)]."""
        shapes = [
            (net.channels,), (net.n_key_heads, net.state_size), (net.n_value_heads, net.state_size),
            (net.n_value_heads,), (net.n_value_heads,),
        ]  # fmt: skip
        views, start = [], 0
        for shape in shapes:
            stop = start + len(net.layers) * n * int(np.prod(shape))
            views.append(flat[start:stop].reshape(len(net.layers), n, *shape))
            start = stop
        return cls(*views)


@dataclass(frozen=True, slots=True)
class RecurrentSpan:
    """The rows of one sequence, as recurrent layers see them.

    Attributes:
        length: committed tokens in front of them.
        parents: of each row, counted in the span; -1: the committed end.
        state: behind the committed end; None: nothing was committed, all is zero.
        after: of a prompt, where the state behind its last row goes.
        inputs: of a step, where they are kept.
    """

    length: int
    parents: npt.NDArray[np.int32]
    state: RecurrentState | None
    after: RecurrentState | None = None
    inputs: StepInputs | None = None
