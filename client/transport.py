"""Two pipes, a reader thread and a write lock: messages in, lines out.

Nothing here knows what a line means. The reader cuts stdout into lines and passes each on together with
its events; writers take turns, and a daemon that does not read its input holds nobody up for ever.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from slotd.protocol.connection import ClientConnection
from slotd.protocol.errors import DaemonDiedError, DaemonTimeoutError
from slotd.protocol.messages import Command, Event

logger = logging.getLogger(__name__)

#: A line of the daemon's that is longer is dropped; the longest real ones are a few KiB.
MAX_LINE = 16 << 20
#: How much of a line goes to the log: prompts are private and can be megabytes.
LOGGED = 200


class HasFileno(Protocol):
    """A file, pipe or socket object."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


#: One end of a pipe: a descriptor, or an unbuffered file object (a buffered one may hide bytes from us).
Pipe = int | HasFileno


class Transport:
    """The wire to one daemon.

    Args:
        stdin: the daemon's standard input, to write to.
        stdout: the daemon's standard output, to read from.
        on_line: called in the reader thread with each line and its events, in order.
        on_end: called in the reader thread, once, after the last line.
        owned: close the pipes at the end (those of a process that was spawned).
    """

    def __init__(
        self,
        stdin: Pipe,
        stdout: Pipe,
        *,
        on_line: Callable[[str, list[Event]], None],
        on_end: Callable[[], None],
        owned: bool = True,
    ) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._in = stdin if isinstance(stdin, int) else stdin.fileno()
        self._out = stdout if isinstance(stdout, int) else stdout.fileno()
        self._on_line, self._on_end = on_line, on_end
        self._owned = owned
        self._connection = ClientConnection()
        self._write_lock = threading.Lock()
        self._writable = True
        self._input_closed = False
        self._was_blocking = os.get_blocking(self._in)
        os.set_blocking(self._in, False)
        self._wake_read, self._wake_write = os.pipe()
        self._closed = False
        self.heard_at = time.monotonic()  # when the last bytes came in
        self._reader = threading.Thread(target=self._read, name="slotd-reader", daemon=True)

    @classmethod
    def attach(
        cls,
        stdin: Pipe,
        stdout: Pipe,
        *,
        on_line: Callable[[str, list[Event]], None],
        on_end: Callable[[], None],
    ) -> Transport:
        """The wire over pipes that stay the caller's: they are left open."""
        return cls(stdin, stdout, on_line=on_line, on_end=on_end, owned=False)

    def start(self) -> None:
        """Begin to read. Whoever waits for the first line has registered by now."""
        self._reader.start()

    # ----- writing

    def send(self, command: Command, timeout: float) -> None:
        """Write one command, whole.

        Raises:
            LocalProtocolError: the command cannot be put on the wire; nothing was written.
            DaemonDiedError: nobody reads the daemon's input.
            DaemonTimeoutError: the daemon did not take it within `timeout` seconds. The wire is then cut,
                as half a line may be on it.
        """
        deadline = time.monotonic() + timeout
        if not self._write_lock.acquire(timeout=timeout):
            raise DaemonTimeoutError(f"the daemon has not taken an earlier command for {timeout:g} s")
        try:
            data = self._connection.send(command)
            logger.debug(">> %s", data[:LOGGED].decode("utf-8", "replace").rstrip("\n"))
            self._write(memoryview(data), deadline, timeout)
        finally:
            self._write_lock.release()

    def try_send(self, command: Command) -> bool:
        """Write a short command if that needs no waiting at all (safe in a finaliser)."""
        if not self._write_lock.acquire(blocking=False):
            return False
        try:
            # Shorter than PIPE_BUF, so the kernel takes all of it or nothing.
            return self._writable and os.write(self._in, self._connection.send(command)) > 0
        except OSError:
            return False
        finally:
            self._write_lock.release()

    def _write(self, data: memoryview, deadline: float, timeout: float) -> None:
        total = len(data)
        while data:
            if not self._writable:
                raise DaemonDiedError("the daemon's input is closed")
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                self._await_room(len(data) < total, deadline, timeout)
            except OSError as error:
                self._writable = False
                raise DaemonDiedError(f"the daemon does not read its input: {error.strerror}") from error

    def _await_room(self, begun: bool, deadline: float, timeout: float) -> None:
        room = select.poll()
        room.register(self._in, select.POLLOUT)
        left = deadline - time.monotonic()
        if left > 0 and room.poll(left * 1000):
            return
        if begun:
            self._writable = False
        raise DaemonTimeoutError(f"the daemon did not take a command within {timeout:g} s")

    # ----- reading

    def _read(self) -> None:
        """The reader thread: lines until the end of output, or until `close`."""
        try:
            self._read_lines()
        finally:
            self._on_end()

    def _read_lines(self) -> None:
        ready = select.poll()
        ready.register(self._out, select.POLLIN)
        ready.register(self._wake_read, select.POLLIN)
        rest = b""
        while True:
            if any(fd == self._wake_read for fd, _ in ready.poll()):
                return
            try:
                piece = os.read(self._out, 1 << 16)
            except BlockingIOError:
                continue
            except OSError as error:
                logger.debug("reading the daemon's output: %s", error)
                piece = b""
            if not piece:
                break
            self.heard_at = time.monotonic()
            *lines, rest = (rest + piece).split(b"\n") if b"\n" in piece else (rest + piece,)
            for line in lines:
                self._take(line)
            if len(rest) > MAX_LINE:
                logger.warning("dropped %d bytes of a daemon line without an end", len(rest))
                rest = b""
        if rest:
            logger.warning("the daemon's output ends in half a line: %s", rest[:LOGGED])

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        logger.debug("<< %s", text[:LOGGED])
        malformed = self._connection.malformed
        events = self._connection.receive(line + b"\n")
        if self._connection.malformed > malformed:
            logger.warning("not a line of the protocol: %s", text[:LOGGED])
        self._on_line(text, events)

    # ----- the end

    def close(self, timeout: float = 2.0) -> None:
        """Close the input, stop reading, wait for the reader. Owned pipes are closed. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self.close_input(timeout)
        os.write(self._wake_write, b"x")
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join(timeout)
        if self._reader.is_alive():  # a callback of the user's blocks it: leave it its descriptors
            logger.warning("the reader thread is held up by a callback")
            return
        os.close(self._wake_read)
        os.close(self._wake_write)
        if self._owned:
            _close(self._stdout)

    def close_input(self, timeout: float = 2.0) -> None:
        """End of input for the daemon, when the pipes are ours; no more commands in any case."""
        self._writable = False  # a writer that waits for room sees it when the wait ends
        if not self._write_lock.acquire(timeout=timeout):
            logger.warning("a writer is still waiting for the daemon; its input stays open for now")
            return
        try:
            if self._input_closed:
                return
            self._input_closed = True
            if self._owned:
                _close(self._stdin)
            else:
                os.set_blocking(self._in, self._was_blocking)
        except OSError as error:
            logger.debug("closing the daemon's input: %s", error)
        finally:
            self._write_lock.release()


def _close(pipe: Pipe) -> None:
    if isinstance(pipe, int):
        os.close(pipe)
    else:
        pipe.close()
