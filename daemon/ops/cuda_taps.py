"""Features of rows on the GPU: the residual stream behind some layers of a model, side by side, as halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slotd.daemon.ops.kernels import kernel

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
