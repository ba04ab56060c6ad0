"""The weights leave the device and come back: at a command, or by themselves when nobody needs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext

from slotd.daemon.account import Account
from slotd.daemon.engine import Engine
from slotd.daemon.idle_unload import IdleUnload, Target
from slotd.daemon.kv.slots import Slot
from slotd.daemon.recovery import Recovery
from slotd.protocol.errors import RequestError

log = logging.getLogger(__name__)


class Parking:
    """Parks and loads the weights of an engine; slots and sequences stay in any case.

    Args:
        engine: has the weights.
        recovery: makes room for them.
        clock: seconds, monotonic.
        idle_unload: seconds without use after which they go by themselves; None: never.
    """

    def __init__(
        self, engine: Engine, recovery: Recovery, clock: Callable[[], float] = time.monotonic,
        idle_unload: float | None = None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._recovery = recovery
        self._clock = clock
        self._idle = IdleUnload(idle_unload, clock())

    @property
    def target(self) -> Target:
        """Where the weights are."""
        return self._idle.target

    # ----- commands

    def park(self) -> bool:
        """Take the weights away until `unpark`. False when a park did already."""
        if self.target is Target.PARKED:
            return False
        self._engine.park()
        self._idle.move(Target.PARKED, self._clock())
        return True

    def unpark(self) -> bool:
        """Load the weights. False when they are here.

        Raises:
            ModelError, OutOfDeviceMemory: as `Engine.unpark`; they are away as before.
        """
        if self.target is Target.LOADED:
            return False
        self._load(None, ())
        return True

    # ----- use

    def need(self, account: Account | None = None, pinned: Collection[Slot] = ()) -> None:
        """The weights are wanted now: load them if they went by themselves.

        Args:
            account: of the request that wants them; loading goes to `load`.
            pinned: slots that are neither moved nor freed to make room for them.

        Raises:
            RequestError: target_parked.
            ModelError, OutOfDeviceMemory: as `Engine.unpark`; the next one that wants them tries again.
        """
        if self.target is Target.PARKED:
            raise RequestError("target_parked")
        if self.target is Target.UNLOADED:
            self._load(account, pinned)

    def used(self) -> None:
        """Something ran or waits."""
        self._idle.used(self._clock())

    def rest(self) -> float | None:
        """Nothing runs or waits: unload the weights if that is so for long enough.

        Returns the seconds to wait until this has to be asked again; None: not before something has run.
        """
        remaining = self._idle.remaining(self._clock())
        if remaining != 0:
            return remaining
        before = self._engine.memory.live() + self._engine.memory.cached
        self._engine.park()
        self._idle.move(Target.UNLOADED, self._clock())
        freed = before - self._engine.memory.live() - self._engine.memory.cached
        log.warning("idle: the weights are unloaded, %d bytes are free; slots stay", freed)
        self._recovery.publish()
        return None

    def _load(self, account: Account | None, pinned: Collection[Slot]) -> None:
        before, began = self.target, self._clock()
        self._idle.move(Target.LOADING, began)
        self._recovery.publish()  # whoever watches for signs of life knows why there are none
        try:
            with nullcontext() if account is None else account.inside("load"):
                self._recovery.attempt(self._engine.unpark, account, pinned)
        except BaseException:
            self._idle.move(before, self._clock())
            raise
        self._idle.move(Target.LOADED, self._clock())
        self._recovery.publish()
        log.info("the weights are loaded again, in %.2f s", self._clock() - began)
