"""Slots in host memory: out of the pages and back, as stored bytes.

The device bytes of a moved slot are free for others; a restore brings it back first. The tier has a budget;
over it the host slot that was used least recently goes to disk where that is possible, else it is dropped.
Writing takes a while: a slot on its way to disk is no longer part of the budget, but its bytes stay until its
file is there, and a restore takes them. Such bytes have a bound of their own; over it slots are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.host_arena import HostArena, Room, Survivor
from slotd.daemon.kv.page_storage import PageStorage
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.kv.recurrent_storage import RecurrentStorage
from slotd.daemon.kv.slots import Slot, Slots
from slotd.daemon.memory import Ledger
from slotd.daemon.ops.page_layout import Bytes
from slotd.protocol.errors import SlotdError

log = logging.getLogger(__name__)

#: Slots on their way to disk may be as large together as the tier, or this many bytes where it is smaller.
LEAVING_BYTES = 256 << 20


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
    moves_to_disk: int = 0
    bytes_to_disk: int = 0
    moves_from_disk: int = 0
    bytes_from_disk: int = 0


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
        arena: where slots get their memory; None, and when it has no room: memory of their own.
        identity: what the K/V depend on, JSON values; a slot of another process must have the same.
        states: the recurrent states; None: the model has none.

    Attributes:
        spill: starts to write slot `number` to disk and calls `spilled` at the end; False: that cannot be.
    """

    def __init__(
        self, device: Device, store: PageStorage, slots: Slots, budget: int,
        arena: HostArena | None = None, identity: Mapping[str, Any] | None = None,
        states: RecurrentStorage | None = None,
    ) -> None:  # fmt: skip
        self.budget = budget
        self._arena = arena
        self._states = states
        self._state_bytes = 0 if states is None else states.n_bytes
        self._identity = {
            **(identity or {}), "page": PAGE, "page_bytes": store.page_bytes,
            "state_bytes": self._state_bytes,
        }  # fmt: skip
        self.counts = HostCounts()
        self._device = device
        self._memory = device.memory
        self._store = store
        self._slots = slots
        self._leaving: set[Slot] = set()
        if arena is not None:
            store.pin(arena)
        self.spill: Callable[[int, Slot], bool] = lambda number, slot: False

    @property
    def used(self) -> int:
        """Bytes in host memory, those on their way to disk aside."""
        return sum(self.size(slot) for _, slot in self._staying())

    @property
    def leaving(self) -> int:
        """Bytes on their way to disk."""
        return sum(self.size(slot) for slot in self._leaving)

    def report(self) -> dict[str, int]:
        """Budget, bytes in use and on their way to disk, and counts, for STATUS."""
        return {"budget": self.budget, "used": self.used, "leaving": self.leaving, **asdict(self.counts)}

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
        if slot.state is not None:
            own += self._state_bytes
        if slot.logits is None or not self._device.logits_on_device:
            return own
        return own + slot.logits.nbytes

    def size(self, slot: Slot) -> int:
        """Bytes of a slot, the same in every tier; on disk without the logits, which are in its file."""
        logits = 0 if slot.logits is None else slot.logits.nbytes
        state = self._state_bytes if len(slot) else 0
        return pages_for(slot.places) * self._store.page_bytes + state + logits

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
                room = self._room(slot, logits)
                copied.host = self._store.read(slot.pages, slot.places, None if room is None else room.images)
                copied.state = self._read_state(slot, room)
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
        if slot.stored is not None:
            raise ValueError(f"slot {number} is on disk")
        copied = self.copy(slot, slot.logits, keep)
        pages, slot.pages = slot.pages, ()
        slot.host, slot.logits, slot.state = copied.host, copied.logits, copied.state
        slot.draft = None  # it can be done without
        self._store.pages.release(pages)

    def promote(self, number: int) -> None:
        """Move a slot back into pages; nothing when it is there.

        Raises:
            KeyError: the slot is empty.
            OutOfDeviceMemory: site slot_move; the slot is as it was.
        """
        slot = self._slots[number]
        if slot.stored is not None:
            raise ValueError(f"slot {number} is on disk")
        if slot.host is None:
            return
        with self._memory.site("slot_move"):
            logits = state = None
            if slot.logits is not None:
                logits = self._device.keep_logits(slot.logits)
            if slot.state is not None and self._states is not None:
                state = self._states.write(slot.state, "snapshot")
            pages = self._store.allocate(pages_for(slot.places))
        self._store.write(pages, slot.host)
        slot.pages, slot.host, slot.logits, slot.state = tuple(pages), None, logits, state
        self.counts.moves_in += 1
        self.counts.bytes_in += self.size(slot)

    def _room(self, slot: Slot, logits: npt.NDArray[np.float32] | None) -> Room | None:
        if self._arena is None:
            return None
        about = {"identity": self._identity, "kv_start": slot.kv_start}
        return self._arena.room(
            len(slot.pages), self._store.page_bytes, about, slot.tokens, logits,
            0 if slot.state is None else self._state_bytes,
        )  # fmt: skip

    def _read_state(self, slot: Slot, room: Room | None) -> Bytes | None:
        if slot.state is None or self._states is None:
            return None
        state = np.empty(self._state_bytes, np.uint8) if room is None else room.state
        self._states.read(slot.state, state)
        return state

    # ----- between two processes

    def record(self) -> None:
        """Have the arena know what the slots hold now."""
        if self._arena is not None:
            in_host = {number: slot.host for number, slot in self._slots.items() if slot.host is not None}
            self._arena.record({number: host.blocks[0] for number, host in in_host.items()})

    def adopt(self) -> None:
        """Fill slots with what an earlier process left in the arena, where it is of the same kind."""
        if self._arena is None:
            return
        for number, survivor in self._arena.survivors().items():
            if survivor.about["identity"] == self._identity and number < self._slots.n_slots:
                self._slots.put(number, self._adopted(survivor))
            else:
                log.warning("slot %d of the process before is of another kind: it is dropped", number)
        self.record()

    def _adopted(self, survivor: Survivor) -> Slot:
        slot = Slot(survivor.tokens, (), survivor.logits, survivor.about["kv_start"])
        slot.host = self._store.stored(survivor.room.images, slot.places)
        slot.state = survivor.room.state if len(survivor.room.state) else None
        return slot

    # ----- room

    def _make_room(self, size: int, keep: Collection[int]) -> None:
        """Have host slots leave, least recently used first, until `size` more bytes fit."""
        candidates = [(number, slot) for number, slot in self._staying() if number not in keep]
        spare = sum(self.size(slot) for _, slot in candidates)
        if size > self.budget - self.used + spare:
            raise OutOfHostMemory(size, self.budget)
        for number, slot in sorted(candidates, key=lambda candidate: candidate[1].last_used):
            if self.used + size <= self.budget:
                break
            self._leave(number, slot)

    def _staying(self) -> list[tuple[int, Slot]]:
        """The slots in host memory that are not on their way to disk."""
        return [
            (number, slot)
            for number, slot in self._slots.items()
            if slot.host is not None and slot not in self._leaving
        ]

    def _leave(self, number: int, slot: Slot) -> None:
        if self.leaving + self.size(slot) <= max(self.budget, LEAVING_BYTES):
            self._leaving.add(slot)  # before it starts: it may end at once
            if self.spill(number, slot):
                return
            self._leaving.discard(slot)
        self._drop(number)

    def spilled(self, number: int, slot: Slot, name: str | None) -> None:
        """The end of what `spill` started. name: the hash of the slot's file; None: there is none."""
        self._leaving.discard(slot)
        if self._slots.get(number) is not slot or slot.host is None:
            return  # freed, replaced or restored meanwhile
        if name is not None:
            self.counts.moves_to_disk += 1
            self.counts.bytes_to_disk += self.size(slot)
            slot.host, slot.logits, slot.state, slot.stored = None, None, None, name
        elif self.used > self.budget:
            self._drop(number)

    def _drop(self, number: int) -> None:
        log.warning("slot %d is dropped: the host tier of %d bytes is full", number, self.budget)
        self._slots.free(number)
        self.counts.dropped += 1
