"""The front: turns commands into work for the engine side, and its messages into lines and ids.

It keeps one promise: every command line gets exactly one terminal event, on the channel that the
protocol names for it, whatever happens behind.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from slotd.daemon.door import Ids, Limits
from slotd.daemon.link import Emit, Finished, Key, Line, Progress, State, Submit, ToEngine, ToFront
from slotd.daemon.open_requests import OpenRequest, OpenRequests, Refusal
from slotd.daemon.outbox import Outbox
from slotd.daemon.prompt_files import write_ids
from slotd.protocol.connection import DaemonConnection
from slotd.protocol.errors import RequestError, Value
from slotd.protocol.grammar import ends_stream
from slotd.protocol.messages import (
    Command,
    Done,
    Error,
    Event,
    Generate,
    Ok,
    Prefill,
    Prompt,
    SnapInlineFailed,
    Tokens,
    Unsupported,
)

log = logging.getLogger(__name__)

#: A request whose readers are this many bytes behind is paused until they have caught up to half of it.
MAX_PENDING = 1 << 20


class Front:
    """Open requests, the two output channels, and what is known of the engine side.

    Args:
        connection: formats events and knows the version the client speaks.
        outbox: where lines and ids go.
        send: hands a message to the engine side.
        limits: what the door checks against.
        props: what HELLO and PROPS report of this daemon, fixed at start.
        peek: the newest state of the engine side; None: the last one that was delivered.
        lines_for_stream: ``--stream-fd -``: requests without id stream as lines, without a descriptor.
        stall_timeout: seconds after which a request whose reader does not read is cancelled.
    """

    def __init__(
        self, connection: DaemonConnection, outbox: Outbox, send: Callable[[ToEngine], None], limits: Limits,
        *, props: Mapping[str, Any], lines_for_stream: bool, stall_timeout: float,
        clock: Callable[[], float] = time.monotonic, peek: Callable[[], State | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.props = {**props, "boot": secrets.token_hex(8)}
        self.closing = False
        self.requests = OpenRequests()
        self._connection = connection
        self._outbox = outbox
        self._send = send
        self._lines_for_stream = lines_for_stream
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._peek = peek
        self._started = clock()
        self._state: Mapping[str, Any] = {"epoch": 0}
        self._state_at = self._started
        self._lane_lock = threading.RLock()
        self._in_lane = False

    # ----- commands in

    @property
    def version_2(self) -> bool:
        """Whether a command without id ends with a [done] line."""
        return self._connection.version >= 2 or self._lines_for_stream

    @property
    def stream(self) -> str | None:
        """What a prompt without id streams to: "fd", "lines", or None when there is nothing."""
        if self._lines_for_stream:
            return "lines"
        return "fd" if self._outbox.has_stream else None

    def accept(self, command: Command, start: Callable[[OpenRequest], None]) -> None:
        """Open the command and start it: now when it has an id, else in its turn in the serial lane."""
        now = self._clock()
        try:
            if command.id is None:
                number = self.requests.next_number()
                self.requests.enqueue(OpenRequest(number, command, start, self.version_2, now))
            else:
                self.requests.add(request := OpenRequest(command.id, command, start, True, now))
        except RequestError as error:
            self.refuse(error)
            return
        if command.id is None:
            self.run_lane()
        else:
            self._start(request)

    def refuse(self, error: RequestError) -> None:
        """Answer a line that is not accepted, in its turn when it has no id."""
        if error.id is not None and self.requests.get(error.id) is not None:
            # A [done] with this id would be taken for that of the open request: an err line instead.
            self.put(Error(code=error.code, fields=error.fields, id=error.id))
        elif error.id is not None:
            self.put(Done(id=error.id, status="err", fields={"code": error.code, **error.fields}))
        else:
            self.requests.enqueue(Refusal(error, self.version_2))
            self.run_lane()

    def run_lane(self) -> None:
        """Start what is next in the serial lane, and everything behind it that ends at once."""
        with self._lane_lock:
            if self._in_lane:
                return  # a start that ended at once got here: the loop below goes on
            self._in_lane = True
            try:
                while (item := self.requests.next_in_lane()) is not None:
                    if isinstance(item, Refusal):
                        self._answer_refusal(item)
                    elif self.closing:
                        self._give_up(item, "shutting_down")
                        self.finish(item, "cancelled")
                    else:
                        self._start(item)
            finally:
                self._in_lane = False

    def submit(self, request: OpenRequest, command: Command, ids: Ids | None = None) -> None:
        """Hand the request to the engine side."""
        self._send(Submit(request.key, command, request.flags, request.taken_at, ids))

    def finish(
        self, request: OpenRequest, status: str, code: str | None = None,
        reason: Mapping[str, Value] | None = None, account: Mapping[str, Value] | None = None,
    ) -> None:  # fmt: skip
        """The terminal event of a request. Only the first call for a request counts."""
        command = request.command
        owes_end = command.ends_stream or (isinstance(command, Unsupported) and command.needs_stream_end)
        if status == "cancelled" and request.cancelled_by is not None:
            reason = {**(reason or {}), "reason": request.cancelled_by}
        with self.requests.lock:
            if self.requests.remove(request.key) is None:
                return
            self._terminate(
                request.key, status, code, reason or {}, account or {}, request.version_2, owes_end
            )
        if request.id is None:
            self.run_lane()

    def _start(self, request: OpenRequest) -> None:
        try:
            request.start(request)
        except RequestError as error:
            self.finish(request, "err", error.code, error.fields)
        except Exception as error:
            log.exception("a command could not be started")
            self.finish(request, "err", "internal", {"reason": f"{type(error).__name__}: {error}"})

    def _answer_refusal(self, refusal: Refusal) -> None:
        error = refusal.error
        owes_end = ends_stream(error.verb)
        self._terminate(0, "err", error.code, error.fields, {}, refusal.version_2, owes_end)

    def _terminate(
        self, key: Key, status: str, code: str | None, reason: Mapping[str, Value],
        account: Mapping[str, Value], version_2: bool, owes_end: bool,
    ) -> None:  # fmt: skip
        request_id = key if isinstance(key, str) else None
        if version_2:
            named = {**({} if code is None else {"code": code}), **reason, **account}
            self.put(Done(id=request_id, status=status, fields=named), key)
        elif code is not None:
            self.put(Error(code=code, fields=reason), key)
        elif status == "cancelled" and not owes_end:
            self.put(Error(code="cancelled"), key)  # version 1 has no other terminal event for it
        if owes_end and request_id is None:
            self._outbox.end_response(key)

    # ----- events out

    def put(self, event: Event, key: Key | None = None) -> None:
        """Print one event."""
        self._outbox.line(self._connection.send(event), key)

    def deliver(self, message: ToFront) -> None:
        """Take one message of the engine side (on its thread)."""
        match message:
            case Emit():
                self._emit(message)
            case State(data=data, at=at):
                self._state, self._state_at = data, self._clock() if at is None else at
            case Line(event=event, key=key):
                self._line(event, key)
            case Progress(key=str() as key, at=at, of=of):
                self.put(Prefill(id=key, at=at, of=of), key)
            case Progress():
                pass  # only requests with an id see progress
            case Finished():
                self._finished(message)

    def _line(self, event: Event, key: Key | None) -> None:
        request = self.requests.get(key) if key is not None else None
        if request is not None and not request.version_2 and isinstance(event, SnapInlineFailed):
            log.warning("the inline snapshot of slot %d was not taken: %s", event.slot, event.reason)
            return  # version 1 is silent here
        self.put(dataclasses.replace(event, id=key) if isinstance(key, str) else event, key)

    def _emit(self, message: Emit) -> None:
        request = self.requests.get(message.key)
        if request is None:
            return
        if isinstance(request.command, Generate):
            request.produced.extend(message.ids)
            return
        if request.id is None and not self._lines_for_stream:
            self._outbox.stream_ids(message.ids, message.key)
        else:
            event = Tokens(id=request.id, at=message.at, ids=message.ids, logprobs=message.logprobs)
            self.put(event, message.key)
        if request.paused_since is None and self._outbox.pending(message.key) > MAX_PENDING:
            request.paused_since = self._clock()
            request.flags.paused = True

    def _finished(self, message: Finished) -> None:
        request = self.requests.get(message.key)
        if request is None:
            return
        status, code, reason = message.status, message.code, message.reason
        if isinstance(request.command, Generate) and code is None and status != "cancelled":
            try:
                write_ids(request.command.out, request.produced, counted=True)
                self.put(_generate_reply(request.command, request.id, message.account), request.key)
            except RequestError as error:
                status, code, reason = "err", error.code, error.fields
        self.finish(request, status, code, reason, message.account)

    # ----- at any moment

    def cancel(self, request_id: str | None) -> bool:
        """Ask for the end of a request: by id, or (None) of the one in the serial lane."""
        request = self.requests.lane_current if request_id is None else self.requests.get(request_id)
        if request is None or not isinstance(request.command, Prompt | Generate):
            return False
        request.flags.cancelled = True
        return True

    def stream_gone(self) -> None:
        """Nobody reads the token stream any more: the request that writes to it has no use."""
        request = self.requests.lane_current
        if request is not None and isinstance(request.command, Prompt):
            self._give_up(request, "stalled")

    def cancel_all(self) -> None:
        """Ask for the end of everything that is open; what waits in the lane is answered in its turn."""
        self.closing = True
        for request in self.requests:
            self._give_up(request, "shutting_down")
        self.run_lane()

    def _give_up(self, request: OpenRequest, why: str) -> None:
        """Cancel a request that nobody asked to cancel; its end says why: it must not be taken for whole."""
        if not request.flags.cancelled:
            request.cancelled_by = why
            request.flags.cancelled = True

    def tick(self) -> bool:
        """Wake paused requests whose reader caught up, cancel those it gave up. True while any is paused."""
        paused = False
        for request in self.requests:
            if request.paused_since is None:
                continue
            if self._outbox.pending(request.key) <= MAX_PENDING // 2:
                request.paused_since, request.flags.paused = None, False
            elif self._clock() - request.paused_since > self._stall_timeout:
                log.warning(
                    "request %s: its reader took nothing for %.0f s", request.key, self._stall_timeout
                )
                request.flags.cancelled = True
            else:
                paused = True
        return paused

    def status(self) -> dict[str, Any]:
        """The object of a STATUS reply: the engine side as last seen, `age_ms` ago, and the open requests."""
        self._look()
        now = self._clock()
        return {
            **self._state, **self.requests.report(), "closing": self.closing,
            "uptime_s": round(now - self._started, 3), "age_ms": round(1000 * (now - self._state_at), 1),
        }  # fmt: skip

    def _look(self) -> None:
        state = self._peek()
        if state is not None:
            self.deliver(state)

    @property
    def epoch(self) -> int:
        """The slot epoch; it only grows."""
        self._look()
        return int(self._state["epoch"])


def _generate_reply(command: Generate, request_id: str | None, account: Mapping[str, Value]) -> Ok:
    """``ok N=.. gen=.. prefill_s=.. decode_s=.. decode_tok_s=.. out=..`` as the source prints it."""
    gen, prefill_s, decode_s = int(account["gen"]), float(account["prefill_s"]), float(account["decode_s"])
    rate = gen / decode_s if decode_s > 0 else 0.0
    return Ok(id=request_id, fields={
        "N": account["prompt"], "gen": gen, "prefill_s": round(prefill_s, 3), "decode_s": round(decode_s, 3),
        "decode_tok_s": round(rate, 1), "out": command.out,
    })  # fmt: skip
