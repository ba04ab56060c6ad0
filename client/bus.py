"""The bus owns what the daemon says: each line goes to the callbacks first, then to the one who waits for it.

Callbacks come first so that whatever they keep consistent (a cache, an epoch) is so before anybody who
waited for the same line goes on. Waiters are asked in the order in which they came. The bus is fed from
the transport's reader thread; everything else may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from slotd.protocol.errors import DaemonError, DaemonTimeoutError
from slotd.protocol.messages import Event

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Event)


class Waiter(Protocol):
    """Something that waits for events (`commands.Command`, `EventWaiter`)."""

    def accepts(self, event: Event) -> bool:
        """Whether `event` is for it."""

    def handle(self, event: Event) -> bool:
        """Take an accepted event. True: it was the last one."""

    def fail(self, error: DaemonError) -> bool:
        """Nothing will come any more. Whether somebody will hear of `error` by it."""


class Callbacks:
    """Who wants to hear of what. Outlives a daemon: a restarted one gets the same callbacks.

    They run in the reader thread, so they must not wait for an answer of the daemon. An exception in one
    is logged and stops nothing.
    """

    def __init__(self) -> None:
        self._by_prefix: list[tuple[str, Callable[[], None]]] = []
        self._by_type: list[tuple[type[Event], Callable[[Any], None]]] = []

    def register_line_callback(self, prefix: str, callback: Callable[[], None]) -> None:
        """Call `callback()` on every line that starts with `prefix`. Any number may share a prefix."""
        self._by_prefix.append((prefix, callback))

    def register_event_callback(self, type: type[E], callback: Callable[[E], None]) -> None:
        """Call `callback(event)` on every event of `type`."""
        self._by_type.append((type, callback))

    def run_line(self, line: str) -> None:
        for prefix, callback in self._by_prefix:
            if line.startswith(prefix):
                _guarded(callback)

    def run_event(self, event: Event) -> None:
        for type, callback in self._by_type:
            if isinstance(event, type):
                _guarded(callback, event)


def _guarded(callback: Callable[..., None], *args: Event) -> None:
    try:
        callback(*args)
    except Exception:
        logger.exception("a callback of the bus failed")


class Bus:
    """Dispatches the lines of one daemon."""

    def __init__(self, callbacks: Callbacks | None = None) -> None:
        self.callbacks = callbacks or Callbacks()
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self._error: DaemonError | None = None
        self._ended = threading.Event()

    def register_line_callback(self, prefix: str, callback: Callable[[], None]) -> None:
        """See `Callbacks.register_line_callback`."""
        self.callbacks.register_line_callback(prefix, callback)

    def register_event_callback(self, type: type[E], callback: Callable[[E], None]) -> None:
        """See `Callbacks.register_event_callback`."""
        self.callbacks.register_event_callback(type, callback)

    @property
    def waiters(self) -> int:
        """How many wait."""
        return len(self._waiters)

    @property
    def error(self) -> DaemonError | None:
        """Why nothing comes any more: a fresh copy, to raise. None while the daemon speaks."""
        return None if self._error is None else type(self._error)(*self._error.args)

    def add(self, waiter: Waiter) -> None:
        """Register `waiter`, before its command is written. Raises what ended the bus, if it has ended."""
        with self._lock:
            if self._error is None:
                self._waiters.append(waiter)
                return
        raise type(self._error)(*self._error.args)

    def remove(self, waiter: Waiter) -> None:
        """Forget `waiter`, if it is there."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def expect(self, accepts: Callable[[Event], bool]) -> EventWaiter:
        """A waiter for one event; use it as a context manager, so that it is removed in any case."""
        return EventWaiter(self, accepts)

    def dispatch(self, line: str, events: list[Event]) -> None:
        """Take one line and what it means."""
        self.callbacks.run_line(line)
        for event in events:
            self.callbacks.run_event(event)
        for event in events:
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            try:
                if waiter.accepts(event):
                    if waiter.handle(event):
                        self.remove(waiter)
                    return
            except Exception as error:  # a bug in one waiter must not leave the others without a reader
                logger.exception("a waiter of the bus failed")
                self.remove(waiter)
                waiter.fail(DaemonError(f"the answer could not be taken: {error}"))
        logger.debug("nobody waits for %s", event)

    def fail(self, error: DaemonError) -> int:
        """End of output: every waiter gets `error`, and so does whoever comes later. How many hear of it."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiters, self._waiters = self._waiters, []
        told = sum([waiter.fail(type(error)(*error.args)) for waiter in waiters])
        self._ended.set()
        return told

    def wait_ended(self, timeout: float) -> bool:
        """Wait until `fail` has been called."""
        return self._ended.wait(timeout)


class EventWaiter:
    """Waits for the first event that a predicate accepts."""

    def __init__(self, bus: Bus, accepts: Callable[[Event], bool]) -> None:
        self.accepts = accepts
        self._bus = bus
        self._settled = threading.Event()
        self._event: Event | None = None
        self._error: DaemonError | None = None

    def __enter__(self) -> Self:
        self._bus.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bus.remove(self)

    def handle(self, event: Event) -> bool:
        self._event = event
        self._settled.set()
        return True

    def fail(self, error: DaemonError) -> bool:
        self._error = error
        self._settled.set()
        return True

    def wait(self, timeout: float) -> Event:
        """The event. DaemonTimeoutError after `timeout` seconds, or the error that ended the bus."""
        if not self._settled.wait(timeout):
            raise DaemonTimeoutError(f"the daemon gave no answer within {timeout:g} s")
        if self._event is None:
            assert self._error is not None
            raise self._error
        return self._event
