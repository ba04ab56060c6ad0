"""Bytes of K/V pages on a CUDA device: from page to page, from place to place, and to host memory and back.

Inside the device everything is enqueued on the engine's stream. Between device and host a stream of its own
copies, so that this can go on beside a step: pages are gathered into one block of device memory and go from
there in one piece. That block is made at the start: what is moved out because memory is full must not need
any. Blocks of host memory are pinned and kept: to pin one costs ten times as much as to fill it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import Ledger
from slotd.daemon.memory.cuda_memory import is_out_of_memory
from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.kernels import kernel
from slotd.daemon.ops.page_layout import Bytes, PageLayout, Strides, divided

log = logging.getLogger(__name__)

#: Addresses of K and of V, uint64 [2, n].
Addresses = npt.NDArray[np.uint64]

#: Entries of one launch, and tokens of one move.
MOST_ENTRIES = 64

#: Bytes that go between device and host at once, when a page is not larger.
STAGING_BYTES = 16 << 20

#: Bytes of a block of host memory, when a page is not larger.
BLOCK_BYTES = 2 << 20

#: What the wide kernels copy at once.
WIDE = 16

THREADS = 256


class _Entries(ctypes.Structure):
    _fields_ = (("from_", ctypes.c_uint64 * (2 * MOST_ENTRIES)), ("to", ctypes.c_uint64 * (2 * MOST_ENTRIES)))


class _Steps(ctypes.Structure):
    _fields_ = (("layer", ctypes.c_uint64 * 2), ("head", ctypes.c_uint64 * 2))


class CudaPages:
    """Copies the pages of one store.

    Args:
        memory: the ledger.
        layout: of the pages.
        stream: where the engine computes (anything with its address as `ptr`); default: the current one.

    Raises:
        OutOfDeviceMemory: no room for what goes between device and host at once.
    """

    def __init__(self, memory: Ledger, layout: PageLayout, stream: Any = None) -> None:
        self._layout = layout
        self._wide_rows = layout.k_row % WIDE == layout.v_row % WIDE == 0
        self._per_transfer = min(MOST_ENTRIES, max(1, STAGING_BYTES // layout.page_bytes))
        self._staging = memory.empty((self._per_transfer * layout.page_bytes,), np.uint8)
        self._pinned = _pinned(layout.page_bytes)
        self._compute = stream
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._settled = cupy.cuda.Event(disable_timing=True)
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}  # pinned: start -> end
        self._cuts: list[int] = []  # where a copy is divided: the ends of pinned ranges
        self.settle()

    @property
    def pages_per_block(self) -> int:
        """Pages in a block of host memory."""
        return max(1, BLOCK_BYTES // self._layout.page_bytes)

    def host_block(self) -> Bytes:
        """A block of pinned host memory for `read`: uint8 [pages_per_block, page bytes], contents undefined.

        Raises:
            MemoryError: the system has no memory left.
        """
        return _pinned(self.pages_per_block * self._layout.page_bytes).reshape(self.pages_per_block, -1)

    def address(self, segment: Any) -> int:
        """Where a segment lies."""
        return int(segment.data.ptr)

    def settle(self) -> None:
        """What was enqueued until now is seen by `read`, and done when `write` overwrites what it reads."""
        self._settled.record(self._compute)

    def pin(self, address: int, n_bytes: int) -> bool:
        """Pin host memory that is there already. False, with a warning, where the system does not let it."""
        try:
            cupy.cuda.runtime.hostRegister(address, n_bytes, 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            log.warning("%d bytes of the host tier are not pinned, slots move slower: %s", n_bytes, error)
            return False
        with self._lock:
            self._ranges[address] = address + n_bytes
            self._divide()
        return True

    def unpin(self, address: int) -> None:
        """What `pin` did at this address is undone."""
        with self._lock:
            del self._ranges[address]
            self._divide()
        with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the device is lost, or the process ends
            cupy.cuda.runtime.hostUnregister(address)

    def _divide(self) -> None:
        self._cuts = sorted({*self._ranges, *self._ranges.values()})

    # ----- inside the device

    def copy(self, sources: Addresses, targets: Addresses, n: int) -> None:
        """The first n places of pages to other pages."""
        self.pages(sources, targets, self._layout.in_segment, self._layout.in_segment, n)

    def move(self, sources: Addresses, targets: Addresses) -> None:
        """The bytes of tokens to other places; all are read before one is written."""
        self.pages_move(sources, targets)

    def pages(
        self, sources: Addresses, targets: Addresses, from_: Strides, to: Strides, n: int, stream: Any = None
    ) -> None:
        """n rows of each head and layer, from and to pages or images, each one once. Enqueued."""
        layout = self._layout
        k_bytes, v_bytes = n * layout.k_row, n * layout.v_row
        wide = k_bytes % WIDE == v_bytes % WIDE == 0
        copy = kernel("pages_copy_wide" if wide else "pages_copy_narrow")
        steps = (_steps(from_), _steps(to), layout.n_head_kv, k_bytes, v_bytes)
        for start in range(0, sources.shape[1], MOST_ENTRIES):
            part = slice(start, start + MOST_ENTRIES)
            entries, count = _entries(sources[:, part], targets[:, part])
            grid = (layout.n_layer * layout.n_head_kv, count, 2)
            copy.launch(grid, THREADS, (entries, *steps), stream=stream or self._compute)

    def pages_move(self, sources: Addresses, targets: Addresses) -> None:
        """The rows of tokens in all heads and layers. Enqueued.

        Raises:
            ValueError: more tokens than a step has rows.
        """
        layout, count = self._layout, sources.shape[1]
        if count > MOST_ENTRIES:
            raise ValueError(f"{count} tokens to move, the limit is {MOST_ENTRIES}")
        entries, _ = _entries(sources, targets)
        move = kernel("pages_move_wide" if self._wide_rows else "pages_move_narrow")
        args = (entries, _steps(layout.in_segment), count, layout.n_head_kv, layout.k_row, layout.v_row)
        held = count * max(layout.k_row, layout.v_row)
        move.launch((layout.n_layer * layout.n_head_kv, 2), THREADS, args, smem=held, stream=self._compute)

    # ----- to the host and back; from any thread, done when they return

    def read(self, sources: Addresses, blocks: Sequence[Bytes]) -> None:
        """Whole pages into images in pinned blocks, one behind the other."""
        with self._lock:
            self._stream.wait_event(self._settled)
            for start, stop in self._transfers(sources.shape[1]):
                self._gather(sources[:, start:stop], TILE)
                for image, offset, size in self._pieces(blocks, start, stop):
                    self._transfer(image.ctypes.data, self._staging.data.ptr + offset, size, to_host=True)
            self._stream.synchronize()

    def write(self, targets: Addresses, blocks: Sequence[Bytes]) -> None:
        """Images in pinned blocks, one behind the other, into whole pages."""
        with self._lock:
            self._stream.wait_event(self._settled)
            for start, stop in self._transfers(targets.shape[1]):
                for image, offset, size in self._pieces(blocks, start, stop):
                    self._transfer(self._staging.data.ptr + offset, image.ctypes.data, size, to_host=False)
                self._scatter(targets[:, start:stop], TILE)
            self._stream.synchronize()

    def read_page(self, source: Addresses, n: int, buffer: memoryview) -> None:
        """The first n places of a page as an image into any host memory."""
        size = n * self._layout.token_bytes
        with self._lock:
            self._stream.wait_event(self._settled)
            self._gather(source, n)
            self._transfer(self._pinned.ctypes.data, self._staging.data.ptr, size, to_host=True)
            self._stream.synchronize()
            np.frombuffer(buffer, np.uint8, size)[...] = self._pinned[:size]

    def write_page(self, target: Addresses, n: int, data: memoryview) -> None:
        """An image of n places from any host memory into the first n places of a page."""
        size = n * self._layout.token_bytes
        with self._lock:
            self._stream.wait_event(self._settled)
            self._pinned[:size] = np.frombuffer(data, np.uint8, size)
            self._transfer(self._staging.data.ptr, self._pinned.ctypes.data, size, to_host=False)
            self._scatter(target, n)
            self._stream.synchronize()

    def _gather(self, sources: Addresses, n: int) -> None:
        layout = self._layout
        images = self._images(sources.shape[1], n)
        self.pages(sources, images, layout.in_segment, layout.in_image(n), n, self._stream)

    def _scatter(self, targets: Addresses, n: int) -> None:
        layout = self._layout
        images = self._images(targets.shape[1], n)
        self.pages(images, targets, layout.in_image(n), layout.in_segment, n, self._stream)

    def _images(self, count: int, n: int) -> Addresses:
        """Images of n places one behind the other in the device's block."""
        first = np.uint64(self._staging.data.ptr)
        k = first + np.arange(count, dtype=np.uint64) * np.uint64(n * self._layout.token_bytes)
        return np.stack([k, k + np.uint64(self._layout.v_offset(n))])

    def _transfers(self, n_pages: int) -> list[tuple[int, int]]:
        """Pages start .. stop - 1 of each transfer."""
        step = self._per_transfer
        return [(start, min(start + step, n_pages)) for start in range(0, n_pages, step)]

    def _pieces(self, blocks: Sequence[Bytes], start: int, stop: int) -> list[tuple[Bytes, int, int]]:
        """Pages start .. stop - 1 of blocks: (their first image, offset in the device's block, bytes)."""
        pieces, page_bytes = [], self._layout.page_bytes
        page = start
        while page < stop:
            block, inside = divmod(page, self.pages_per_block)
            count = min(stop - page, self.pages_per_block - inside)
            pieces.append((blocks[block][inside:], (page - start) * page_bytes, count * page_bytes))
            page += count
        return pieces

    def _transfer(self, target: int, source: int, size: int, *, to_host: bool) -> None:
        runtime = cupy.cuda.runtime
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        for start, stop in divided(target if to_host else source, size, self._cuts):
            runtime.memcpyAsync(target + start, source + start, stop - start, kind, self._stream.ptr)


def _entries(sources: Addresses, targets: Addresses) -> tuple[_Entries, int]:
    entries, count = _Entries(), sources.shape[1]
    for field, addresses in ((entries.from_, sources), (entries.to, targets)):
        np.frombuffer(field, np.uint64).reshape(2, MOST_ENTRIES)[:, :count] = addresses
    return entries, count


def _steps(strides: Strides) -> _Steps:
    return _Steps((strides.k_layer, strides.v_layer), (strides.k_head, strides.v_head))


def _pinned(n_bytes: int) -> Bytes:
    """Pinned host memory; what is let go stays with CuPy for the next request of the same size.

    Raises:
        MemoryError: the system has no memory left.
    """
    try:
        memory = cupy.cuda.alloc_pinned_memory(n_bytes)
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError(f"{n_bytes} bytes of pinned host memory") from None
        raise
    return np.frombuffer(memory, np.uint8, n_bytes)
