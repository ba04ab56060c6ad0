"""A small block of memory that front and engine process share: state, sign of life, flags of requests.

The engine process writes state and sign of life, the front the flags; neither waits for the other. There are
two places for the state: a writer fills the one that is not current, then makes it current, so a reader finds
a whole one at any moment, also after the writer was killed in the middle. A reader that is overtaken twice
sees a wrong checksum and looks again.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping
from typing import Any

from slotd.daemon.link import Flags, State

#: Most requests that the engine side knows at once: two flags each.
MAX_REQUESTS = 16_384

#: Most bytes of a state as JSON: 64 running requests and 64 slots of 300 bytes need a tenth of it.
STATE_BYTES = 512 * 1024

SIGN_OF_LIFE = struct.Struct("<d")
CURRENT = struct.Struct("<I")
HEADER = struct.Struct("<IId")  # length, checksum, time.monotonic() of the state

CURRENT_AT = 8
FLAGS_AT = 64
STATES_AT = FLAGS_AT + 2 * MAX_REQUESTS
PLACE_BYTES = HEADER.size + STATE_BYTES
BLOCK_BYTES = STATES_AT + 2 * PLACE_BYTES

#: How often a reader looks again when it was overtaken.
TRIES = 5


class SharedState:
    """The block.

    Args:
        descriptor: of an existing block; None: make one.

    Attributes:
        descriptor: to be inherited by the other process.
        cells: holds the flags of request n at `flags_at(n)`.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("slotd-state", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, BLOCK_BYTES)
        self.descriptor = descriptor
        self.cells = mmap.mmap(descriptor, BLOCK_BYTES)

    def close(self) -> None:
        """Let go of the block; what the other process has stays."""
        self.cells.close()
        os.close(self.descriptor)

    @staticmethod
    def flags_at(number: int) -> int:
        """Where the flags of request `number` (below MAX_REQUESTS) are."""
        return FLAGS_AT + 2 * number

    # ----- the engine process

    def write(self, data: Mapping[str, Any]) -> None:
        """Make `data` the state as of now; also a sign of life.

        Raises:
            ValueError: it is larger than STATE_BYTES.
        """
        text = json.dumps(data, separators=(",", ":")).encode()
        if len(text) > STATE_BYTES:
            raise ValueError(f"a state of {len(text)} bytes is larger than {STATE_BYTES}")
        place = 1 - CURRENT.unpack_from(self.cells, CURRENT_AT)[0]
        start = STATES_AT + place * PLACE_BYTES
        now = time.monotonic()
        self.cells[start + HEADER.size : start + HEADER.size + len(text)] = text
        HEADER.pack_into(self.cells, start, len(text), zlib.crc32(text), now)
        CURRENT.pack_into(self.cells, CURRENT_AT, place)
        SIGN_OF_LIFE.pack_into(self.cells, 0, now)

    def sign_of_life(self) -> None:
        """Say that the engine process is at work."""
        SIGN_OF_LIFE.pack_into(self.cells, 0, time.monotonic())

    def flags(self, at: int) -> Flags:
        """The flags of a request, as the engine sees them: to look at them is a sign of life."""
        return _WatchedFlags(self, at)

    # ----- the front

    def last_sign(self) -> float:
        """time.monotonic() of the last sign of life; 0 when there was none."""
        return float(SIGN_OF_LIFE.unpack_from(self.cells, 0)[0])

    def written(self) -> float:
        """time.monotonic() of the state that was written last, 0 before the first one."""
        start = STATES_AT + CURRENT.unpack_from(self.cells, CURRENT_AT)[0] * PLACE_BYTES
        return float(HEADER.unpack_from(self.cells, start)[2])

    def read(self) -> State | None:
        """The state that was written last; None before the first one."""
        for _ in range(TRIES):
            start = STATES_AT + CURRENT.unpack_from(self.cells, CURRENT_AT)[0] * PLACE_BYTES
            length, checksum, at = HEADER.unpack_from(self.cells, start)
            if length == 0:
                return None
            text = self.cells[start + HEADER.size : start + HEADER.size + min(length, STATE_BYTES)]
            if zlib.crc32(text) == checksum:
                return State(json.loads(text), at)
        return None


class _WatchedFlags(Flags):
    """Between two layers the engine does nothing but look here, so this says that it is at work."""

    __slots__ = ("_block",)

    def __init__(self, block: SharedState, at: int) -> None:
        super().__init__(block.cells, at)
        self._block = block

    @property
    def cancelled(self) -> bool:
        self._block.sign_of_life()
        return super().cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        raise AttributeError("the front sets it")
