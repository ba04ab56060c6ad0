"""What a prompt starts from: the longest prefix that is known, and every page it will need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES, pages_for
from slotd.daemon.kv.slots import Slot
from slotd.daemon.memory import OutOfDeviceMemory, Policy
from slotd.daemon.memory.pressure import Extent
from slotd.daemon.parking import Parking
from slotd.daemon.recovery import Recovery
from slotd.daemon.retained import RetainedSequences
from slotd.daemon.sequence import Sequence
from slotd.daemon.slot_chains import chain, check_spans, prefix_in
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import RestoreChain

#: Pages are reserved for this many positions beyond prompt + answer: provisional rows of a step.
STEP_MARGIN = PAGE

Logits = npt.NDArray[np.float32]

T = TypeVar("T")


class SlotOnDisk(Exception):
    """A prompt starts from slot `number`, whose bytes have to be read from disk first."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


class Admission:
    """Makes the sequences of admitted prompts.

    Args:
        engine: owns slots and pages.
        retained: ended sequences that may share a prefix.
        recovery: gives things up when the pages do not fit.
        parking: brings the weights back.
        chunk: longest prefill piece, tokens.
    """

    def __init__(
        self, engine: Engine, retained: RetainedSequences, recovery: Recovery, parking: Parking, chunk: int
    ) -> None:
        self._engine = engine
        self._retained = retained
        self._recovery = recovery
        self._parking = parking
        self._chunk = chunk

    def sequence_for(self, job: Job, extent: Extent) -> tuple[Sequence, Logits | None]:
        """A sequence for the job, and the logits behind it when a slot knows the whole prompt.

        extent: how much may be given up for it.

        Raises:
            RequestError: target_parked, empty_slot, prefix_shorter, prefix_mismatch; oom when it would not
                fit with the memory all to itself (nothing was given up for it then).
            ModelError: the weights, which had gone by themselves, cannot be loaded again.
            OutOfDeviceMemory: it does not fit now, or the weights do not.
            SlotOnDisk: it starts from a slot that is not in memory.
        """
        slots = self._engine.slots
        self._parking.need(job.account, [slots[number] for number in _slots_of(job) if number in slots])
        self._check_size(job)
        sequence, logits = self._known_prefix(job, extent)
        try:
            self._reserve(job, sequence, extent)
        except OutOfDeviceMemory:
            self._engine.close(sequence)
            raise
        return sequence, logits

    def _check_size(self, job: Job) -> None:
        """Refuse what would not fit with the memory all to itself; storage is taken in whole segments."""
        memory, store = self._engine.memory, self._engine.store
        requested = -(-pages_for(_needed(job)) // SEGMENT_PAGES) * store.segment_bytes
        requested += 2 * self._engine.recurrence.state_bytes  # a prompt computes the next one beside it
        free = max(0, memory.total - memory.live("weights"))
        if requested > free:
            raise RequestError("oom", {"site": "prefill_reserve", "requested": requested, "free": free})

    def _known_prefix(self, job: Job, extent: Extent) -> tuple[Sequence, Logits | None]:
        """A sequence with the longest known prefix of the prompt; its logits when that is all of it."""
        slots, command = self._engine.slots, job.command
        if job.restore_slot is not None:
            number = job.restore_slot
            return self._restored(job, [number], lambda: prefix_in(slots, number, "thick", job.ids), extent)
        if isinstance(command, RestoreChain):
            check_spans(self._engine, command.verb)
            return self._restored(job, _slots_of(job), lambda: chain(slots, command, job.ids), extent)

        def start() -> Sequence:
            match = self._retained.best_match(job.ids)
            if match is None:
                return self._engine.open()
            with self._engine.memory.within("prefill_build"):
                return self._engine.fork(match[0].sequence, match[1])

        return self._try(job, start, extent), None

    def _restored(
        self, job: Job, numbers: list[int], whole: Callable[[], Slot], extent: Extent
    ) -> tuple[Sequence, Logits | None]:
        """A sequence that holds what slots do together, which is a prefix of the prompt, or more of it.

        whole: what they hold; asked again in each try, because slots and pages may have moved.
        """
        length, logits_are_kept = self._reusable(whole(), job)
        job.pinned = [self._engine.slots[number] for number in numbers]

        def start() -> Sequence:
            match = self._retained.best_match(job.ids)
            job.from_slot = match is None or match[1] <= length
            if length == 0 and match is None:
                return self._engine.open()
            if match is None or match[1] <= length:
                for number in numbers:
                    if self._engine.slots[number].stored is not None:
                        raise SlotOnDisk(number)
                return self._engine.restore_chain(numbers, whole, length)
            entry, shared = match
            with self._engine.memory.site("restore"):
                for number in numbers:  # used, but left where it is, which may be host memory
                    self._engine.slots.touch(number)
                return self._engine.fork(entry.sequence, shared)

        sequence = self._try(job, start, extent)
        return sequence, whole().logits if logits_are_kept else None

    def _reusable(self, held: Slot, job: Job) -> tuple[int, bool]:
        """How much of a snapshot that the prompt starts with is reused, and whether the logits behind it."""
        if len(held) < len(job.ids):
            return len(held), False
        if held.logits is None:  # the answer starts from the last token's logits: compute it once more
            return self._engine.recurrence.resumable(held, len(held) - 1), False
        return len(held), True

    def _reserve(self, job: Job, sequence: Sequence, extent: Extent) -> None:
        """Every page that the job will need. Only a prompt of several pieces passes the site."""
        n_tokens = _needed(job)
        site = "prefill_reserve" if len(job.ids) > self._chunk else None
        if self._recovery.policy is Policy.SEED:
            missing = pages_for(n_tokens) - len(sequence.pages)
            # Ended sequences are no slots: they make way without a failure, as the source's cache does.
            self._recovery.give_up_for(lambda: self._engine.store.has_room(missing))
        self._try(job, lambda: self._engine.reserve(sequence, n_tokens, site), extent)

    def _try(self, job: Job, work: Callable[[], T], extent: Extent) -> T:
        return self._recovery.attempt(work, job.account, job.pinned, extent=extent)


def _slots_of(job: Job) -> list[int]:
    """The slots that the prompt starts from."""
    if isinstance(job.command, RestoreChain):
        return [number for number in (job.command.thick, *job.command.thins) if number >= 0]
    return [] if job.restore_slot is None else [job.restore_slot]


def _needed(job: Job) -> int:
    return len(job.ids) + job.n_gen + STEP_MARGIN
