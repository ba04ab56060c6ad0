"""Pages of K/V: who holds them, how much room there is, and what any store of them can do.

The bytes are a subclass's: `store.PageStore` keeps them as NumPy arrays, `cuda_store.CudaPageStore` in the
memory of a GPU. A page that is handed out still holds what its last owner wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES, Pages
from slotd.daemon.memory import Ledger
from slotd.daemon.memory.pinned_stretch import Stretch
from slotd.daemon.ops.page_layout import Bytes, PageLayout

#: Where one token's K and V lie: page, and place in it.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The bytes of pages outside the store, in host memory.

    Attributes:
        layout: of the store.
        blocks: uint8 [pages of a block, page bytes], page images one behind the other; all blocks have
            equally many, the last one may have more than are filled. Undefined behind the last token.
        n_tokens: how many tokens they hold.
    """

    layout: PageLayout
    blocks: tuple[Bytes, ...]
    n_tokens: int

    def image(self, index: int) -> Bytes:
        """uint8 [page bytes], the page `index` of these."""
        block, inside = divmod(index, len(self.blocks[0]))
        image: Bytes = self.blocks[block][inside]
        return image

    def read_page(self, index: int, n: int, buffer: memoryview) -> None:
        """As `PageStorage.read_page`, for the page `index` of these."""
        self.layout.cut(self.image(index), n, buffer)


class PageStorage(ABC):
    """Pages with their K/V.

    Args:
        memory: the ledger.
        shape: of the model's K/V.
        tag: what they count as in the ledger.

    Attributes:
        pages: who holds which.
        layout: where the bytes of a page lie.
    """

    def __init__(self, memory: Ledger, shape: KvShape, tag: str = "kv") -> None:
        self.pages = Pages()
        self._memory = memory
        self._tag = tag
        self.layout = shape.layout

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        return self.layout.token_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment."""
        return self.layout.segment_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layout.page_bytes

    # ----- taking and giving back

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """n pages with one owner each, contents undefined; grows by whole segments.

        Raises:
            OutOfDeviceMemory: no room for another segment; nothing has changed then.
        """
        added: list[int] = []
        try:
            while self.pages.n_free < n:
                added.append(self._add_segment())
        except BaseException:
            self._remove_segments(added)
            raise
        return self.pages.allocate(n, after)

    def trim(self) -> int:
        """Give segments without a used page back to the ledger's pool. Returns their bytes."""
        free = self.pages.free_segments()
        free = [segment for segment in free if self._has_segment(segment)]
        self._remove_segments(free)
        return len(free) * self.segment_bytes

    def compact(self, fixed: Collection[int] = ()) -> dict[int, int]:
        """Move pages together, so that `trim` finds segments without a used page: old -> new pages.

        fixed: pages that have to stay where they are.
        """
        moves = self.pages.compaction(fixed)
        self._relocate(moves)
        self.pages.relocate(moves)
        return moves

    def _add_segment(self) -> int:
        block = self._memory.empty((self.segment_bytes,), np.uint8, tag=self._tag)
        number = self.pages.add_segment()
        self._put_segment(number, block)
        return number

    def _remove_segments(self, numbers: list[int]) -> None:
        for number in numbers:
            self.pages.remove_segment(number)
            self._drop_segment(number)

    @abstractmethod
    def _put_segment(self, number: int, block: Any) -> None:
        """Keep the storage of a new segment, uint8 [segment bytes] of the device."""

    @abstractmethod
    def _drop_segment(self, number: int) -> None:
        """Let it go."""

    @abstractmethod
    def _has_segment(self, number: int) -> bool:
        """Whether it is kept."""

    @abstractmethod
    def _relocate(self, moves: dict[int, int]) -> None:
        """Copy whole pages, source -> target."""

    # ----- room

    def capacity(self) -> int:
        """Tokens that the pages could hold if nothing but the weights took memory."""
        free = self._memory.total - self._memory.live("weights") - self._memory.live("draft")
        return max(0, free // self.segment_bytes) * SEGMENT_PAGES * PAGE

    def has_room(self, n: int) -> bool:
        """Whether n pages could be allocated now, without a trim."""
        missing = n - self.pages.n_free
        return -(-missing // SEGMENT_PAGES) <= self._memory.room_for(self.segment_bytes)

    def report(self) -> dict[str, Any]:
        """Bytes: total, free, cached, live by tag; pages: in use, free, tokens and bytes of each."""
        memory = self._memory
        return {
            "total": memory.total, "limit": memory.limit, "free": memory.free, "pool": memory.pool_kind,
            "cached": memory.cached, "live": dict(memory.by_tag), "pages_used": self.pages.n_used,
            "pages_free": self.pages.n_free, "page_tokens": PAGE, "page_bytes": self.page_bytes,
        }  # fmt: skip

    # ----- contents

    def pin(self, memory: Stretch) -> None:
        """Prepare to `read` into images of this memory and to `write` from them; nothing need be done."""
        return

    def stored(self, images: Bytes, n_tokens: int) -> StoredPages:
        """Page images, uint8 [pages, page bytes], as what `read` returns."""
        return StoredPages(self.layout, (images,), n_tokens)

    def settle(self) -> None:
        """What was computed until now may be read by `read_page` of other threads."""
        return

    @abstractmethod
    def prepare(self, page: int, start: int, stop: int) -> None:
        """Before rows are written to places start..stop-1 of a page; what lies behind must do no harm."""

    @abstractmethod
    def copy(self, source: int, target: int, n: int) -> None:
        """The first n places of a page, as stored bytes, to another page."""

    @abstractmethod
    def move(self, sources: Sequence[Place], targets: Sequence[Place]) -> None:
        """Move the stored bytes of tokens. All sources are read before any target is written.

        Raises:
            OutOfDeviceMemory: no room to hold them; nothing has changed then.
        """

    @abstractmethod
    def read_page(self, page: int, n: int, buffer: memoryview) -> None:
        """The first n places of a page as an image of n places. From any thread."""

    @abstractmethod
    def write_page(self, page: int, n: int, data: memoryview) -> None:
        """Put an image of n places into the first n places of a page. From any thread."""

    @abstractmethod
    def read(self, pages: Sequence[int], n_tokens: int, images: Bytes | None = None) -> StoredPages:
        """The first n_tokens of these pages, in host memory.

        images: uint8 [pages, page bytes], where to put them; None: into memory of their own.

        Raises:
            MemoryError: the system has no memory left.
        """

    @abstractmethod
    def write(self, pages: Sequence[int], stored: StoredPages) -> None:
        """Put stored bytes back into pages."""
