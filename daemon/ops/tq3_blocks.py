"""tq3_0: three bits a number. A group of 128 numbers is one length and 128 directions out of eight.

A group x of length n is kept as the rotation (`rotation`) of x / n, each number as the nearest of eight
centroids c, and as a float16 factor d: x ~ d c, rotated. d is n / |c|, so the length survives the rounding.
Read back, the numbers stay rotated.

The bytes are those of four blocks of 32: d (the same in the four), then two bits of each number, four to a
byte from the lowest bits on, then the third bit of each number, eight to a byte likewise.
"""

from __future__ import annotations

import numpy as np

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import Array
from slotd.daemon.ops.rotation import GROUP, rotate_unmetered

TQ3_0 = np.dtype([("d", "<f2"), ("qs", "V8"), ("qh", "V4")])

#: Numbers in a block.
BLOCK = 32
BLOCKS = GROUP // BLOCK

_POSITIVE = (0.021460, 0.065717, 0.117832, 0.190685)
_BORDERS = (0.043589, 0.091775, 0.154259)

#: Lloyd and Max's best eight values for numbers of a normal distribution, divided by sqrt(128).
CENTROIDS = np.array([-c for c in reversed(_POSITIVE)] + list(_POSITIVE), dtype=np.float32)
THRESHOLDS = np.array([-t for t in reversed(_BORDERS)] + [0.0, *_BORDERS], dtype=np.float32)

_SQUARES = CENTROIDS * CENTROIDS

_BYTES = np.arange(256, dtype=np.uint32)
#: For each byte of `qs` its four numbers as bytes, and for each of `qh` its eight, each worth 4.
_LOW = (_BYTES & 3) | (_BYTES >> 2 & 3) << 8 | (_BYTES >> 4 & 3) << 16 | (_BYTES >> 6) << 24
_HIGH = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 2).view(
    np.uint64
)[:, 0]


def write_groups(x: Array, stored: Array) -> None:
    """x float32 [..., dim], contiguous, dim a multiple of 128 -> blocks [..., dim / 32].

    Numbers that are not finite make the factor of their group so.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    length = np.sqrt(_tree_sum(groups * groups))
    units = np.divide(groups, length, out=np.zeros_like(groups), where=length != 0)
    codes = np.searchsorted(THRESHOLDS, rotate_unmetered(units), side="right").astype(np.uint8)
    d = length / np.sqrt(_tree_sum(_SQUARES[codes]))
    blocks = codes.reshape(*stored.shape, BLOCK)
    stored["d"] = np.repeat(d, BLOCKS, axis=-1).reshape(stored.shape)
    quarters = (blocks & 3).reshape(*stored.shape, BLOCK // 4, 4) << np.array([0, 2, 4, 6], dtype=np.uint8)
    stored["qs"] = np.bitwise_or.reduce(quarters, axis=-1).view("V8")[..., 0]
    stored["qh"] = np.packbits(blocks >> 2, axis=-1, bitorder="little").view("V4")[..., 0]


def _tree_sum(x: Array) -> Array:
    """The sum of each 128 numbers, halves onto halves: [..., 1]."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def read_groups(memory: DeviceMemory, stored: Array, out: Array) -> None:
    """The numbers, rotated, into `out` float32 [..., blocks, 32], a view."""
    codes = memory.empty((*stored.shape, BLOCK), np.uint8)
    _take(memory, _LOW, stored["qs"], codes.view(np.uint32))
    high = memory.empty((*stored.shape, BLOCK), np.uint8)
    _take(memory, _HIGH, stored["qh"], high.view(np.uint64))
    codes |= high
    factor = memory.empty((*stored.shape, 1))
    factor[..., 0] = stored["d"]
    # Into `out` through an array of its own: NumPy would make one behind the ledger's back.
    values = np.take(CENTROIDS, codes, out=memory.empty(codes.shape), mode="clip")
    np.multiply(values, factor, out=out)


def _take(memory: DeviceMemory, table: Array, packed: Array, out: Array) -> None:
    raw = memory.empty(packed.shape, packed.dtype)
    raw[...] = packed
    indices = raw.view(np.uint8).reshape(*packed.shape, packed.dtype.itemsize)
    np.take(table, indices, out=out, mode="clip")
