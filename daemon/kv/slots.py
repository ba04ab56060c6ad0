"""Slots: numbered snapshots that share pages with the sequences they were taken from.

A slot costs references, not copies: the pages below its length never change while it holds them, because a
sequence copies a shared page before it writes there. Content changes by allocate-then-swap: the new
snapshot is complete before the old one is let go, so a failed one destroys nothing.

A slot in the host tier holds no pages but a copy of their bytes (`host_tier`), one in the disk tier only the
name of its file (`slot_store`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.page_storage import StoredPages
from slotd.daemon.kv.pages import PAGE, Pages


@dataclass(slots=True, eq=False)
class Slot:
    """One snapshot: of a prefix (thick), or of a span that a chain puts behind one (thin).

    Its text never changes, its place may.

    Attributes:
        tokens: the ids up to its end, those before a span included.
        pages: pages that hold its K/V, the last one possibly in part; one reference each. Those of a span
            begin with the page that its first token lies in. None while the slot is in another tier.
        logits: float32 [n_vocab] of the token that follows, or None; a restore without new tokens needs them.
        kv_start: first position of a span; None for a prefix.
        host: the bytes of the pages while the slot is in host memory, else None.
        stored: hash of its file while its bytes are there only, else None.
        last_used: when it was filled or restored last, seconds on the clock of its `Slots`.
        content_hash: see `slot_hash`; None until somebody has asked.
        state: of the recurrent layers behind the last token: as the backend keeps it while the pages are on
            the device, uint8 [state bytes] in host memory; None on disk, and for models without such layers.
        draft: what the draft knows of it, see `drafting`; None: nothing. Only while it is on the device.
    """

    tokens: array[int]
    pages: tuple[int, ...]
    logits: npt.NDArray[np.float32] | None
    kv_start: int | None = None
    host: StoredPages | None = None
    stored: str | None = None
    last_used: float = 0.0
    content_hash: str | None = None
    state: Any = None
    draft: Any = None

    @property
    def kind(self) -> str:
        """thick or thin."""
        return "thick" if self.kv_start is None else "thin"

    @property
    def places(self) -> int:
        """Places that it covers in its pages, counted from the first page on."""
        return len(self.tokens) - (self.kv_start or 0) // PAGE * PAGE

    def __len__(self) -> int:
        """The position behind its last token."""
        return len(self.tokens)

    @property
    def tier(self) -> str:
        """Where its bytes are: device, host or disk."""
        if self.stored is not None:
            return "disk"
        return "device" if self.host is None else "host"


class Slots(Mapping[int, Slot]):
    """The filled slots by number.

    Args:
        pages: where the references are counted.
        n_slots: how many there may be, 0 .. n_slots-1.
        clock: seconds, only growing.
    """

    def __init__(self, pages: Pages, n_slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.n_slots = n_slots
        self.clock = clock
        self._pages = pages
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._slots))

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, number: int, slot: Slot) -> None:
        """Fill a slot; it takes its own references, then the old content goes.

        Raises:
            ValueError: no slot of this number.
        """
        if not 0 <= number < self.n_slots:
            raise ValueError(f"slot {number} is not below {self.n_slots}")
        self._pages.share(slot.pages)
        old = self._slots.get(number)
        self._slots[number] = slot
        slot.last_used = self.clock()
        if old is not None:
            self._pages.release(old.pages)

    def follow(self, moves: Mapping[int, int]) -> None:
        """Pages have moved: old -> new numbers."""
        for slot in self._slots.values():
            slot.pages = tuple(moves.get(page, page) for page in slot.pages)

    def touch(self, number: int) -> None:
        """A slot is used now."""
        self._slots[number].last_used = self.clock()

    def free(self, number: int) -> bool:
        """Empty a slot; whether it held something."""
        slot = self._slots.pop(number, None)
        if slot is None:
            return False
        self._pages.release(slot.pages)
        return True
