"""Page storage in the memory of a GPU. Here are addresses only; `ops.cuda_pages` moves the bytes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.page_storage import PageStorage, Place, StoredPages
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES, pages_for
from slotd.daemon.memory import Ledger
from slotd.daemon.memory.pinned_stretch import Stretch
from slotd.daemon.ops.page_layout import Bytes, PageLayout

#: Page tables whose addresses are remembered: those of the rows of one step.
MOST_TABLES = 64

#: Addresses of K and of V, uint64 [2, n].
Addresses = npt.NDArray[np.uint64]


class PageCopies(Protocol):
    """What moves the bytes; see `ops.cuda_pages.CudaPages`."""

    @property
    def pages_per_block(self) -> int: ...
    def host_block(self) -> Bytes: ...
    def address(self, segment: Any) -> int: ...
    def pin(self, memory: Stretch) -> None: ...
    def settle(self) -> None: ...
    def copy(self, sources: Addresses, targets: Addresses, n: int) -> None: ...
    def move(self, sources: Addresses, targets: Addresses) -> None: ...
    def read(self, sources: Addresses, blocks: Sequence[Bytes]) -> None: ...
    def write(self, targets: Addresses, blocks: Sequence[Bytes]) -> None: ...
    def read_page(self, source: Addresses, n: int, buffer: memoryview) -> None: ...
    def write_page(self, target: Addresses, n: int, data: memoryview) -> None: ...


class MakePageCopies(Protocol):
    """Makes them for a store."""

    def __call__(self, memory: Ledger, layout: PageLayout) -> PageCopies: ...


class CudaPageStore(PageStorage):
    """Pages on a GPU; see `PageStorage`.

    Everything but `read_page` and `write_page` is for the engine's thread.

    Args:
        copies: makes what moves the bytes.

    Attributes:
        before_reuse: a method that is called before pages get another owner or their memory goes: it enqueues
            what is still to be written to them. Its object is not kept alive.
    """

    before_reuse: weakref.WeakMethod[Callable[[], None]] | None = None

    def __init__(self, copies: MakePageCopies, memory: Ledger, shape: KvShape, tag: str = "kv") -> None:
        super().__init__(memory, shape, tag)
        self._copies = copies(memory, self.layout)
        self._segments: dict[int, Any] = {}
        self._tables: OrderedDict[int, tuple[list[int], Addresses]] = OrderedDict()
        # By page; 0: its segment is not there.
        self._addresses: Addresses = np.zeros((2, 0), dtype=np.uint64)

    def _at(self, pages: Sequence[int]) -> Addresses:
        found: Addresses = self._addresses[:, pages]
        return found

    def addresses(self, table: list[int]) -> Addresses:
        """Where pages lie: uint64 [2, n], K and V of layer 0, head 0, place 0 (see `PageLayout`).

        A table is asked for at every step and rarely changes: what was found is remembered.
        """
        known = self._tables.get(id(table))
        if known is not None and known[0] == table:
            self._tables.move_to_end(id(table))
            return known[1]
        found = self._at(table)
        self._tables[id(table)] = (table.copy(), found)
        if len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)
        return found

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        self._write_what_is_left()
        pages = super().allocate(n, after)
        self._copies.settle()  # what the last owner of these pages still reads is enqueued
        return pages

    def trim(self) -> int:
        self._write_what_is_left()
        return super().trim()

    def _write_what_is_left(self) -> None:
        write = None if self.before_reuse is None else self.before_reuse()
        if write is not None:
            write()

    def settle(self) -> None:
        self._copies.settle()

    def pin(self, memory: Stretch) -> None:
        self._copies.pin(memory)

    def _put_segment(self, number: int, block: Any) -> None:
        self._tables.clear()  # the same pages, at other places
        end = (number + 1) * SEGMENT_PAGES
        if end > self._addresses.shape[1]:
            missing = np.zeros((2, end - self._addresses.shape[1]), dtype=np.uint64)
            self._addresses = np.concatenate([self._addresses, missing], axis=1)
        base = self._copies.address(block)
        for index in range(SEGMENT_PAGES):
            k, v = self.layout.offsets(index)
            self._addresses[:, number * SEGMENT_PAGES + index] = base + k, base + v
        self._segments[number] = block

    def _drop_segment(self, number: int) -> None:
        self._addresses[:, number * SEGMENT_PAGES : (number + 1) * SEGMENT_PAGES] = 0
        del self._segments[number]

    def _has_segment(self, number: int) -> bool:
        return number in self._segments

    def _relocate(self, moves: dict[int, int]) -> None:
        if moves:
            sources, targets = self._at(list(moves)), self._at(list(moves.values()))
            self._copies.copy(sources, targets, PAGE)
            self._copies.settle()

    # ----- contents

    def prepare(self, page: int, start: int, stop: int) -> None:
        return  # the kernels read no place behind a row's position

    def copy(self, source: int, target: int, n: int) -> None:
        self._copies.copy(self._at([source]), self._at([target]), n)

    def move(self, sources: Sequence[Place], targets: Sequence[Place]) -> None:
        self._copies.move(self._places(sources), self._places(targets))

    def read_page(self, page: int, n: int, buffer: memoryview) -> None:
        self._copies.read_page(self._at([page]), n, buffer)

    def write_page(self, page: int, n: int, data: memoryview) -> None:
        self._copies.write_page(self._at([page]), n, data)

    def stored(self, images: Bytes, n_tokens: int) -> StoredPages:
        n = self._copies.pages_per_block
        blocks = tuple(images[start : start + n] for start in range(0, len(images), n))
        return StoredPages(self.layout, blocks, n_tokens)

    def read(self, pages: Sequence[int], n_tokens: int, images: Bytes | None = None) -> StoredPages:
        if images is None:
            n_blocks = -(-len(pages) // self._copies.pages_per_block)
            blocks = tuple(self._copies.host_block() for _ in range(n_blocks))
            stored = StoredPages(self.layout, blocks, n_tokens)
        else:
            stored = self.stored(images, n_tokens)
        self._copies.settle()
        self._copies.read(self._at(pages), stored.blocks)
        return stored

    def write(self, pages: Sequence[int], stored: StoredPages) -> None:
        assert len(pages) == pages_for(stored.n_tokens)
        self._copies.settle()
        self._copies.write(self._at(pages), stored.blocks)

    def _places(self, places: Sequence[Place]) -> Addresses:
        pages, offsets = np.array(places, dtype=np.int64).reshape(-1, 2).T
        rows = np.array([[self.layout.k_row], [self.layout.v_row]], dtype=np.uint64)
        found: Addresses = self._at(pages.tolist()) + rows * offsets.astype(np.uint64)
        return found
