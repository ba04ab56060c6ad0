"""The best of a row of logits: what a device is asked for in place of the row, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

#: What is done to a logit: `Adjustments.kinds` is their sum.
BIASED, PENALISED, BANNED = 1, 2, 4

_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is done to single logits before a choice, in this order, each step rounded to float32.

    Add the bias; divide by the repetition penalty if positive, else multiply by it; take off frequency and
    presence penalty, the result at most the largest float32; ban (-inf).

    Attributes:
        ids: int32 [m], ascending, each once.
        kinds: int32 [m], which of the steps an id gets.
        biases: float32 [m].
        frequencies: float32 [m], the frequency penalty times how often the id stands in the window.
        repetition, presence: float32.
    """

    ids: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int32]
    biases: npt.NDArray[np.float32]
    frequencies: npt.NDArray[np.float32]
    repetition: np.float32
    presence: np.float32

    def apply(self, logits: Logits) -> Logits:
        """Adjusted logits; float32 [V], as `logits`, which are not changed."""
        values = logits[self.ids]
        biased = (self.kinds & BIASED) != 0
        values[biased] += self.biases[biased]
        penalised = (self.kinds & PENALISED) != 0
        values[penalised] = self._penalise(values[penalised], self.frequencies[penalised])
        values[(self.kinds & BANNED) != 0] = -np.inf
        adjusted = logits.copy()
        adjusted[self.ids] = values
        return adjusted

    def _penalise(self, values: Logits, frequencies: npt.NDArray[np.float32]) -> Logits:
        with np.errstate(over="ignore"):
            values = np.where(values > 0, values / self.repetition, values * self.repetition)
        values -= frequencies
        values -= self.presence
        # A tiny repetition penalty overflows; that is a huge logit, not a fault of the model.
        return np.minimum(values, _LARGEST)


@dataclass(frozen=True, slots=True)
class View:
    """A row of outputs as a choice looks at it.

    Attributes:
        row: of the outputs.
        most: how many candidates are wanted, at least 1.
        temperature: of the total; None: it is not needed.
        adjustments: None: the raw logits.
    """

    row: int
    most: int
    temperature: float | None = None
    adjustments: Adjustments | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The head of a view in the order (value descending, id ascending); values of -inf are left out.

    Attributes:
        values: float32 [k], k >= 1, adjusted logits.
        ids: int32 [k].
        raw: float32 [k], their logits before adjustments.
        total: the sum of exp((value - values[0]) / temperature) over the vocabulary, None if not asked for.
            Its bits depend on the row and the view alone; another order of the sum differs in the last bits.
        complete: all other values are -inf.
    """

    values: Logits
    ids: npt.NDArray[np.int32]
    raw: Logits
    total: float | None
    complete: bool
