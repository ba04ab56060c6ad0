"""Slots in host memory: out of the pages and back, as stored bytes.

The device bytes of a moved slot are free for others; a restore brings it back first. The tier has a budget;
over it the host slot that was used least recently is dropped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.page_storage import PageStorage
from slotd.daemon.kv.pages import pages_for
from slotd.daemon.kv.slots import Slot, Slots
from slotd.daemon.memory import Ledger
from slotd.protocol.errors import SlotdError

log = logging.getLogger(__name__)


class OutOfHostMemory(SlotdError):
    """A slot does not fit into the host tier.

    Attributes:
        requested: its bytes.
        budget: bytes of the whole tier; 0 = it is off.
    """

    def __init__(self, requested: int, budget: int) -> None:
        self.requested = requested
        self.budget = budget
        super().__init__(f"a slot of {requested} bytes does not fit into the host tier of {budget} bytes")


@dataclass(slots=True)
class HostCounts:
    """What the tier has done; counts only grow."""

    moves_out: int = 0
    bytes_out: int = 0
    moves_in: int = 0
    bytes_in: int = 0
    dropped: int = 0


class Device(Protocol):
    """What the tier needs of the backend; see `backend.Backend`."""

    @property
    def memory(self) -> Ledger: ...
    @property
    def logits_on_device(self) -> bool: ...
    def keep_logits(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...


class HostTier:
    """Moves slots between pages and host memory.

    Args:
        device: whose memory it relieves.
        store: the pages.
        slots: the slots that are moved.
        budget: most bytes in host memory, 0 = none.
    """

    def __init__(self, device: Device, store: PageStorage, slots: Slots, budget: int) -> None:
        self.budget = budget
        self.counts = HostCounts()
        self._device = device
        self._memory = device.memory
        self._store = store
        self._slots = slots

    @property
    def used(self) -> int:
        """Bytes in host memory."""
        return sum(self.size(slot) for slot in self._slots.values() if slot.host is not None)

    def report(self) -> dict[str, int]:
        """Budget, bytes in use, and counts, for STATUS."""
        return {"budget": self.budget, "used": self.used, **asdict(self.counts)}

    def slot_report(self, content_hash: Callable[[Slot], str | None]) -> dict[str, Any]:
        """For each filled slot: tokens, kind, tier, bytes, those nobody else holds, idle seconds, hash."""
        now = self._slots.clock()
        return {
            str(number): {
                "tokens": len(slot), "kind": slot.kind, "tier": slot.tier, "bytes": self.size(slot),
                "own_bytes": self.own_bytes(slot), "idle_s": round(now - slot.last_used, 3),
                "hash": content_hash(slot),
            }
            for number, slot in self._slots.items()
        }  # fmt: skip

    def own_bytes(self, slot: Slot) -> int:
        """Device bytes that nobody but this slot holds."""
        if slot.host is not None:
            return 0
        own = sum(self._store.pages.references(page) == 1 for page in slot.pages) * self._store.page_bytes
        if slot.logits is None or not self._device.logits_on_device:
            return own
        return own + slot.logits.nbytes

    def size(self, slot: Slot) -> int:
        """Bytes of a slot, the same in both tiers."""
        logits = 0 if slot.logits is None else slot.logits.nbytes
        return pages_for(slot.places) * self._store.page_bytes + logits

    def copy(self, slot: Slot, logits: npt.NDArray[np.float32] | None, keep: Collection[int] = ()) -> Slot:
        """A host slot with the content of a device slot, which stays as it is, and these logits.

        keep: host slots that must not be dropped for it.

        Raises:
            OutOfDeviceMemory: site slot_move (only injected).
            OutOfHostMemory: it does not fit.
        """
        copied = Slot(slot.tokens, (), logits, slot.kv_start)
        size = self.size(copied)
        with self._memory.site("slot_move"):
            self._make_room(size, keep)
            try:
                copied.host = self._store.read(slot.pages, slot.places)
                copied.logits = None if logits is None else logits.copy()
            except MemoryError:
                raise OutOfHostMemory(size, self.budget) from None
        self.counts.moves_out += 1
        self.counts.bytes_out += size
        return copied

    def demote(self, number: int, keep: Collection[int] = ()) -> None:
        """Move a slot to host memory; nothing when it is there.

        Raises:
            KeyError: the slot is empty.
            OutOfDeviceMemory, OutOfHostMemory: as `copy`; the slot is as it was.
        """
        slot = self._slots[number]
        if slot.host is not None:
            return
        copied = self.copy(slot, slot.logits, keep)
        pages, slot.pages = slot.pages, ()
        slot.host, slot.logits = copied.host, copied.logits
        self._store.pages.release(pages)

    def promote(self, number: int) -> None:
        """Move a slot back into pages; nothing when it is there.

        Raises:
            KeyError: the slot is empty.
            OutOfDeviceMemory: site slot_move; the slot is as it was.
        """
        slot = self._slots[number]
        if slot.host is None:
            return
        with self._memory.site("slot_move"):
            logits = None
            if slot.logits is not None:
                logits = self._device.keep_logits(slot.logits)
            pages = self._store.allocate(pages_for(slot.places))
        self._store.write(pages, slot.host)
        slot.pages, slot.host, slot.logits = tuple(pages), None, logits
        self.counts.moves_in += 1
        self.counts.bytes_in += self.size(slot)

    def _make_room(self, size: int, keep: Collection[int]) -> None:
        """Drop host slots, least recently used first, until `size` more bytes fit."""
        droppable = [
            number for number, slot in self._slots.items() if slot.host is not None and number not in keep
        ]
        spare = sum(self.size(self._slots[number]) for number in droppable)
        if size > self.budget - self.used + spare:
            raise OutOfHostMemory(size, self.budget)
        droppable.sort(key=lambda number: self._slots[number].last_used)
        for number in droppable:
            if self.used + size <= self.budget:
                break
            log.warning("slot %d is dropped: the host tier of %d bytes is full", number, self.budget)
            self._slots.free(number)
            self.counts.dropped += 1


def default_budget() -> int:
    """A quarter of the memory that programs can get now, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (available,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024 // 4
    except (OSError, ValueError):  # no such file or line: another system, or an old kernel
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
