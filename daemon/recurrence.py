"""The engine's rules for recurrent layers: where their state follows the rows, and where it can be had again.

K/V of a longer text hold those of each shorter one; a recurrent state does not. It is there behind the last
committed token, in slots, and in checkpoints that a sequence keeps on its way, and nowhere in between: a
restore never takes a state back. With a model that has no such layers every position can be had.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.recurrent_storage import RecurrentStorage, State
from slotd.daemon.kv.slot_files import Blob
from slotd.daemon.kv.slots import Slot
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.ops.page_layout import Bytes
from slotd.daemon.row_checks import row_counts
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.protocol.errors import RequestError, Value

#: Most checkpoints of a sequence; the oldest goes.
MOST_CHECKPOINTS = 4


class Recurrence:
    """States of the sequences of an engine.

    Args:
        store: keeps them; None: the model has no recurrent layers.
        every: tokens from one checkpoint of a sequence to the next, 0 = none are kept.
    """

    def __init__(self, store: RecurrentStorage | None, every: int) -> None:
        self.store = store
        self.every = every

    @property
    def state_bytes(self) -> int:
        """Bytes of one state; 0: there are none."""
        return 0 if self.store is None else self.store.n_bytes

    @property
    def checkpoints(self) -> bool:
        """Whether any are kept."""
        return self.store is not None and self.every > 0

    # ----- rows

    def open(self, rows: Rows, kind: Kind) -> None:
        """Room for what a forward of these rows leaves.

        Raises:
            OutOfDeviceMemory: no room; the caller drops the rows.
        """
        if self.store is None:
            return
        for sequence, n in zip(rows.sequences, row_counts(rows), strict=True):
            if sequence.state is None and kind is Kind.STEP:
                sequence.state = self.store.blank()
            sequence.open_state = self.store.open(kind, n)

    def check_path(self, kind: Kind, n: int, path: npt.NDArray[np.int64]) -> None:
        """Raises ValueError: a prompt keeps no state but the one behind all its rows."""
        if self.store is not None and kind is Kind.PROMPT and len(path) not in (0, n):
            raise ValueError(f"{len(path)} of {n} rows of a prompt: recurrent layers commit all or none")

    def commit(self, sequence: Sequence, path: npt.NDArray[np.int64]) -> None:
        """Move the state of a sequence along a path of its open rows. Needs no memory, so it cannot fail."""
        if self.store is not None and len(path):
            sequence.state = self.store.commit(sequence.state, sequence.open_state, path)

    # ----- where a state can be had

    def resumable(self, source: Sequence | Slot, length: int) -> int:
        """How many of the first `length` tokens of a sequence or slot can be resumed from: the most."""
        if self.store is None or (length == len(source) and source.state is not None):
            return length
        return max(checkpoints_in(source, length), default=0)

    def state_at(self, source: Sequence | Slot, length: int, tag: str | None = "state") -> State | None:
        """A copy of the state behind the first `length` tokens; None: there is none to be kept.

        tag: of the copy in the ledger; None: the state itself.

        Raises:
            ValueError: it is not there.
            OutOfDeviceMemory: no room.
        """
        if self.store is None or length == 0:
            return None
        if self.resumable(source, length) != length:
            raise ValueError(f"the recurrent state behind {length} of {len(source)} tokens is not there")
        state = source.state
        if length < len(source):
            assert isinstance(source, Sequence)
            state = source.checkpoints[length]
        return state if tag is None else self.store.copy(state, tag)

    # ----- files

    def reading(self, slot: Slot) -> Callable[[], Blob | None]:
        """The work, for any thread, that reads the state of a slot as it is now."""
        store, state, in_host = self.store, slot.state, slot.host is not None

        def work() -> Blob | None:
            if store is None or state is None:
                return None
            data: Bytes = state if in_host else np.empty(store.n_bytes, np.uint8)
            if not in_host:
                store.read(state, data)
            return Blob.of(data.data)

        return work

    def check_bytes(self, name: str, n_bytes: int, n_tokens: int) -> None:
        """Raises RequestError, wrong_snapshot: a stored state is not of the size of this model's.

        Without tokens there is none.
        """
        wanted = self.state_bytes if n_tokens else 0
        if n_bytes != wanted:
            fields: dict[str, Value] = {"hash": name, "field": "state_bytes", "stored": n_bytes}
            raise RequestError("wrong_snapshot", {**fields, "wanted": wanted})

    def write(self, data: bytes) -> State | None:
        """A state for a slot from the bytes of a file; of no bytes there is none.

        Raises:
            OutOfDeviceMemory: site slot_move.
        """
        if self.store is None or not data:
            return None
        return self.store.write(np.frombuffer(data, np.uint8), "snapshot")

    # ----- checkpoints

    def keep_checkpoint(self, sequence: Sequence) -> None:
        """Keep the state of a sequence when the last one it keeps is far behind. It can be done without."""
        if self.store is None or not self.checkpoints:
            return
        if len(sequence) - max(sequence.checkpoints, default=0) < self.every:
            return
        try:
            sequence.checkpoints[len(sequence)] = self.store.copy(sequence.state, "snapshot")
        except OutOfDeviceMemory:
            return
        while len(sequence.checkpoints) > MOST_CHECKPOINTS:
            del sequence.checkpoints[min(sequence.checkpoints)]


def checkpoints_in(source: Sequence | Slot, length: int) -> dict[int, State]:
    """The checkpoints of a sequence that do not lie behind its first `length` tokens; a slot has none."""
    kept = source.checkpoints if isinstance(source, Sequence) else {}
    return {position: state for position, state in kept.items() if position <= length}
