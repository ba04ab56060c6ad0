from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator

import pytest

from slotd.daemon.arena_directory import (
    DIRECTORY_BYTES,
    ENTRY_BYTES,
    MOST_ENTRIES,
    ArenaDirectory,
    ArenaEntry,
    default_budget,
    intact_slots,
    make_arena,
)


@pytest.fixture
def cells() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, DIRECTORY_BYTES + 100_000) as made:
        yield made


def written(cells: mmap.mmap, place: int, slot: int, text: bytes, generation: int) -> ArenaEntry:
    offset = DIRECTORY_BYTES + 1000 * place
    cells[offset : offset + len(text)] = text
    entry = ArenaEntry(slot, offset, len(text), zlib.crc32(text), generation)
    ArenaDirectory(cells).write(place, entry)
    return entry


def test_what_is_written_counts_until_it_is_cleared(cells: mmap.mmap) -> None:
    directory = ArenaDirectory(cells)
    assert directory.entries() == {}
    first = written(cells, 0, 63, b"abc", 1)
    last = written(cells, MOST_ENTRIES - 1 - 160, 0, b"x" * 900, 2)
    assert directory.entries() == {0: first, MOST_ENTRIES - 1 - 160: last}
    assert directory.intact() == {63: first, 0: last}
    directory.clear(0)
    assert directory.intact() == {0: last}


@pytest.mark.parametrize("byte", range(8 + 28 + 4))
def test_no_byte_of_an_entry_may_be_wrong(cells: mmap.mmap, byte: int) -> None:
    """A writer that is killed in the middle leaves an entry of which some bytes are old."""
    written(cells, 3, 5, b"abc", 7)
    cells[3 * ENTRY_BYTES + byte] ^= 0x41
    assert ArenaDirectory(cells).intact() == {}


def test_no_byte_of_a_payload_may_be_wrong(cells: mmap.mmap) -> None:
    entry = written(cells, 3, 5, b"abcdef", 7)
    kept = written(cells, 4, 6, b"abcdef", 8)
    cells[entry.offset + 5] ^= 1
    assert ArenaDirectory(cells).intact() == {6: kept}
    assert ArenaDirectory(cells).entries() == {4: kept}  # it will not count later either


def test_of_two_entries_for_a_slot_the_newest_that_is_intact_counts(cells: mmap.mmap) -> None:
    old = written(cells, 1, 5, b"old", 7)
    new = written(cells, 0, 5, b"new", 9)
    assert ArenaDirectory(cells).intact() == {5: new}
    old = written(cells, 1, 5, b"old", 7)
    cells[new.offset] ^= 1
    assert ArenaDirectory(cells).intact() == {5: old}


def test_an_entry_beyond_the_end_is_none(cells: mmap.mmap) -> None:
    ArenaDirectory(cells).write(0, ArenaEntry(1, len(cells) - 2, 3, 0, 1))
    assert ArenaDirectory(cells).intact() == {}


def test_an_arena_takes_no_memory_before_it_is_used() -> None:
    descriptor = make_arena(1 << 33)
    assert descriptor is not None
    try:
        assert os.fstat(descriptor).st_size > 1 << 33
        assert os.fstat(descriptor).st_blocks == 0
        assert intact_slots(descriptor) == []
        assert os.fstat(descriptor).st_blocks * 512 <= 2 * DIRECTORY_BYTES
    finally:
        os.close(descriptor)
    assert intact_slots(None) == []
    assert make_arena(0) is None


def test_where_files_may_not_be_so_large_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    assert make_arena(1 << 20) is None
    assert "File too large" in caplog.text


def test_the_default_budget_is_a_share_of_what_is_there() -> None:
    assert 0 < default_budget() < 2**48
