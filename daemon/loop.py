"""The life of the daemon process: reads stdin, watches its surroundings, ends in order.

It ends when stdin does (after everything accepted has run), and at once, with everything cancelled but
answered, on `quit`, a signal, the death of its parent, or when nobody reads stdout any more.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import sys

from slotd.daemon.front import Front
from slotd.daemon.handlers import AT_ONCE, IN_TURN
from slotd.daemon.link import Host
from slotd.daemon.outbox import Outbox
from slotd.protocol.connection import DaemonConnection
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import Cancel, Command, Done, Quit, Unsupported

log = logging.getLogger(__name__)

READ_SIZE = 1 << 20

#: How often the surroundings are looked at, in seconds; more often while a request is paused.
WATCH_INTERVAL, PAUSED_INTERVAL = 0.25, 0.02

#: Limits of an orderly end, in seconds; together they stay under the promised two.
END_ENGINE, END_OUTPUT = 1.2, 0.4


class Loop:
    """Feeds stdin to the front until something ends the daemon.

    Args:
        stdin_fd: where command lines come from.
        stdout_fd: the real stdout, watched for a reader that went away.
    """

    def __init__(
        self, stdin_fd: int, stdout_fd: int, connection: DaemonConnection, front: Front, outbox: Outbox,
        host: Host, stall_timeout: float,
    ) -> None:  # fmt: skip
        self._stall_timeout = stall_timeout
        self._stdin_fd = stdin_fd
        self._stdout_fd = stdout_fd
        self._connection = connection
        self._front = front
        self._outbox = outbox
        self._host = host
        self._parent = os.getppid()
        self._reason: str | None = None
        self._exit_code = 0
        self._quit: Quit | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def request_end(self, reason: str, exit_code: int = 0) -> None:
        """End at once; callable from signal handlers and any thread. The first call counts."""
        if self._reason is None:
            self._reason, self._exit_code = reason, exit_code
        try:
            os.write(self._wake_write, b"x")
        except OSError:
            pass  # the pipe is full of earlier requests

    def install_signals(self) -> None:
        """SIGTERM, SIGINT and SIGHUP end the daemon in order."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda n, _: self.request_end(signal.Signals(n).name))
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def run(self) -> int:
        """Serve until the end; returns the exit code."""
        at_eof = self._serve()
        if at_eof:
            self._finish_accepted()
        self._end(self._reason or "end of input")
        return self._exit_code

    def _serve(self) -> bool:
        """Read and dispatch lines; True at end of input, False when asked to end."""
        poll = self._watch(self._stdin_fd)
        while self._reason is None:
            for descriptor, _ in self._wait(poll):
                if descriptor == self._stdin_fd:
                    data = os.read(self._stdin_fd, READ_SIZE)
                    for item in self._connection.messages(data) if data else self._connection.end():
                        self._dispatch(item)
                    if not data:
                        return True
        return False

    def _finish_accepted(self) -> None:
        """After end of input: let everything accepted run to its end, and its readers take it."""
        poll = self._watch()
        while self._reason is None and (
            len(self._front.requests) or self._outbox.is_moving(self._stall_timeout)
        ):
            self._wait(poll, PAUSED_INTERVAL)

    def _watch(self, *inputs: int) -> select.poll:
        poll = select.poll()
        for descriptor in (*inputs, self._wake_read):
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        poll.register(self._stdout_fd, 0)  # only tells when the reader is gone
        return poll

    def _wait(self, poll: select.poll, interval: float = WATCH_INTERVAL) -> list[tuple[int, int]]:
        """One round of waiting: look at readers, parent and paused requests."""
        paused = self._front.tick()
        events = poll.poll(1000 * (PAUSED_INTERVAL if paused else interval))
        for descriptor, event in events:
            if descriptor == self._stdout_fd and event & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                self.request_end("nobody reads stdout")
        if os.getppid() != self._parent:
            self.request_end("the parent died")
        return events

    def _dispatch(self, item: Command | RequestError) -> None:
        front = self._front
        if self._reason is not None and not isinstance(item, RequestError):
            item = _too_late(item)
        try:
            if isinstance(item, RequestError):
                front.refuse(item)
            elif isinstance(item, Quit):
                self._quit = item
                self.request_end("quit")
            elif type(item) in AT_ONCE:
                AT_ONCE[type(item)](front, item)
            else:
                front.accept(item, functools.partial(IN_TURN[type(item)], front))
        except RequestError as error:
            front.refuse(error)

    def _end(self, reason: str) -> None:
        """Cancel what is open, answer it, free everything, and let the last lines out."""
        log.info("ending: %s", reason)
        self._front.cancel_all()
        self._host.stop(END_ENGINE)
        for request in self._front.requests:  # the engine side did not answer in time
            self._front.finish(request, "cancelled")
        if self._quit is not None and (self._quit.id is not None or self._front.version_2):
            self._front.put(Done(id=self._quit.id, status="ok", fields={"epoch": self._front.epoch}))
        self._outbox.flush(END_OUTPUT)


def _too_late(command: Command) -> RequestError:
    """The refusal of a command that was read after the end was asked for."""
    verb = command.name if isinstance(command, Unsupported) else command.verb
    own_id = None if isinstance(command, Cancel) else command.id  # CANCEL's id is another request's
    return RequestError("shutting_down", id=own_id, verb=verb)


def end_process(code: int) -> None:
    """Leave now: a thread that hangs in a write or a matrix product must not hold the process."""
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(code)
