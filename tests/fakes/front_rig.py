"""A front without pipes and engine: lines in, engine messages by hand, everything it writes in a list."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slotd.daemon.door import Limits
from slotd.daemon.front import Front
from slotd.daemon.handlers import AT_ONCE, IN_TURN
from slotd.daemon.link import Emit, Finished, Key, Submit, ToEngine
from slotd.protocol.connection import DaemonConnection
from slotd.protocol.errors import RequestError

#: What a prompt's account has at least.
ACCOUNT = {"prompt": 3, "reused": 0, "gen": 2, "epoch": 0, "seed": 1, "prefill_s": 0.25, "decode_s": 0.5}


class RecordingOutbox:
    """Takes what a front writes: lines (str) and stream values (int) in one list, in order.

    Attributes:
        behind: bytes that the reader of a key has not taken, as the test says.
        keys: the keys the lines were put under, in order.
        flushed: how often a flush was asked for.
    """

    def __init__(self, has_stream: bool = True) -> None:
        self.has_stream = has_stream
        self.written: list[str | int] = []
        self.keys: list[Key | None] = []
        self.behind: dict[Key, int] = {}
        self.flushed = 0

    def line(self, data: bytes, key: Key | None = None) -> None:
        assert data.endswith(b"\n")
        assert data.count(b"\n") == 1
        self.written.append(data.decode().removesuffix("\n"))
        self.keys.append(key)

    def stream_ids(self, ids: Sequence[int], key: Key) -> None:
        self.written.extend(ids)

    def end_response(self, key: Key) -> None:
        if self.has_stream:
            self.written.append(-1)

    def is_moving(self, patience: float) -> bool:
        return False  # nothing ever waits to be written

    def pending(self, key: Key) -> int:
        return self.behind.get(key, 0)

    def flush(self, timeout: float) -> bool:
        self.flushed += 1
        return True


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def generate_line(folder: Path, out: Path, n_gen: int = 2) -> str:
    """A `generate` command for the prompt 5, 6, 7, whose input file is written."""
    np.asarray([3, 5, 6, 7], "<i4").tofile(folder / "in.bin")
    return f"generate {folder / 'in.bin'} {n_gen} {out}"


class FrontRig:
    """A front between a client (`say`, `take`) and an engine side (`sent`, `emit`, `finish`), both the test.

    Args:
        stream: "fd", "lines" (``--stream-fd -``) or None.
        version: 2 has said HELLO.
    """

    def __init__(self, stream: str | None = "fd", version: int = 1) -> None:
        self.clock = Clock()
        self.sent: list[ToEngine] = []
        self.connection = DaemonConnection()
        self.outbox = RecordingOutbox(stream == "fd")
        self.front = Front(
            self.connection, self.outbox, self.sent.append,  # type: ignore[arg-type]
            Limits(n_vocab=320, max_ctx=64, slots=8), props={"slots": 8},
            lines_for_stream=stream == "lines", stall_timeout=60.0, clock=self.clock,
        )  # fmt: skip
        if version == 2:
            self.say("HELLO")
            self.take()

    def say(self, *lines: str) -> None:
        """The client's lines, dispatched as the loop does."""
        for item in self.connection.messages("".join(line + "\n" for line in lines).encode()):
            try:
                if isinstance(item, RequestError):
                    self.front.refuse(item)
                elif type(item) in AT_ONCE:
                    AT_ONCE[type(item)](self.front, item)
                else:
                    self.front.accept(item, functools.partial(IN_TURN[type(item)], self.front))
            except RequestError as error:
                self.front.refuse(error)

    def take(self) -> list[str | int]:
        """What was written since the last call."""
        written, self.outbox.written = self.outbox.written, []
        return written

    def submits(self) -> list[Submit]:
        """Everything that was handed to the engine side."""
        return [message for message in self.sent if isinstance(message, Submit)]

    def last(self) -> Submit:
        """The last thing that was handed to the engine side."""
        return self.submits()[-1]

    def emit(self, *ids: int, at: int = 0, key: Key | None = None) -> None:
        """The engine side produced ids for a key, by default that of the last submit."""
        self.front.deliver(Emit(self.last().key if key is None else key, at, ids))

    def finish(
        self, status: str = "ok", code: str | None = None, key: Key | None = None, **reason: Any
    ) -> None:
        """The engine side ends a key, by default that of the last submit."""
        key = self.last().key if key is None else key
        self.front.deliver(Finished(key, status, code, reason, ACCOUNT))
