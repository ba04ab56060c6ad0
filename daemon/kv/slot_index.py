"""What a folder of stored snapshots holds, in memory: who needs which file, and where a piece is.

Pure bookkeeping. A page file is needed by the snapshots that have pieces in it; one that nobody needs may go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slotd.daemon.kv.page_files import PageEntry, PageTable
from slotd.daemon.kv.slot_files import BadFile, Manifest, Part

#: Where a piece is: page file and index.
Place = tuple[str, int]


@dataclass(slots=True)
class Stored:
    """A snapshot: the head of its manifest, and when it was used last, in nanoseconds."""

    manifest: Manifest
    used_ns: int


@dataclass(slots=True)
class PageFile:
    """A page file: its table, where its pieces start, its length, and the snapshots that need it.

    Attributes:
        offsets: tokens of the file in front of each piece, and behind the last one.
    """

    table: PageTable
    data_start: int
    offsets: list[int]
    users: set[str] = field(default_factory=set)

    @property
    def n_bytes(self) -> int:
        """Length of the file."""
        return self.data_start + self.offsets[-1] * self.table.token_bytes

    def entries(self, part: Part) -> tuple[PageEntry, ...]:
        """The entries of a part."""
        return self.table.entries[part.first : part.first + part.count]


class SlotIndex:
    """The snapshots by hash and the page files by name."""

    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}
        self.files: dict[str, PageFile] = {}
        self._pieces: dict[bytes, dict[PageEntry, Place]] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.n_bytes for file in self.files.values()) + sum(
            stored.manifest.file_bytes for stored in self.stored.values()
        )

    # ----- snapshots

    def add(self, name: str, manifest: Manifest, used_ns: int) -> None:
        """A snapshot; one of the same hash is replaced. Its page files must be here."""
        self.forget(name)
        self.stored[name] = Stored(manifest, used_ns)
        for part in manifest.parts:
            self.files[part.name].users.add(name)

    def forget(self, name: str) -> None:
        """A snapshot is gone, if it was here."""
        if self.stored.pop(name, None) is not None:
            for file in self.files.values():
                file.users.discard(name)

    def by_use(self) -> list[str]:
        """Hashes of the snapshots, least recently used first."""
        return sorted(self.stored, key=lambda name: self.stored[name].used_ns)

    def use(self, name: str, now_ns: int) -> int:
        """Note a use and return its time, later than every other one even if the clock went back."""
        newest = max(stored.used_ns for stored in self.stored.values())
        self.stored[name].used_ns = used_ns = max(now_ns, newest + 1)
        return used_ns

    # ----- page files

    def ids_of(self, part: Part) -> bytes:
        """The ids of a part.

        Raises:
            BadFile: its page file is not here, or is shorter.
        """
        file = self.files.get(part.name)
        if file is None or part.first + part.count > len(file.table.entries):
            raise BadFile("pages_missing")
        return file.table.ids[4 * file.offsets[part.first] : 4 * file.offsets[part.first + part.count]]

    def add_file(self, table: PageTable) -> None:
        """A page file; nobody needs it yet, unless it was here before."""
        name = table.name
        if name in self.files:
            return  # it is named by its content
        self.files[name] = PageFile(table, table.data_start, table.offsets)
        for index, entry in enumerate(table.entries):
            self._pieces.setdefault(entry.start, {}).setdefault(entry, (name, index))

    def forget_file(self, name: str) -> None:
        """A page file is gone."""
        for entry in self.files.pop(name).table.entries:
            places = self._pieces.get(entry.start, {})
            if places.get(entry, ("",))[0] == name:
                del places[entry]
                if not places:
                    del self._pieces[entry.start]

    def pieces_from(self, start: bytes, most: int) -> list[tuple[PageEntry, Place]]:
        """Pieces of at most so many tokens behind the ids with this hash, the longest first."""
        found = [each for each in self._pieces.get(start, {}).items() if each[0].n <= most]
        return sorted(found, key=lambda each: -each[0].n)

    def unneeded(self) -> list[str]:
        """Page files that no snapshot needs."""
        return [name for name, file in self.files.items() if not file.users]
