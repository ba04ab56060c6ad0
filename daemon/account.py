"""Where a request's time went. The parts sum to the wall time by construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slotd.protocol.event_grammar import ACCOUNT

#: In wire order, as the protocol lists them behind the wall time. A request is always in exactly one.
PARTS = tuple(name.removesuffix("_s") for name in ACCOUNT if name != "wall_s")


class Account:
    """A stopwatch that is always in one part; seconds on the given clock."""

    __slots__ = ("_clock", "_part", "_seconds", "_since", "_start")

    def __init__(self, clock: Callable[[], float], start: float) -> None:
        self._clock = clock
        self._start = self._since = start
        self._part = "queue"
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def enter(self, part: str) -> None:
        """Close the current part and begin `part`."""
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """`part` for a while, then the part that was running."""
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self, part: str) -> float:
        """Seconds spent in `part` up to the last change of parts."""
        return self._seconds[part]

    def close(self) -> dict[str, float]:
        """wall_s and one ``<part>_s`` per part, in seconds, rounded to microseconds."""
        self.enter(self._part)
        parts = {f"{part}_s": round(seconds, 6) for part, seconds in self._seconds.items()}
        return {"wall_s": round(self._since - self._start, 6), **parts}
