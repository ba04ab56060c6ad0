"""What the device rounds, worked out by NumPy: weights (weight_tiles.cuh).

They are halves under a power of two of their row. A model of such weights, computed in float32, is what the
device computes but for its activations.
Only the types of the default model and of what is made like it are here.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from slotd.daemon.weights.reader import GgufFile, ModelFile

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

#: Largest exponent of a row's power of two, either way.
_MOST = 100

#: A code in the low bits of a half is the code times this.
_UNIT = 2.0**-24


def held_values(type_name: str, rows: Bytes, n_in: int) -> Floats:
    """float32 [n, n_in] of rows of GGUF blocks, uint8 [n, bytes of a row].

    Raises:
        KeyError: a type that is not worked out here.
    """
    return _HELD[type_name](rows, n_in)


class HeldModel(ModelFile):
    """A model file whose matrices are dequantised as the kernels hold them."""

    @classmethod
    def of(cls, file: ModelFile) -> HeldModel:
        """The same file."""
        return cls(file.path, file._data, file.header, file.hyper)

    def dequantise(self, name: str) -> Floats:
        shape = self.header.tensors[name].shape
        if len(shape) == 1 or name.endswith(".ssm_conv1d.weight"):  # not multiplied with: kept as float32
            return GgufFile.dequantise(self, name)
        rows = self.tensor(name).view(np.uint8)
        parts = [rows[start : start + 4096] for start in range(0, len(rows), 4096)]
        kind = self.block_type(name).name
        return np.concatenate([held_values(kind, part, shape[0]) for part in parts])


def _row_exponents(peaks: Floats) -> npt.NDArray[np.int64]:
    """e of each row whose largest factor is `peaks`, float32 [n]: 2^e brings it to 2^14 .. 2^15."""
    _, exponents = np.frexp(peaks)
    return np.where(peaks > 0, np.clip(14 - (exponents - 1), -_MOST, _MOST), 0).astype(np.int64)


def _scaled(values: Floats, exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
    """Halves of values [n, ...] times 2^exponents [n]."""
    shape = (-1, *(1,) * (values.ndim - 1))
    return np.ldexp(values.astype(np.float64), exponents.reshape(shape)).astype(np.float16)


def _affine(codes: npt.NDArray[np.int64], s: Floats, m: Floats, nibbles: bool) -> Floats:
    """code * s + m by one fused multiply-add in halves. codes [n, groups, width], s and m [n, groups]."""
    e = _row_exponents(np.maximum(np.abs(s) * np.float32(1 / _UNIT), np.abs(m)).max(axis=1))
    held_s, held_m = _scaled(s, e + 24), _scaled(m, e)
    return _fused(codes, held_s, held_m, e, nibbles)


def _fused(
    codes: npt.NDArray[np.int64], s: npt.NDArray[np.float16], m: npt.NDArray[np.float16],
    e: npt.NDArray[np.int64], nibbles: bool,
) -> Floats:  # fmt: skip
    units = np.full(codes.shape[1:], _UNIT)
    if nibbles:  # the upper 32 of 64 columns stand four bits higher, under a sixteenth of s
        columns = np.arange(codes[0].size).reshape(codes.shape[1:])
        upper = columns[:, 0] // 32 % 2 == 1
        units[upper] *= 16
        s = np.where(upper, s * np.float16(0.0625), s)
    # A code has 8 bits and a half 11: the product is exact in float64, and so is nearly every sum.
    exact = codes * units * s.astype(np.float64)[:, :, None] + m.astype(np.float64)[:, :, None]
    halves = exact.astype(np.float16).astype(np.float64)
    return np.ldexp(halves, -e[:, None, None]).astype(np.float32).reshape(len(codes), -1)


def _blocks(rows: Bytes, n_in: int, elements: int) -> Bytes:
    return rows.reshape(len(rows), n_in // elements, -1)


def _halves(blocks: Bytes, at: int) -> Floats:
    """The half at byte `at` of each block: float32 [n, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(blocks: Bytes) -> npt.NDArray[np.int64]:
    """16 bytes -> 32 codes, the low nibbles first."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(np.int64)


def _q4_0(rows: Bytes, n_in: int) -> Floats:
    blocks = _blocks(rows, n_in, 32)
    d = _halves(blocks, 0)
    return _affine(_nibbles(blocks[..., 2:]), d, -8 * d, nibbles=True)


def _q4_1(rows: Bytes, n_in: int) -> Floats:
    blocks = _blocks(rows, n_in, 32)
    return _affine(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2), nibbles=True)


def _q8_0(rows: Bytes, n_in: int) -> Floats:
    blocks = _blocks(rows, n_in, 32)
    d = _halves(blocks, 0)
    codes = blocks[..., 2:].view(np.int8).astype(np.int64) + 128
    return _affine(codes, d, -128 * d, nibbles=False)


def _q6_k(rows: Bytes, n_in: int) -> Floats:
    """A scale of 16 columns is a byte times d, rounded to a half; codes count from -32."""
    blocks = _blocks(rows, n_in, 256)
    d, scales = _halves(blocks, 208), blocks[..., 192:208].view(np.int8).astype(np.int64)
    low, high = blocks[..., :128].astype(np.int64), blocks[..., 128:192].astype(np.int64)
    codes = np.empty((*blocks.shape[:2], 2, 4, 32), np.int64)
    for half in range(2):
        for quarter in range(4):
            nibble = low[..., 64 * half + 32 * (quarter % 2) :][..., :32] >> (4 * (quarter // 2)) & 15
            codes[:, :, half, quarter] = nibble | (high[..., 32 * half :][..., :32] >> (2 * quarter) & 3) << 4
    s = np.abs(d)[..., None] * np.maximum(np.abs(scales), 1).astype(np.float32)
    peaks = np.maximum(s * np.float32(1 / _UNIT), s * 32)
    e = _row_exponents(peaks.reshape(len(rows), -1).max(axis=1))
    held_d = _scaled(d, e + 24)
    held_s = (scales.astype(np.float16) * held_d[..., None]).reshape(len(rows), -1)
    held_m = held_s * np.float16(-(2.0**-19))
    return _fused(codes.reshape(len(rows), -1, 16), held_s, held_m, e, nibbles=True)


def _plain(type_name: str) -> Callable[[Bytes, int], Floats]:
    def held(rows: Bytes, n_in: int) -> Floats:
        values = quants.dequantize(rows, gguf.GGMLQuantizationType[type_name]).astype(np.float32)
        e = _row_exponents(np.abs(values).max(axis=1))
        halves = _scaled(values, e).astype(np.float64)
        return np.ldexp(halves, -e[:, None]).astype(np.float32)

    return held


_HELD: dict[str, Callable[[Bytes, int], Floats]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q6_K": _q6_k,
    "F32": _plain("F32"), "F16": _plain("F16"), "BF16": _plain("BF16"),
}  # fmt: skip
