"""Outputs whose logits lie far away: candidates as a device gives them, from NumPy, and a count of reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotd.daemon.backend import HostOutputs
from slotd.daemon.candidates import Candidates, Logits, View


def look_at(logits: Logits, view: View) -> Candidates | None:
    """The candidates of a view of a row, float32 [V]; None when it is not finite."""
    values = logits if view.adjustments is None else view.adjustments.apply(logits)
    if not (logits < np.inf).all() or not (values < np.inf).all() or values.max() == -np.inf:
        return None
    order = np.argsort(-values, kind="stable")[: view.most].astype(np.int32)
    order = order[values[order] > -np.inf]
    total = None
    if view.temperature is not None:
        # Ascending and from the smallest: another order than that of the host's running sum.
        total = float(np.sum(np.exp((np.sort(values).astype(np.float64) - values.max()) / view.temperature)))
    complete = len(order) == np.count_nonzero(values > -np.inf)
    return Candidates(values[order], order, logits[order], total, complete)


class FarOutputs:
    """Rows of logits, float32 [m, V].

    Attributes:
        reads: how often a row was read.
        asked: the views of each call of `candidates`.
        silent: rows for which there are no candidates.
    """

    at_hand = False

    def __init__(self, logits: Logits) -> None:
        self._logits = logits
        self.rows = np.arange(len(logits))
        self.reads = 0
        self.asked: list[list[View]] = []
        self.silent: set[int] = set()

    @property
    def logits(self) -> Logits:
        raise AssertionError("all rows were read")

    def row(self, index: int) -> Logits:
        self.reads += 1
        return self._logits[index]

    def candidates(self, views: Sequence[View]) -> list[Candidates | None]:
        self.asked.append(list(views))
        return [None if v.row in self.silent else look_at(self._logits[v.row], v) for v in views]

    def greedy(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        return HostOutputs(self._logits, self.rows).greedy()
