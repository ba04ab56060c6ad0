"""One class per request: what is sent, and how its answer is recognised.

A command lives NEW -> ACTIVE (-> CANCELLING) -> DONE, and knows two moments apart: `result`, its answer is
known; `finished`, its last line has come and the wire is quiet about it. A cancelled command stays with
the bus until its last line, so that no late line is ever taken for somebody else's.
"""

from __future__ import annotations

import enum
import itertools
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, ClassVar

from slotd.client.failure import done_error
from slotd.protocol import messages
from slotd.protocol.errors import DaemonError, RemoteProtocolError, RequestError
from slotd.protocol.messages import Event

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Where a command is in its life."""

    NEW = "new"  # not on the wire
    ACTIVE = "active"
    CANCELLING = "cancelling"  # CANCEL was written, the last line has not come
    DONE = "done"


class IdSource:
    """Request ids that no other client of the same daemon makes: a random prefix and a number."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)  # next() on it is atomic

    def __call__(self) -> str:
        return f"{self._prefix}.{next(self._numbers)}"


class Command:
    """Base: knows its id, its last line and its failure. A subclass picks the answer out in `take`.

    Every answer has an id, so `accepts` compares ids only.

    Attributes:
        immediate: the daemon owes the answer at once, whatever its engine does.
    """

    immediate: ClassVar[bool] = False

    def __init__(self, request: messages.Command) -> None:
        self.request = request
        self.state = State.NEW
        self.result: Future[Any] = Future()
        self.finished: Future[None] = Future()

    @property
    def id(self) -> str:
        assert self.request.id is not None
        return self.request.id

    def accepts(self, event: Event) -> bool:
        return event.id == self.request.id

    def handle(self, event: Event) -> bool:
        """Take an event of this command; True when it was the last one."""
        match event:
            case messages.Error(code=code, fields=fields):
                self._end(RequestError(code, fields, id=self.request.id, verb=self.request.verb))
                return True
            case messages.Done(status="err", fields=fields):
                self._end(done_error(fields, self.request.id, self.request.verb))
                return True
            case messages.Done():
                self._end(RemoteProtocolError(f"{self.request.verb} {self.id} ended without its answer"))
                return True
        self.take(event)
        return False

    def take(self, event: Event) -> None:
        """Look for the answer in `event`."""

    def fail(self, error: DaemonError) -> bool:
        """The daemon is gone. False when the answer was known already."""
        open = not self.result.done()
        self._end(error)
        return open

    def _answer(self, value: Any) -> None:
        _settle(self.result, value)

    def _end(self, error: Exception) -> None:
        """No more lines. `error` is the result if none is known yet."""
        self.state = State.DONE
        _settle_error(self.result, error)
        _settle(self.finished, None)


def _settle(future: Future[Any], value: Any) -> None:
    try:
        if not future.done():
            future.set_result(value)
    except InvalidStateError:  # an asyncio task that waited was cancelled just now
        logger.debug("an answer came for somebody who no longer waits")


def _settle_error(future: Future[Any], error: Exception) -> None:
    try:
        if not future.done():
            future.set_exception(error)
    except InvalidStateError:
        logger.debug("an error came for somebody who no longer waits")


class _Json(Command):
    """The answer is the JSON object of an event of `kind`."""

    immediate = True
    kind: ClassVar[str]

    def take(self, event: Event) -> None:
        if isinstance(event, messages.Json) and event.kind == self.kind:
            self._answer({key: value for key, value in event.data.items() if key != "id"})


class Hello(_Json):
    """HELLO; the result is its object. A daemon of version 1 answers with an error that has no id."""

    kind = "hello"

    def __init__(self, id: str) -> None:
        super().__init__(messages.Hello(id=id))

    def accepts(self, event: Event) -> bool:
        foreign = isinstance(event, messages.Error) and event.id is None
        return foreign or super().accepts(event)


class Status(_Json):
    """STATUS; the result is its object."""

    kind = "status"

    def __init__(self, id: str) -> None:
        super().__init__(messages.Status(id=id))


