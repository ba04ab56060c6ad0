"""Random weights straight in GGUF's block formats: every field of a block is drawn, nothing is quantised.

Numbers of a tensor have about the standard deviation asked for and a mean near 0; scales differ from block
to block and from sub-block to sub-block, and scale and minimum of a sub-block differ too, so that code which
mixes them up is seen. Byte layouts: ggml's block formats.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Every type the generator knows.
TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)

#: What a type falls back to when a row is no multiple of 256 numbers, as llama.cpp's quantiser has it.
FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}


def random_rows(kind: str, n_out: int, n_in: int, std: float, seed: int) -> npt.NDArray[np.generic]:
    """A random matrix of one type.

    Returns:
        float32 or float16 [n_out, n_in] for F32 and F16; uint8 [n_out, bytes of a row] for all others.

    Raises:
        ValueError: an unknown type, or n_in is no multiple of its block.
    """
    if kind not in TYPES:
        raise ValueError(f"no random weights of type {kind}; known: {', '.join(TYPES)}")
    elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if n_in % elements:
        raise ValueError(f"rows of {n_in} numbers do not consist of {kind} blocks of {elements}")
    rng = np.random.Generator(np.random.SFC64(seed))
    if elements == 1:
        return _plain(kind, n_out, n_in, std, rng)
    n_blocks = n_out * n_in // elements
    words = rng.integers(0, 2**64, -(-n_blocks * n_bytes // 8), dtype=np.uint64)
    blocks = words.view(np.uint8)[: n_blocks * n_bytes].reshape(n_blocks, n_bytes)
    _SHAPERS[kind](blocks, std, rng)
    return blocks.reshape(n_out, -1)


def _plain(kind: str, n_out: int, n_in: int, std: float, rng: np.random.Generator) -> npt.NDArray[np.generic]:
    values = rng.standard_normal((n_out, n_in), dtype=np.float32) * np.float32(std)
    if kind == "F16":
        return values.astype(np.float16)
    if kind == "BF16":  # its upper half; a bf16 number as any other
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n_out, -1)
    return values


def _scales(n: int, std: float, rng: np.random.Generator, signed: bool = False) -> npt.NDArray[np.float32]:
    """n scales between half and one and a half of a middle, root mean square `std`."""
    scales = (0.5 + rng.random(n, dtype=np.float32)) * np.float32(std / np.sqrt(13 / 12))
    return scales * np.where(rng.random(n) < 0.5, np.float32(-1), np.float32(1)) if signed else scales


def _put(blocks: Bytes, at: int, values: npt.NDArray[np.float32]) -> None:
    """Float16 values at a byte offset of every block."""
    blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _symmetric(
    at: int, rms: float, signed: bool = False
) -> Callable[[Bytes, float, np.random.Generator], None]:
    """A block whose only scale lies at `at`; rms: of what it multiplies when all other bytes are random."""

    def shape(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        _put(blocks, at, _scales(len(blocks), std / rms, rng, signed))

    return shape


def _with_minimum(middle: float, rms: float) -> Callable[[Bytes, float, np.random.Generator], None]:
    """Scale and minimum in front; quants around `middle` have the root mean square `rms`."""

    def shape(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        scales = _scales(len(blocks), std / rms, rng)
        offset = middle + 0.5 * (rng.random(len(blocks), dtype=np.float32) - np.float32(0.5))
        _put(blocks, 0, scales)
        _put(blocks, 2, -scales * offset)

    return shape


def _k_with_minimum(middle: float, rms: float) -> Callable[[Bytes, float, np.random.Generator], None]:
    """Q4_K and Q5_K: d, dmin, then eight 6-bit scales and eight 6-bit minima in 12 bytes."""

    def shape(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
        n = len(blocks)
        scales = rng.integers(24, 61, (n, 8), dtype=np.uint8)
        minima = scales + rng.integers(0, 7, (n, 8), dtype=np.uint8) - 3
        low, high = scales[:, :4], scales[:, 4:]
        low_minima, high_minima = minima[:, :4], minima[:, 4:]
        blocks[:, 4:8] = low | (high >> 4) << 6
        blocks[:, 8:12] = low_minima | (high_minima >> 4) << 6
        blocks[:, 12:16] = (high & 15) | (high_minima & 15) << 4
        d = _scales(n, std / (rms * 43.3), rng)  # 43.3: root mean square of 24..60
        _put(blocks, 0, d)
        _put(blocks, 2, d * np.float32(middle))

    return shape


def _q2_k(blocks: Bytes, std: float, rng: np.random.Generator) -> None:
    """16 bytes of 4-bit scale and minimum, 64 of quants, then d and dmin."""
    scales = rng.integers(5, 15, (len(blocks), 16), dtype=np.uint8)
    minima = scales + rng.integers(0, 3, scales.shape, dtype=np.uint8) - 1
    blocks[:, :16] = scales | minima << 4
    d = _scales(len(blocks), std / (1.2 * 9.9), rng)  # 9.9: root mean square of 5..14
    _put(blocks, 80, d)
    _put(blocks, 82, d * np.float32(1.5))


#: Root mean squares: of -8..7 4.64, of 0..15 around 7.5 4.61, of -16..15 9.25, of 0..31 around 15.5 9.23,
#: of a signed byte 73.9, of -4..3 2.35, of a 6-bit scale less 32 18.5, of -32..31 18.5, of IQ4's table 65.6.
_SHAPERS: dict[str, Callable[[Bytes, float, np.random.Generator], None]] = {
    "Q4_0": _symmetric(0, 4.64, signed=True),
    "Q4_1": _with_minimum(7.5, 4.61),
    "Q5_0": _symmetric(0, 9.25, signed=True),
    "Q5_1": _with_minimum(15.5, 9.23),
    "Q8_0": _symmetric(0, 73.9),
    "Q2_K": _q2_k,
    "Q3_K": _symmetric(108, 2.35 * 18.5),
    "Q4_K": _k_with_minimum(7.5, 4.61),
    "Q5_K": _k_with_minimum(15.5, 9.23),
    "Q6_K": _symmetric(208, 18.5 * 73.9),
    "IQ4_NL": _symmetric(0, 65.6, signed=True),
    "IQ4_XS": _symmetric(0, 18.5 * 65.6),
}
