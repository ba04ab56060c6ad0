"""The ledger: every allocation of the engine, with a tag, from one pool under one optional limit.

Arrays carry their own life: when an array and all views of it are gone, its block is back in the pool.
Nothing is freed by hand, exactly as with CuPy's pool. The return is noticed through a weak reference to
the buffer object that NumPy keeps as the array's base; the callback may run at any moment, also inside
the ledger, so it only notes the block in a queue that the next call of the ledger empties.

Cached blocks stay until somebody calls `trim`, also when an allocation fails because of them: what to give
up then, and in which order, is decided in `pressure`.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory.interface import FLOAT32, TAGS, Ledger, OutOfDeviceMemory
from slotd.daemon.memory.pool import Block, Pool, new_block, size_class

if TYPE_CHECKING:
    from slotd.daemon.memory.faults import Faults


class _Lease(weakref.ref[memoryview]):
    """A weak reference to the buffer of an array that was handed out; knows what comes back."""

    __slots__ = ("block", "tag")

    block: Block
    tag: str


class DeviceMemory(Ledger):
    """The ledger over host memory, for the NumPy backend.

    Freed blocks stay cached by size class until they are trimmed.
    """

    def __init__(self, limit: int | None = None, faults: Faults | None = None) -> None:
        super().__init__(limit, faults)
        self._pool = Pool()
        self._live = dict.fromkeys(TAGS, 0)
        self._leases: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()
        self._note_return = self._returned.append
        self._lock = threading.RLock()

    def empty(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike = FLOAT32, tag: str = "scratch"
    ) -> npt.NDArray[Any]:
        """A new C-contiguous array, 64-byte aligned, contents undefined.

        Raises:
            OutOfDeviceMemory: over the limit, or the system refused.
            KeyError: a tag that is not one of TAGS.
        """
        kind = np.dtype(dtype)
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, kind)
        size = size_class(count * kind.itemsize)
        with self._lock:
            if self._returned:
                self._take_back()
            self._live[tag] += size
            block = self._pool.take(size)
            if block is None:
                block = self._grow(size, tag)
            flat: npt.NDArray[Any] = np.frombuffer(block, kind, count)
            lease = _Lease(flat.base, self._note_return)  # type: ignore[arg-type]
            lease.block = block
            lease.tag = tag
            self._leases[id(lease)] = lease
        return flat.reshape(shape)

    def trim(self) -> int:
        """Release all cached blocks. Returns the bytes released."""
        with self._lock:
            self._take_back()
            return self._pool.trim()

    def live(self, tag: str | None = None) -> int:
        """Bytes in use under a tag, or under all of them. Blocks count whole."""
        with self._lock:
            self._take_back()
            return sum(self._live.values()) if tag is None else self._live[tag]

    @property
    def by_tag(self) -> Mapping[str, int]:
        """Bytes in use for each tag."""
        with self._lock:
            self._take_back()
            return dict(self._live)

    @property
    def cached(self) -> int:
        """Bytes of freed blocks that the pool keeps."""
        with self._lock:
            self._take_back()
            return self._pool.cached

    @property
    def total(self) -> int:
        """The limit, or the physical memory of the machine."""
        if self.limit is not None:
            return self.limit
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @property
    def free(self) -> int:
        """Bytes that may still be taken from the system: total - live - cached."""
        with self._lock:
            self._take_back()
            return max(0, self.total - sum(self._live.values()) - self._pool.cached)

    def room_for(self, n_bytes: int) -> int:
        """How many blocks of n_bytes could be taken now without a trim."""
        size = size_class(n_bytes)
        with self._lock:
            return self.free // size + self._pool.count(size)

    def _take_back(self) -> None:
        while self._returned:
            lease = self._returned.popleft()
            del self._leases[id(lease)]
            self._live[lease.tag] -= lease.block.nbytes
            self._pool.put(lease.block)

    def _grow(self, size: int, tag: str) -> Block:
        """A block from the system; `size` is already counted as live and uncounted on failure."""
        live = sum(self._live.values())
        if self.limit is None or live + self._pool.cached <= self.limit:
            try:
                return new_block(size)
            except MemoryError:
                pass
        self._live[tag] -= size
        raise OutOfDeviceMemory(self.current_site, size, self.free)
