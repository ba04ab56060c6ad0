"""Whole pages between K/V and page files. Pages are independent, so two threads copy, check and move them.

A checksum costs about as long as the disk takes; one thread doing both in turn would reach half of it.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slotd.daemon.kv.slot_files import BadFile, PageEntry, PageTable, Part, encode_page_table
from slotd.daemon.kv.slot_folder import FileReader, SystemWriting, write_at
from slotd.daemon.kv.slot_index import PageFile
from slotd.protocol.slot_identity import HASH_BYTES

#: Fills a buffer with the K/V of the first `n` tokens of page `index`, as stored: (index, n, buffer).
ReadPage = Callable[[int, int, memoryview], None]

#: Takes such bytes, which are valid during the call only. Pages come in any order, from several threads.
WritePage = Callable[[int, int, memoryview], None]

WORKERS = 2

#: Fewer pages than this are not worth threads.
FEW = 4

T = TypeVar("T")


def write_pages(
    descriptor: int, page_bytes: int, chains: Sequence[bytes], read_page: Callable[[int, memoryview], None],
    check_stop: Callable[[], None],
) -> PageTable:  # fmt: skip
    """Write a page file with a page for each chain hash; read_page(number, buffer) gives page `number`."""
    start = data_start(page_bytes, len(chains))
    system = SystemWriting(descriptor, start)

    def write(number: int, buffer: memoryview) -> PageEntry:
        check_stop()
        read_page(number, buffer)
        end = start + (number + 1) * page_bytes
        write_at(descriptor, buffer, end - page_bytes)
        system.written_to(end)
        return PageEntry(chains[number], zlib.crc32(buffer))

    table = PageTable(page_bytes, tuple(_each_page(write, range(len(chains)), page_bytes)))
    write_at(descriptor, encode_page_table(table), 0)
    return table


def read_pages(
    file: FileReader, pages: PageFile, part: Part, write_page: Callable[[int, memoryview], None],
    check_stop: Callable[[], None],
) -> None:  # fmt: skip
    """Check the pages of a part and hand them to write_page(number in the part, bytes).

    Raises:
        BadFile: one is damaged.
    """
    start = pages.data_start + part.first * pages.page_bytes
    file.expect(start, part.count * pages.page_bytes)

    def read(number: int, buffer: memoryview) -> None:
        check_stop()
        file.into(buffer, start + number * pages.page_bytes)
        if zlib.crc32(buffer) != pages.entries[part.first + number].crc:
            raise BadFile("page_checksum")
        write_page(number, buffer)

    _each_page(read, range(part.count), pages.page_bytes)


def data_start(page_bytes: int, n: int) -> int:
    """Where the pages start in a file of n pages."""
    return PageTable(page_bytes, (PageEntry(bytes(HASH_BYTES), 0),) * n).data_start


def _each_page(work: Callable[[int, memoryview], T], numbers: range, page_bytes: int) -> list[T]:
    """work(number, buffer of one page) for all numbers; the first failure ends it and is raised."""
    own = threading.local()

    def run(number: int) -> T:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(page_bytes))
        return work(number, own.buffer)

    if len(numbers) < FEW:
        return [run(number) for number in numbers]
    pool = ThreadPoolExecutor(WORKERS, "slotd-disk")
    try:
        return list(pool.map(run, numbers))
    finally:
        pool.shutdown(cancel_futures=True)
