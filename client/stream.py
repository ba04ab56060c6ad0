"""A running answer: chunks as they come, then the whole completion."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, Protocol, Self

from slotd.client import commands
from slotd.client.completion import Assembler, Chunk, Completion
from slotd.client.session import PATIENCE, Session
from slotd.protocol import messages
from slotd.protocol.errors import DaemonDiedError, DaemonError, DaemonTimeoutError, RequestError, SlotdError
from slotd.protocol.messages import Event

logger = logging.getLogger(__name__)


class Again(Protocol):
    """Who knows how to send a request again whose slot was refused (`cached_client.SecondTry`)."""

    def wanted(self, event: Event) -> bool:
        """Whether `event` is such a refusal."""

    def request(self, id: str) -> messages.Prompt | None:
        """The request without the slot."""

    def unsent(self, id: str, error: SlotdError) -> None:
        """It could not be sent."""


class Further(Protocol):
    """Who makes the request behind the thinking budget (`thinking_budget.ThinkingBudget`)."""

    def request(
        self, produced: Sequence[int], *, close: bool, seed: int | None
    ) -> tuple[messages.Prompt, Again] | None:
        """The request, and who sends it again; None when there is no room for it."""


class Stream:
    """Iterate for `Chunk`s; `result` gives the `Completion`. Made by `Client.stream`.

    Use it as a context manager: left early, it cancels the request. Without one, a stream that is dropped
    sends the cancel when it is collected. One thread reads a stream; any thread may `cancel` it.

    Attributes:
        id: the request id.
    """

    def __init__(
        self,
        session: Session,
        command: commands.Generation,
        assembler: Assembler,
        timeout: float | None,
        again: Again | None = None,
        further: Further | None = None,
    ) -> None:
        self.id = command.id
        self._again = again
        self._further = further
        self._session = session
        self.command = command
        self._assembler = assembler
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._cancel_deadline: float | None = None
        self._timed_out = False
        self._cancel_asked = False
        self._refusal: Event | None = None
        self._error: SlotdError | None = None

    # ----- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """The next piece of the answer.

        Raises:
            StopIteration: the answer is whole; `result` has it.
            RequestError: the request failed.
            DaemonDiedError: the daemon ended meanwhile.
            DaemonTimeoutError: `timeout` has passed (the request was cancelled), or the daemon is stuck.
        """
        while not self.ended:
            chunk = self.process(self._wait())
            if self.wants_cancel:
                self.begin_cancel()
            if self.wants_resend:
                self.resend()
            if chunk is not None:
                return chunk
        raise StopIteration

    def result(self) -> Completion:
        """Read to the end; the whole answer. Raises what reading raised."""
        for _ in self:
            pass
        if self._error is not None:
            raise self._error
        assert self._assembler.completion is not None
        return self._assembler.completion

    @property
    def ended(self) -> bool:
        """Whether everything has been read, or reading failed."""
        return self._error is not None or self._assembler.completion is not None

    def _wait(self) -> Event | DaemonError:
        """The next event. Silence is looked into at least once in every `reply_timeout`, so this ends."""
        while True:
            if self.overdue:
                self.attend()
            try:
                return self.command.events.get(timeout=self.patience)
            except queue.Empty:
                self.attend()

    # What follows is the part that `AsyncStream` shares; only `attend` and `begin_cancel` may block.

    @property
    def _due(self) -> float | None:
        return self._deadline if self._cancel_deadline is None else self._cancel_deadline

    @property
    def overdue(self) -> bool:
        """Whether the deadline has passed: `attend` must be called now."""
        return self._due is not None and time.monotonic() >= self._due

    @property
    def patience(self) -> float:
        """Seconds to wait for an event before `attend` must be called."""
        wait = self._session.reply_timeout
        return wait if self._due is None else min(wait, max(0.0, self._due - time.monotonic()))

    def attend(self) -> None:
        """See to a silence or a deadline: ask for a sign of life, or cancel. Raises DaemonError."""
        if self.overdue:
            if self._cancel_deadline is not None:
                self._fail(DaemonTimeoutError(f"request {self.id} was cancelled and does not end"))
            self._deadline = None
            self._timed_out = True
            self.begin_cancel()
            return
        try:
            self._session.check_alive()
        except DaemonTimeoutError as error:
            self._fail(error)
        except DaemonDiedError as error:
            if self.command.events.empty():  # else: what came before its death is read first
                self._fail(error)

    def process(self, item: Event | DaemonError) -> Chunk | None:
        """What one event gives. Raises the error that ends the answer."""
        if isinstance(item, DaemonError):
            self._session.death_told |= isinstance(item, DaemonDiedError)
            self._fail(item)
        if self._again is not None and self._again.wanted(item):
            self._refusal = item
            return None
        try:
            chunk = self._assembler.feed(item)
        except SlotdError as error:
            if isinstance(error, RequestError) and error.code == "shutting_down":
                self._session.ending = self._session.death_told = True
            self._error = error
            raise
        completion = self._assembler.completion
        if self._timed_out and completion is not None and completion.finish_reason == "cancelled":
            self._fail(DaemonTimeoutError(f"the answer took longer than {self._timeout} s; it was cancelled"))
        return chunk

    @property
    def wants_cancel(self) -> bool:
        """Whether a stop string has been found while the daemon still generates."""
        return self._assembler.stopped_by is not None and not self.ended

    @property
    def wants_resend(self) -> bool:
        """Whether `resend` must be called: the slot to start from was not what it should be, or the request
        has ended at its thinking budget and the rest of the answer is to be asked for."""
        return self._refusal is not None or self._assembler.paused

    def resend(self) -> None:
        """Send, under the same id, the request behind the thinking budget; or the refused one without its
        slot. That happens once, nothing of the answer had come.

        Raises:
            RequestError: it cannot be sent again, and failed as the daemon said.
            DaemonDiedError, DaemonTimeoutError: it cannot be sent.
        """
        if self._cancel_asked:
            self._refusal = self._again = None
            self._assembler.go_on()
            self.process(messages.Done(id=self.id, status="cancelled"))
            return
        made = self._continued() if self._refusal is None else self._retried()
        if made is None:
            return
        request, again = made
        self.command = self.command.successor(request)
        try:
            self._session.send(self.command)
        except SlotdError as error:
            again.unsent(self.id, error)
            self._error = error
            raise

    def _retried(self) -> tuple[messages.Prompt, Again] | None:
        assert self._refusal is not None
        assert self._again is not None
        refusal, again, self._refusal, self._again = self._refusal, self._again, None, None
        request = again.request(self.id)
        if request is None:
            self.process(refusal)
            return None
        return request, again

    def _continued(self) -> tuple[messages.Prompt, Again] | None:
        assert self._further is not None
        assembler, further, self._further = self._assembler, self._further, None
        made = further.request(assembler.ids, close=assembler.cut, seed=assembler.seed)
        if made is None:
            assembler.end()
            return None
        assembler.go_on()
        self._again = made[1]
        return made

    def _fail(self, error: SlotdError) -> NoReturn:
        self._error = error
        self._session.bus.remove(self.command)
        raise error

    # ----- ending early

    def cancel(self) -> bool:
        """Ask the daemon to end the request; whether it was still open. The last chunks and `result` follow.

        Raises:
            DaemonDiedError, DaemonTimeoutError: it cannot be asked.
        """
        self._cancel_asked = True
        if self.command.state is commands.State.DONE:
            return False
        self._mark_cancelling()
        return bool(self._session.ask(commands.Cancel(self.id)))

    def close(self) -> None:
        """Cancel the request if it still runs, and wait for its end. Never raises for a dead daemon."""
        if self.ended:
            return
        try:
            self.begin_cancel()
            self.result()
        except SlotdError as error:
            logger.debug("request %s ended with: %s", self.id, error)

    def begin_cancel(self) -> None:
        """Write CANCEL once, without waiting for its answer."""
        self._cancel_asked = True
        if self.command.state is commands.State.ACTIVE:
            self._mark_cancelling()
            self._session.send(commands.Cancel(self.id))

    def _mark_cancelling(self) -> None:
        self._cancel_deadline = time.monotonic() + PATIENCE * self._session.reply_timeout
        if self.command.state is commands.State.ACTIVE:
            self.command.state = commands.State.CANCELLING

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Also run by the garbage collector, in any thread and under any lock: nothing here may wait.
        command = getattr(self, "command", None)
        if command is not None and command.state is commands.State.ACTIVE:
            self._session.transport.try_send(messages.Cancel(id=self.id))
