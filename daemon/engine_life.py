"""When an engine process is overdue, and whether one that died is replaced. Pure: callers have the clock."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

#: So many replacements within so many seconds are the most.
MOST_REPLACEMENTS, WITHIN = 3, 60.0

#: Loading a model may take so many times longer than a sign of life.
START_FACTOR = 5

#: The engine is asked for a sign of life after this part of the time it has to give one.
PING_AFTER = 0.25


class Phase(enum.Enum):
    """What the engine process is doing."""

    STARTING = "starting"
    RUNNING = "running"
    DOWN = "down"  # it died too often
    ENDING = "ending"


class EngineLife:
    """The life of the engine, through all processes that host it.

    Args:
        now: when the first one was started.
        timeout: longest time without a sign of life, seconds; START_FACTOR times as much while it loads.

    Attributes:
        phase: what the present one is doing.
        replacements: how many were started in place of one that died.
        epoch: of the slots; it only grows.
        reason: why the last one died, "" when none has.
    """

    def __init__(self, now: float, timeout: float) -> None:
        self.phase = Phase.STARTING
        self.replacements = 0
        self.epoch = 0
        self.reason = ""
        self._timeout = timeout
        self._since = now  # a start, or a sign of life that is no older
        self._pinged: float | None = None
        self._replaced: deque[float] = deque(maxlen=MOST_REPLACEMENTS)

    def opened(self, now: float) -> None:
        """The model is loaded."""
        if self.phase is Phase.STARTING:
            self.phase, self._since, self._pinged = Phase.RUNNING, now, None

    def ending(self) -> None:
        """The daemon ends: a death is none any more."""
        self.phase = Phase.ENDING

    def died(self, now: float, reason: str, epoch: int) -> bool:
        """It has died; `epoch` is the last one it knew. Whether it may be replaced.

        From here to `opened` no message may be written: one that is taken from the queue for a process that
        has died is in nobody's hands.
        """
        self.reason = reason
        if self.phase is Phase.ENDING:
            return False
        self.epoch = max(self.epoch, epoch) + 1
        again = self.may_start(now)
        self.phase = Phase.STARTING if again else Phase.DOWN
        return again

    def may_start(self, now: float) -> bool:
        """Whether it has been replaced less than MOST_REPLACEMENTS times within WITHIN seconds."""
        return len(self._replaced) < MOST_REPLACEMENTS or now - self._replaced[0] >= WITHIN

    def started(self, now: float) -> None:
        """Another process was started in its place."""
        self.phase, self._since, self._pinged = Phase.STARTING, now, None
        self._replaced.append(now)
        self.replacements += 1

    def overdue(self, now: float, last_sign: float, loading: bool = False) -> float | None:
        """Seconds without a sign of life, when these are too many; loading: it loads weights on request."""
        silent = now - max(self._since, last_sign)
        slow = loading or self.phase is Phase.STARTING
        return silent if silent > self._timeout * (START_FACTOR if slow else 1) else None

    def wants_ping(self, now: float, last_sign: float) -> bool:
        """Whether to ask for a sign of life now; True once for each silence."""
        last = max(self._since, last_sign)
        if self.phase is not Phase.RUNNING or now - last < self._timeout * PING_AFTER:
            return False
        if self._pinged is not None and self._pinged >= last:
            return False
        self._pinged = now
        return True

    def refusal(self) -> dict[str, str | int | float]:
        """The fields of `engine_down`."""
        return {"reason": self.reason, "replaced": MOST_REPLACEMENTS, "within_s": int(WITHIN)}

    def report(self) -> dict[str, Any]:
        """For STATUS."""
        return {
            "phase": self.phase.value, "replacements": self.replacements,
            **({"died_of": self.reason} if self.reason else {}),
        }  # fmt: skip
