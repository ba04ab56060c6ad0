"""Failures on purpose: `SLOTD_FAULT=site:nth[:count]`.

The nth time the process passes the site an allocation failure is raised there, and again on each of the
following passes until `count` of them have failed. Sites are counted, so a test hits the same place in
every run.

`device_lost:nth[:count]` is no shortage: the nth forward of the engine finds the device gone. That ends the
engine's process, so `count` says how many of these, the first one and its replacements, it happens to.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from slotd.daemon.memory.interface import DEVICE_LOST, SITES
from slotd.protocol.errors import ConfigError

#: The environment variable.
VARIABLE = "SLOTD_FAULT"


@dataclass(slots=True)
class Faults:
    """Fail passes `nth` to `nth + count - 1` of `site`; the first pass is 1."""

    site: str
    nth: int
    count: int = 1
    _passes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str | None) -> Faults | None:
        """The value of the variable; None or empty: no faults.

        Raises:
            ConfigError: unknown site, or numbers that are not positive integers.
        """
        if not text:
            return None
        site, *numbers = text.split(":")
        if site not in (*SITES, DEVICE_LOST):
            names = " ".join((*SITES, DEVICE_LOST))
            raise ConfigError(f"{VARIABLE}={text}: no site {site!r}; the sites are {names}")
        if len(numbers) not in (1, 2) or not all(_is_count(number) for number in numbers):
            raise ConfigError(f"{VARIABLE}={text}: expected SITE:NTH or SITE:NTH:COUNT, both 1 or more")
        return cls(site, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 1)

    def spares(self, replacements: int) -> bool:
        """Whether the engine process that comes after so many replacements does not lose its device."""
        return self.site == DEVICE_LOST and replacements >= self.count

    def hits(self, site: str) -> bool:
        """Count one pass of `site`; whether it has to fail."""
        if site != self.site:
            return False
        with self._lock:
            self._passes += 1
            return self.nth <= self._passes < self.nth + self.count


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 2**31
