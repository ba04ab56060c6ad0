"""Tensor element types of GGUF files: names, block sizes and which of them can be read.

A row of a quantised tensor is a run of blocks; a block holds `block_elements` numbers in `block_bytes`
bytes. All of it comes from the gguf package.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants


@dataclass(frozen=True, slots=True)
class BlockType:
    """One ggml type.

    Attributes:
        type_id: its number in the file.
        name: e.g. ``Q4_1``.
        block_elements: numbers in a block (1 for plain types).
        block_bytes: bytes of a block.
    """

    type_id: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, n: int) -> int:
        """Bytes of n numbers, a multiple of `block_elements`."""
        return n // self.block_elements * self.block_bytes


@functools.cache
def block_type(type_id: int) -> BlockType | None:
    """The type with this number, None when there is none."""
    try:
        kind = gguf.GGMLQuantizationType(type_id)
    except ValueError:
        return None
    elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    return BlockType(type_id, kind.name, elements, n_bytes)


@functools.cache
def can_dequantise(kind: BlockType) -> bool:
    """Whether gguf turns this type into float32 (integer and run-time-only types it does not)."""
    try:
        dequantise_blocks(np.zeros((1, kind.block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantise_blocks(data: npt.NDArray[np.uint8], kind: BlockType) -> npt.NDArray[np.float32]:
    """Rows of blocks as float32.

    Args:
        data: uint8 [..., blocks * block_bytes].

    Returns:
        float32 [..., blocks * block_elements], never a view of `data`.

    Raises:
        NotImplementedError: a type that `can_dequantise` denies.
    """
    # Scales may be anything in a file; a value that float16 or float32 cannot hold becomes inf or NaN
    # here and is found where it matters, so numpy's warnings would only be noise.
    with np.errstate(all="ignore"):
        values = quants.dequantize(data, gguf.GGMLQuantizationType(kind.type_id))
    own: npt.NDArray[np.float32] = values.copy() if np.may_share_memory(values, data) else values
    return own
