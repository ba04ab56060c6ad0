from __future__ import annotations

from typing import Any

from slotd.daemon.link import State
from slotd.daemon.slots_seen import LostSlots, SlotsSeen
from slotd.protocol.messages import AllCleared, Restored, SnapFreed, SnapInline, SnapTaken, SnapThin


def state(*slots: int, pages: int = 0, logits: int = 0) -> State:
    memory: dict[str, Any] = {"pages_used": pages, "page_bytes": 1000, "live": {"snapshot": logits, "kv": 9}}
    return State({"slots": {str(slot): {"tokens": 5} for slot in slots}, "memory": memory})


def test_slots_of_the_last_state_and_those_filled_since() -> None:
    seen = SlotsSeen()
    seen.note(SnapInline(slot=7, cur_pos=3))
    seen.note(SnapThin(slot=1, kv_start=0, kv_end=3))
    seen.note(Restored(slot=6, cur_pos=3))
    assert seen.lost(state(3, 10, pages=2, logits=24)) == LostSlots((1, 3, 7, 10), 2024)
    assert seen.lost(state()) == LostSlots((), 0)


def test_slots_that_were_freed_since_are_not_lost() -> None:
    seen = SlotsSeen()
    for slot in range(5):
        seen.note(SnapTaken(slot=slot, cur_pos=3))
    seen.note(SnapFreed(slot=1))
    seen.note(AllCleared(epoch=1, freed=(2, 3), kept=(), bytes=0))
    seen.note(SnapTaken(slot=3, cur_pos=3))
    assert seen.lost(state(0, 1, 2, 3, 4)).slots == (0, 3, 4)


def test_a_process_that_never_published_anything() -> None:
    assert SlotsSeen().lost(None) == LostSlots((), 0)
