"""Hosting the engine side by a thread of the front's own process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from slotd.daemon.link import State, Stop, ToEngine
from slotd.daemon.memory import DeviceLost
from slotd.daemon.scheduler import Scheduler

log = logging.getLogger(__name__)


class EngineHost:
    """Runs a scheduler on a thread of its own.

    Args:
        scheduler: the engine side.
        on_death: called when the scheduler itself fails, which no request should be able to cause.
    """

    def __init__(self, scheduler: Scheduler, on_death: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name="slotd-engine", daemon=True)

    def start(self) -> None:
        """Begin to take turns."""
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine side."""
        self._scheduler.put(message)

    def stop(self, timeout: float) -> bool:
        """Ask it to end and wait; False when it has not ended within `timeout` seconds."""
        self._scheduler.put(Stop())
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def state(self) -> State | None:
        """None: every state is delivered as a message."""
        return None

    def _run(self) -> None:
        try:
            self._scheduler.run()
        except (Exception, DeviceLost):
            log.critical("the scheduler died", exc_info=True)
            self._on_death()
