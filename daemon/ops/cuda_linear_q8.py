"""Linear layers on the GPU for rows of 8-bit whole numbers, a scale for each 32 (``--math q8``).

For the rows of steps, where the time that weights take is what counts. One order of sums for any of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from slotd.daemon.ops.cuda_linear import WARP, Output, launches_of, parts_of, warps_for
from slotd.daemon.ops.cuda_weights import Matrix
from slotd.daemon.ops.kernels import kernel

#: Most rows of one launch; more are several.
MOST_ROWS = 24

#: Bytes of the sums of a row and segment in shared memory, and what a block can have of it.
_SUM_BYTES, _SHARED_BYTES = 16 * 4 * 4, 227 << 10


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Rows as the kernels of this module read them (kernels/prepare.cu, Integers).

    Attributes:
        codes: int8 [segments, room, 256].
        scale: float32 [segments, room, 4, 4]: of two times 32 columns the scale, and it times the codes' sum.
        sums16: int32 [segments, room, 4, 4]: sums of the codes of 16 columns.
        n: rows.
        room: rows that there is memory for.
    """

    codes: Any
    scale: Any
    sums16: Any
    n: int
    room: int


class _Rows(ctypes.Structure):
    _fields_ = [
        ("codes", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("sums16", ctypes.c_uint64),
        ("n", ctypes.c_int32), ("room", ctypes.c_int32),
    ]  # fmt: skip


def has_whole_numbers(weight: Matrix) -> bool:
    """Whether all of a weight is stored as whole numbers times scales."""
    return all(part.format.name != "f16" for part in weight.parts)


def multiply_integers(x: IntegerRows, weight: Matrix, y: Any, *, add: bool) -> None:
    """y = x weight^T, or y += it. y: float32 [x.n, weight.n_out], rows contiguous."""
    for first in range(0, x.n, MOST_ROWS):
        rows = _Rows(
            x.codes.data.ptr + first * 256, x.scale.data.ptr + first * 64, x.sums16.data.ptr + first * 64,
            min(MOST_ROWS, x.n - first), x.room,
        )  # fmt: skip
        linear_q8(rows, weight, Output(y[first:].data.ptr, y.strides[0] // 4, int(add)))


def linear_q8(rows: _Rows, weight: Matrix, output: Output) -> None:
    """The product for at most MOST_ROWS rows."""
    for parts in launches_of(weight):
        chosen = kernel(f"linear_q8_{parts[0].format.name}_{'one' if rows.n == 1 else 'few'}")
        tiles = sum(part.n_tiles for part in parts)
        most = min(chosen.most_threads // WARP, _SHARED_BYTES // (2 * rows.n * _SUM_BYTES))
        warps = warps_for(tiles, weight.n_segments, chosen.registers, most)
        args = (parts_of(parts, weight), rows, output)
        chosen.launch(tiles, warps * WARP, args, smem=2 * warps * rows.n * _SUM_BYTES, pdl=True)
