"""Page accounting: who holds which page, and which ones a new owner gets. No storage, pure bookkeeping.

Pages are numbered through all segments: page p is page `p % SEGMENT_PAGES` of segment
`p // SEGMENT_PAGES`. Owners are sequences and slots; each holds one reference to every page it names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops.batch import TILE

#: Tokens in a page: the attention tile, so that a tile never crosses two pages.
PAGE = TILE

#: Pages in a segment, the unit in which storage is taken and given back.
SEGMENT_PAGES = 16

#: Mark of a page whose segment is not there.
_ABSENT = -1


def pages_for(n_tokens: int) -> int:
    """Pages that n_tokens take."""
    return -(-n_tokens // PAGE)


class Pages:
    """Reference counts of all pages."""

    def __init__(self) -> None:
        self._references = np.empty(0, dtype=np.int32)

    # ----- segments

    def add_segment(self) -> int:
        """Make the pages of one more segment free. Returns its number, the lowest that is not there."""
        absent = np.flatnonzero(self._by_segment()[:, 0] == _ABSENT)
        if len(absent):
            segment = int(absent[0])
            self._by_segment()[segment] = 0
            return segment
        self._references = np.append(self._references, np.zeros(SEGMENT_PAGES, dtype=np.int32))
        return len(self._references) // SEGMENT_PAGES - 1

    def remove_segment(self, segment: int) -> None:
        """Take a segment away.

        Raises:
            ValueError: one of its pages has an owner.
        """
        references = self._by_segment()[segment]
        if np.any(references):
            raise ValueError(f"segment {segment} is not free")
        references[:] = _ABSENT

    def free_segments(self) -> list[int]:
        """Segments whose pages are all free."""
        return [int(segment) for segment in np.flatnonzero(~np.any(self._by_segment(), axis=1))]

    # ----- pages

    @property
    def n_free(self) -> int:
        """Pages without an owner."""
        return int(np.count_nonzero(self._references == 0))

    @property
    def n_used(self) -> int:
        """Pages with at least one owner."""
        return int(np.count_nonzero(self._references > 0))

    def references(self, page: int) -> int:
        """Owners of a page."""
        return int(self._references[page])

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """n free pages, each with one owner, in runs as long as possible (attention reads a run as one view).

        First what directly follows page `after`, then the shortest run that holds the rest, then the
        longest ones.

        Raises:
            ValueError: fewer than n pages are free.
        """
        if n > self.n_free:
            raise ValueError(f"{n} pages wanted, {self.n_free} are free")
        taken: list[int] = []
        while len(taken) < n:
            runs = self._free_runs()
            start, length = self._choose(runs, n - len(taken), after)
            pages = range(start, start + min(length, n - len(taken)))
            self._references[pages.start : pages.stop] = 1
            taken += pages
            after = taken[-1]
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each page.

        Raises:
            ValueError: a page is free.
        """
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} has no owner")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; without one it is free.

        Raises:
            ValueError: a page is free already.
        """
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} has no owner")
            self._references[page] -= 1

    # ----- moving

    def compaction(self, fixed: Collection[int] = ()) -> dict[int, int]:
        """Moves (page -> free page) that leave as few segments in use as the pages need; empty when they do.

        The fullest segments stay, and those with a fixed page, which has to stay where it is; what the others
        hold goes into their free places, in ascending order.
        """
        counts = np.count_nonzero(self._by_segment() > 0, axis=1)
        anchored = {page // SEGMENT_PAGES for page in fixed}
        used = [segment for segment in range(len(counts)) if counts[segment]]
        ranked = sorted(used, key=lambda segment: (segment not in anchored, -counts[segment], segment))
        needed = max(-(-int(counts.sum()) // SEGMENT_PAGES), len(anchored))
        kept, emptied = sorted(ranked[:needed]), sorted(ranked[needed:])
        sources = [page for segment in emptied for page in self._pages_of(segment, used=True)]
        targets = [page for segment in kept for page in self._pages_of(segment, used=False)]
        return dict(zip(sources, targets, strict=False))

    def owners_beside(self, known: Iterable[Iterable[int]]) -> set[int]:
        """Used pages that have owners beside the known ones, which are given by the pages of each."""
        rest = self._references.copy()
        for pages in known:
            np.subtract.at(rest, list(pages), 1)
        return set(np.flatnonzero(rest > 0).tolist())

    def relocate(self, moves: Mapping[int, int]) -> None:
        """All owners of each page own its target instead. Who names pages has to follow.

        Raises:
            ValueError: a source is free or a target is not; nothing has changed then.
        """
        for source, target in moves.items():
            if self._references[source] < 1 or self._references[target] != 0:
                raise ValueError(f"page {source} can not move to {target}")
        for source, target in moves.items():
            self._references[target], self._references[source] = self._references[source], 0

    # ----- inside

    def _pages_of(self, segment: int, used: bool) -> list[int]:
        references = self._by_segment()[segment]
        found = np.flatnonzero(references > 0 if used else references == 0)
        pages: list[int] = (segment * SEGMENT_PAGES + found).tolist()
        return pages

    def _by_segment(self) -> npt.NDArray[np.int32]:
        return self._references.reshape(-1, SEGMENT_PAGES)

    def _free_runs(self) -> list[tuple[int, int]]:
        """(first page, length) of every run of free pages, ascending; a run stays inside its segment."""
        free = np.zeros((len(self._references) // SEGMENT_PAGES, SEGMENT_PAGES + 2), dtype=np.int8)
        free[:, 1:-1] = self._by_segment() == 0
        steps = np.diff(free, axis=1)
        segments, starts = np.nonzero(steps == 1)
        ends = np.nonzero(steps == -1)[1]
        first = segments * SEGMENT_PAGES + starts
        return list(zip(first.tolist(), (ends - starts).tolist(), strict=True))

    @staticmethod
    def _choose(runs: list[tuple[int, int]], n: int, after: int | None) -> tuple[int, int]:
        for run in runs:
            if after is not None and run[0] == after + 1:
                return run
        enough = [run for run in runs if run[1] >= n]
        if enough:
            return min(enough, key=lambda run: run[1])
        return max(runs, key=lambda run: run[1])
