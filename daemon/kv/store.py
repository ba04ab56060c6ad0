"""Page storage as NumPy arrays: segments of pages in the K/V types, taken from the ledger as needed.

Attention masks places behind the committed end, but a masked NaN stays a NaN (0 * NaN), so they are set to
zero before a call reads the page: `prepare`. How far a page may be unclean is one number for each page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.page_storage import PageStorage, Place, StoredPages
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES
from slotd.daemon.memory import Ledger
from slotd.daemon.ops.batch import Array, Piece, Run
from slotd.daemon.ops.kv_blocks import stored_bytes
from slotd.daemon.ops.page_layout import Bytes


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


class PageStore(PageStorage):
    """Pages in host memory; see `PageStorage`."""

    def __init__(self, memory: Ledger, shape: KvShape, tag: str = "kv") -> None:
        super().__init__(memory, shape, tag)
        self._segments: dict[int, Segment] = {}
        rows, k_type, v_type = (
            (shape.n_layer, SEGMENT_PAGES, shape.n_head_kv, PAGE),
            shape.k_type,
            shape.v_type,
        )
        self._k_shape, self._k_dtype = (*rows, k_type.items(shape.head_dim)), k_type.dtype
        self._v_shape, self._v_dtype = (*rows, v_type.items(shape.value_dim)), v_type.dtype

    def _put_segment(self, number: int, block: Any) -> None:
        k_bytes = self.layout.offsets(0)[1]
        self._segments[number] = Segment(
            k=block[:k_bytes].view(self._k_dtype).reshape(self._k_shape),
            v=block[k_bytes:].view(self._v_dtype).reshape(self._v_shape),
            unclean=[PAGE] * SEGMENT_PAGES,
        )

    def _drop_segment(self, number: int) -> None:
        del self._segments[number]

    def _has_segment(self, number: int) -> bool:
        return number in self._segments

    def _relocate(self, moves: dict[int, int]) -> None:
        for source, target in moves.items():
            self.copy(source, target, PAGE)
            from_segment, from_index = self._locate(source)
            to_segment, to_index = self._locate(target)
            to_segment.unclean[to_index] = from_segment.unclean[from_index]

    # ----- contents

    def prepare(self, page: int, start: int, stop: int) -> None:
        """Everything from `start` on is zero."""
        segment, index = self._locate(page)
        unclean = segment.unclean[index]
        if unclean > start:
            for plane in (segment.k, segment.v):
                stored_bytes(plane[:, index, :, start:unclean])[...] = 0
        segment.unclean[index] = stop

    def copy(self, source: int, target: int, n: int) -> None:
        for inside, outside in zip(self._planes(target, n), self._planes(source, n), strict=True):
            inside[...] = outside

    def move(self, sources: Sequence[Place], targets: Sequence[Place]) -> None:
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
        image = np.frombuffer(buffer, np.uint8, n * self.bytes_per_token)
        self._read(page, n, self.layout.planes(image, n))

    def write_page(self, page: int, n: int, data: memoryview) -> None:
        self._write(page, n, self.layout.planes(np.frombuffer(data, np.uint8, n * self.bytes_per_token), n))

    def read(self, pages: Sequence[int], n_tokens: int, images: Bytes | None = None) -> StoredPages:
        if images is None:
            images = np.empty((len(pages), self.page_bytes), np.uint8)
        stored = self.stored(images, n_tokens)
        for number, page in enumerate(pages):
            n = min(PAGE, n_tokens - number * PAGE)
            k, v = self.layout.planes(stored.image(number), PAGE)
            self._read(page, n, (k[:, :, :n], v[:, :, :n]))
        return stored

    def write(self, pages: Sequence[int], stored: StoredPages) -> None:
        for number, page in enumerate(pages):
            n = min(PAGE, stored.n_tokens - number * PAGE)
            k, v = self.layout.planes(stored.image(number), PAGE)
            self._write(page, n, (k[:, :, :n], v[:, :, :n]))

    def _read(self, page: int, n: int, planes: tuple[Array, Array]) -> None:
        for outside, inside in zip(planes, self._planes(page, n), strict=True):
            outside[...] = inside

    def _write(self, page: int, n: int, planes: tuple[Array, Array]) -> None:
        for inside, outside in zip(self._planes(page, n), planes, strict=True):
            inside[...] = outside
        segment, index = self._locate(page)
        segment.unclean[index] = max(segment.unclean[index], n)

    def _planes(self, page: int, n: int) -> tuple[Array, Array]:
        """Views of the bytes of K and V in the first n places of a page: [n_layer, n_head_kv, n, row]."""
        segment, index = self._locate(page)
        k, v = segment.k[:, index, :, :n], segment.v[:, index, :, :n]
        return stored_bytes(k), stored_bytes(v)

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
