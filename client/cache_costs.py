"""What restoring costs against computing, and what the daemon still has without being told. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from slotd.client.cache_entries import WIDTH, shared_tokens

#: Weight of a new measurement in the running mean.
WEIGHT = 0.3

#: Trust in a guess before one was made.
FIRST_TRUST = 0.97

#: Shorter common prefixes are not reused by the daemon on its own.
MIN_SHARED = 16

#: Computed tokens that a rate must rest on: fewer say more about overhead than about the rate.
MIN_MEASURED = 32


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured rates; 0 means not measured, and then costs nothing.

    Attributes:
        prefill: prompt tokens computed in a second.
        restore: seconds for restoring a slot in memory.
        load: seconds for each token that is loaded from a file.
    """

    prefill: float = 0.0
    restore: float = 0.0
    load: float = 0.0

    def saved(self, tokens: int, *, cold: bool = False) -> float:
        """Seconds that starting from `tokens` tokens saves, what it costs taken off.

        Without a measured prefill rate a computed token counts as one second: then more tokens are better.
        """
        computing = tokens / self.prefill if self.prefill else float(tokens)
        return computing - self.restore - (tokens * self.load if cold else 0.0)

    def measure_prefill(self, tokens: int, seconds: float) -> Costs:
        """These costs with one more prefill measured."""
        if tokens < MIN_MEASURED or seconds <= 0:
            return self
        return replace(self, prefill=_mean(self.prefill, tokens / seconds))

    def measure_restore(self, seconds: float) -> Costs:
        """These costs with one more restore measured."""
        return self if seconds < 0 else replace(self, restore=_mean(self.restore, seconds))


def _mean(before: float, now: float) -> float:
    return now if not before else before + WEIGHT * (now - before)


class Recent:
    """The sequences that the daemon probably still holds: it keeps those that ended last, and reuses them.

    A guess, used only to choose: wrong, it costs computing. `limit` is how many the daemon keeps.

    Attributes:
        trust: what a guessed token is worth beside one that a slot surely holds.
    """

    def __init__(self, limit: int = 4) -> None:
        self.trust = FIRST_TRUST
        self._ended: deque[bytes] = deque(maxlen=max(1, limit))

    def add(self, ids: bytes) -> None:
        """A request ended with these tokens computed."""
        self._ended.append(ids)

    def clear(self) -> None:
        """The daemon has given them up."""
        self._ended.clear()

    def judge(self, expected: int, reused: int) -> None:
        """So many tokens were expected to be reused, so many were. After a wrong guess nothing is known."""
        if not expected:
            return
        if reused >= expected:
            self.trust += WEIGHT * (1.0 - self.trust)
        else:
            self.trust *= 0.5
            self.clear()

    def expected(self, ids: bytes) -> int:
        """Tokens of the prompt `ids` that a bare prompt would probably not compute again."""
        known = self._shared(ids[:-WIDTH], self._ended)
        return known if known >= MIN_SHARED else 0

    def worth(self, ids: bytes) -> int:
        """`expected`, discounted by how far it can be trusted."""
        return int(self.trust * self.expected(ids))

    @staticmethod
    def _shared(ids: bytes, sequences: Iterable[bytes]) -> int:
        return max((shared_tokens(ids, sequence) for sequence in sequences), default=0)
