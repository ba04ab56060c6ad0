"""The best of rows of logits chosen on the GPU: one small copy in, one out.

What goes in is a block of views and their adjustments, what comes out a block of heads and candidates; both
are laid out here, in host memory, and tested without a device.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.candidates import Candidates, View
from slotd.daemon.ops.kernels import kernel

#: As in kernels/sample.cu.
SLICES, THREADS, GROUPS, STRIDE, ROOM = 64, 256, 4096, 16384, 2048
SORT_THREADS, SLICE_BYTES, STATE_BYTES = 1024, 16, 8

#: Rounds of a thread that fit the mask of those with an adjusted id.
MOST_VOCAB = 32 * STRIDE

#: Most candidates of a view: of random values more than so many would often pass ROOM.
MOST_WANTED = 1024

#: Most adjustments of a view: each of its blocks goes through all of them.
MOST_ADJUSTMENTS = 4096

VIEW = np.dtype(
    [("row", "<i4"), ("most", "<i4"), ("first", "<i4"), ("n_adjustments", "<i4")]
    + [("repetition", "<f4"), ("presence", "<f4"), ("per_temperature", "<f8")]
)
ADJUSTMENT = np.dtype([("id", "<i4"), ("kinds", "<i4"), ("bias", "<f4"), ("frequency", "<f4")])
HEAD = np.dtype([("total", "<f8"), ("found", "<u4"), ("kept", "<i4"), ("finite", "<i4"), ("cut", "<i4")])

_ALIGNED = 256


def can_be_looked_at(view: View, n_vocab: int) -> bool:
    """Whether the kernels are made for such a view."""
    if n_vocab > MOST_VOCAB or view.most > MOST_WANTED:
        return False
    if view.adjustments is None:
        return True
    ids = view.adjustments.ids
    return len(ids) <= MOST_ADJUSTMENTS and int(ids[0]) >= 0 and int(ids[-1]) < n_vocab


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """Where things lie in the input, in device memory behind it, and in the output.

    Attributes:
        n_views, n_adjustments: in all.
        most: room for candidates of each view.
    """

    n_views: int
    n_adjustments: int
    most: int

    @classmethod
    def of(cls, views: SequenceOf[View]) -> SampleLayout:
        adjusted = sum(len(view.adjustments.ids) for view in views if view.adjustments is not None)
        return cls(len(views), adjusted, max(view.most for view in views))

    @property
    def n_bytes_in(self) -> int:
        return self.n_views * VIEW.itemsize + self.n_adjustments * ADJUSTMENT.itemsize

    @property
    def n_bytes_out(self) -> int:
        return self.n_views * (HEAD.itemsize + 3 * 4 * self.most)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of input, output, groups, slices, states and found values on the device; last, their end."""
        n = self.n_views
        sizes = [self.n_bytes_in, self.n_bytes_out]
        sizes += [n * GROUPS * 4, n * SLICES * SLICE_BYTES, n * STATE_BYTES, n * ROOM * 8]
        return tuple(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def pack(layout: SampleLayout, views: SequenceOf[View], target: npt.NDArray[np.uint8]) -> None:
    """Write the input: views, then adjustments. target: uint8 [n_bytes_in or more]."""
    edge = layout.n_views * VIEW.itemsize
    heads = target[:edge].view(VIEW)
    adjustments = target[edge : layout.n_bytes_in].view(ADJUSTMENT)
    first = 0
    for i, view in enumerate(views):
        per_temperature = 0.0 if view.temperature is None else 1 / view.temperature
        adjusted, n = view.adjustments, 0
        if adjusted is not None:
            n = len(adjusted.ids)
            part = adjustments[first : first + n]
            part["id"], part["kinds"] = adjusted.ids, adjusted.kinds
            part["bias"], part["frequency"] = adjusted.biases, adjusted.frequencies
        factors = (1, 0) if adjusted is None else (adjusted.repetition, adjusted.presence)
        heads[i] = (view.row, view.most, first, n, *factors, per_temperature)
        first += n


def unpack(
    layout: SampleLayout, views: SequenceOf[View], n_vocab: int, source: npt.NDArray[np.uint8]
) -> list[Candidates | None]:
    """Read the output, uint8 [n_bytes_out]; None for a view that the device cannot tell."""
    source = source.copy()
    edge = layout.n_views * HEAD.itemsize
    values = source[edge:].view(np.float32).reshape(layout.n_views, 3, layout.most)
    ids = values.view(np.int32)
    found: list[Candidates | None] = []
    for i, (total, n, kept, finite, cut) in enumerate(source[:edge].view(HEAD).tolist()):
        if not finite or not kept:  # nothing is kept where more is found than there is room for
            found.append(None)
            continue
        wanted_total = None if views[i].temperature is None else total
        complete = n == kept and (n == n_vocab or not cut)
        found.append(
            Candidates(values[i, 0, :kept], ids[i, 1, :kept], values[i, 2, :kept], wanted_total, complete)
        )
    return found


def sample(logits: Any, layout: SampleLayout, work: int) -> None:
    """Enqueue the kernels.

    logits: float32 [n, n_vocab] on the device, which stay as they are.
    work: address of `layout.offsets[-1]` bytes on the device, the input at the start.
    """
    n_vocab = logits.shape[1]
    views, out, groups, slices, states, found, _ = (work + offset for offset in layout.offsets)
    adjustments = views + layout.n_views * VIEW.itemsize
    grid = (SLICES, layout.n_views)
    lists = out + layout.n_views * HEAD.itemsize
    row = (logits, n_vocab, views)
    kernel("sample_slices").launch(grid, THREADS, (*row, adjustments, groups, slices, states), pdl=True)
    kernel("sample_collect").launch(grid, THREADS, (*row, adjustments, groups, states, found), pdl=True)
    args = (*row, slices, states, found, out, lists, layout.most)
    kernel("sample_sort").launch(layout.n_views, SORT_THREADS, args, pdl=True)