class Props(_Json):
    """PROPS; the result is its object."""

    kind = "props"

    def __init__(self, id: str) -> None:
        super().__init__(messages.Props(id=id))


class Snapshot(Command):
    """SNAPSHOT; the result is the number of tokens in the slot."""

    def __init__(self, id: str, slot: int, of: str | None) -> None:
        super().__init__(messages.Snapshot(id=id, slot=slot, of=of))

    def take(self, event: Event) -> None:
        if isinstance(event, messages.SnapTaken):
            self._answer(event.cur_pos)


class FreeSnapshot(Command):
    """FREE_SNAPSHOT; the result is None."""

    def __init__(self, id: str, slot: int) -> None:
        super().__init__(messages.FreeSnapshot(id=id, slot=slot))

    def take(self, event: Event) -> None:
        if isinstance(event, messages.SnapFreed):
            self._answer(None)


class ListSlots(Command):
    """LIST_SLOTS; the result is the occupied slots, a tuple of int."""

    def __init__(self, id: str) -> None:
        super().__init__(messages.ListSlots(id=id))

    def take(self, event: Event) -> None:
        if isinstance(event, messages.SlotList):
            self._answer(event.slots)


class Stored(_Json):
    """STORED; the result is its object. It may wait for the engine."""

    immediate = False
    kind = "stored"

    def __init__(self, id: str) -> None:
        super().__init__(messages.Stored(id=id))


class LoadSnapshot(Command):
    """LOAD_SNAPSHOT; the result is the event that says slot and length."""

    def __init__(self, id: str, slot: int, hash: str) -> None:
        super().__init__(messages.LoadSnapshot(id=id, slot=slot, hash=hash))

    def take(self, event: Event) -> None:
        if isinstance(event, messages.SnapLoaded):
            self._answer(event)


class Cancel(Command):
    """CANCEL; `target` is the id of another request. The result: whether it was still open."""

    immediate = True

    def __init__(self, target: str) -> None:
        super().__init__(messages.Cancel(id=target))

    def accepts(self, event: Event) -> bool:
        return isinstance(event, messages.Cancelled) and event.id == self.request.id

    def handle(self, event: Event) -> bool:
        assert isinstance(event, messages.Cancelled)
        self._answer(event.found)
        self.state = State.DONE
        _settle(self.finished, None)
        return True


class Generation(Command):
    """A prompt or RESTORE. Its events pile up in `events` for whoever reads the answer.

    The last item is the `Done`, or the DaemonError that came instead.

    Args:
        ended: called with the id when it is known how the request ended, in the reader thread.
    """

    def __init__(self, request: messages.Prompt, ended: Callable[[str], None] | None = None) -> None:
        super().__init__(request)
        self.events: SimpleQueue[Event | DaemonError] = SimpleQueue()
        self._listener: Callable[[], object] | None = None
        self._ended = ended
        if ended is not None:
            self.result.add_done_callback(lambda _: ended(self.id))

    def successor(self, request: messages.Prompt) -> Generation:
        """A further request of the same answer, under the same id."""
        return Generation(request, self._ended)

    def accepts(self, event: Event) -> bool:
        return event.id == self.request.id and not isinstance(event, messages.Cancelled)

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener()` in the reader thread whenever `events` has grown."""
        self._listener = listener

    def handle(self, event: Event) -> bool:
        if isinstance(event, messages.Error):
            event = messages.Done(id=event.id, status="err", fields={"code": event.code, **event.fields})
        last = isinstance(event, messages.Done)
        if last:
            self.state = State.DONE
        self._put(event)
        if last:
            self._answer(event)
            _settle(self.finished, None)
        return last

    def fail(self, error: DaemonError) -> bool:
        self._put(error)
        return super().fail(error)

    def _put(self, item: Event | DaemonError) -> None:
        self.events.put(item)
        if self._listener is not None:
            try:
                self._listener()
            except RuntimeError:  # its event loop is closed: nobody reads this answer any more
                logger.debug("nobody listens to %s any more", self.id)
