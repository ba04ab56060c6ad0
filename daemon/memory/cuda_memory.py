"""The ledger over the memory of a CUDA device: CuPy's pools, with tags, one limit and one failure.

Two kinds of pool keep freed blocks. `legacy` (cupy.cuda.MemoryPool) splits and joins blocks of cudaMalloc and
gives them back when it is trimmed, or by itself before an allocation fails for want of memory. `vmm`
(cupy.cuda.MemoryAsyncPool) is the driver's own pool over virtual memory, which needs no trim.

An array keeps its block through a lease: when the array and all its views are gone the lease goes, notes
its bytes in a queue that the next call of the ledger empties, and lets the block go back to the pool. What
a pool keeps belongs to the stream that was current when it was taken: the engine works on one.

A captured graph names addresses that the pool would hand out again: what is allocated while a graph is
captured comes from a pool of its own (`capture_pool`), which counts as live while the graphs may run. There
is one such pool for each tag: graphs of one leave alone what those of another have to say.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory.interface import FLOAT32, TAGS, Ledger, OutOfDeviceMemory, PoolKind

if TYPE_CHECKING:
    from slotd.daemon.memory.faults import Faults

#: cudaMalloc's alignment, and what CuPy rounds blocks to.
BLOCK = 512

#: A pool's limit of 0 means none.
NO_LIMIT = 0

#: cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY.
OUT_OF_MEMORY = 2


class Pool(Protocol):
    """What is used of CuPy's pools."""

    def malloc(self, size: int) -> Any:
        """A pointer with `.ptr` and `.mem.size`. Raises MemoryError."""
        ...

    def free_all_blocks(self) -> None: ...
    def total_bytes(self) -> int: ...
    def used_bytes(self) -> int: ...
    def set_limit(self, size: int) -> None: ...


