"""The commands that are not prompts: snapshots of ended sequences, slots, parking."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from slotd.daemon.engine import Engine
from slotd.daemon.kv.host_tier import OutOfHostMemory
from slotd.daemon.kv.slots import Slot
from slotd.daemon.link import Finished, Key, Line, Started, Submit, ToFront
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.memory.pressure import Extent
from slotd.daemon.parking import Parking
from slotd.daemon.recovery import Recovery
from slotd.daemon.retained import Retained, RetainedSequences
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.slot_chains import check_free_for, check_spans, filled
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

T = TypeVar("T")


def describe(error: Exception) -> tuple[str, dict[str, Value]]:
    """Wire code and fields of a failure; anything unforeseen is `internal`, with a traceback in the log."""
    match error:
        case RequestError():
            return error.code, error.fields
        case OutOfDeviceMemory():
            return "oom", {"site": error.site, "requested": error.requested, "free": error.free}
        case OutOfHostMemory():
            fields: dict[str, Value] = {"site": "slot_move", "tier": "host"}
            return "oom", {**fields, "requested": error.requested, "budget": error.budget}
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
        recovery: survives running out of memory, knows the slot epoch.
        parking: takes the weights away and brings them back.
    """

    def __init__(
        self, engine: Engine, retained: RetainedSequences, deliver: Callable[[ToFront], None],
        recovery: Recovery, parking: Parking, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._retained = retained
        self._deliver = deliver
        self._recovery = recovery
        self._parking = parking
        self._clock = clock

    def run(self, submit: Submit) -> None:
        """Run the command and end its key, whatever happens."""
        self._deliver(Started(submit.key))
        failure: Exception | None = None
        try:
            self._dispatch(submit)
        except Exception as error:
            failure = error
        self.end(submit, failure)

    def end(self, submit: Submit, error: Exception | None) -> None:
        """End the key of a command that was done, or failed with `error`."""
        self._recovery.publish()  # a STATUS behind the answer shows what the command did
        code, reason = (None, {}) if error is None else describe(error)
        wall = round(self._clock() - submit.submitted_at, 6)
        account: dict[str, Value] = {"epoch": self._recovery.epoch, "wall_s": wall}
        self._deliver(Finished(submit.key, "err" if code else "ok", code, reason, account))

    def _dispatch(self, submit: Submit) -> None:
        command = submit.command
        match command:
            case Snapshot(held=True):
                self.hold(submit, command)
            case Snapshot():
                check_free_for(self._engine.slots, command.slot, "thick")
                entry = self._ended_sequence(submit.key, command.of)
                logits = self.attempt(lambda: self._catch_up(entry), spare=entry.key)
                self.attempt(lambda: self._keep(command, entry, logits), spare=entry.key)
                self._reply_taken(submit, command)
            case SnapshotThin():
                self._keep_span(submit, command)
            case FreeSnapshot():
                self._engine.free_slot(command.slot)
                self._reply(submit, SnapFreed(slot=command.slot))
            case ListSlots():
                self._reply(submit, SlotList(slots=tuple(sorted(self._engine.slots))))
            case FreeDrafter():
                pass  # this build never loads one, so there is nothing to say
            case Park():
                for what in self._parked(command.what):
                    self._reply(submit, Parked(what=what))
            case Unpark():
                for what in self._unparked(command.what):
                    self._reply(submit, Unparked(what=what))
            case _:
                raise RequestError("unsupported", {"verb": command.verb})

    def _parked(self, what: str) -> Iterator[str]:
        """Park weights; those that went. The draft goes with its target, whose matrices it uses."""
        drafts = self._engine.drafts
        if what != "draft" and self._parking.park():
            yield "target"
        if what != "target":
            self._engine.drafting.park()
        if drafts and not self._engine.drafts:
            yield "draft"

    def _unparked(self, what: str) -> Iterator[str]:
        """Load parked weights; those that came."""
        drafts = self._engine.drafts
        if what != "target":
            self._engine.drafting.parked = False  # it comes with its target
        if what != "draft" and self._parking.unpark():
            yield "target"
        if what != "target":
            self._engine.drafting.unpark()
        if self._engine.drafts and not drafts:
            yield "draft"

    def hold(self, submit: Submit, command: Snapshot) -> None:
        """SNAPSHOT held=1: put what a slot in memory holds into another tier of memory, and say so."""
        self._move_held(command.slot, command.tier or "device")
        self._reply_taken(submit, command)

    def captured(self, key: Key, of: str | None) -> Slot:
        """A snapshot, in no slot, of the sequence that a SNAPSHOT of request `key` means: all that was said.

        Raises:
            RequestError: nothing_to_snapshot, target_parked.
            OutOfDeviceMemory: no room for the last token or for the logits.
        """
        entry = self._ended_sequence(key, of)
        logits = self.attempt(lambda: self._catch_up(entry), spare=entry.key)
        return self.attempt(lambda: self._engine.capture(entry.sequence, logits), spare=entry.key)

    def _keep_span(self, submit: Submit, command: SnapshotThin) -> None:
        check_spans(self._engine, command.verb)
        check_free_for(self._engine.slots, command.slot, "thin")
        entry = self._ended_sequence(submit.key, command.of)
        if command.kv_end > len(entry.sequence):
            self.attempt(lambda: self._catch_up(entry), spare=entry.key)
        length = len(entry.sequence)
        if command.kv_end > length:
            limit = f"{command.kv_start + 1}..{length}"
            raise RequestError("bad_args", {"field": "kv_end", "value": command.kv_end, "limit": limit})
        span = self.attempt(
            lambda: self._engine.capture(entry.sequence, length=command.kv_end, kv_start=command.kv_start),
            spare=entry.key,
        )
        self._engine.slots.put(command.slot, span)
        reply = SnapThin(slot=command.slot, kv_start=command.kv_start, kv_end=command.kv_end)
        self._reply(submit, reply)

    def _reply_taken(self, submit: Submit, command: Snapshot) -> None:
        """The answer to SNAPSHOT: how long the slot is, and where it is when a tier was asked for."""
        held = self._engine.slots[command.slot]
        tier = held.tier if command.tier or command.held else None
        self._reply(submit, SnapTaken(slot=command.slot, cur_pos=len(held), tier=tier))

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

    def attempt(self, work: Callable[[], T], pinned: Collection[Slot] = (), spare: Key | None = None) -> T:
        """Do what may run out of memory and can be done without: no slot is freed for it.

        pinned: slots that are not moved for it; spare: the ended request whose sequence it works on.

        Raises:
            OutOfDeviceMemory: there is no room without losing something.
        """
        return self._recovery.attempt(work, pinned=pinned, extent=Extent.LOSSLESS, spare=spare)

    def _keep(self, command: Snapshot, entry: Retained, logits: npt.NDArray[np.float32] | None) -> None:
        self._engine.snapshot(command.slot, entry.sequence, logits, tier=command.tier or "device")

    def _move_held(self, number: int, tier: str) -> None:
        """Put what a slot holds into the tier; nothing when it is there."""
        held = filled(self._engine.slots, number, "thick")
        if tier == "host":
            self.attempt(lambda: self._engine.host_tier.demote(number), [held])
        else:
            self.attempt(lambda: self._engine.host_tier.promote(number), [held])

    def _catch_up(self, entry: Retained) -> npt.NDArray[np.float32] | None:
        """Compute the last emitted token, so that the snapshot holds everything that was said."""
        if not entry.pending:
            return None
        self._parking.need()
        self._engine.reserve(entry.sequence, len(entry.sequence) + len(entry.pending), "snapshot")
        rows = Rows.chain(entry.sequence, entry.pending)
        outputs = self._engine.forward(rows, Kind.STEP)
        self._engine.commit(entry.sequence, range(len(rows)))
        entry.pending = ()
        last: npt.NDArray[np.float32] = outputs.logits[-1]
        return last
