"""Messages between the front (lines, pipes, open requests) and the engine side (scheduler, sequences).

The front submits work under a key; the engine side answers with messages that carry the same key and
ends every submitted key with exactly one `Done`. Messages are plain data, so that a thread (NumPy) or a
child process (CUDA) can host the engine side.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slotd.protocol.errors import Value
from slotd.protocol.messages import Command, Event, TokenLogprob

if TYPE_CHECKING:  # the process of the front starts that of the engine before it loads NumPy
    import numpy as np
    import numpy.typing as npt

#: Key of a request: its id, or a number the front gives to a command without one.
Key = str | int


class Cells(Protocol):
    """Bytes that two processes may share: a bytearray, an mmap."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Flags:
    """What the front may change about a running request at any moment (read between steps and layers).

    Args:
        cells: where the two bytes are, default: in memory of this process.
        at: index of the first one.
    """

    __slots__ = ("_at", "_cells", "_lock")

    def __init__(self, cells: Cells | None = None, at: int = 0) -> None:
        self._cells = bytearray(2) if cells is None else cells
        self._at = at
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        """Somebody wants its end."""
        return self._cells[self._at] != 0

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._set(0, value)

    @property
    def paused(self) -> bool:
        """Its reader does not read: do not produce more."""
        return self._cells[self._at + 1] != 0

    @paused.setter
    def paused(self, value: bool) -> None:
        self._set(1, value)

    def move(self, cells: Cells, at: int) -> None:
        """Keep them elsewhere from now on; no change that another thread makes meanwhile is lost."""
        with self._lock:
            for index in range(2):
                cells[at + index] = self._cells[self._at + index]
            self._cells, self._at = cells, at

    def _set(self, index: int, value: bool) -> None:
        with self._lock:
            self._cells[self._at + index] = int(value)


# ----- front -> engine


@dataclass(frozen=True, slots=True)
class Submit:
    """Run `command`; `ids` is the whole prompt for commands that have one (already read and checked)."""

    key: Key
    command: Command
    flags: Flags
    submitted_at: float  # time.monotonic() at which the line was taken
    ids: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    """Publish the state: the front has not seen a sign of life for a while. Only between processes."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine side: cancel everything, answer every key, free everything."""


# ----- engine -> front


@dataclass(frozen=True, slots=True)
class Opened:
    """The model is loaded: what the front has to know of it.

    Attributes:
        n_vocab: size of the vocabulary.
        max_ctx: most positions of a sequence.
        stored: whether there is a folder for snapshots on disk.
        props: what HELLO and PROPS report, JSON values.
    """

    n_vocab: int
    max_ctx: int
    stored: bool
    props: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine side ends because of this: `kind` is the name of the exception."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """The engine side begins with this key, which it may not survive: run it once at most."""

    key: Key


@dataclass(frozen=True, slots=True)
class Progress:
    """`at` of `of` prompt tokens are in the cache."""

    key: Key
    at: int
    of: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Newly generated tokens; `at` is the index of the first one in the answer."""

    key: Key
    at: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """An event to print before anything that follows; the front adds the request's id. No key: nobody's."""

    event: Event
    key: Key | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a key.

    Attributes:
        status: ok, stop, length, cancelled or err.
        code: the error code, with status err.
        reason: what names the end: the error's fields, or stop=ID, or limit=n_gen|max_ctx.
        account: counts, epoch, seed and times, for the [done] line.
    """

    key: Key
    status: str
    code: str | None = None
    reason: Mapping[str, Value] = field(default_factory=dict)
    account: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """What STATUS and PROPS report of the engine side; replaced whole, at least every 100 ms.

    at: time.monotonic() at which it was so; None: now.
    """

    data: Mapping[str, Any]
    at: float | None = None


ToEngine = Submit | Stop
ToFront = Opened | Failed | Started | Progress | Emit | Line | Finished | State


class Host(Protocol):
    """What hosts the engine side, a thread (`host`) or a process (`process_host`), as the front sees it."""

    def start(self) -> None:
        """Begin to take turns."""

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine side. Raises RequestError when it takes none any more."""

    def stop(self, timeout: float) -> bool:
        """Ask it to end and wait; False when it has not ended within `timeout` seconds."""

    def state(self) -> State | None:
        """The newest state; None: it was delivered as a message."""
