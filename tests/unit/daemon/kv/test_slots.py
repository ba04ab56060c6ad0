"""Slots: references, allocate-then-swap."""

from __future__ import annotations

from array import array

import pytest

from slotd.daemon.kv.pages import Pages
from slotd.daemon.kv.slots import Slot, Slots


@pytest.fixture
def pages() -> Pages:
    pages = Pages()
    pages.add_segment()
    pages.allocate(4)
    return pages


def slot(*pages: int) -> Slot:
    return Slot(array("i", [1, 2, 3]), pages, None)


def test_a_slot_holds_references(pages: Pages) -> None:
    slots = Slots(pages, 2)
    slots.put(1, slot(0, 1))
    assert [pages.references(page) for page in range(3)] == [2, 2, 1]
    assert (list(slots), len(slots), 1 in slots, 0 in slots, len(slots[1])) == ([1], 1, True, False, 3)


def test_new_content_replaces_old(pages: Pages) -> None:
    slots = Slots(pages, 2)
    slots.put(0, slot(0, 1))
    slots.put(0, slot(1, 2))
    assert [pages.references(page) for page in range(4)] == [1, 2, 2, 1]


def test_a_failed_put_keeps_the_old_content(pages: Pages) -> None:
    slots = Slots(pages, 2)
    slots.put(0, slot(0))
    with pytest.raises(ValueError, match="page 9 has no owner"):
        slots.put(0, slot(9))
    assert slots[0].pages == (0,)
    with pytest.raises(ValueError, match="slot 2 is not below 2"):
        slots.put(2, slot(0))
    assert pages.references(0) == 2


def test_free(pages: Pages) -> None:
    slots = Slots(pages, 2)
    slots.put(1, slot(0, 1))
    assert slots.free(1) is True
    assert slots.free(1) is False
    assert pages.references(0) == 1
    assert list(slots) == []
