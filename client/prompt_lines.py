"""Typed lines into turns: one line is one turn, three double quotes open and close a turn of several lines.

Pure: fed with lines by the terminal and by a pipe alike.
"""

from __future__ import annotations

FENCE = '"""'


class TurnReader:
    """Collects lines. `feed` returns a whole turn, or None while a block is open (or for a blank line)."""

    def __init__(self) -> None:
        self._block: list[str] | None = None
        self.quoted = False  # whether the turn returned last came from a block: then it is never a command

    @property
    def open(self) -> bool:
        """Whether a block waits for its closing quotes."""
        return self._block is not None

    def feed(self, line: str) -> str | None:
        line = line.rstrip("\r\n")
        if self._block is None:
            return self._start(line)
        if line.rstrip().endswith(FENCE):
            self._block.append(line.rstrip()[: -len(FENCE)])
            return self._close()
        self._block.append(line)
        return None

    def drop(self) -> None:
        """Forget an open block (Ctrl-C, end of input)."""
        self._block = None

    def _start(self, line: str) -> str | None:
        self.quoted = False
        stripped = line.strip()
        if not stripped.startswith(FENCE):
            return line if stripped else None
        rest = stripped[len(FENCE) :]
        self._block = []
        if rest.endswith(FENCE):
            self._block.append(rest[: -len(FENCE)])
            return self._close()
        if rest:
            self._block.append(rest)
        return None

    def _close(self) -> str | None:
        lines, self._block = self._block or [], None
        # The closing quotes usually stand on a line of their own, which is no line of the text.
        if lines and not lines[-1].strip():
            lines.pop()
        text = "\n".join(lines)
        self.quoted = bool(text.strip())
        return text if self.quoted else None
