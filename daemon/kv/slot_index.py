"""What a folder of stored snapshots holds, in memory: who needs which file, and where a page is.

Pure bookkeeping. A page file is needed by the snapshots that have pages in it; one that nobody needs may go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slotd.daemon.kv.slot_files import Manifest, PageEntry, PageTable


@dataclass(slots=True)
class Stored:
    """A snapshot: the head of its manifest, and when it was used last, in nanoseconds."""

    manifest: Manifest
    used_ns: int


@dataclass(slots=True)
class PageFile:
    """A page file: its pages, where the first one starts, its length, and the snapshots that need it."""

    entries: tuple[PageEntry, ...]
    page_bytes: int
    data_start: int
    n_bytes: int
    users: set[str] = field(default_factory=set)


class SlotIndex:
    """The snapshots by hash and the page files by name."""

    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}
        self.files: dict[str, PageFile] = {}
        self._pages: dict[bytes, dict[int, tuple[str, int]]] = {}

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

    # ----- pages

    def add_file(self, table: PageTable) -> None:
        """A page file; nobody needs it yet, unless it was here before."""
        name, start = table.name, table.data_start
        if name in self.files:
            return  # it is named by its content
        n_bytes = start + len(table.entries) * table.page_bytes
        self.files[name] = PageFile(table.entries, table.page_bytes, start, n_bytes)
        for index, entry in enumerate(table.entries):
            self._pages.setdefault(entry.chain, {}).setdefault(entry.crc, (name, index))

    def forget_file(self, name: str) -> None:
        """A page file is gone."""
        for entry in self.files.pop(name).entries:
            places = self._pages.get(entry.chain, {})
            if places.get(entry.crc, ("",))[0] == name:
                del places[entry.crc]
                if not places:
                    del self._pages[entry.chain]

    def places(self, chain: bytes) -> dict[int, tuple[str, int]]:
        """Where pages with this chain hash are: {CRC-32 of the bytes: (page file, index)}."""
        return self._pages.get(chain, {})

    def unneeded(self) -> list[str]:
        """Page files that no snapshot needs."""
        return [name for name, file in self.files.items() if not file.users]
