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
    SnapTaken,
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
        code: str | None = None
        reason: dict[str, Value] = {}
        try:
            self._dispatch(submit)
        except Exception as error:
            code, reason = describe(error)
        wall = round(self._clock() - submit.submitted_at, 6)
        account: dict[str, Value] = {"epoch": self._epoch(), "wall_s": wall}
        self._deliver(Finished(submit.key, "err" if code else "ok", code, reason, account))

    def _dispatch(self, submit: Submit) -> None:
        command = submit.command
        match command:
            case Snapshot(tier="host" | "disk") | Snapshot(held=True):
                raise RequestError("unsupported", {"field": "tier", "value": command.tier or "device"})
            case Snapshot():
                entry = self._ended_sequence(submit.key, command.of)
                logits = self._catch_up(entry)
                self._engine.snapshot(command.slot, entry.sequence, logits)
                self._reply(
                    submit, SnapTaken(slot=command.slot, cur_pos=len(entry.sequence), tier=command.tier)
                )
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
