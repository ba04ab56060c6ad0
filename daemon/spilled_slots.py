"""Slots in the disk tier: how the full host tier sends them there, and how they come back.

The file of such a slot is a stored snapshot like any other. It stays when the slot comes back or is freed. It
may be dropped, or go for others when the folder is full: then the slot is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from slotd.daemon.background import Background, Steps
from slotd.daemon.engine import Engine
from slotd.daemon.kv.page_pieces import PieceWriter
from slotd.daemon.kv.pages import pages_for
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.kv.slots import Slot
from slotd.protocol.errors import RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Attempt(Protocol):
    """Runs a step that may run out of device memory, and again after something was given up for it."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


class SpilledSlots:
    """Writes slots of the host tier to disk and reads them again.

    Args:
        engine: owns slots and pages; its host tier is told to spill here.
        store: the snapshots on disk; tells which ones are gone.
        background: where files are written and read.
        saving: the work that saves a slot as it is now; its result is the hash.
        call_soon: makes the scheduler's thread call a function; from any thread.
    """

    def __init__(
        self, engine: Engine, store: SlotStore, background: Background,
        saving: Callable[[Slot], Callable[[], str]], call_soon: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._store = store
        self._background = background
        self._saving = saving
        self._coming: set[Slot] = set()
        engine.host_tier.spill = self._spill
        store.removed = lambda name: call_soon(lambda: self._lose(name))

    # ----- to disk

    def _spill(self, number: int, slot: Slot) -> bool:
        """Start to write a slot of the host tier; False: it cannot be written."""
        if self._store.read_only or slot.kind != "thick":
            return False
        self._background.start(self._write(number, slot), lambda error: _log_failure(number, error))
        return True

    def _write(self, number: int, slot: Slot) -> Steps:
        name = None
        try:
            name = yield self._saving(slot)
        finally:
            self._engine.host_tier.spilled(number, slot, name)

    # ----- and back

    def bring_back(self, number: int, attempt: Attempt) -> Steps:
        """Read a slot into pages. When its file is gone or bad the slot is empty afterwards.

        Raises:
            OutOfDeviceMemory: site slot_move; the slot is as it was.
        """
        slot, slots, store = self._engine.slots[number], self._engine.slots, self._engine.store
        while slot in self._coming:  # for somebody else: the work of this thread is done in order
            yield _nothing
        name = slot.stored
        if name is None or slots.get(number) is not slot:
            return
        pages: list[int] = []
        self._coming.add(slot)
        try:
            pages = attempt(lambda: self._blank_pages(slot))
            writer = PieceWriter(store.layout, lambda index, n, data: store.write_page(pages[index], n, data))
            data, found = yield lambda: self._store.read(name, writer)
            self._engine.recurrence.check_bytes(name, len(found), len(slot))
            logits = attempt(lambda: self._engine.keep_logits(np.frombuffer(data, "<f4"))) if data else None
            state = attempt(lambda: self._engine.recurrence.write(found))
            if slots.get(number) is slot:
                store.pages.share(pages)
                slot.pages, slot.logits, slot.state, slot.stored = tuple(pages), logits, state, None
                self._count(slot)
        except RequestError as error:
            self._drop(number, slot, str(error))
        finally:
            self._coming.discard(slot)
            store.pages.release(pages)

    def confirm(self, number: int) -> Steps:
        """Look whether the file of a slot is there. When it is not the slot is empty afterwards."""
        slot = self._engine.slots[number]
        name = slot.stored or ""
        if not (yield lambda: self._store.holds(name)):
            self._drop(number, slot, "its file is gone")

    def _blank_pages(self, slot: Slot) -> list[int]:
        with self._engine.memory.site("slot_move"):
            return self._engine.store.allocate(pages_for(slot.places))

    def _count(self, slot: Slot) -> None:
        counts = self._engine.host_tier.counts
        counts.moves_from_disk += 1
        counts.bytes_from_disk += self._engine.host_tier.size(slot)

    # ----- files that are gone

    def _lose(self, name: str) -> None:
        for number, slot in list(self._engine.slots.items()):
            if slot.stored == name:
                self._drop(number, slot, "its file is gone")

    def _drop(self, number: int, slot: Slot, reason: str) -> None:
        """Empty the slot, unless it was filled with something else meanwhile."""
        if self._engine.slots.get(number) is slot and slot.stored is not None:
            log.warning("slot %d is dropped: %s", number, reason)
            self._engine.free_slot(number)
            self._engine.host_tier.counts.dropped += 1


def _nothing() -> None:
    """Work that is done when all that was asked for before is."""


def _log_failure(number: int, error: Exception | None) -> None:
    if error is not None:
        log.warning("slot %d was not written to disk: %s", number, error)
