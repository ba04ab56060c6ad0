"""K and V as they are stored: the GGUF block formats, written from float32 and read back, in NumPy.

The dtype of a stored plane says its format; one item holds one number (f32, f16, bf16) or a block of 32. The
last axis of a stored array counts items. Bytes are those of the ggml reference quantiser. tq3_0, which GGUF
does not have, is in `tq3_blocks`.

A block holds a float16 scale d, in some formats a float16 minimum m, and 32 whole numbers q: y = d q or
d q + m. Signed formats keep q with an offset. q[i] is the low half of byte i of `qs` and q[i + 16] the high
one; a fifth bit of q[i] is bit i of `qh`. To NumPy these fields are opaque (V16): it then copies one item at
a time, several times faster than 16 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import Array
from slotd.daemon.ops.tq3_blocks import TQ3_0, read_groups, write_groups

#: Numbers in a block.
BLOCK = 32

F32 = np.dtype("<f4")
F16 = np.dtype("<f2")
BF16 = np.dtype("<u2")
NIBBLES = np.dtype("V16")

Q8_0 = np.dtype([("d", F16), ("qs", "V32")])
Q4_0 = np.dtype([("d", F16), ("qs", NIBBLES)])
Q4_1 = np.dtype([("d", F16), ("m", F16), ("qs", NIBBLES)])
Q5_0 = np.dtype([("d", F16), ("qh", "V4"), ("qs", NIBBLES)])
Q5_1 = np.dtype([("d", F16), ("m", F16), ("qh", "V4"), ("qs", NIBBLES)])


@dataclass(frozen=True, slots=True)
class _Codes:
    """The whole numbers of a block format: q is low .. high, and q - low is what nibbles keep."""

    low: int
    high: int

    @property
    def with_minimum(self) -> bool:
        """y = d q + m."""
        return self.low == 0

    @property
    def with_fifth_bits(self) -> bool:
        """Four bits are not enough."""
        return self.high - self.low == 31


_CODES = {
    Q8_0: _Codes(-127, 127),
    Q4_0: _Codes(-8, 7),
    Q4_1: _Codes(0, 15),
    Q5_0: _Codes(-16, 15),
    Q5_1: _Codes(0, 31),
}

#: For each byte of `qh`, the fifth bits of its eight numbers, each where bit 4 of a number is.
_FIFTH_BITS = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4).view(
    np.uint64
)[:, 0]


def item_numbers(dtype: np.dtype[Any]) -> int:
    """Numbers in one stored item."""
    return BLOCK if dtype in _CODES or dtype == TQ3_0 else 1


def is_rotated(stored: Array) -> bool:
    """Whether the numbers read back are rotated (`rotation`)."""
    return stored.dtype == TQ3_0


def width(stored: Array) -> int:
    """Numbers along the last axis of a stored array."""
    return int(stored.shape[-1]) * item_numbers(stored.dtype)


def stored_bytes(stored: Array) -> Array:
    """A view of a stored array as uint8 [..., bytes]: what is moved and copied. Blocks are never remade."""
    return stored.view(np.uint8)


# ----- writing


def write_stored(x: Array, stored: Array) -> None:
    """Store x float32 [..., dim] into an array of items [..., dim / numbers in one].

    Its scratch is a few times x, which is at most a page: it does not come from the ledger.
    """
    if stored.dtype == BF16:
        stored[...] = _round_to_bf16(x)
    elif stored.dtype in _CODES:
        _write_blocks(np.ascontiguousarray(x).reshape(*stored.shape, BLOCK), stored)
    elif stored.dtype == TQ3_0:
        write_groups(np.ascontiguousarray(x), stored)
    else:
        stored[...] = x


def _round_to_bf16(x: Array) -> Array:
    """The upper half of each float32, rounded to the nearest, ties to even; a NaN stays one."""
    bits: Array = np.ascontiguousarray(x).view(np.uint32)
    bits = np.where(np.isnan(x), bits & 0xFFFF0000 | 0x400000, bits)
    bits += (bits >> 16 & 1) + 0x7FFF
    return bits >> 16


def _write_blocks(x: Array, stored: Array) -> None:
    """x [..., blocks, 32], contiguous."""
    codes = _CODES[stored.dtype]
    if stored.dtype == Q8_0:
        d = np.abs(x).max(axis=-1, keepdims=True) / codes.high
        q = _round_half_away(x * _inverse(d)).astype(np.int8)
        stored["qs"] = q.view(stored.dtype["qs"])[..., 0]
    elif codes.with_minimum:
        m = x.min(axis=-1, keepdims=True)
        d = (x.max(axis=-1, keepdims=True) - m) / codes.high
        _pack((x - m) * _inverse(d) + np.float32(0.5), codes, stored)
        stored["m"] = m[..., 0]
    else:
        # The number of largest magnitude, whatever its sign, becomes `low` exactly.
        d = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1) / codes.low
        _pack(x * _inverse(d) + np.float32(0.5 - codes.low), codes, stored)
    stored["d"] = d[..., 0]


def _inverse(d: Array) -> Array:
    """1 / d, and 0 where d is 0."""
    return np.divide(1, d, out=np.zeros_like(d), where=d != 0)


def _round_half_away(x: Array) -> Array:
    """To the nearest whole number, halves away from zero. Exact: no sum is rounded."""
    whole: Array = np.trunc(x)
    rest = x - whole
    whole += np.trunc(rest + rest)
    return whole


def _pack(shifted: Array, codes: _Codes, stored: Array) -> None:
    """The whole parts of `shifted` [..., blocks, 32], at most what fits, as nibbles and fifth bits."""
    q = np.minimum(shifted, codes.high - codes.low).astype(np.uint8)
    packed = q[..., :16] & 15 | q[..., 16:] << 4
    stored["qs"] = packed.view(NIBBLES)[..., 0]
    if codes.with_fifth_bits:
        fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
        stored["qh"] = fifth.view(stored.dtype["qh"])[..., 0]


# ----- reading


def as_float32(memory: DeviceMemory, stored: Array) -> Array:
    """The stored numbers as float32 [..., dim]: themselves, or a copy. See `is_rotated`."""
    if stored.dtype == F32:
        return stored
    return read_stored(memory, stored, memory.empty((*stored.shape[:-1], width(stored))))


def read_stored(memory: DeviceMemory, stored: Array, out: Array) -> Array:
    """The stored numbers into `out` float32 [..., dim], which is returned. Scratch comes from the ledger."""
    if stored.dtype == BF16:
        np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
    elif stored.dtype in _CODES:
        _read_blocks(memory, stored, out.reshape(*stored.shape, BLOCK))
    elif stored.dtype == TQ3_0:
        read_groups(memory, stored, out.reshape(*stored.shape, BLOCK))
    else:
        out[...] = stored
    return out


def _read_blocks(memory: DeviceMemory, stored: Array, out: Array) -> None:
    """out [..., blocks, 32], a view."""
    codes = _CODES[stored.dtype]
    q = _unpack_bytes(memory, stored) if stored.dtype == Q8_0 else _unpack_nibbles(memory, stored, codes)
    factor = memory.empty((*stored.shape, 1))
    factor[..., 0] = stored["d"]
    np.multiply(q, factor, out=out)
    if codes.with_minimum:
        factor[..., 0] = stored["m"]
        out += factor


def _unpack_bytes(memory: DeviceMemory, stored: Array) -> Array:
    q = memory.empty(stored.shape, stored.dtype["qs"])
    q[...] = stored["qs"]
    return q.view(np.int8).reshape(*stored.shape, BLOCK)


def _unpack_nibbles(memory: DeviceMemory, stored: Array, codes: _Codes) -> Array:
    low, high = memory.empty(stored.shape, NIBBLES), memory.empty(stored.shape, NIBBLES)
    low[...] = stored["qs"]
    np.right_shift(low.view(np.uint8), 4, out=high.view(np.uint8))
    np.bitwise_and(low.view(np.uint8), 15, out=low.view(np.uint8))
    halves = memory.empty((*stored.shape, 2), NIBBLES)
    halves[..., 0] = low
    halves[..., 1] = high
    q = halves.view(np.uint8)
    if codes.with_fifth_bits:
        q |= _fifth_bits(memory, stored)
    signed = q.view(np.int8)
    signed += codes.low
    return signed


def _fifth_bits(memory: DeviceMemory, stored: Array) -> Array:
    """[..., blocks, 32] uint8, 16 or 0."""
    qh = memory.empty(stored.shape, stored.dtype["qh"])
    qh[...] = stored["qh"]
    indices = qh.view(np.uint8).reshape(*stored.shape, BLOCK // 8)
    bits = memory.empty(indices.shape, np.uint64)
    return np.take(_FIFTH_BITS, indices, out=bits, mode="clip").view(np.uint8)
