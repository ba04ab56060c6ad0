"""The host arena's directory: which slots lie in it, so that the next engine process finds them.

The arena is one piece of shared memory: this directory, then the bytes of slots. A slot's payload is written
first, then its entry with length and checksum, then the entry's generation. Only an entry whose generation
and checksum match counts; a process that is killed in the middle leaves nothing that does.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

#: Most entries: each slot may have one, and those that are replaced or on their way elsewhere for a while.
MOST_ENTRIES = 256

#: slot, offset and length of the payload, its CRC-32; behind them the CRC-32 of these and the generation.
FIELDS = struct.Struct("<qQQI")
CHECK = struct.Struct("<I")
GENERATION = struct.Struct("<Q")
ENTRY_BYTES = 64

DIRECTORY_BYTES = MOST_ENTRIES * ENTRY_BYTES

#: Address space beyond the budget: memory is taken for what is written only, and slots on their way to disk
#: or about to be replaced are beside the budget for a while.
SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ArenaEntry:
    """Where a slot lies.

    Attributes:
        slot: its number.
        offset, length: of the payload, in bytes.
        checksum: CRC-32 of the payload.
        generation: larger than that of every entry before it; above 0.
    """

    slot: int
    offset: int
    length: int
    checksum: int
    generation: int


class ArenaDirectory:
    """Reads and writes entries at the start of the arena.

    Args:
        cells: the arena.
    """

    def __init__(self, cells: mmap.mmap) -> None:
        self._cells = cells

    def write(self, place: int, entry: ArenaEntry) -> None:
        """Make the entry count, whose payload is complete."""
        start = place * ENTRY_BYTES
        self.clear(place)
        fields = FIELDS.pack(entry.slot, entry.offset, entry.length, entry.checksum)
        self._cells[start + 8 : start + 8 + len(fields)] = fields
        CHECK.pack_into(self._cells, start + 8 + len(fields), _check(fields, entry.generation))
        GENERATION.pack_into(self._cells, start, entry.generation)

    def clear(self, place: int) -> None:
        """Make it count no more."""
        GENERATION.pack_into(self._cells, place * ENTRY_BYTES, 0)

    def entries(self) -> dict[int, ArenaEntry]:
        """The entries that are whole, by place; the payload is not looked at."""
        found = {}
        for place in range(MOST_ENTRIES):
            start = place * ENTRY_BYTES
            (generation,) = GENERATION.unpack_from(self._cells, start)
            fields = self._cells[start + 8 : start + 8 + FIELDS.size]
            (check,) = CHECK.unpack_from(self._cells, start + 8 + FIELDS.size)
            if generation and check == _check(fields, generation):
                slot, offset, length, checksum = FIELDS.unpack(fields)
                found[place] = ArenaEntry(slot, offset, length, checksum, generation)
        return found

    def intact(self) -> dict[int, ArenaEntry]:
        """By slot, the newest entry whose payload has its checksum. The others are cleared. Reads it all."""
        found = self.entries()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            intact = dict(zip(found, pool.map(self._is_intact, found.values()), strict=True))
        kept: dict[int, ArenaEntry] = {}
        for place, entry in sorted(found.items(), key=lambda item: -item[1].generation):
            if intact[place] and entry.slot not in kept:
                kept[entry.slot] = entry
            else:
                self.clear(place)
        return kept

    def _is_intact(self, entry: ArenaEntry) -> bool:
        if entry.offset + entry.length > len(self._cells):
            return False
        with memoryview(self._cells) as whole, whole[entry.offset : entry.offset + entry.length] as payload:
            return zlib.crc32(payload) == entry.checksum


def _check(fields: bytes, generation: int) -> int:
    return zlib.crc32(GENERATION.pack(generation) + fields)


def intact_slots(descriptor: int | None) -> list[int]:
    """The slots in an arena that nobody uses now; what is not intact counts no more."""
    if descriptor is None:
        return []
    try:
        cells = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    except OSError:  # not so much address space: the engine process did without it too
        return []
    with cells:
        return sorted(ArenaDirectory(cells).intact())


def make_arena(budget: int) -> int | None:
    """The descriptor of an empty arena for so many bytes of slots; no memory is taken yet.

    Returns:
        None: there is to be none, or this process may not have one (a limit on the size of files); slots
        then get ordinary memory.
    """
    if budget == 0:
        return None
    descriptor = os.memfd_create("slotd-host-cache", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, DIRECTORY_BYTES + 2 * budget + SPARE_BYTES)
    except OSError as error:
        log.warning("the host tier is ordinary memory, which does not outlive this process: %s", error)
        os.close(descriptor)
        return None
    return descriptor


def default_budget() -> int:
    """A quarter of the memory that programs can get now, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (available,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024 // 4
    except (OSError, ValueError):  # no such file or line: another system, or an old kernel
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
