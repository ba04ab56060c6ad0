"""The same things done to the pages of a NumPy store and of a CUDA store, and what then differs."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.cuda_store import Addresses, CudaPageStore, MakePageCopies
from slotd.daemon.kv.element_types import kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory, Ledger
from slotd.daemon.memory.pinned_stretch import Stretch
from slotd.daemon.ops.page_layout import Bytes, PageLayout, Strides


class HostCopies:
    """`ops.cuda_pages.CudaPages` over addresses of this process: each head, layer and plane row by row.

    Attributes:
        settled: how often `settle` was called.
        pinned: the memory that images may lie in.
    """

    pages_per_block = 2

    def __init__(self, memory: Ledger, layout: PageLayout) -> None:
        self._layout = layout
        self.settled = 0

    def host_block(self) -> Bytes:
        return np.full((self.pages_per_block, self._layout.page_bytes), 0xEE, np.uint8)

    def address(self, segment: Any) -> int:
        return int(segment.ctypes.data)

    def pin(self, memory: Stretch) -> None:
        self.pinned = memory

    def settle(self) -> None:
        self.settled += 1

    def copy(self, sources: Addresses, targets: Addresses, n: int) -> None:
        self._copy(sources, targets, self._layout.in_segment, self._layout.in_segment, n)

    def move(self, sources: Addresses, targets: Addresses) -> None:
        layout = self._layout
        moved = [
            (target, ctypes.string_at(source, size))
            for source, target, size in _units(
                layout, sources, targets, layout.in_segment, layout.in_segment, 1
            )
        ]
        for target, data in moved:
            ctypes.memmove(target, data, len(data))

    def read(self, sources: Addresses, blocks: Sequence[Bytes]) -> None:
        images = self._images(blocks, sources.shape[1], PAGE)
        self._copy(sources, images, self._layout.in_segment, self._layout.in_image(PAGE), PAGE)

    def write(self, targets: Addresses, blocks: Sequence[Bytes]) -> None:
        images = self._images(blocks, targets.shape[1], PAGE)
        self._copy(images, targets, self._layout.in_image(PAGE), self._layout.in_segment, PAGE)

    def read_page(self, source: Addresses, n: int, buffer: memoryview) -> None:
        image = np.frombuffer(buffer, np.uint8)
        images = self._images([image[None]], 1, n)
        self._copy(source, images, self._layout.in_segment, self._layout.in_image(n), n)

    def write_page(self, target: Addresses, n: int, data: memoryview) -> None:
        image = np.frombuffer(data, np.uint8)
        images = self._images([image[None]], 1, n)
        self._copy(images, target, self._layout.in_image(n), self._layout.in_segment, n)

    def _images(self, blocks: Sequence[Bytes], count: int, n: int) -> Addresses:
        images = list(itertools.chain.from_iterable(blocks))[:count]
        k = np.array([image.ctypes.data for image in images], np.uint64)
        return np.stack([k, k + np.uint64(self._layout.v_offset(n))])

    def _copy(self, sources: Addresses, targets: Addresses, from_: Strides, to: Strides, n: int) -> None:
        for source, target, size in _units(self._layout, sources, targets, from_, to, n):
            ctypes.memmove(target, source, size)


def _units(
    layout: PageLayout, sources: Addresses, targets: Addresses, from_: Strides, to: Strides, n: int
) -> list[tuple[int, int, int]]:
    """(source, target, bytes) of what one block of threads copies."""
    units = []
    for entry, layer, head in itertools.product(
        range(sources.shape[1]), range(layout.n_layer), range(layout.n_head_kv)
    ):
        for plane, row in enumerate((layout.k_row, layout.v_row)):
            steps = [(s.k_layer, s.k_head) if plane == 0 else (s.v_layer, s.v_head) for s in (from_, to)]
            source, target = (
                int(addresses[plane, entry]) + layer * by_layer + head * by_head
                for addresses, (by_layer, by_head) in zip((sources, targets), steps, strict=True)
            )
            units.append((source, target, n * row))
    return units


class Mirror:
    """A store of each kind, with the same noise in the same pages.

    Args:
        copies: of the CUDA store.
        memory: its ledger.
        n_pages: how many are allocated.
        shape: n_layer, n_head_kv, head_dim, value_dim.
    """

    def __init__(
        self, copies: MakePageCopies, memory: Ledger, n_pages: int, types: tuple[str, str] = ("f16", "f16"),
        shape: tuple[int, int, int, int] = (2, 3, 64, 32),
    ) -> None:  # fmt: skip
        kv_shape = KvShape(*shape, *map(kv_type, types))
        self.host = PageStore(DeviceMemory(), kv_shape)
        self.cuda = CudaPageStore(copies, memory, kv_shape)
        self.pages = self.host.allocate(n_pages)
        assert self.cuda.allocate(n_pages) == self.pages
        self.rng = np.random.default_rng(0)
        for page in self.pages:
            self.put(page, PAGE)

    def noise(self, n: int) -> npt.NDArray[np.uint8]:
        """A random image of n places."""
        return self.rng.integers(0, 256, n * self.host.bytes_per_token, dtype=np.uint8)

    def put(self, page: int, n: int) -> None:
        """Write the same noise to n places of a page."""
        image = self.noise(n).data
        self.host.write_page(page, n, image)
        self.cuda.write_page(page, n, image)

    def differing(self) -> list[int]:
        """Pages that are not the same in both."""
        return [page for page in self.pages if self._page(self.host, page) != self._page(self.cuda, page)]

    def _page(self, store: Any, page: int) -> bytes:
        buffer = bytearray(store.page_bytes)
        store.read_page(page, PAGE, memoryview(buffer))
        return bytes(buffer)

    # ----- what is done to both

    def check_copies(self) -> None:
        """The first places of pages to other pages."""
        for n, source, target in ((1, 0, 3), (17, 1, 4), (PAGE, 2, 5)):
            self.host.copy(self.pages[source], self.pages[target], n)
            self.cuda.copy(self.pages[source], self.pages[target], n)
        assert self.differing() == []

    def check_moves(self) -> None:
        """Places that are sources and targets at once, over two pages; and as many as there may be."""
        first, second = self.pages[:2]
        moves = [
            ([(first, 3), (second, 9), (second, 0)], [(first, 2), (first, 3), (second, 9)]),
            ([(first, 5)], [(second, 63)]),
            ([(first, p) for p in range(64)], [(second, p) for p in reversed(range(64))]),
        ]
        for sources, targets in moves:
            self.host.move(sources, targets)
            self.cuda.move(sources, targets)
        assert self.differing() == []

    def check_pages_outside(self) -> None:
        """Out to host memory, in part and in any order, and back into other pages."""
        half = len(self.pages) // 2
        order = self.rng.permutation(self.pages).tolist()
        sources, targets = order[:half], order[half : 2 * half]
        n_tokens = half * PAGE - 30
        outside = self.host.read(sources, n_tokens), self.cuda.read(sources, n_tokens)
        for index, n in ((0, PAGE), (half - 1, PAGE - 30), (half - 1, 1)):
            images = [bytearray(n * self.host.bytes_per_token) for _ in outside]
            for stored, image in zip(outside, images, strict=True):
                stored.read_page(index, n, memoryview(image))
            assert images[0] == images[1]
        self.cuda.write(targets, outside[1])
        self.host.write(targets[:-1], outside[0])
        last = bytearray(self.host.page_bytes)  # behind the last token the whole page comes along
        self.host.read_page(sources[-1], PAGE, memoryview(last))
        self.host.write_page(targets[-1], PAGE, memoryview(last))
        assert self.differing() == []

    def check_single_pages(self) -> None:
        """Parts of pages as images, through any host memory."""
        for n in (1, 7, 63, PAGE):
            page = self.pages[n % len(self.pages)]
            self.put(page, n)
            images = [bytearray(n * self.host.bytes_per_token) for _ in range(2)]
            for store, image in zip((self.host, self.cuda), images, strict=True):
                store.read_page(page, n, memoryview(image))
            assert images[0] == images[1]
        assert self.differing() == []
