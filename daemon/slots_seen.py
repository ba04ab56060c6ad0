"""Which slots the front knows to be filled: the last state, and what was said since."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slotd.daemon.link import State
from slotd.protocol.messages import AllCleared, Event, SnapFreed, SnapInline, SnapLoaded, SnapTaken, SnapThin


@dataclass(frozen=True, slots=True)
class LostSlots:
    """The slots that went with an engine process, and the device bytes of its K/V and slots."""

    slots: tuple[int, ...]
    device_bytes: int


class SlotsSeen:
    """Slots by what the engine process has said of them."""

    def __init__(self) -> None:
        self._filled: set[int] = set()
        self._freed: set[int] = set()

    def note(self, event: Event) -> None:
        """A line of the engine process: it may be newer than the state."""
        match event:
            case SnapTaken(slot=slot) | SnapInline(slot=slot) | SnapLoaded(slot=slot) | SnapThin(slot=slot):
                self._filled.add(slot)
                self._freed.discard(slot)
            case SnapFreed(slot=slot):
                self._forget({slot})
            case AllCleared(freed=freed):
                self._forget(set(freed))

    def lost(self, state: State | None, kept: Collection[int] = ()) -> LostSlots:
        """The process is gone; `state` is its last one. Nothing but `kept` is filled afterwards."""
        reported = set() if state is None else {int(slot) for slot in state.data["slots"]}
        slots = tuple(sorted((self._filled | (reported - self._freed)) - set(kept)))
        self._filled, self._freed = set(kept), set()
        return LostSlots(slots, 0 if state is None else _device_bytes(state))

    def _forget(self, slots: set[int]) -> None:
        self._filled -= slots
        self._freed |= slots


def _device_bytes(state: State) -> int:
    memory = state.data["memory"]
    return int(memory["pages_used"] * memory["page_bytes"] + memory["live"]["snapshot"])
