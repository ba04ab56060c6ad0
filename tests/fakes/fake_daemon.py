"""A scripted daemon on the other end of two pipes: what it must be told, and what it says to that.

    daemon = FakeDaemon()
    daemon.expect("LIST_SLOTS id=$id", "[snap] slots=0,3 id=$id", "[done] id=$id status=ok")

A line with ``$id`` matches any request id, and ``$id`` in the replies is that id; a compiled pattern is
matched against the whole line. Expectations are met in order. The first line that does not fit is kept
for `assert_done`, and everything after it goes unanswered.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Self

_ID = re.compile(r"(?:^| )id=(\S+)")

Reply = str | Callable[[], None]


def _pattern(line: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(line, str):
        return re.compile(re.escape(line).replace(r"\$id", r"[A-Za-z0-9._:-]+"))
    return line


class FakeDaemon:
    """`stdin` and `stdout` are the client's ends, to attach to. Close it, or use it as a context manager.

    Args:
        hello: expect a HELLO first, and answer it with this JSON; None: no HELLO is expected.
    """

    def __init__(self, hello: str | None = '{"id":"$id","max_ctx":64,"epoch":1}') -> None:
        self._commands, self.stdin = os.pipe()
        self.stdout, self._events = os.pipe()
        self._script: list[tuple[re.Pattern[str], tuple[Reply, ...]]] = []
        self._standing: list[tuple[re.Pattern[str], tuple[Reply, ...]]] = []
        self._lock = threading.Lock()
        self._open = True
        self.lines: list[str] = []  # everything it was told
        self.ids: list[str] = []  # the ids of the lines that have one
        self.surprise: str | None = None
        if hello is not None:
            self.expect("HELLO id=$id", f"[hello] {hello}", "[done] id=$id status=ok")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def expect(self, line: str | re.Pattern[str], *replies: Reply) -> Self:
        """The next line must be `line`; then say `replies` (a callable among them is called)."""
        with self._lock:
            self._script.append((_pattern(line), replies))
        return self

    def always(self, line: str, *replies: Reply) -> Self:
        """Say `replies` to `line` whenever it comes and is not the next line expected."""
        self._standing.append((_pattern(line), replies))
        return self

    def say(self, *lines: str) -> None:
        """Say something unasked."""
        for line in lines:
            self.say_bytes(line.encode() + b"\n")

    def say_bytes(self, data: bytes) -> None:
        """Say exactly these bytes; nothing when it has hung up meanwhile."""
        try:
            os.write(self._events, data)
        except OSError:
            if self._open:
                raise

    def hang_up(self) -> None:
        """Close both ends, as a process that dies does."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._events)

    def wait_for_ids(self, count: int) -> list[str]:
        """The ids of the first `count` lines that have one, when they have come (ten seconds at most)."""
        deadline = time.monotonic() + 10
        while len(self.ids) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(self.ids) >= count, f"only {len(self.ids)} commands with an id have come"
        return self.ids[:count]

    def assert_done(self) -> None:
        """Everything expected has been said, and nothing else."""
        assert self.surprise is None, f"not expected: {self.surprise!r}"
        assert not self._script, f"still expected: {[pattern.pattern for pattern, _ in self._script]}"

    def close(self) -> None:
        self.hang_up()
        os.close(self.stdin)
        self._thread.join(5)
        os.close(self.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        with os.fdopen(self._commands, "rb") as commands:
            for raw in commands:
                self._answer(raw.decode().rstrip("\n"))

    def _answer(self, line: str) -> None:
        self.lines.append(line)
        found = _ID.search(line)
        id = found[1] if found else ""
        if found:
            self.ids.append(id)
        with self._lock:
            if self._script and self._script[0][0].fullmatch(line) and self.surprise is None:
                _, replies = self._script.pop(0)
            else:
                standing = [replies for pattern, replies in self._standing if pattern.fullmatch(line)]
                if not standing:
                    self.surprise = self.surprise or line
                    return
                replies = standing[0]
        for reply in replies:
            if callable(reply):
                reply()
            else:
                self.say(reply.replace("$id", id))
