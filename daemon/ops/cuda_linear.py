"""Linear layers on the GPU: prepared rows times tiled weights, one order of sums for every number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy

from slotd.daemon.ops.cuda_weights import Matrix, MatrixPart
from slotd.daemon.ops.kernels import kernel

#: Most rows of one launch of the kernel for few rows.
MOST_FEW_ROWS = 64

#: Rows of x and tiles of outputs of a block of the kernel for many rows, and its threads.
PROMPT_COLUMNS, PROMPT_TILES, PROMPT_THREADS = 128, 8, 256

#: Its shared memory: a ring of four stages of x, and the sums over slabs.
PROMPT_SHARED = 4 * 2 * PROMPT_COLUMNS * 64 + PROMPT_THREADS * 64 * 4

WARP = 32

#: Registers of a multiprocessor (since Kepler).
REGISTERS = 65536

#: Fewer would leave sums of a tile without a thread that adds them up.
LEAST_WARPS = 4

_MOST_PARTS = 4
_ROW_GROUPS = (8, 16, 24, 32, 64)
_COLUMN_STRIDE = 20


class _Part(ctypes.Structure):
    _fields_ = [
        ("tiles", ctypes.c_uint64), ("row_scale", ctypes.c_uint64), ("format", ctypes.c_int32),
        ("n_tiles", ctypes.c_int32), ("n_rows", ctypes.c_int32), ("first_output", ctypes.c_int32),
    ]  # fmt: skip


class _Parts(ctypes.Structure):
    _fields_ = [
        ("part", _Part * _MOST_PARTS), ("n_parts", ctypes.c_int32), ("n_segments", ctypes.c_int32),
    ]  # fmt: skip


class _Rows(ctypes.Structure):
    _fields_ = [
        ("halves", ctypes.c_uint64), ("scale", ctypes.c_uint64),
        ("n", ctypes.c_int32), ("room", ctypes.c_int32), ("paired", ctypes.c_int32),
    ]  # fmt: skip


class Output(ctypes.Structure):
    """Where products go: address, floats from one row to the next, whether to add."""

    _fields_ = [("y", ctypes.c_uint64), ("stride", ctypes.c_int32), ("add", ctypes.c_int32)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows as the linear kernels read them (kernels/prepare.cu).

    Attributes:
        halves: uint8, [segments, 8, room, 4] pieces of 16 bytes.
        scale: float32 [room], the power of two of each row.
        n: rows of x.
        room: rows that there is memory for.
        paired: each row of x stands for two, the second is what rounding the first one left over.
    """

    halves: Any
    scale: Any
    n: int
    room: int
    paired: bool = False

    @property
    def columns(self) -> int:
        """Rows as the kernels count them."""
        return 2 * self.n if self.paired else self.n


def room_for(n: int) -> int:
    """Rows to allocate for n: the kernel for many rows takes them in blocks."""
    return n if n <= MOST_FEW_ROWS else -(-n // PROMPT_COLUMNS) * PROMPT_COLUMNS


def multiply(x: Prepared, weight: Matrix, y: Any, *, add: bool) -> None:
    """y = x weight^T, or y += it. y: float32 [x.n, weight.n_out], rows contiguous."""
    rows = _Rows(x.halves.data.ptr, x.scale.data.ptr, x.columns, x.room, x.paired)
    output = Output(y.data.ptr, y.strides[0] // 4, int(add))
    if x.columns > MOST_FEW_ROWS:
        linear_prompt(rows, weight, output)
    else:
        linear(rows, weight, output)


def linear(rows: _Rows, weight: Matrix, output: Output) -> None:
    """The product for at most 64 rows."""
    group = next(group for group in _ROW_GROUPS if group >= rows.n)
    for parts in launches_of(weight):
        chosen = kernel(f"linear_{parts[0].format.name}_{group}")
        tiles = sum(part.n_tiles for part in parts)
        warps = warps_for(tiles, weight.n_segments, chosen.registers, chosen.most_threads // WARP)
        smem = 2 * warps * group * _COLUMN_STRIDE * 4
        args = (parts_of(parts, weight), rows, output)
        chosen.launch(tiles, warps * WARP, args, smem=smem, pdl=True)


def linear_prompt(rows: _Rows, weight: Matrix, output: Output) -> None:
    """The product for any number of rows, `rows.room` of them a multiple of 128: one launch for each part."""
    for part in weight.parts:
        grid = (rows.room // PROMPT_COLUMNS, -(-part.n_tiles // PROMPT_TILES))
        args = (parts_of([part], weight), rows, output)
        kernel(f"linear_prompt_{part.format.name}").launch(
            grid, PROMPT_THREADS, args, smem=PROMPT_SHARED, pdl=True
        )


@lru_cache(maxsize=256)
def warps_for(n_tiles: int, n_segments: int, registers: int, most: int) -> int:
    """Warps that share the segments of a tile. Any number gives the same sums.

    A block takes a turn for each `warps` segments, and the card takes the blocks in waves, as many at a time
    as registers allow: the fewest turns in all waves together win. It picked the fastest in all 24 measured
    combinations of the shapes of a 23B model and numbers of rows, but for ties within 2 %.
    """
    at_once = REGISTERS // (-(-registers // 8) * 8 * WARP)  # warps of a multiprocessor

    def cost(warps: int) -> tuple[int, int]:
        waves = -(-n_tiles // (max(1, at_once // warps) * multiprocessors()))
        return waves * -(-n_segments // warps), warps

    return min(range(LEAST_WARPS, most + 1), key=cost)


@lru_cache(maxsize=1)
def multiprocessors() -> int:
    """Of the current device."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return int(properties["multiProcessorCount"])


def launches_of(weight: Matrix) -> Iterator[list[MatrixPart]]:
    """Its parts, those of one format together, as many as a launch takes."""
    for form in dict.fromkeys(part.format for part in weight.parts):
        parts = [part for part in weight.parts if part.format == form]
        for first in range(0, len(parts), _MOST_PARTS):
            yield parts[first : first + _MOST_PARTS]


def parts_of(parts: Iterable[MatrixPart], weight: Matrix) -> _Parts:
    """Parts of a weight as the kernels take them."""
    listed = list(parts)
    entries = [
        _Part(p.tiles.data.ptr, p.row_scale.data.ptr, p.format.number, p.n_tiles, p.rows, p.first)
        for p in listed
    ]
    return _Parts((_Part * _MOST_PARTS)(*entries), len(entries), weight.n_segments)
