"""Where the bytes of a page of K/V lie: in a segment of pages, and in an image outside.

A row is one token's key or value of one head, as stored. In a segment K of all its pages come first,
[n_layer, pages, n_head_kv, TILE, row], then V. An image holds the first n places of one page in one piece:
K [n_layer, n_head_kv, n, row], then V. All offsets are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.batch import TILE

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Strides:
    """From one layer and one head to the next, for K and for V."""

    k_layer: int
    k_head: int
    v_layer: int
    v_head: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Of one model's pages.

    Attributes:
        n_layer, n_head_kv: of the model.
        k_row, v_row: bytes of a row.
        segment_pages: pages in a segment.
    """

    n_layer: int
    n_head_kv: int
    k_row: int
    v_row: int
    segment_pages: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.n_layer * self.n_head_kv * (self.k_row + self.v_row)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, and of its image."""
        return self.token_bytes * TILE

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment."""
        return self.page_bytes * self.segment_pages

    # ----- in a segment

    def offsets(self, index: int) -> tuple[int, int]:
        """K and V of layer 0, head 0, place 0 of page `index` of a segment."""
        in_layer = self.n_head_kv * TILE
        v_plane = self.n_layer * self.segment_pages * in_layer * self.k_row
        return index * in_layer * self.k_row, v_plane + index * in_layer * self.v_row

    @property
    def in_segment(self) -> Strides:
        """Steps in a segment."""
        in_layer = self.segment_pages * self.n_head_kv * TILE
        return Strides(in_layer * self.k_row, TILE * self.k_row, in_layer * self.v_row, TILE * self.v_row)

    # ----- in an image

    def v_offset(self, n: int) -> int:
        """V of layer 0, head 0, place 0 of an image of n places; K is at 0."""
        return self.n_layer * self.n_head_kv * n * self.k_row

    def in_image(self, n: int) -> Strides:
        """Steps in an image of n places."""
        heads = self.n_head_kv * n
        return Strides(heads * self.k_row, n * self.k_row, heads * self.v_row, n * self.v_row)

    def planes(self, image: Bytes, n: int) -> tuple[Bytes, Bytes]:
        """Views of an image of n places: [n_layer, n_head_kv, n, row] of K and of V."""
        shape, v = (self.n_layer, self.n_head_kv, n), self.v_offset(n)
        return image[:v].reshape(*shape, self.k_row), image[v : n * self.token_bytes].reshape(
            *shape, self.v_row
        )

    def cut(self, image: Bytes, n: int, out: Any) -> None:
        """The first n places of a page's image as an image of their own, into a buffer."""
        target = np.frombuffer(out, np.uint8, n * self.token_bytes)
        for part, whole in zip(self.planes(target, n), self.planes(image, TILE), strict=True):
            part[...] = whole[:, :, :n]


def divided(address: int, size: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """start, stop of the parts of `size` bytes at an address, cut at those of `cuts` that lie inside.

    cuts: addresses, ascending. One copy of a GPU must not go from one pinned range into another.
    """
    inside = cuts[bisect_right(cuts, address) : bisect_left(cuts, address + size)]
    return list(pairwise((0, *(cut - address for cut in inside), size)))
