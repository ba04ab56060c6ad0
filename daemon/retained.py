"""Sequences that ended lately, kept so that the next request that shares their prefix starts there.

An ended or cancelled request leaves its K/V in place. They cost only pages nobody else asks for: they
are the first thing given up when pages run short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slotd.daemon.link import Key
from slotd.daemon.sequence import Sequence

#: A shorter common prefix is not worth a page copy.
MIN_SHARED = 16


@dataclass(slots=True)
class Retained:
    """An ended request: its sequence, and the emitted token that is not in it yet (or none)."""

    key: Key
    sequence: Sequence
    pending: tuple[int, ...]


class RetainedSequences:
    """Ended sequences by request key, oldest first, at most `limit`.

    Args:
        limit: how many to keep.
        close: gives a dropped sequence's pages back.
        resumable: how many of the first `length` tokens of a sequence another one can start with.
    """

    def __init__(
        self, limit: int, close: Callable[[Sequence], None],
        resumable: Callable[[Sequence, int], int] = lambda sequence, length: length,
    ) -> None:  # fmt: skip
        self._limit = limit
        self._close = close
        self._resumable = resumable
        self._entries: OrderedDict[Key, Retained] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Retained]:
        return iter(self._entries.values())

    def add(self, entry: Retained) -> None:
        """Keep an ended sequence; the oldest one leaves when there are too many."""
        self.drop(entry.key)
        self._entries[entry.key] = entry
        while len(self._entries) > self._limit:
            self.drop_oldest()

    def get(self, key: Key) -> Retained | None:
        """The sequence of request `key`, if it is still here."""
        return self._entries.get(key)

    def latest(self, wanted: Callable[[Key], bool]) -> Retained | None:
        """The one that ended last among the keys that are wanted."""
        return next((entry for entry in reversed(self._entries.values()) if wanted(entry.key)), None)

    def drop(self, key: Key) -> None:
        """Give up the sequence of request `key`, if it is here."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._close(entry.sequence)

    def drop_oldest(self, spare: Key | None = None) -> bool:
        """Give up the oldest sequence that is not request `spare`'s; False when there is none."""
        oldest = next((key for key in self._entries if key != spare), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True

    def best_match(self, ids: npt.NDArray[np.int32]) -> tuple[Retained, int] | None:
        """The sequence to start from with the longest prefix that `ids` share, and that prefix's length.

        The last prompt token is never counted: its logits are needed, so it is computed in any case.
        """
        best: tuple[Retained, int] | None = None
        for entry in self._entries.values():
            shared = common_prefix(ids[:-1], np.frombuffer(entry.sequence.tokens, dtype=np.int32))
            shared = self._resumable(entry.sequence, shared)
            if shared >= MIN_SHARED and (best is None or shared > best[1]):
                best = entry, shared
        return best


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many leading ids are the same."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
