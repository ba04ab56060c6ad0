"""Pieces of pages: whatever the cuts, the page is the same in the end."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from slotd.daemon.kv.element_types import kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.page_pieces import PieceReader, PieceWriter
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory


@pytest.mark.parametrize("types", [("f32", "f16"), ("q8_0", "q4_0")])
@pytest.mark.parametrize("cuts", [[0, 64], [0, 1, 2, 64], [0, 20, 40, 60], [0, 63, 64], [0, 5]])
def test_pieces_of_pages_make_the_same_pages(types: tuple[str, str], cuts: list[int]) -> None:
    """P52: stored bytes are moved, whatever numbers they are."""
    store = PageStore(DeviceMemory(), KvShape(3, 2, 64, 32, *map(kv_type, types)))
    pages = store.allocate(4)
    noise = np.random.default_rng(1).integers(0, 256, (2, store.page_bytes), dtype=np.uint8)
    for page, image in zip(pages[:2], noise, strict=True):
        store.write_page(page, PAGE, memoryview(image))
    read = PieceReader(store.layout, lambda index, n, buffer: store.read_page(pages[index], n, buffer))
    write = PieceWriter(store.layout, lambda index, n, data: store.write_page(pages[2 + index], n, data))
    for index in range(2):
        for start, end in pairwise(cuts):
            piece = memoryview(bytearray((end - start) * store.bytes_per_token))
            read(index, start, end - start, piece)
            write(index, start, end - start, piece)
    for index in range(2):
        for offset in range(cuts[-1]):
            there, here = store.place(pages[2 + index], offset), store.place(pages[index], offset)
            assert [plane.tobytes() for plane in there] == [plane.tobytes() for plane in here]
