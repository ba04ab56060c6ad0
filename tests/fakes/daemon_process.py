"""The real daemon as a child process, spoken to line by line as a version 1 client would."""

from __future__ import annotations

import os
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from slotd.daemon import blas_threads
from slotd.protocol.messages import Done, Event, Json, Tokens
from slotd.protocol.wire import parse_event

#: Bound of every wait, in seconds: a busy machine with two cores is slow, a hang is not slow.
PATIENCE = 60.0


def _environment() -> dict[str, str]:
    """The environment without the test process's own thread count: a daemon chooses as it does for a user."""
    return {name: value for name, value in os.environ.items() if name not in blas_threads.VARIABLES}


class DaemonProcess:
    """``python -m slotd.daemon daemon MODEL ...`` with pipes; use as a context manager.

    Args:
        model: path of the GGUF.
        flags: further flags.
        stream: give it a token stream (``--stream-fd``).
        env: further environment variables.
        preexec_fn: called in the child before it becomes the daemon.
    """

    def __init__(
        self, model: Path, *flags: str, stream: bool = True, env: dict[str, str] | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._stream_read: int | None = None
        argv = [sys.executable, "-m", "slotd.daemon", "daemon", str(model), *flags]
        pass_fds: tuple[int, ...] = ()
        if stream:
            self._stream_read, write = os.pipe()
            argv.append(f"--stream-fd={write}")
            pass_fds = (write,)
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=pass_fds,
            env={**_environment(), **(env or {})}, preexec_fn=preexec_fn,
        )  # fmt: skip
        for descriptor in pass_fds:
            os.close(descriptor)
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._dones: dict[str | None, Done] = {}  # terminal events that were passed over
        self._stderr = b""
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._read_lines, self._read_stderr)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> DaemonProcess:
        self.wait_line("[daemon] ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----- what it says

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode().rstrip("\n")
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            self._stderr += raw

    @property
    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return self._stderr.decode(errors="replace")

    def wait_stderr(self, text: str, timeout: float = PATIENCE) -> None:
        """Wait until `text` stands on its stderr: a thread reads it, beside the lines."""
        end = time.monotonic() + timeout
        while text not in self.stderr:
            assert time.monotonic() < end, self.stderr
            time.sleep(0.01)

    def next_line(self, timeout: float = PATIENCE) -> str:
        """The next line of its stdout."""
        try:
            line = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no line within {timeout} s; stderr: {self.stderr[-2000:]}") from None
        if line is None:
            self._queue.put(None)
            raise EOFError(f"stdout ended; stderr: {self.stderr[-2000:]}")
        return line

    def wait_line(self, prefix: str, timeout: float = PATIENCE) -> str:
        """The next line that starts with `prefix`; lines before it are passed over."""
        end = time.monotonic() + timeout
        while True:
            line = self.next_line(max(0.01, end - time.monotonic()))
            if line.startswith(prefix):
                return line

    def wait_event(self, wanted: Callable[[Event], bool], timeout: float = PATIENCE) -> Event:
        """The next event that is wanted; others are passed over."""
        end = time.monotonic() + timeout
        while True:
            event = parse_event(self.next_line(max(0.01, end - time.monotonic())))
            if wanted(event):
                return event
            if isinstance(event, Done):
                self._dones[event.id] = event

    def wait_done(self, request_id: str | None, timeout: float = PATIENCE) -> Done:
        """The terminal event of a request, also when it came while something else was waited for."""
        if request_id in self._dones:
            return self._dones.pop(request_id)
        event = self.wait_event(lambda event: isinstance(event, Done) and event.id == request_id, timeout)
        assert isinstance(event, Done)
        return event

    def wait_json(self, kind: str) -> dict[str, Any]:
        """The object of the next [hello], [status] or [props] line."""
        event = self.wait_event(lambda event: isinstance(event, Json) and event.kind == kind)
        assert isinstance(event, Json)
        return dict(event.data)

    def wait_json_of(self, command: str, kind: str) -> dict[str, Any]:
        """The object that a command asks for."""
        self.send(command)
        return self.wait_json(kind)

    def quiet(self, seconds: float) -> list[str]:
        """Every line of the next `seconds`."""
        end, lines = time.monotonic() + seconds, []
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                self._queue.put(None)
                break
            lines.append(line)
        return lines

    # ----- what it is told

    def send(self, *lines: str) -> None:
        """Write command lines."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(line + "\n" for line in lines).encode())
        self.process.stdin.flush()

    def send_bytes(self, data: bytes) -> None:
        """Write raw bytes."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read_stream(self) -> list[int]:
        """Token ids up to the next -1, which is not part of the result."""
        ids = []
        while (value := self.read_stream_value()) != -1:
            ids.append(value)
        return ids

    def read_stream_value(self) -> int:
        """One value of the token stream."""
        assert self._stream_read is not None
        data = b""
        while len(data) < 4:
            part = os.read(self._stream_read, 4 - len(data))
            if not part:
                raise EOFError(f"the token stream ended; stderr: {self.stderr[-2000:]}")
            data += part
        return int(struct.unpack("<i", data)[0])

    def generate(
        self,
        ids: list[int],
        n_gen: int,
        fields: str = "",
        request_id: str = "t",
        *,
        slot: int | None = None,
        timeout: float = PATIENCE,
    ) -> tuple[list[int], Done]:
        """An id'd prompt to its end: its ids and its terminal event. slot: that it is to start from."""
        restore = "" if slot is None else f"RESTORE {slot} "
        self.send(f"{restore}- {n_gen} ids={','.join(map(str, ids))} id={request_id} {fields}".rstrip())
        produced: list[int] = []

        def collect(event: Event) -> bool:
            if isinstance(event, Tokens) and event.id == request_id:
                produced.extend(event.ids)
            return isinstance(event, Done) and event.id == request_id

        done = self.wait_event(collect, timeout)
        assert isinstance(done, Done)
        return produced, done

    # ----- its end

    def answers(self, open_ids: Collection[str]) -> dict[str, list[int]]:
        """The tokens of requests under way, by id, up to the end of the last one."""
        produced: dict[str, list[int]] = {id: [] for id in open_ids}
        left = set(open_ids)
        while left:
            event = parse_event(self.next_line(120))
            if isinstance(event, Tokens):
                produced[str(event.id)].extend(event.ids)
            elif isinstance(event, Done):
                left.discard(str(event.id))
        return produced

    def end_input(self) -> None:
        """Close its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait_exit(self, timeout: float = PATIENCE) -> int:
        """Wait for its end; returns the exit code."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            try:
                self.end_input()
                self.process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        for thread in self._threads:
            thread.join(10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        if self._stream_read is not None:
            os.close(self._stream_read)
            self._stream_read = None
