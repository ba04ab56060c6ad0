"""Page tables: room behind the tokens of a sequence, in pages that are its own where rows are written."""

from __future__ import annotations

from slotd.daemon.kv.page_storage import PageStorage, Place
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.memory import OutOfDeviceMemory


def place_of(pages: list[int], place: int) -> Place:
    """Where place number `place` of a page table lies."""
    return pages[place // PAGE], place % PAGE


def extend(store: PageStorage, pages: list[int], n_tokens: int) -> None:
    """Have pages for n_tokens places in all.

    Raises:
        OutOfDeviceMemory: the table is as it was.
    """
    missing = pages_for(n_tokens) - len(pages)
    if missing > 0:
        pages += store.allocate(missing, pages[-1] if pages else None)


def make_writable(store: PageStorage, pages: list[int], length: int, end: int) -> None:
    """Every page of places length .. end-1 is there, private, and does no harm behind them.

    Raises:
        OutOfDeviceMemory: what lies before `length` is as it was.
    """
    extend(store, pages, end)
    for index in range(length // PAGE, pages_for(end)):
        start = max(0, length - index * PAGE)
        if store.pages.references(pages[index]) > 1:
            _make_private(store, pages, index, start)
        store.prepare(pages[index], start, min(PAGE, end - index * PAGE))


def _make_private(store: PageStorage, pages: list[int], index: int, n: int) -> None:
    """Replace a shared page of the page table by a copy of its first n places."""
    shared = pages[index]
    try:
        (page,) = store.allocate(1)
    except OutOfDeviceMemory:
        if index == len(pages) - 1:
            raise
        page = pages.pop()  # admission reserves one page more than the tokens need
    store.copy(shared, page, n)
    pages[index] = page
    store.pages.release([shared])
