"""Host memory that a CUDA device is told of in pieces, when it first copies from or to them.

What the driver knows (page-locked memory) moves several times faster than what it does not. To tell it costs
0.1 to 0.3 s for each GB, so a stretch of many GB is not told of as a whole. The pages that the driver knows
are those that lay there at the time: it must forget them before they go back to the system.

A copy stays within one registration, or outside of all: the driver refuses others.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

log = logging.getLogger(__name__)

#: Bytes that are told of at once, at multiples of this from the start on.
PIECE = 32 << 20


class Stretch(Protocol):
    """Host memory at `address`, of which the system has given the first `taken` bytes; see `kv.host_arena`.

    Attributes:
        on_release: called with an address before the memory from there on goes back to the system.
    """

    on_release: Callable[[int], None]

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def taken(self) -> int: ...


class PinnedStretch:
    """What the driver knows of a stretch. Thread-safe. When this object goes, the driver forgets it all.

    Args:
        stretch: the memory; kept as long as the driver knows of it.
        register: tells the driver of (address, bytes). Raises when it refuses.
        unregister: has it forget what was told of at an address.
    """

    def __init__(
        self, stretch: Stretch, register: Callable[[int, int], None], unregister: Callable[[int], None]
    ) -> None:
        self._stretch = stretch
        self._register, self._unregister = register, unregister
        # By piece: its start, and the end of each registration, one behind the other.
        self._edges: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self._refused = False
        weakref.finalize(self, _forget_all, self._edges, unregister, stretch)
        method = weakref.WeakMethod(self.forget)

        def on_release(address: int) -> None:
            forget = method()
            if forget is not None:
                forget(address)

        stretch.on_release = on_release

    @property
    def known(self) -> int:
        """Bytes that the driver knows of."""
        with self._lock:
            return sum(edges[-1] - edges[0] for edges in self._edges.values())

    def parts(self, address: int, size: int) -> list[tuple[int, int]]:
        """Parts (address, bytes) in which `size` bytes can be copied; the driver is told of them first."""
        base, end = self._stretch.address, address + size
        if not base <= address < base + self._stretch.size:
            return [(address, size)]
        limit = base + _up(self._stretch.taken, mmap.PAGESIZE)
        cuts = [address]
        with self._lock:
            for piece in range((address - base) // PIECE, (end - 1 - base) // PIECE + 1):
                start = base + piece * PIECE
                edges = self._edges.setdefault(piece, [start])
                self._tell(edges, min(start + PIECE, limit))
                cuts += [edge for edge in edges if cuts[-1] < edge < end]
        return [(start, stop - start) for start, stop in pairwise([*cuts, end])]

    def forget(self, address: int) -> None:
        """Have the driver forget all that reaches behind an address: other memory may lie there soon."""
        first_page = _up(address, mmap.PAGESIZE)
        with self._lock:
            for edges in self._edges.values():
                while len(edges) > 1 and edges[-1] > first_page:
                    edges.pop()
                    self._unregister(edges[-1])

    def _tell(self, edges: list[int], end: int) -> None:
        start = edges[-1]
        if self._refused or start >= end:
            return
        try:
            self._register(start, end - start)
        except Exception as error:  # a driver, a limit or a sandbox that will not: an error type of CuPy's
            self._refused = True
            log.warning("slots move more slowly: host memory cannot be page-locked (%s)", error)
        else:
            edges.append(end)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _forget_all(edges: dict[int, list[int]], unregister: Callable[[int], None], _: Stretch) -> None:
    for start in [start for each in edges.values() for start in each[:-1]]:
        try:
            unregister(start)
        except Exception as error:  # at the end of a process whose device is gone
            log.debug("page-locked memory at the end: %s", error)
    edges.clear()