class Device(Protocol):
    """One CUDA device, and CuPy on it."""

    def pool(self, kind: PoolKind) -> Pool:
        """A new pool; for vmm the driver's."""
        ...

    def serve_cupy(self, pool: Pool) -> None:
        """Have CuPy take what it allocates by itself from this pool too."""
        ...

    def array(self, address: int, size: int, owner: object, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array over `size` bytes at `address`, which keeps `owner` alive."""
        ...

    def free_bytes(self) -> int:
        """Bytes that the driver has left."""
        ...

    def poison(self) -> None:
        """Make a kernel write where nothing is: the context is lost, as by a fault of a kernel of ours."""
        ...


class _Lease:
    """Holds a block while arrays use it."""

    __slots__ = ("_pointer", "_returned", "_size", "_tag")

    def __init__(self, pointer: Any, tag: str, size: int, returned: deque[tuple[str, int]]) -> None:
        self._pointer, self._tag, self._size, self._returned = pointer, tag, size, returned

    def __del__(self) -> None:
        # May run at any moment, inside the ledger too: a deque takes it without a lock.
        self._returned.append((self._tag, self._size))


class CudaMemory(Ledger):
    """See `Ledger`.

    Args:
        device: the device.
        limit: most bytes of device memory for this process.
        faults: failures to inject when a site is passed.
        pool_kind: legacy or vmm.
        overhead: bytes that the context itself takes: the limit covers them too.
    """

    def __init__(
        self,
        device: Device,
        limit: int | None = None,
        faults: Faults | None = None,
        *,
        pool_kind: PoolKind = "legacy",
        overhead: int = 0,
    ) -> None:
        super().__init__(limit, faults)
        self.pool_kind = pool_kind
        self.overhead = overhead
        self._device = device
        self._pool = device.pool(pool_kind)
        self._captured: dict[str, Pool] = {}  # by tag
        self._live = dict.fromkeys(TAGS, 0)
        self._returned: deque[tuple[str, int]] = deque()
        self._graphs: dict[object, weakref.WeakMethod[Callable[[], None]]] = {}
        self._lock = threading.RLock()
        device.serve_cupy(self._pool)

    # ----- arrays

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike = FLOAT32, tag: str = "scratch") -> Any:
        kind = np.dtype(dtype)
        n_bytes = math.prod(shape) * kind.itemsize
        if n_bytes == 0:
            return self._device.array(0, 0, None, shape, kind)
        capturing: str | None = getattr(self._here, "capturing", None)
        with self._lock:
            self._take_back()
            counted = self._live[tag]
            pointer = self._malloc(self._pool if capturing is None else self._captured[capturing], n_bytes)
            size = int(pointer.mem.size)
            if capturing is not None:
                lease = _Lease(pointer, tag, 0, self._returned)  # the pool counts as a whole
            else:
                self._live[tag] = counted + size
                lease = _Lease(pointer, tag, size, self._returned)
        return self._device.array(int(pointer.ptr), n_bytes, lease, shape, kind)

    def trim(self) -> int:
        with self._lock:
            before = self._pool.total_bytes()
            self._pool.free_all_blocks()
            return max(0, before - self._pool.total_bytes())

    # ----- captured graphs

    @contextmanager
    def capture_pool(self, drop_graphs: Callable[[], None], tag: str = "scratch") -> Iterator[None]:
        """Around the capture of a graph: arrays that this thread makes inside keep their place for it.

        They may be let go inside: a later array of the same capture, or of another graph of the same tag
        that never runs at the same time, gets the same place; nothing else does.

        Args:
            drop_graphs: a method that forgets every graph captured with it; called by `retire`. It is
                remembered weakly: when its object is gone, so are its graphs.
            tag: what the arrays count as.
        """
        with self._lock:
            if tag not in self._captured:
                self._captured[tag] = self._device.pool("legacy")
            self._graphs[id(getattr(drop_graphs, "__self__", None))] = weakref.WeakMethod(drop_graphs)
        self._here.capturing = tag
        try:
            yield
        finally:
            self._here.capturing = None

    def retire(self) -> int:
        with self._lock:
            for method in list(self._graphs.values()):
                drop_graphs = method()
                if drop_graphs is not None:
                    drop_graphs()
            self._graphs.clear()
            before = self._held()
            for pool in self._captured.values():
                pool.free_all_blocks()
            return max(0, before - self._held())

    @contextmanager
    def driver_failures(self) -> Iterator[None]:
        """Name a want of memory that the driver meets inside (a graph, a module) as the ledger does.

        Raises:
            OutOfDeviceMemory: at the current site; how much was wanted is not known, so 0.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = OutOfDeviceMemory(self.current_site, 0, self.free)
        else:
            return
        raise failure

    # ----- what there is

    def live(self, tag: str | None = None) -> int:
        by_tag = self.by_tag
        return sum(by_tag.values()) if tag is None else by_tag[tag]

    @property
    def by_tag(self) -> Mapping[str, int]:
        with self._lock:
            self._take_back()
            captured = {tag: self._live[tag] + pool.total_bytes() for tag, pool in self._captured.items()}
            return self._live | captured

    @property
    def cached(self) -> int:
        with self._lock:
            return max(0, self._pool.total_bytes() - self._pool.used_bytes())

    @property
    def total(self) -> int:
        """What this process could hold now: the limit without the context, less when others hold memory."""
        with self._lock:
            there = self._held() + self._device.free_bytes()
            return there if self.limit is None else min(there, max(0, self.limit - self.overhead))

    @property
    def free(self) -> int:
        with self._lock:
            return max(0, self.total - self._held())

    def room_for(self, n_bytes: int) -> int:
        """At least so many blocks; the pool may find more in what it keeps."""
        return self.free // (-(-n_bytes // BLOCK) * BLOCK)

    # ----- inside

    def _lose_device(self) -> None:
        self._device.poison()

    def _held(self) -> int:
        return self._pool.total_bytes() + sum(pool.total_bytes() for pool in self._captured.values())

    def _malloc(self, pool: Pool, n_bytes: int) -> Any:
        try:
            self._keep_limit(pool, n_bytes)
            return pool.malloc(n_bytes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of `except`: CuPy's error holds frames, and they hold blocks.
        raise OutOfDeviceMemory(self.current_site, n_bytes, self.free)

    def _keep_limit(self, pool: Pool, n_bytes: int) -> None:
        """Have the pool refuse to grow over what the limit leaves it.

        Raises:
            MemoryError: the driver's pool, which has no hard limit of its own, would.
        """
        most = None
        if self.limit is not None:
            most = self.limit - self.overhead - (self._held() - pool.total_bytes())
        if pool is not self._pool or self.pool_kind == "legacy":
            pool.set_limit(NO_LIMIT if most is None else max(1, most))  # 1: less than any block
        elif most is not None:
            if pool.used_bytes() + n_bytes > most:
                raise MemoryError
            if pool.total_bytes() + n_bytes > most:
                pool.free_all_blocks()

    def _take_back(self) -> None:
        while self._returned:
            tag, size = self._returned.popleft()
            self._live[tag] -= size


class CupyDevice:
    """CuPy on the process's device. See `Device`."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def pool(self, kind: PoolKind) -> Pool:
        cuda = self._cupy.cuda
        pool: Pool = cuda.MemoryPool() if kind == "legacy" else cuda.MemoryAsyncPool()
        return pool

    def serve_cupy(self, pool: Pool) -> None:
        self._cupy.cuda.set_allocator(pool.malloc)

    def array(self, address: int, size: int, owner: object, shape: tuple[int, ...], dtype: Any) -> Any:
        memory = self._cupy.cuda.UnownedMemory(address, size, owner, 0)
        return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    def free_bytes(self) -> int:
        return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def poison(self) -> None:
        source = 'extern "C" __global__ void write_nowhere(unsigned long long at) { *(int*)at = 1; }'
        self._cupy.RawKernel(source, "write_nowhere")((1,), (1,), (np.uint64(8),))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of CuPy, the runtime or the driver means that memory ran out."""
    return isinstance(error, MemoryError) or getattr(error, "status", None) == OUT_OF_MEMORY
