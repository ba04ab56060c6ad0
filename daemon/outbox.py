"""The two ways out: protocol lines on stdout, token ids on the stream descriptor.

Each has a queue and a thread that writes, so a reader that stops reading blocks neither the engine nor
the other channel. While a reader keeps up, its pipe has room and the queue is empty; then a line is written
at once by whoever has it, which saves every token two switches of threads. The two channels have no common
order except one rule: a -1 on the stream leaves only after every line that was put before it.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from slotd.daemon.link import Key

log = logging.getLogger(__name__)

#: Ends a response on the token stream.
END_OF_RESPONSE = -1


class Channel:
    """A queue of byte strings and the thread that writes them to one descriptor.

    Args:
        fd: where to write; blocking writes are fine, this thread does nothing else.
        name: for the log and the thread.
        on_broken: called once, from whichever thread wrote, when the reader is gone.
    """

    def __init__(self, fd: int, name: str, on_broken: Callable[[], None]) -> None:
        self._fd = fd
        self._name = name
        self._on_broken = on_broken
        self._queue: deque[tuple[bytes, Key | None, Callable[[], bool] | None]] = deque()
        self._condition = threading.Condition()
        self._room = _room_of(fd)
        self._pending: Counter[Key | None] = Counter()
        self._put = 0
        self._written = 0
        self.broken = False
        self._moved_at = time.monotonic()
        threading.Thread(target=self._write_all, name=f"slotd-{name}", daemon=True).start()

    def put(self, data: bytes, key: Key | None, after: Callable[[], bool] | None = None) -> None:
        """Write `data`, or queue it behind what waits; `after` waits for a condition before the write."""
        with self._condition:
            self._put += 1
            if self.broken:
                self._written = self._put
            elif after is None and not self._queue and self._has_room(len(data)):
                self._write_now(data)
            else:
                if not self._queue:
                    self._moved_at = time.monotonic()
                self._queue.append((data, key, after))
                self._pending[key] += len(data)
                self._condition.notify_all()

    @property
    def ticket(self) -> int:
        """Stands for everything that was put so far."""
        return self._put

    def is_written(self, ticket: int) -> bool:
        """Whether everything up to `ticket` is written (or can never be)."""
        return self._written >= ticket

    def pending(self, key: Key) -> int:
        """Bytes of `key` that are not written yet."""
        return self._pending[key]

    def wait_written(self, ticket: int, timeout: float | None = None) -> bool:
        """Wait until everything up to `ticket` is written (or can never be)."""
        with self._condition:
            return self._condition.wait_for(lambda: self._written >= ticket, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty; False when it is not within `timeout` seconds."""
        return self.wait_written(self._put, timeout)

    def is_moving(self, patience: float) -> bool:
        """Whether something is unwritten, and waits for its reader since less than `patience` seconds."""
        return self._written < self._put and time.monotonic() - self._moved_at < patience

    def _has_room(self, n: int) -> bool:
        """Whether n bytes can be written without waiting for the reader."""
        return self._room is not None and n <= select.PIPE_BUF and bool(self._room.poll(0))

    def _write_now(self, data: bytes) -> None:
        try:
            self._write(data)
            self._written = self._put
        except OSError as error:
            self._break(error)

    def _write_all(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue)
                data, key, after = self._queue[0]
            try:
                if after is None or after():
                    self._write(data)
            except OSError as error:
                self._break(error)
                return
            with self._condition:
                self._queue.popleft()
                self._written += 1
                self._moved_at = time.monotonic()
                self._pending[key] -= len(data)
                if not self._pending[key]:
                    del self._pending[key]
                self._condition.notify_all()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # somebody made the pipe non-blocking: wait as a blocking write does
                room = select.poll()
                room.register(self._fd, select.POLLOUT)
                room.poll()

    def _break(self, error: OSError) -> None:
        log.info("nobody reads %s any more: %s", self._name, error)
        with self._condition:
            self.broken = True
            self._queue.clear()
            self._pending.clear()
            self._written = self._put
            self._condition.notify_all()
        self._on_broken()


def _room_of(fd: int) -> select.poll | None:
    """Tells when a pipe has room for PIPE_BUF bytes; None for what gives no such promise (a terminal)."""
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return None
    room = select.poll()
    room.register(fd, select.POLLOUT)
    return room


class Outbox:
    """Lines on stdout and, when there is one, ids on the stream descriptor."""

    def __init__(
        self, stdout_fd: int, stream_fd: int | None, on_stdout_gone: Callable[[], None],
        on_stream_gone: Callable[[], None],
    ) -> None:  # fmt: skip
        self._lines = Channel(stdout_fd, "stdout", on_stdout_gone)
        self._stream = Channel(stream_fd, "stream", on_stream_gone) if stream_fd is not None else None

    @property
    def has_stream(self) -> bool:
        """Whether a token stream is there and still read."""
        return self._stream is not None and not self._stream.broken

    def line(self, data: bytes, key: Key | None = None) -> None:
        """Queue one protocol line, newline included."""
        self._lines.put(data, key)

    def stream_ids(self, ids: Sequence[int], key: Key) -> None:
        """Queue token ids: little-endian int32, one write of four bytes each, as the source daemon does."""
        if self._stream is not None:
            for token in ids:
                self._stream.put(struct.pack("<i", token), key)

    def end_response(self, key: Key) -> None:
        """Queue the -1 that ends a response, behind every line queued so far."""
        if self._stream is not None:
            lines = self._lines
            ticket = lines.ticket
            after = None if lines.is_written(ticket) else lambda: lines.wait_written(ticket)
            self._stream.put(struct.pack("<i", END_OF_RESPONSE), key, after)

    def pending(self, key: Key) -> int:
        """Bytes of `key` that its readers have not taken yet."""
        return self._lines.pending(key) + (self._stream.pending(key) if self._stream is not None else 0)

    def is_moving(self, patience: float) -> bool:
        """Whether a reader still has something to take, and lets it wait for less than `patience` seconds."""
        return self._lines.is_moving(patience) or (
            self._stream is not None and self._stream.is_moving(patience)
        )

    def flush(self, timeout: float) -> bool:
        """Wait for both queues to empty; False when they do not within `timeout` seconds each."""
        lines = self._lines.flush(timeout)
        return (self._stream.flush(timeout) if self._stream is not None else True) and lines
