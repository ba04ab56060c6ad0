"""Linear layers on the GPU with rows of whole numbers: eight bits for each number, a scale for each 32.

As exact as those 8 bits allow, and in one order of sums for every number of rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import cupy

from slotd.daemon.ops.cuda_linear import (
    LEAST_WARPS,
    REGISTERS,
    WARP,
    Output,
    Prepared,
    multiply,
    multiprocessors,
    parts_of,
)
from slotd.daemon.ops.cuda_weights import Format, Matrix
from slotd.daemon.ops.kernels import kernel

#: Most rows of one launch of the kernel for few rows.
MOST_FEW_ROWS = 64

#: Rows that are multiplied together by the kernel for few rows.
_ROW_GROUPS = (1, 8, 16, 24, 64)

#: Tiles that a warp copies ahead, and floats of the 16 sums of a row in shared memory (kernels/linear_q8.cu).
_STAGES, _COLUMN_STRIDE = 3, 20

#: Shared memory that the system takes of each block.
_RESERVED_SHARED = 1024


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Rows as the kernels of this module read them (kernels/prepare.cu, Integers).

    Attributes:
        codes: uint8 [segments, room, 256], in the order of the tensor cores.
        scale: float32 [segments, room / 2, 4, 2, 2], of each 32 columns.
        sums: float32 [segments, room, 4, 4], scale times the sum of the codes in two pieces.
        sums16: the same for each 16 columns, [segments, room, 2, 4, 4]; None where no weight wants it.
        n: rows.
        room: rows that there is memory for, an even number.
    """

    codes: Any
    scale: Any
    sums: Any
    sums16: Any
    n: int
    room: int


#: Rows for either kind of product.
Rows = Prepared | IntegerRows


class RowKind(Enum):
    """How rows are prepared for a product."""

    HALVES = "16-bit numbers"
    INTEGERS = "whole numbers"
    INTEGERS_SUMS_16 = "whole numbers with sums of each 16 columns"


class _Rows(ctypes.Structure):
    _fields_ = [
        ("codes", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("sums", ctypes.c_uint64),
        ("sums16", ctypes.c_uint64), ("n", ctypes.c_int32), ("room", ctypes.c_int32),
    ]  # fmt: skip


def row_kind(weight: Matrix, math: str) -> RowKind:
    """What rows a weight is multiplied with. Whole numbers need whole numbers on the other side.

    math: exact or q8.
    """
    forms = {part.format.name for part in weight.parts}
    if math != "q8" or "f16" in forms:
        return RowKind.HALVES
    return RowKind.INTEGERS_SUMS_16 if "u4_h16" in forms else RowKind.INTEGERS


def room_for_integers(n: int) -> int:
    """Rows to allocate for n."""
    return n + n % 2


def multiply_rows(x: Rows, weight: Matrix, y: Any, *, add: bool) -> None:
    """y = x weight^T, or y += it, with rows of the kind that `row_kind` names."""
    if isinstance(x, Prepared):
        multiply(x, weight, y, add=add)
    else:
        multiply_q8(x, weight, y, add=add)


def multiply_q8(x: IntegerRows, weight: Matrix, y: Any, *, add: bool) -> None:
    """y = x weight^T, or y += it. y: float32 [x.n, weight.n_out], rows contiguous."""
    for first in range(0, x.n, MOST_FEW_ROWS):
        n = min(MOST_FEW_ROWS, x.n - first)
        sums16 = 0 if x.sums16 is None else x.sums16.data.ptr + first * 128
        rows = _Rows(
            x.codes.data.ptr + first * 256, x.scale.data.ptr + first * 32, x.sums.data.ptr + first * 64,
            sums16, n, x.room,
        )  # fmt: skip
        linear_q8(rows, weight, Output(y[first:].data.ptr, y.strides[0] // 4, int(add)))


def linear_q8(rows: _Rows, weight: Matrix, output: Output) -> None:
    """The product for at most 64 rows: one launch for each format of the weight."""
    group = next(group for group in _ROW_GROUPS if group >= rows.n)
    for form in dict.fromkeys(part.format for part in weight.parts):
        parts = [part for part in weight.parts if part.format == form]
        chosen = kernel(f"linear_q8_{form.name}_{group}")
        tiles = sum(part.n_tiles for part in parts)
        shared = shared_of_warp(form, group)
        warps = warps_for(tiles, weight.n_segments, chosen.registers, shared, chosen.most_threads // WARP)
        args = (parts_of(parts, weight), rows, output)
        chosen.launch(tiles, warps * WARP, args, smem=warps * shared, pdl=True)


def shared_of_warp(form: Format, group: int) -> int:
    """Bytes of shared memory of each warp: its tiles, and two turns of its sums."""
    return _STAGES * -(-form.tile_bytes // 128) * 128 + 2 * group * _COLUMN_STRIDE * 4


@lru_cache(maxsize=256)
def warps_for(n_tiles: int, n_segments: int, registers: int, shared: int, most: int) -> int:
    """Warps that share the segments of a tile. Any number gives the same sums.

    Chosen as `cuda_linear.warps_for` does, with shared memory as a second limit.
    """
    by_registers = REGISTERS // (-(-registers // 8) * 8 * WARP)

    def cost(warps: int) -> tuple[int, int]:
        by_shared = shared_of_multiprocessor() // (warps * shared + _RESERVED_SHARED)
        at_once = max(1, min(by_registers // warps, by_shared))
        waves = -(-n_tiles // (at_once * multiprocessors()))
        return waves * -(-n_segments // warps), warps

    return min(range(LEAST_WARPS, most + 1), key=cost)


@lru_cache(maxsize=1)
def shared_of_multiprocessor() -> int:
    """Bytes of shared memory of a multiprocessor of the current device."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return int(properties["sharedMemPerMultiprocessor"])
