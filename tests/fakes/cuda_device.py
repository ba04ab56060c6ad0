"""A CUDA device without one: pools over counted bytes, arrays of NumPy at the addresses of the pools.

The pools behave as CuPy's do: blocks of 512 bytes, freed ones are kept, the smallest that is large enough is
taken and split, and before an allocation fails for want of device memory the pool gives back what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 512
FIRST_ADDRESS = 1 << 20


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory.OutOfMemoryError."""


class FakeDevice:
    """One device of `capacity` bytes, `others` of which another process holds."""

    def __init__(self, capacity: int, others: int = 0) -> None:
        self.capacity = capacity
        self.others = others
        self.pools: list[FakePool] = []
        self.served: FakePool | None = None
        self._next_address = FIRST_ADDRESS

    def pool(self, kind: str) -> FakePool:
        self.pools.append(FakePool(self, kind))
        return self.pools[-1]

    def serve_cupy(self, pool: Any) -> None:
        self.served = pool

    def array(
        self, address: int, size: int, owner: object, shape: tuple[int, ...], dtype: Any
    ) -> npt.NDArray[Any]:
        array = np.empty(math.prod(shape), dtype).view(OwningArray)
        assert array.nbytes == size
        array.owner, array.address = owner, address
        return array.reshape(shape)

    def free_bytes(self) -> int:
        return self.capacity - self.others - sum(pool.total_bytes() for pool in self.pools)

    def take_address(self, size: int) -> int:
        address, self._next_address = self._next_address, self._next_address + size
        return address


class OwningArray(np.ndarray[Any, Any]):
    """A NumPy array that keeps its owner alive, as views of it do."""

    owner: object
    address: int

    def __array_finalize__(self, parent: Any) -> None:
        self.owner = getattr(parent, "owner", None)
        self.address = getattr(parent, "address", 0)


class Memory:
    """A block in use; gives itself back."""

    def __init__(self, address: int, size: int, free: Callable[[int, int], None]) -> None:
        self.address, self.size, self._free = address, size, free

    def __del__(self) -> None:
        self._free(self.address, self.size)


class Pointer:
    """As cupy.cuda.MemoryPointer."""

    def __init__(self, mem: Memory) -> None:
        self.mem, self.ptr = mem, mem.address


class FakePool:
    """As cupy.cuda.MemoryPool, without joining blocks."""

    def __init__(self, device: FakeDevice, kind: str) -> None:
        self.kind = kind
        self.limit = 0
        self._device = device
        self._kept: list[tuple[int, int]] = []  # (size, address)
        self._used = 0

    def malloc(self, size: int) -> Pointer:
        size = -(-size // BLOCK) * BLOCK
        fitting = [block for block in self._kept if block[0] >= size]
        if fitting:
            kept, address = min(fitting)
            self._kept.remove((kept, address))
            if kept > size:
                self._kept.append((kept - size, address + size))
        else:
            if self.limit and self.total_bytes() + size > self.limit:
                raise OutOfMemoryError
            if size > self._device.free_bytes():
                self.free_all_blocks()
            if size > self._device.free_bytes():
                raise OutOfMemoryError
            address = self._device.take_address(size)
        self._used += size
        return Pointer(Memory(address, size, self._put))

    def free_all_blocks(self) -> None:
        self._kept.clear()

    def total_bytes(self) -> int:
        return self._used + sum(size for size, _ in self._kept)

    def used_bytes(self) -> int:
        return self._used

    def set_limit(self, size: int) -> None:
        assert self.kind == "legacy", "the driver's pool takes a threshold for a limit"
        self.limit = size

    def _put(self, address: int, size: int) -> None:
        self._used -= size
        self._kept.append((size, address))
