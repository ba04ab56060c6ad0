"""A sequence: one timeline of committed tokens and the pages that hold their K/V."""

from __future__ import annotations

from array import array
from typing import Any


class Sequence:
    """Committed tokens, the page table, and at most one open forward.

    Only the engine changes a sequence: `tokens` and `pages` grow by reserve and commit, `state` follows.

    Attributes:
        tokens: the committed ids; their count is the committed length.
        pages: page numbers; token t lives in page `pages[t // PAGE]` at offset `t % PAGE`.
        open_rows: number of provisional rows behind the committed end, 0 when no forward is open.
        state: of the recurrent layers behind the committed end, as the backend keeps it; None: there are no
            such layers, or nothing was committed.
        checkpoints: length -> state behind so many tokens, which never changes; see `recurrence`.
        draft: what the draft knows of it, see `drafting`; None: nothing.
        open_state: what the open forward leaves for a commit of these layers.
    """

    __slots__ = ("checkpoints", "draft", "open_rows", "open_state", "pages", "state", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self.pages: list[int] = []
        self.open_rows = 0
        self.state: Any = None
        self.checkpoints: dict[int, Any] = {}
        self.draft: Any = None
        self.open_state: Any = None

    def __len__(self) -> int:
        """The committed length, in tokens."""
        return len(self.tokens)
