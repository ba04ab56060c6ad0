"""Pieces of pages between K/V and page files.

Writing takes longer than a checksum, so one thread does both in turn and the system writes beside it.
Reading is faster: a second thread reads and checks one piece while the first puts the one before it
into its page.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slotd.daemon.kv.page_files import PageEntry, PageTable, encode_page_table
from slotd.daemon.kv.slot_files import BadFile, Part
from slotd.daemon.kv.slot_folder import FileReader, SystemWriting, write_at
from slotd.daemon.kv.slot_index import PageFile

#: Fills a buffer with K/V of tokens start .. start+n-1 of page `index`, as stored: (index, start, n, buffer).
ReadPage = Callable[[int, int, int, memoryview], None]

#: Takes such bytes, which are valid during the call only: (index, start, n, bytes).
WritePage = Callable[[int, int, int, memoryview], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A piece to be written: n tokens from position `at` on, and the hashes in front of and behind them."""

    at: int
    n: int
    start: bytes
    end: bytes


def write_pieces(
    descriptor: int, token_bytes: int, page: int, pieces: Sequence[Wanted], ids: bytes, read_page: ReadPage,
    check_stop: Callable[[], None],
) -> PageTable:  # fmt: skip
    """Write a page file with these pieces.

    page: tokens in a page; ids: those of the pieces, one behind the other.
    """
    place = blank_table(token_bytes, page, pieces, ids).data_start
    system = SystemWriting(descriptor, place)
    buffer = memoryview(bytearray(max(piece.n for piece in pieces) * token_bytes))
    entries = []
    for piece in pieces:
        check_stop()
        data = buffer[: piece.n * token_bytes]
        read_page(piece.at // page, piece.at % page, piece.n, data)
        write_at(descriptor, data, place)
        place += len(data)
        system.written_to(place)
        entries.append(PageEntry(piece.start, piece.end, piece.at % page, piece.n, zlib.crc32(data)))
    table = PageTable(token_bytes, tuple(entries), ids)
    write_at(descriptor, encode_page_table(table), 0)
    return table


def read_pieces(
    file: FileReader, pages: PageFile, part: Part, at: int, page: int, write_page: WritePage,
    check_stop: Callable[[], None],
) -> int:  # fmt: skip
    """Check the pieces of a part and hand them to write_page.

    Args:
        at: position of the first token.
        page: tokens in a page.

    Returns:
        The position behind the last one.

    Raises:
        BadFile: one is damaged.
    """
    token_bytes, offsets = pages.table.token_bytes, pages.offsets
    first, last = offsets[part.first], offsets[part.first + part.count]
    place = pages.data_start + first * token_bytes
    file.expect(place, (last - first) * token_bytes)
    entries = pages.entries(part)
    longest = max(entry.n for entry in entries) * token_bytes
    buffers = [memoryview(bytearray(longest)) for _ in range(2)]

    def read(number: int) -> memoryview:
        entry = entries[number]
        data = buffers[number % 2][: entry.n * token_bytes]
        file.into(data, place + (offsets[part.first + number] - first) * token_bytes)
        if zlib.crc32(data) != entry.crc:
            raise BadFile("page_checksum")
        return data

    with ThreadPoolExecutor(1, "slotd-disk-read") as reader:
        ahead = reader.submit(read, 0)
        for number, entry in enumerate(entries):
            check_stop()
            data = ahead.result()
            if number + 1 < len(entries):
                ahead = reader.submit(read, number + 1)
            write_page(at // page, at % page, entry.n, data)
            at += entry.n
    return at


def blank_table(token_bytes: int, page: int, pieces: Sequence[Wanted], ids: bytes) -> PageTable:
    """The table of a file with these pieces before their checksums are known; it has its final length."""
    entries = tuple(PageEntry(piece.start, piece.end, piece.at % page, piece.n, 0) for piece in pieces)
    return PageTable(token_bytes, entries, ids)
