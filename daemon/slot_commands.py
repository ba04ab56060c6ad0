"""The commands that are not prompts: snapshots of ended sequences, slots, parking."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slotd.daemon.engine import Engine
from slotd.daemon.link import Finished, Key, Line, Submit, ToFront
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.retained import Retained, RetainedSequences
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.slot_chains import check_free_for
from slotd.protocol.errors import ModelError, RequestError, Value
from slotd.protocol.messages import (
    Event,
    FreeDrafter,
    FreeSnapshot,
    ListSlots,
    Park,
    Parked,
    SlotList,
    SnapFreed,
    Snapshot,
    SnapshotThin,
    SnapTaken,
    SnapThin,
    Unpark,
    Unparked,
)

log = logging.getLogger(__name__)


def describe(error: Exception) -> tuple[str, dict[str, Value]]:
    """Wire code and fields of a failure; anything unforeseen is `internal`, with a traceback in the log."""
    match error:
        case RequestError():
            return error.code, error.fields
        case OutOfDeviceMemory():
            return "oom", {"site": error.site, "requested": error.requested, "free": error.free}
        case ModelError():
            return "internal", {"reason": str(error)}
        case _:
            log.error("a request failed unexpectedly", exc_info=error)
            return "internal", {"reason": f"{type(error).__name__}: {error}"}


class SlotCommands:
    """Runs one command to its end between two steps.

    Args:
        engine: owns slots and weights.
        retained: the sequences SNAPSHOT may mean.
        deliver: takes the reply lines and the Finished of each command.
        epoch: the slot epoch, for the Finished.
    """

    def __init__(
        self, engine: Engine, retained: RetainedSequences, deliver: Callable[[ToFront], None],
        epoch: Callable[[], int], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._retained = retained
        self._deliver = deliver
        self._epoch = epoch
        self._clock = clock

    def run(self, submit: Submit) -> None:
        """Run the command and end its key, whatever happens."""
        failure: Exception | None = None
        try:
            self._dispatch(submit)
        except Exception as error:
            failure = error
        self.end(submit, failure)

    def end(self, submit: Submit, error: Exception | None) -> None:
        """End the key of a command that was done, or failed with `error`."""
        code, reason = (None, {}) if error is None else describe(error)
        wall = round(self._clock() - submit.submitted_at, 6)
        account: dict[str, Value] = {"epoch": self._epoch(), "wall_s": wall}
        self._deliver(Finished(submit.key, "err" if code else "ok", code, reason, account))

    def _dispatch(self, submit: Submit) -> None:
        command = submit.command
        match command:
            case Snapshot(tier="host" | "disk") | Snapshot(held=True):
                raise RequestError("unsupported", {"field": "tier", "value": command.tier or "device"})
            case Snapshot():
                check_free_for(self._engine.slots, command.slot, "thick")
                slot = self._engine.snapshot(command.slot, *self.ended(submit.key, command.of))
                self._reply(submit, SnapTaken(slot=command.slot, cur_pos=len(slot), tier=command.tier))
            case SnapshotThin():
                self._keep_span(submit, command)
            case FreeSnapshot():
                self._engine.free_slot(command.slot)
                self._reply(submit, SnapFreed(slot=command.slot))
            case ListSlots():
                self._reply(submit, SlotList(slots=tuple(sorted(self._engine.slots))))
            case FreeDrafter():
                pass  # this build never loads one, so there is nothing to say
            case Park(what="all" | "target"):
                if self._engine.park():
                    self._reply(submit, Parked(what="target"))
            case Unpark(what="all" | "target"):
                if self._engine.unpark():
                    self._reply(submit, Unparked(what="target"))
            case Park() | Unpark():
                pass  # the draft: never loaded, so nothing changes
            case _:
                raise RequestError("unsupported", {"verb": command.verb})

    def ended(self, key: Key, of: str | None) -> tuple[Sequence, npt.NDArray[np.float32] | None]:
        """The sequence that a SNAPSHOT of request `key` means, with all that was said, and its logits.

        Raises:
            RequestError: nothing_to_snapshot, target_parked.
            OutOfDeviceMemory: the last token cannot be computed.
        """
        entry = self._ended_sequence(key, of)
        logits = self._catch_up(entry)
        return entry.sequence, logits

    def _keep_span(self, submit: Submit, command: SnapshotThin) -> None:
        check_free_for(self._engine.slots, command.slot, "thin")
        entry = self._ended_sequence(submit.key, command.of)
        if command.kv_end > len(entry.sequence):
            self._catch_up(entry)
        length = len(entry.sequence)
        if command.kv_end > length:
            limit = f"{command.kv_start + 1}..{length}"
            raise RequestError("bad_args", {"field": "kv_end", "value": command.kv_end, "limit": limit})
        span = self._engine.capture(entry.sequence, length=command.kv_end, kv_start=command.kv_start)
        self._engine.slots.put(command.slot, span)
        reply = SnapThin(slot=command.slot, kv_start=command.kv_start, kv_end=command.kv_end)
        self._reply(submit, reply)

    def _reply(self, submit: Submit, event: Event) -> None:
        self._deliver(Line(event, submit.key))

    def _ended_sequence(self, key: Key, of: str | None) -> Retained:
        """The sequence SNAPSHOT means: request `of`, else the last one of its own kind of request."""
        if of is not None:
            entry = self._retained.get(of)
        elif isinstance(key, int):
            entry = self._retained.latest(lambda candidate: isinstance(candidate, int))
        else:
            entry = self._retained.latest(lambda _: True)
        if entry is None:
            raise RequestError("nothing_to_snapshot", {} if of is None else {"of": of})
        return entry

    def _catch_up(self, entry: Retained) -> npt.NDArray[np.float32] | None:
        """Compute the last emitted token, so that the snapshot holds everything that was said."""
        if not entry.pending:
            return None
        if self._engine.parked:
            raise RequestError("target_parked")
        self._engine.reserve(entry.sequence, len(entry.sequence) + len(entry.pending), "snapshot")
        rows = Rows.chain(entry.sequence, entry.pending)
        outputs = self._engine.forward(rows, Kind.STEP)
        self._engine.commit(entry.sequence, range(len(rows)))
        entry.pending = ()
        last: npt.NDArray[np.float32] = outputs.logits[-1]
        return last
