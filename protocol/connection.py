"""The two ends of the line protocol: bytes in -> messages out, message -> bytes. No I/O happens here.

`DaemonConnection` is what a daemon holds, `ClientConnection` what a client holds. Neither ever raises for
bytes that come in, and both give exactly one item for every line.
"""

from __future__ import annotations

from collections.abc import Iterator

from slotd.protocol.command_lines import format_command, parse_command, refuse
from slotd.protocol.errors import LocalProtocolError, RemoteProtocolError, RequestError
from slotd.protocol.event_lines import format_event, parse_event
from slotd.protocol.linebuffer import DEFAULT_MAX_LINE, BadLine, LineBuffer
from slotd.protocol.messages import Command, Event, Hello, Json, Unknown


class DaemonConnection:
    """The daemon's end: command lines in, event lines out.

    Attributes:
        version: 1 until a HELLO was received, then 2.

    Args:
        max_line: longest command line in bytes.
    """

    def __init__(self, max_line: int = DEFAULT_MAX_LINE) -> None:
        self.version = 1
        self._max_line = max_line
        self._buffer = LineBuffer(max_line)

    def receive(self, data: bytes) -> list[Command | RequestError]:
        """What the lines that `data` completes say, in order.

        A `RequestError` stands for a line that is refused; it is given, never raised. Afterwards `version`
        is the one behind the last of them.
        """
        return list(self.messages(data))

    def messages(self, data: bytes) -> Iterator[Command | RequestError]:
        """As `receive`, one by one: at each item `version` is the one its line was sent under.

        Only a HELLO changes it, for the lines behind it. The iterator must be exhausted.
        """
        return self._read(self._buffer.feed(data))

    def end(self) -> list[Command | RequestError]:
        """What the last line says when the input ended without a newline."""
        return list(self._read(self._buffer.end()))

    def send(self, event: Event) -> bytes:
        """The event as one line.

        Raises:
            LocalProtocolError: a value of it cannot be put on the wire.
        """
        return _encode(format_event(event))

    def _read(self, lines: list[str | BadLine]) -> Iterator[Command | RequestError]:
        for line in lines:
            message = self._read_line(line)
            yield message
            if isinstance(message, Hello):
                self.version = 2

    def _read_line(self, line: str | BadLine) -> Command | RequestError:
        if isinstance(line, BadLine):
            limit = {"limit": self._max_line} if line.code == "line_too_long" else {}
            return refuse(line.code, line.text, dict(limit))
        try:
            return parse_command(line)
        except RequestError as error:
            return error


class ClientConnection:
    """The client's end: event lines in, command lines out.

    Attributes:
        version: 1 until the answer to HELLO was received, then 2.
        malformed: how many lines broke the grammar; each was given as `Unknown`.

    Args:
        max_line: longest line in bytes, both ways. A longer command is refused here, because the daemon
            could not say whose it was; a client that knows a daemon's larger limit passes it.
    """

    def __init__(self, max_line: int = DEFAULT_MAX_LINE) -> None:
        self.version = 1
        self.malformed = 0
        self._max_line = max_line
        self._buffer = LineBuffer(max_line)

    def receive(self, data: bytes) -> list[Event]:
        """What the lines that `data` completes say, in order."""
        return [self._read_line(line) for line in self._buffer.feed(data)]

    def end(self) -> list[Event]:
        """What the last line says when the output ended without a newline."""
        return [self._read_line(line) for line in self._buffer.end()]

    def send(self, command: Command) -> bytes:
        """The command as one line.

        Raises:
            LocalProtocolError: a value is not allowed, or the line is longer than `max_line`.
        """
        line = _encode(format_command(command))
        if len(line) - 1 > self._max_line:
            raise LocalProtocolError(f"the line has {len(line) - 1} bytes, max_line is {self._max_line}")
        return line

    def _read_line(self, line: str | BadLine) -> Event:
        if isinstance(line, BadLine):
            self.malformed += 1
            return Unknown(text=line.text)
        try:
            event = parse_event(line)
        except RemoteProtocolError:
            self.malformed += 1
            return Unknown(text=line)
        if isinstance(event, Json) and event.kind == "hello":
            self.version = 2
        return event


def _encode(line: str) -> bytes:
    return line.encode() + b"\n"
