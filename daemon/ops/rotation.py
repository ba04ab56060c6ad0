"""The rotation behind tq3_0: a fixed orthogonal map of groups of 128 numbers, in which outliers are spread.

Forward: multiply by SIGNS_1, Walsh-Hadamard transform / sqrt(128), multiply by SIGNS_2. Backward: the same
with the signs exchanged. Products of two rotated vectors are those of the vectors, so keys and queries are
both left rotated; of values the sum is rotated back, once for each row of attention.

Every number is a tree of additions of fixed shape, whatever stands beside it: exact mode needs nothing else,
and a kernel that adds in this order gets the same bits.
"""

from __future__ import annotations

import numpy as np

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import Array

#: Numbers that are rotated together.
GROUP = 128

#: 1 / sqrt(128).
SCALE = np.float32(GROUP**-0.5)


def _signs(bits: int) -> Array:
    """Bit i of a 128-bit number -> -1 where it is set, else 1. The numbers are the first digits of pi."""
    return np.array([-1 if bits >> i & 1 else 1 for i in range(GROUP)], dtype=np.float32)


SIGNS_1 = _signs(0x243F6A8885A308D313198A2E03707344)
SIGNS_2 = _signs(0xA4093822299F31D0082EFA98EC4E6C89)


def rotate(memory: DeviceMemory, x: Array) -> Array:
    """x float32 [..., dim], dim a multiple of 128 -> rotated, a new array from the ledger."""
    return _turn(x, SIGNS_1, SIGNS_2, memory.empty(x.shape), memory.empty(x.shape))


def rotate_back(memory: DeviceMemory, x: Array, out: Array) -> None:
    """The inverse, of rotated x [..., dim] into `out`, which is contiguous and not x."""
    _turn(x, SIGNS_2, SIGNS_1, out, memory.empty(x.shape))


def rotate_unmetered(x: Array) -> Array:
    """As `rotate`, with scratch that is not the ledger's."""
    return _turn(x, SIGNS_1, SIGNS_2, np.empty(x.shape, np.float32), np.empty(x.shape, np.float32))


def _turn(x: Array, before: Array, after: Array, out: Array, scratch: Array) -> Array:
    """Into `out`, which is returned; both it and `scratch` are contiguous and have the shape of x."""
    groups = (*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    source, target = out.reshape(groups), scratch.reshape(groups)
    np.multiply(x.reshape(groups), before, out=source)
    width = 1
    while width < GROUP:
        pairs = (*groups[:-1], GROUP // (2 * width), 2, width)
        read, write = source.reshape(pairs), target.reshape(pairs)
        np.add(read[..., 0, :], read[..., 1, :], out=write[..., 0, :])
        np.subtract(read[..., 0, :], read[..., 1, :], out=write[..., 1, :])
        source, target = target, source
        width *= 2
    np.multiply(source, after * SCALE, out=out.reshape(groups))
    return out
