"""Which entry is in which slot, and which only in a file. Pure; the rules of when are `Caches`'."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from slotd.client.cache_entries import FullEntry, PrefixEntry
from slotd.client.cache_eviction import full_victim, goes_on

#: Cold prefix entries (files of the daemon's that no slot holds) that are remembered.
MOST_COLD = 256

#: Prefixes that lost their slots and are remembered, to know them when they come back.
MOST_GONE = 64

Entry = PrefixEntry | FullEntry


class Bindings:
    """The entries of both caches. One entry for each slot and for each key.

    Args:
        byte_budget: most bytes of files of full entries; 0 is no limit.

    Attributes:
        prefix: bound prefix entries by key.
        cold: prefix entries that only a file of the daemon's holds, by key.
        full: full entries by key, bound and cold.
    """

    def __init__(self, byte_budget: int = 0) -> None:
        self.prefix: dict[str, PrefixEntry] = {}
        self.cold: dict[str, PrefixEntry] = {}
        self.full: dict[str, FullEntry] = {}
        self._byte_budget = byte_budget
        self._garbage: list[str] = []
        self._gone: deque[tuple[bytes, int]] = deque(maxlen=MOST_GONE)  # ids, and when they were used last
        self._tick = 0

    # ----- slots

    def bound(self) -> Iterator[Entry]:
        """Every entry that a slot holds."""
        yield from self.prefix.values()
        yield from (entry for entry in self.full.values() if entry.slot is not None)

    def slots(self) -> set[int]:
        """The slots of all bound entries."""
        return {entry.slot for entry in self.bound() if entry.slot is not None}

    def bind(self, entry: Entry, slot: int) -> None:
        """Make `entry` the only one of its slot and of its key."""
        self.empty(slot)
        entry.slot = slot
        self.touch(entry)
        if isinstance(entry, PrefixEntry):
            before = self.cold.pop(entry.key, None) or self.prefix.get(entry.key)
            if before is not None:
                entry.hits, entry.content = before.hits, entry.content or before.content
            entry.proven = self.away(entry.ids) is not None or goes_on(entry.ids, self.prefix.values())
            self.prefix[entry.key] = entry
            return
        known = self.full.get(entry.key)
        if known is not None:
            entry.hits, entry.artifact_bytes = known.hits, known.artifact_bytes
        self.full[entry.key] = entry

    def unbind(self, entry: Entry) -> None:
        """Its slot no longer holds it: cold when a file does, else forgotten."""
        entry.slot = None
        if isinstance(entry, FullEntry):
            if not entry.artifact_bytes and self.full.get(entry.key) is entry:
                del self.full[entry.key]
        elif self.prefix.get(entry.key) is entry:
            del self.prefix[entry.key]
            self._gone.append((entry.ids, entry.used))
            if entry.content:
                self._add_cold(entry)

    def empty(self, slot: int) -> int:
        """Unbind every entry of this slot; how many there were."""
        found = [entry for entry in self.bound() if entry.slot == slot]
        for entry in found:
            self.unbind(entry)
        return len(found)

    def unbind_all(self) -> tuple[int, int]:
        """Unbind everything; how many prefix and full entries were bound."""
        found = list(self.bound())
        for entry in found:
            self.unbind(entry)
        prefix = sum(isinstance(entry, PrefixEntry) for entry in found)
        return prefix, len(found) - prefix

    def away(self, ids: bytes) -> int | None:
        """Ticks since a prefix of `ids` was used that has lost its slot; None: no such is remembered."""
        return next((self._tick - used for gone, used in reversed(self._gone) if ids.startswith(gone)), None)

    def touch(self, entry: Entry) -> None:
        """`entry` is the one used last."""
        self._tick += 1
        entry.used = self._tick

    # ----- files

    def adopt_prefix(self, entry: PrefixEntry) -> None:
        """Take a cold entry for a file that the daemon has."""
        self.touch(entry)
        if entry.key not in self.prefix:
            self._add_cold(entry)

    def adopt_full(self, entry: FullEntry) -> None:
        """Take a cold entry out of a file of our own."""
        self.touch(entry)
        self.full.setdefault(entry.key, entry)

    def drop_full(self, key: str) -> None:
        """The file of a full entry is gone, bad or too much: without it the entry is not kept."""
        if self.full.pop(key, None) is not None:
            self._garbage.append(key)

    def take_garbage(self) -> list[str]:
        """Keys of full entries whose files are to be deleted; each is told once."""
        garbage, self._garbage = self._garbage, []
        return garbage

    def trim_full(self, key_of: Callable[[bytes], str], protected: Collection[int]) -> None:
        """Drop full entries of least worth until their files fit the budget; none of `protected` slots."""
        while self._byte_budget and self.artifact_bytes > self._byte_budget:
            with_file = [e for e in self.full.values() if e.artifact_bytes and e.slot not in protected]
            worst = full_victim(with_file, b"", key_of)
            if worst is None:
                return
            self.drop_full(worst.key)

    @property
    def artifact_bytes(self) -> int:
        """Bytes of all files of full entries."""
        return sum(entry.artifact_bytes for entry in self.full.values())

    def _add_cold(self, entry: PrefixEntry) -> None:
        self.cold[entry.key] = entry
        while len(self.cold) > MOST_COLD:
            del self.cold[min(self.cold.values(), key=lambda other: other.used).key]
