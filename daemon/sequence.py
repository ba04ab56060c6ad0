"""A sequence: one timeline of committed tokens and the pages that hold their K/V."""

from __future__ import annotations

from array import array


class Sequence:
    """Committed tokens, the page table, and at most one open forward.

    Only the engine changes a sequence: `tokens` and `pages` grow by reserve and commit.

    Attributes:
        tokens: the committed ids; their count is the committed length.
        pages: page numbers; token t lives in page `pages[t // PAGE]` at offset `t % PAGE`.
        open_rows: number of provisional rows behind the committed end, 0 when no forward is open.
    """

    __slots__ = ("open_rows", "pages", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self.pages: list[int] = []
        self.open_rows = 0

    def __len__(self) -> int:
        """The committed length, in tokens."""
        return len(self.tokens)
