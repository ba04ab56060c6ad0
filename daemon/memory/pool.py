"""Raw host blocks by size class, as a legacy GPU pool keeps them.

A freed block stays here for the next request of its class; only `trim` gives it back. Blocks are never
split or joined, so pressure and fragmentation look the way they do on a device.
"""

from __future__ import annotations

import functools

import numpy as np

#: Start of every block, in bytes: a cache line, and the widest vector register.
ALIGNMENT = 64

#: Smallest block, in bytes.
SMALLEST = 512

#: The raw bytes. NumPy makes a new memoryview of it for every array, which dies with the array.
Block = memoryview


@functools.lru_cache(maxsize=4096)
def size_class(n_bytes: int) -> int:
    """Bytes of the block that serves a request: eight classes an octave, so at most 1/8 is lost."""
    if n_bytes <= SMALLEST:
        return SMALLEST
    step = 1 << ((n_bytes - 1).bit_length() - 4)
    return -(-n_bytes // step) * step


def new_block(size: int) -> Block:
    """`size` bytes, aligned, contents undefined.

    Raises:
        MemoryError: the system has no memory left.
    """
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw.data[start : start + size]


class Pool:
    """Freed blocks, by size class. Not thread-safe: the ledger holds its lock around every call.

    Attributes:
        cached: bytes of the blocks kept here.
    """

    def __init__(self) -> None:
        self.cached = 0
        self._free: dict[int, list[Block]] = {}

    def count(self, size: int) -> int:
        """How many blocks of exactly this class are kept."""
        return len(self._free.get(size, ()))

    def take(self, size: int) -> Block | None:
        """A kept block of exactly this class, or None."""
        blocks = self._free.get(size)
        if not blocks:
            return None
        self.cached -= size
        return blocks.pop()

    def put(self, block: Block) -> None:
        """Keep a block that nobody uses any more."""
        self.cached += block.nbytes
        self._free.setdefault(block.nbytes, []).append(block)

    def trim(self) -> int:
        """Give every kept block back to the system. Returns the bytes given back."""
        released, self.cached = self.cached, 0
        self._free.clear()
        return released
