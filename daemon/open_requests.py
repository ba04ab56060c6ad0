"""The front's table of open requests: every accepted command until its terminal event."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slotd.daemon.link import Flags, Key
from slotd.protocol.errors import RequestError, Value
from slotd.protocol.messages import Command

#: More open requests than this are refused: a client that only sends would fill the memory.
MAX_OPEN = 10_000


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One accepted command.

    Attributes:
        key: the request id, or a number for a command without one.
        start: begins its work, once, in its turn.
        version_2: it ends with a [done] line.
        flags: shared with the engine side.
        taken_at: time.monotonic() at which its line was read.
        produced: ids of a `generate` command, which go to a file and not to a channel.
        cancelled_by: why it was cancelled when nobody asked for it: an error code.
        paused_since: since when its reader has been too far behind, None when it is not.
    """

    key: Key
    command: Command
    start: Callable[[OpenRequest], None]
    version_2: bool
    taken_at: float
    flags: Flags = field(default_factory=Flags)
    produced: list[int] = field(default_factory=list)
    cancelled_by: str | None = None
    paused_since: float | None = None

    @property
    def id(self) -> str | None:
        """The request id, None for a command without one."""
        return self.key if isinstance(self.key, str) else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line without id that is not a command: its error waits for its turn like a command would."""

    error: RequestError
    version_2: bool


LaneItem = OpenRequest | Refusal


class OpenRequests:
    """Open requests by key, and the serial lane of those without an id. Thread-safe.

    Attributes:
        lock: held by whoever ends a request, until its terminal event is queued: its id is free only then.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._by_key: dict[Key, OpenRequest] = {}
        self._lane: deque[LaneItem] = deque()
        self._lane_current: OpenRequest | None = None
        self._next_number = 0

    def __len__(self) -> int:
        with self.lock:
            return len(self._by_key) + len(self._lane)

    def __iter__(self) -> Iterator[OpenRequest]:
        with self.lock:
            return iter(list(self._by_key.values()))

    def get(self, key: Key) -> OpenRequest | None:
        """The open request with this key."""
        with self.lock:
            return self._by_key.get(key)

    def next_number(self) -> int:
        """A key for a command without an id."""
        with self.lock:
            self._next_number += 1
            return self._next_number

    def add(self, request: OpenRequest) -> None:
        """Open a request with an id.

        Raises:
            RequestError: duplicate_id, busy.
        """
        with self.lock:
            if request.key in self._by_key:
                raise RequestError("duplicate_id", id=request.id, verb=request.command.verb)
            self._check_room(request)
            self._by_key[request.key] = request

    def _check_room(self, request: OpenRequest) -> None:
        if len(self) >= MAX_OPEN:
            fields: dict[str, Value] = {"open": len(self), "limit": MAX_OPEN}
            raise RequestError("busy", fields, id=request.id, verb=request.command.verb)

    def remove(self, key: Key) -> OpenRequest | None:
        """Close a request; None when it is not open (any more)."""
        with self.lock:
            request = self._by_key.pop(key, None)
            if request is self._lane_current:
                self._lane_current = None
            return request

    # ----- the serial lane

    def enqueue(self, item: LaneItem) -> None:
        """Put a command (or a refusal) behind the commands without id that came before it.

        Raises:
            RequestError: busy (never for a refusal).
        """
        with self.lock:
            if isinstance(item, OpenRequest):
                self._check_room(item)
            self._lane.append(item)

    def next_in_lane(self) -> LaneItem | None:
        """The next item, when the one before it has ended; an accepted command becomes open."""
        with self.lock:
            if self._lane_current is not None or not self._lane:
                return None
            item = self._lane.popleft()
            if isinstance(item, OpenRequest):
                self._lane_current = item
                self._by_key[item.key] = item
            return item

    @property
    def lane_current(self) -> OpenRequest | None:
        """The command without id that runs now."""
        return self._lane_current

    def report(self) -> dict[str, Any]:
        """Counts for STATUS."""
        with self.lock:
            return {"open": len(self._by_key), "lane": len(self._lane)}
