"""Drafts without a draft model: what followed the last few tokens when they stood in the text before.

Agents repeat their input, and answers repeat their question. The text is looked up by its n-grams of a few
sizes; where several places fit, the one that agrees with the end of the text furthest back comes first, then
the most recent one.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator

from slotd.daemon.spec.tree import DraftTree, grow

#: Most recent occurrences of an n-gram that are looked at.
LOOKED_AT = 4

#: How far back an occurrence is compared with the end of the text, in tokens.
COMPARED = 32

#: Most continuations in one tree.
CONTINUATIONS = 4

_BYTES = array("i").itemsize


class _Occurrences:
    """Where the n-grams of one size ended, each linked to the one before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: dict[bytes, int] = {}
        self._earlier = array("i", [-1] * size)

    def extend(self, raw: bytes, base: int, end: int) -> None:
        """Take in the n-grams that end before token `end` and were not yet there.

        raw: the tokens from `base` on, which is not behind the first n-gram to take in.
        """
        last, earlier, width = self._last, self._earlier, self.size * _BYTES
        for stop in range(len(earlier), end):
            start = (stop - base) * _BYTES - width
            gram = raw[start : start + width]
            earlier.append(last.get(gram, -1))
            last[gram] = stop

    def of(self, gram: bytes) -> Iterator[int]:
        """Ends of the gram, the most recent first."""
        stop = self._last.get(gram, -1)
        while stop >= 0:
            yield stop
            stop = self._earlier[stop]

    @property
    def known(self) -> int:
        """n-grams that end before this token are in."""
        return len(self._earlier)


class NgramIndex:
    """The text of one sequence, prompt and answer, the pending token included.

    Text is taken in when a draft is asked for: a microsecond and up to 400 bytes for each token, 0.3 s and
    100 MB for 250,000 that repeat little.

    Args:
        longest, shortest: sizes of the n-grams: `longest`, half of that and so on, down to `shortest`.
    """

    def __init__(self, longest: int = 8, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens")
        self._ids = array("i")
        self._levels = [_Occurrences(longest)]
        while (size := self._levels[-1].size) > shortest:
            self._levels.append(_Occurrences(max(size // 2, shortest)))

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Iterable[int]) -> None:
        """The text goes on."""
        self._ids.extend(ids)

    def propose(self, n: int) -> list[int]:
        """The n tokens that may follow, [] where the end of the text is new."""
        self._take_in()
        for level in self._levels:
            places = self._places([level])
            if places:
                return self._continuation(places[0][1], n)
        return []

    def propose_tree(self, root: int, budget: int) -> DraftTree:
        """Several continuations as one tree of at most `budget` nodes besides the root.

        A place that agrees over m tokens is taken to go on for d more with probability (m + 1) / (m + d + 1),
        the rule of succession; what is left of it falls to the places behind it.

        root: the pending token, the last one of the text.
        """
        self._take_in()
        left, paths = 1.0, []
        for number, (agreed, stop) in enumerate(self._places(self._levels)[:CONTINUATIONS]):
            tokens = self._continuation(stop, budget)
            paths.append(
                [
                    (-left * (agreed + 1) / (agreed + depth + 1), number, token)
                    for depth, token in enumerate(tokens, 1)
                ]
            )
            left *= 1 / (agreed + 2)
        return grow(root, ((number, token) for _, number, token in heapq.merge(*paths)), budget)

    def _take_in(self) -> None:
        base = max(self._levels[-1].known - self._levels[0].size, 0)
        raw = self._ids[base:].tobytes()
        for level in self._levels:
            level.extend(raw, base, len(self._ids))

    def _places(self, levels: Iterable[_Occurrences]) -> list[tuple[int, int]]:
        """(tokens that agree, where the continuation starts), best first."""
        ids, n = self._ids, len(self._ids)
        found: dict[int, int] = {}
        for level in levels:
            gram = ids[n - level.size :].tobytes() if n >= level.size else b""
            for _, stop in zip(range(LOOKED_AT), level.of(gram), strict=False):
                if stop not in found:
                    most = min(COMPARED, stop)
                    agreed = level.size
                    while agreed < most and ids[stop - 1 - agreed] == ids[n - 1 - agreed]:
                        agreed += 1
                    found[stop] = agreed
        return sorted(((agreed, stop) for stop, agreed in found.items()), reverse=True)

    def _continuation(self, start: int, n: int) -> list[int]:
        """What followed; text that ends before n tokens is taken to go on as it would repeat itself."""
        tokens = self._ids[start : start + n].tolist()
        period = len(self._ids) - start
        while len(tokens) < n:
            tokens.append(tokens[-period])
        return tokens
