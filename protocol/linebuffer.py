"""Bytes -> whole lines, with a size limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Longest line in bytes, without its newline. 16 MiB is a prompt of 1.5 million ids written inline.
DEFAULT_MAX_LINE = 16 * 1024 * 1024

# How much of a line that is too long is kept to tell whose it was.
_HEAD = 256


@dataclass(frozen=True, slots=True)
class BadLine:
    """Stands for one line that cannot be read.

    Attributes:
        code: the wire code of the error.
        text: what can be read of it: with replacement characters, or the words that stand whole at
            the start of a line that is too long.
    """

    code: Literal["line_too_long", "bad_utf8"]
    text: str


class LineBuffer:
    """Collects bytes and gives whole lines back. No byte is searched twice, and of a line that grows over
    the limit nothing but its head is kept.

    Args:
        max_line: longest line in bytes, without its newline and a carriage return before it.
    """

    def __init__(self, max_line: int = DEFAULT_MAX_LINE) -> None:
        self._max_line = max_line
        self._partial = bytearray()
        self._skipping = False  # inside a line that was already given up

    def feed(self, data: bytes) -> list[str | BadLine]:
        """The lines that `data` completes, in order, without newline.

        A line that is too long stands in the list when it crosses the limit, not when it ends.
        """
        *ends, rest = data.split(b"\n")
        lines: list[str | BadLine] = []
        for part in ends:
            lines += self._extend(part)
            lines += self._finish()
        lines += self._extend(rest)
        return lines

    def end(self) -> list[str | BadLine]:
        """The last line when the input ended without a newline; nothing when it ended with one."""
        return self._finish() if self._partial else []

    def _extend(self, part: bytes) -> list[str | BadLine]:
        if self._skipping:
            return []
        self._partial += part
        if len(self._partial) <= self._max_line + 1:  # the one more may be a carriage return
            return []
        self._skipping = True
        return [self._give_up()]

    def _finish(self) -> list[str | BadLine]:
        if self._skipping:
            self._skipping = False
            return []
        line = bytes(self._partial.removesuffix(b"\r"))
        if len(line) > self._max_line:
            return [self._give_up()]
        self._partial.clear()
        try:
            return [line.decode()]
        except UnicodeDecodeError:
            return [BadLine("bad_utf8", line.decode(errors="replace"))]

    def _give_up(self) -> BadLine:
        # Not more than has surely arrived, so that the same bytes give the same head however they are cut.
        head = bytes(self._partial[: min(_HEAD, self._max_line)]).decode(errors="replace")
        self._partial.clear()
        # The last word may be cut, and an open JSON string would hide where words begin.
        return BadLine("line_too_long", head.partition('"')[0].rpartition(" ")[0])
