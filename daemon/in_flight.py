"""What was submitted to the engine process and has not ended: what becomes of it when that process dies."""

from __future__ import annotations

from dataclasses import dataclass

from slotd.daemon.link import Key, Submit


@dataclass(slots=True)
class _Entry:
    submit: Submit
    place: int
    started: bool = False


class InFlight:
    """Submitted requests in the order in which they came, each with a place for its flags.

    A request that the engine has begun with may be what killed it, and may have changed slots or said tokens:
    it is never run again. One that only waited has left no trace and can be submitted to the next engine.

    Args:
        places: how many requests there can be at once.
    """

    def __init__(self, places: int) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._free = list(range(places - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, submit: Submit) -> int:
        """A new request; returns the place of its flags.

        Raises:
            IndexError: all places are taken.
        """
        place = self._free.pop()
        self._entries[submit.key] = _Entry(submit, place)
        return place

    def place(self, key: Key) -> int | None:
        """The place of a request's flags, None when it has ended."""
        entry = self._entries.get(key)
        return None if entry is None else entry.place

    def start(self, key: Key) -> None:
        """The engine begins with it."""
        if key in self._entries:
            self._entries[key].started = True

    def finish(self, key: Key) -> Submit | None:
        """The engine has ended it, or it is given up: its place is free. None when it is not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._free.append(entry.place)
        return entry.submit

    def started(self) -> list[Submit]:
        """Those that the engine has begun with."""
        return [entry.submit for entry in self._entries.values() if entry.started]

    def waiting(self) -> list[Submit]:
        """Those that it has not."""
        return [entry.submit for entry in self._entries.values() if not entry.started]
