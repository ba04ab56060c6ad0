"""Where the weights of the target are, and when nobody has needed them for long enough. Pure."""

from __future__ import annotations

import enum


class Target(enum.Enum):
    """Where the weights are, as STATUS says it."""

    LOADED = "loaded"
    LOADING = "loading"
    UNLOADED = "unloaded"  # nobody needed them: who does has them loaded
    PARKED = "parked"  # by command: they stay away until the next command


class IdleUnload:
    """The weights through loads, parks and idle times. Callers have the clock.

    Args:
        after: seconds without use after which loaded weights are to go; None: never.
        now: when they were loaded first.

    Attributes:
        target: where they are.
    """

    def __init__(self, after: float | None, now: float) -> None:
        self.target = Target.LOADED
        self._after = after
        self._since = now  # the last time that something ran, waited, or was loaded

    def used(self, now: float) -> None:
        """Something runs, waits or was asked for: the time begins anew."""
        self._since = now

    def move(self, target: Target, now: float) -> None:
        """The weights are there from `now` on."""
        self.target, self._since = target, now

    def remaining(self, now: float) -> float | None:
        """Seconds until the weights are to be unloaded, 0: now; None: as it is, they never are."""
        if self._after is None or self.target is not Target.LOADED:
            return None
        return max(0.0, self._since + self._after - now)
