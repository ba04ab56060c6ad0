"""Runs steps that may run out of memory: carries out the rungs of the ladder and tries again.

What is given up, and in which order, is decided in `memory.pressure`; here it is done, counted and announced.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from slotd.daemon.account import Account
from slotd.daemon.engine import Engine
from slotd.daemon.kv.host_tier import OutOfHostMemory
from slotd.daemon.kv.slots import Slot
from slotd.daemon.link import Key, Line, ToFront
from slotd.daemon.memory import OutOfDeviceMemory, Policy
from slotd.daemon.memory.pressure import (
    Clear,
    DropDraft,
    Extent,
    Fail,
    GiveUp,
    Held,
    Ladder,
    Move,
    Situation,
    Trim,
)
from slotd.daemon.retained import RetainedSequences
from slotd.protocol.messages import AllCleared

log = logging.getLogger(__name__)

T = TypeVar("T")

MIB = 1 << 20


class Recovery:
    """Survives running out of memory.

    Args:
        engine: owns slots, pages and the pool.
        retained: ended sequences, the first thing that is given up.
        deliver: takes the announcement.
        publish: makes what STATUS shows current, so that a new epoch is known before its announcement.
        policy: what it may cost.
        epoch: at the start.

    Attributes:
        epoch: of the slots; raised by every announcement.
        publish: makes what STATUS shows current.
    """

    def __init__(
        self, engine: Engine, retained: RetainedSequences, deliver: Callable[[ToFront], None],
        publish: Callable[[], None], policy: Policy, epoch: int = 0,
    ) -> None:  # fmt: skip
        self.epoch = self._first_epoch = epoch
        self.policy = policy
        self._engine = engine
        self._retained = retained
        self._deliver = deliver
        self.publish = publish
        self._out_of_memory: Counter[str] = Counter()
        self._rungs: Counter[str] = Counter()
        self._trims: Counter[str] = Counter()
        self._trimmed_bytes: Counter[str] = Counter()

    def attempt(
        self, work: Callable[[], T], account: Account | None = None, pinned: Collection[Slot] = (),
        *, extent: Extent = Extent.ALL, spare: Key | None = None,
    ) -> T:  # fmt: skip
        """Run `work` until it succeeds or nothing more may be given up for it.

        Args:
            work: a step that changes nothing when it fails.
            account: the request's; time spent on rungs goes to `recover`.
            pinned: slots that are neither moved nor freed for it (the policy `seed` frees them).
            extent: how far the ladder goes.
            spare: the ended request whose sequence the step works on.

        Raises:
            OutOfDeviceMemory: of the last try.
        """
        ladder: Ladder | None = None
        while True:
            try:
                return work()
            except OutOfDeviceMemory as error:
                failure = error.bare()
            # Outside of `except`: the frames of the failed step, and the arrays in them, are gone.
            self._note(failure)
            ladder = ladder or Ladder(self.policy, failure.site, extent)
            with nullcontext() if account is None else account.inside("recover"):
                again = self._climb(ladder, pinned, spare)
            if not again:
                raise failure

    def trim(self, why: str) -> None:
        """Give cached blocks of a legacy pool back; `why` names the count: interval or end."""
        if self._engine.memory.pool_kind != "legacy":
            return
        released = self._engine.trim()
        self._trims[why] += 1
        self._trimmed_bytes[why] += released
        log.info("pool trim (%s): %d bytes (%.1f MiB) released", why, released, released / MIB)

    def do_less(self, failure: OutOfDeviceMemory, how: Literal["shrink", "split"]) -> None:
        """A step ran out of memory, and smaller ones are tried: the cache goes first.

        how: as it is counted: trees shrink, or a step of several sequences is split into one for each.
        """
        self._note(failure)
        self._rungs[how] += 1
        self._engine.trim()

    def give_up_for(self, fits: Callable[[], bool]) -> None:
        """Close ended sequences, oldest first, until it fits or none is left."""
        while not fits() and self._retained.drop_oldest():
            self._engine.trim()

    def report(self) -> dict[str, Any]:
        """Counters since the start, for STATUS."""
        return {
            "oom": dict(self._out_of_memory),
            "rungs": dict(self._rungs),
            "all_cleared": self.epoch - self._first_epoch,
            "trims": {why: {"count": n, "bytes": self._trimmed_bytes[why]} for why, n in self._trims.items()},
        }

    def _note(self, failure: OutOfDeviceMemory) -> None:
        self._out_of_memory[failure.site] += 1
        log.warning("%s", failure)

    # ----- the ladder

    def _climb(self, ladder: Ladder, pinned: Collection[Slot], spare: Key | None) -> bool:
        """Carry out rungs until one is worth another try; False when the request has to fail."""
        while True:
            rung = ladder.next(self._situation(pinned, spare))
            match rung:
                case Trim():
                    self._engine.compact()
                    again = True
                case GiveUp():
                    again = self._give_up(spare)
                case Move(slot=number):
                    again = self._move(number, pinned)
                case DropDraft():
                    self._engine.drafting.give_up("its memory was needed for requests")
                    again = True
                case Clear():
                    self._clear(rung)
                    again = rung.retry
                case Fail():
                    self._rungs["fail"] += 1
                    return False
            if again or isinstance(rung, Clear):
                self._rungs[type(rung).__name__.lower()] += 1
            if again:
                return True

    def _situation(self, pinned: Collection[Slot], spare: Key | None) -> Situation:
        engine, tier = self._engine, self._engine.host_tier
        return Situation(
            ended=len(self._retained) - (spare is not None and self._retained.get(spare) is not None),
            slots=tuple(
                Held(
                    slot=number, tier=slot.tier, bytes=tier.size(slot),
                    own_bytes=tier.own_bytes(slot), last_used=slot.last_used, pinned=slot in pinned,
                )
                for number, slot in engine.slots.items()
            ),
            host_room=tier.budget,
            draft=engine.drafts,
        )  # fmt: skip

    def _give_up(self, spare: Key | None) -> bool:
        """Whether closing the oldest ended sequence freed a page or a state."""
        pages, memory = self._engine.store.pages, self._engine.memory
        pages_used, states = pages.n_used, memory.live("state")
        self._retained.drop_oldest(spare)
        self._engine.compact()
        return pages.n_used < pages_used or memory.live("state") < states

    def _move(self, number: int, pinned: Collection[Slot]) -> bool:
        """Whether the slot could be moved."""
        slots = self._engine.slots
        keep = {number, *(other for other, slot in slots.items() if slot in pinned)}
        try:
            self._engine.host_tier.demote(number, keep)
        except (OutOfDeviceMemory, OutOfHostMemory) as error:
            if isinstance(error, OutOfDeviceMemory):
                self._note(error)
            log.warning("slot %d stays where it is: %s", number, error)
            return False
        self._engine.compact()
        return True

    def _clear(self, rung: Clear) -> None:
        """Free the slots, raise the epoch, say so."""
        engine = self._engine
        before = self._held_bytes()
        for number in rung.freed:
            engine.free_slot(number)
        while rung.ended and self._retained.drop_oldest():
            pass
        engine.compact()
        self.epoch += 1
        freed = before - self._held_bytes()
        log.warning("all-cleared: slots %s freed, %s kept, %d bytes", rung.freed, rung.kept, freed)
        self.publish()
        self._deliver(Line(AllCleared(epoch=self.epoch, freed=rung.freed, kept=rung.kept, bytes=freed)))

    def _held_bytes(self) -> int:
        """Device bytes of pages in use and of slots' logits, and all bytes of the host tier."""
        engine = self._engine
        pages = engine.store.pages.n_used * engine.store.page_bytes
        return pages + engine.memory.live("snapshot") + engine.host_tier.used
