"""Page storage: segments of pages in the K/V types, taken from the ledger as needed.

A page that is handed out still holds what its last owner wrote. Attention masks those places, but a masked
NaN stays a NaN (0 * NaN), so places behind the committed end are set to zero before a call reads the page:
`prepare`. How far a page may be unclean is kept as one number for each page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.kv.element_types import KvType
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES, Pages
from slotd.daemon.memory import Ledger
from slotd.daemon.ops.batch import Array, Piece, Run
from slotd.daemon.ops.kv_blocks import stored_bytes

#: Where one token's K and V lie: page, and place in it.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Storage of SEGMENT_PAGES pages, one allocation.

    Attributes:
        k: [n_layer, SEGMENT_PAGES, n_head_kv, PAGE, items of a key] in the K type.
        v: [n_layer, SEGMENT_PAGES, n_head_kv, PAGE, items of a value] in the V type.
        unclean: for each page, the number of places from the front that may not be zero.
    """

    k: Array
    v: Array
    unclean: list[int]


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The bytes of pages outside the store.

    Attributes:
        k: [n_layer, n_pages, n_head_kv, PAGE, ...] as stored; undefined behind the last token.
        v: the same for values.
        n_tokens: how many tokens they hold.
    """

    k: Array
    v: Array
    n_tokens: int

    def read_page(self, index: int, n: int, buffer: memoryview) -> None:
        """As `PageStore.read_page`, for the page `index` of these."""
        _fill(buffer, (stored_bytes(self.k[:, index, :, :n]), stored_bytes(self.v[:, index, :, :n])))


class PageStore:
    """Pages with their K/V.

    Args:
        memory: the ledger.
        n_layer, n_head_kv, head_dim, value_dim: of the model.
        k_type, v_type: how K and V are stored.
    """

    def __init__(
        self,
        memory: Ledger,
        n_layer: int,
        n_head_kv: int,
        head_dim: int,
        value_dim: int,
        k_type: KvType,
        v_type: KvType,
    ) -> None:
        self.pages = Pages()
        self._memory = memory
        self._segments: dict[int, Segment] = {}
        shape = (n_layer, SEGMENT_PAGES, n_head_kv, PAGE)
        self._k_shape, self._k_type = (*shape, k_type.items(head_dim)), k_type
        self._v_shape, self._v_type = (*shape, v_type.items(value_dim)), v_type
        self.bytes_per_token = k_type.bytes_per_token(n_layer, n_head_kv, head_dim) + v_type.bytes_per_token(
            n_layer, n_head_kv, value_dim
        )

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment."""
        return self.bytes_per_token * PAGE * SEGMENT_PAGES

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.bytes_per_token * PAGE

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
        free = [segment for segment in free if segment in self._segments]
        self._remove_segments(free)
        return len(free) * self.segment_bytes

    def compact(self, fixed: Collection[int] = ()) -> dict[int, int]:
        """Move pages together, so that `trim` finds segments without a used page: old -> new pages.

        fixed: pages that have to stay where they are.
        """
        moves = self.pages.compaction(fixed)
        for source, target in moves.items():
            self.copy(source, target, PAGE)
            from_segment, from_index = self._locate(source)
            to_segment, to_index = self._locate(target)
            to_segment.unclean[to_index] = from_segment.unclean[from_index]
        self.pages.relocate(moves)
        return moves

    def _add_segment(self) -> int:
        block = self._memory.empty((self.segment_bytes,), np.uint8, tag="kv")
        k_bytes = int(np.prod(self._k_shape)) * self._k_type.dtype.itemsize
        number = self.pages.add_segment()
        self._segments[number] = Segment(
            k=block[:k_bytes].view(self._k_type.dtype).reshape(self._k_shape),
            v=block[k_bytes:].view(self._v_type.dtype).reshape(self._v_shape),
            unclean=[PAGE] * SEGMENT_PAGES,
        )
        return number

    def _remove_segments(self, numbers: list[int]) -> None:
        for number in numbers:
            self.pages.remove_segment(number)
            del self._segments[number]

    # ----- room

    def capacity(self) -> int:
        """Tokens that the pages could hold if nothing but the weights took memory."""
        free = self._memory.total - self._memory.live("weights")
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

    def prepare(self, page: int, start: int, stop: int) -> None:
        """Before rows are written to places start..stop-1 of a page: everything from start on is zero."""
        segment, index = self._locate(page)
        unclean = segment.unclean[index]
        if unclean > start:
            for plane in (segment.k, segment.v):
                stored_bytes(plane[:, index, :, start:unclean])[...] = 0
        segment.unclean[index] = stop

    def copy(self, source: int, target: int, n: int) -> None:
        """The first n places of a page, as stored bytes, to another page."""
        from_segment, from_index = self._locate(source)
        to_segment, to_index = self._locate(target)
        for to_plane, from_plane in ((to_segment.k, from_segment.k), (to_segment.v, from_segment.v)):
            stored_bytes(to_plane[:, to_index, :, :n])[...] = stored_bytes(from_plane[:, from_index, :, :n])

    def move(self, sources: Sequence[Place], targets: Sequence[Place]) -> None:
        """Move the stored bytes of tokens. All sources are read before any target is written.

        Raises:
            OutOfDeviceMemory: no room to hold them; nothing has changed then.
        """
        held = [self._held(plane) for place in sources for plane in self.place(*place)]
        views = [stored_bytes(plane) for place in targets for plane in self.place(*place)]
        for plane, target in zip(held, views, strict=True):
            target[...] = plane

    def _held(self, plane: Array) -> Array:
        stored = stored_bytes(plane)
        copy: Array = self._memory.empty(stored.shape, stored.dtype)
        copy[...] = stored
        return copy

    def read_page(self, page: int, n: int, buffer: memoryview) -> None:
        """The first n places of a page as stored bytes: [n_layer, n_head_kv, n, dim] of K, then of V."""
        _fill(buffer, self._planes(page, n))

    def write_page(self, page: int, n: int, data: memoryview) -> None:
        """Put bytes of `read_page` into the first n places of a page."""
        segment, index = self._locate(page)
        start = 0
        for plane in self._planes(page, n):
            plane[...] = np.frombuffer(data, np.uint8, plane.size, start).reshape(plane.shape)
            start += plane.size
        segment.unclean[index] = max(segment.unclean[index], n)

    def _planes(self, page: int, n: int) -> tuple[Array, Array]:
        """Views of the bytes of K and V in the first n places of a page."""
        segment, index = self._locate(page)
        k, v = segment.k[:, index, :, :n], segment.v[:, index, :, :n]
        return stored_bytes(k), stored_bytes(v)

    def read(self, pages: Sequence[int], n_tokens: int) -> StoredPages:
        """The first n_tokens of these pages, as stored bytes, in ordinary memory.

        Raises:
            MemoryError: the system has no memory left.
        """
        stored = StoredPages(
            np.empty((*self._k_shape[:1], len(pages), *self._k_shape[2:]), self._k_type.dtype),
            np.empty((*self._v_shape[:1], len(pages), *self._v_shape[2:]), self._v_type.dtype),
            n_tokens,
        )
        for number, page in enumerate(pages):
            segment, index = self._locate(page)
            n = min(PAGE, n_tokens - number * PAGE)
            for outside, inside in ((stored.k, segment.k), (stored.v, segment.v)):
                stored_bytes(outside[:, number, :, :n])[...] = stored_bytes(inside[:, index, :, :n])
        return stored

    def write(self, pages: Sequence[int], stored: StoredPages) -> None:
        """Put stored bytes back into pages."""
        for number, page in enumerate(pages):
            segment, index = self._locate(page)
            n = min(PAGE, stored.n_tokens - number * PAGE)
            for inside, outside in ((segment.k, stored.k), (segment.v, stored.v)):
                stored_bytes(inside[:, index, :, :n])[...] = stored_bytes(outside[:, number, :, :n])
            segment.unclean[index] = max(segment.unclean[index], n)

    def place(self, page: int, offset: int) -> tuple[Array, Array]:
        """Views of one token's K and V: [n_layer, n_head_kv, items]."""
        segment, index = self._locate(page)
        return segment.k[:, index, :, offset], segment.v[:, index, :, offset]

    def runs(self, table: Sequence[int]) -> Iterator[Run]:
        """The pages of a page table as views, one for each run of consecutive pages."""
        first = 0
        while first < len(table):
            segment, index = self._locate(table[first])
            stop = first + 1
            most = min(len(table), first + SEGMENT_PAGES - index)
            while stop < most and table[stop] == table[first] + stop - first:
                stop += 1
            inside = slice(index, index + stop - first)
            yield Run(first, segment.k[:, inside], segment.v[:, inside])
            first = stop

    def pieces(self, table: Sequence[int], place: int, n: int, row: int) -> Iterator[Piece]:
        """Where rows row..row+n-1 go when the first one's place is `place`: one piece for each page."""
        done = 0
        while done < n:
            offset = (place + done) % PAGE
            count = min(n - done, PAGE - offset)
            segment, index = self._locate(table[(place + done) // PAGE])
            inside = slice(offset, offset + count)
            yield Piece(
                row + done, row + done + count, segment.k[:, index, :, inside], segment.v[:, index, :, inside]
            )
            done += count

    def _locate(self, page: int) -> tuple[Segment, int]:
        number, index = divmod(page, SEGMENT_PAGES)
        return self._segments[number], index


def _fill(buffer: memoryview, planes: tuple[Array, Array]) -> None:
    """Put bytes one behind the other."""
    start = 0
    for plane in planes:
        target = np.frombuffer(buffer, np.uint8, plane.size, start).reshape(plane.shape)
        target[...] = plane
        start += plane.size
