"""Recurrent states of sequences: how they come about, are kept and move. A subclass for each device.

The committed state of a sequence changes in one place, `commit`. A prompt computes the state behind its rows
beside the one in front of them. A step keeps the inputs of its rows, not a state for each: a commit replays
the accepted path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.page_layout import Bytes
from slotd.daemon.rows import Kind

#: A state as the backend keeps it.
State = Any

#: What a forward leaves until it is committed or dropped.
Opened = Any


class RecurrentStorage(ABC):
    """States in the memory of a device.

    Attributes:
        n_bytes: of one state, the same on every device.
    """

    n_bytes: int

    @abstractmethod
    def blank(self) -> State:
        """The state of a sequence without tokens.

        Raises:
            OutOfDeviceMemory: no room.
        """

    @abstractmethod
    def open(self, kind: Kind, n: int) -> Opened:
        """Room for what a forward of n rows of one sequence leaves.

        Raises:
            OutOfDeviceMemory: no room.
        """

    @abstractmethod
    def commit(self, state: State | None, opened: Opened, path: npt.NDArray[np.int64]) -> State:
        """The state behind the rows of a path; needs no memory.

        state: of the sequence, used up. path: rows of the forward; of a prompt call all of them.
        """

    @abstractmethod
    def copy(self, state: State, tag: str) -> State:
        """Another one like it, under a tag of the ledger.

        Raises:
            OutOfDeviceMemory: no room.
        """

    @abstractmethod
    def read(self, state: State, buffer: Bytes) -> None:
        """The bytes of a state, uint8 [n_bytes], into host memory. From any thread."""

    @abstractmethod
    def write(self, data: Bytes, tag: str) -> State:
        """A state from its bytes.

        Raises:
            OutOfDeviceMemory: no room.
        """
