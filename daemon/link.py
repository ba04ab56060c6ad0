"""Messages between the front (lines, pipes, open requests) and the engine side (scheduler, sequences).

The front submits work under a key; the engine side answers with messages that carry the same key and
ends every submitted key with exactly one `Done`. Messages are plain data, so that a thread (NumPy) or a
child process (CUDA) can host the engine side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.protocol.errors import Value
from slotd.protocol.messages import Command, Event, TokenLogprob

#: Key of a request: its id, or a number the front gives to a command without one.
Key = str | int


class Flags:
    """What the front may change about a running request at any moment (read between steps and layers)."""

    __slots__ = ("cancelled", "paused")

    def __init__(self) -> None:
        self.cancelled = False
        self.paused = False  # its reader does not read: do not produce more


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
class Stop:
    """End the engine side: cancel everything, answer every key, free everything."""


# ----- engine -> front


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
    """What STATUS and PROPS report of the engine side; replaced whole, at least every 100 ms."""

    data: Mapping[str, Any]


ToEngine = Submit | Stop
ToFront = Progress | Emit | Line | Finished | State
