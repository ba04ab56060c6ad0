"""Pieces of pages out of images and back: a store of pages knows images of the first places of a page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slotd.daemon.kv.pages import PAGE
from slotd.daemon.ops.page_layout import PageLayout

#: (index, n, buffer): an image of the first n places of page `index`, read into a buffer or written from it.
ImageCopy = Callable[[int, int, memoryview], None]


class PieceReader:
    """Reads pieces of pages; one thread uses it.

    Args:
        layout: of the pages.
        read_image: reads an image.
    """

    def __init__(self, layout: PageLayout, read_image: ImageCopy) -> None:
        self._layout = layout
        self._read_image = read_image

    def __call__(self, index: int, start: int, n: int, buffer: memoryview) -> None:
        """Places start .. start+n-1 of page `index`, as an image of n places."""
        if not start:
            self._read_image(index, n, buffer)
            return
        end = start + n
        whole = np.empty(end * self._layout.token_bytes, np.uint8)
        self._read_image(index, end, whole.data)
        piece = np.frombuffer(buffer, np.uint8, n * self._layout.token_bytes)
        planes = zip(self._layout.planes(piece, n), self._layout.planes(whole, end), strict=True)
        for target, source in planes:
            target[...] = source[:, :, start:end]


class PieceWriter:
    """Writes pieces of pages that come in order, each behind the one before it; one thread uses it.

    Args:
        layout: of the pages.
        write_image: writes an image.
    """

    def __init__(self, layout: PageLayout, write_image: ImageCopy) -> None:
        self._layout = layout
        self._write_image = write_image
        self._page = np.zeros(0, np.uint8)  # the image of a page whose pieces have come in part

    def __call__(self, index: int, start: int, n: int, data: memoryview) -> None:
        """Places start .. start+n-1 of page `index`, from an image of n places."""
        if not start and n == PAGE:
            self._write_image(index, n, data)
            return
        layout, end = self._layout, start + n
        if not len(self._page):
            self._page = np.zeros(layout.page_bytes, np.uint8)
        piece = np.frombuffer(data, np.uint8, n * layout.token_bytes)
        for target, source in zip(layout.planes(self._page, PAGE), layout.planes(piece, n), strict=True):
            target[:, :, start:end] = source
        joined = bytearray(end * layout.token_bytes)
        layout.cut(self._page, end, joined)
        self._write_image(index, end, memoryview(joined))
