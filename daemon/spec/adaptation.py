"""Whether guessing ahead pays, for each sequence and step: expected tokens for each second.

What a step costs is measured by its number of rows; it is the same for all sequences. What is accepted is
measured row by row: trees are nested, so a tree tells what any smaller one would have accepted. From both
follows the best mode and size. What a sequence may lose against plain decoding is an allowance, which failed
guesses use up: plain decoding takes over before more than 3 % of an answer of 256 tokens is lost.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: Most rows of a step.
MOST_ROWS = 64

#: Sizes that are tried, root included: fewer than there could be, since each one has to be measured.
SIZES = (2, 3, 4, 6, 8, 12, 16, 23, 32, 48, 64)

#: Steps that are measured before anything else than plain decoding is tried.
STEPS_FIRST = 3

#: Measurements of a number of rows that count; the one in the middle is taken.
MEASUREMENTS = 5

#: The first step with a number of rows may have to prepare something, once. It did if it took this many
#: times what it should.
OUTLIER = 4.0

#: Where the seconds of a draft model are kept among those of rows.
DRAFT = 0

#: While one number of rows is known only, seconds are taken to grow with this power of it.
GROWTH = 0.5

#: What a draft model is taken to cost before it is measured, in plain steps.
DRAFT_COST = 0.5

#: Steps of all sequences, and of one, that what is expected rests on before there are any.
USUAL_PRIOR, OWN_PRIOR = 8, 4.0

#: Steps that acceptance is averaged over: of all sequences, and of one.
USUAL_MEMORY, OWN_MEMORY = 256, 16

#: Only what promises this much more than plain decoding is done.
WORTH_IT = 1.02

#: Tokens after which a mode is tried again that does not seem the best: twice as many after each failure.
TRY_AGAIN, TRY_AGAIN_MOST = 64, 512

#: Tokens after which a mode is tried for the first time, on the allowance.
TRY_FIRST = 8

#: A step has at most this many times the rows that were measured before.
GROW_BY = 4

#: What a sequence may lose, in plain steps: at first, more for each token, and at most, after gains.
#: 4 + 256 * 0.008 = 6 are 2.4 % of 256.
ALLOWED_AT_FIRST, ALLOWED_PER_TOKEN, ALLOWED_MOST = 4.0, 0.008, 8.0


class Mode(enum.StrEnum):
    """Where the rows of a step come from."""

    PLAIN = "plain"
    CHAIN = "chain"
    TREE = "tree"
    NGRAM = "ngram"

    @property
    def drafted(self) -> bool:
        """Whether a draft model has to run for it."""
        return self in (Mode.CHAIN, Mode.TREE)


@dataclass(frozen=True)
class Beside:
    """What the other sequences bring to a step: rows, tokens expected of them, whether a draft model runs."""

    rows: int = 0
    tokens: float = 0.0
    drafted: bool = False


ALONE = Beside()


class Choice(NamedTuple):
    """What a sequence does in the next step: rows, root included, and the tokens expected of them."""

    mode: Mode
    rows: int
    tokens: float


PLAIN = Choice(Mode.PLAIN, 1, 1.0)


class StepCosts:
    """Measured seconds of a step: what its rows take, all sequences together, and what a draft model adds.

    Shared by all sequences.
    """

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}
        self._seen: set[int] = set()
        self._rows = [0.0] * (MOST_ROWS + 1)
        self._draft = 0.0

    def note(self, rows: int, seconds: float, draft: float = 0.0) -> float:
        """A step took so long. Returns what of it counts: not what had to be prepared once.

        rows: of all sequences. draft: what of the seconds a draft model took, 0: none ran.
        """
        counted = self._count(rows, seconds - draft, self._rows[rows])
        self._rows = _curve({n: _middle(measured) for n, measured in self._measured.items() if n != DRAFT})
        if draft:
            counted += self._count(DRAFT, draft, DRAFT_COST * self._rows[1])
        drafts = self._measured.get(DRAFT)
        self._draft = _middle(drafts) if drafts else DRAFT_COST * self._rows[1]
        return counted

    def _count(self, what: int, seconds: float, expected: float) -> float:
        first = what not in self._seen
        self._seen.add(what)
        if first and seconds > OUTLIER * expected > 0:
            return expected
        self._measured.setdefault(what, deque(maxlen=MEASUREMENTS)).append(seconds)
        return seconds

    @property
    def ready(self) -> bool:
        """Whether enough steps were measured to compare anything with."""
        return sum(len(measured) for n, measured in self._measured.items() if n != DRAFT) >= STEPS_FIRST

    @property
    def most_rows(self) -> int:
        """Rows of the largest step that was measured."""
        return max(self._measured, default=0)

    def seconds(self, rows: int, drafted: bool = False) -> float:
        """As measured, or as the measurements suggest. Something must have been measured."""
        return self._rows[rows] + self._draft if drafted else self._rows[rows]


class UsualAcceptance:
    """How often each row of a mode's trees is accepted, on average. Shared by all sequences."""

    def __init__(self) -> None:
        rows = np.arange(1.0, MOST_ROWS)
        line, tree = 0.7 * 0.65 ** (rows - 1), 0.7 / rows  # what drafters and n-grams have shown
        self._rates = {Mode.CHAIN: line, Mode.TREE: tree, Mode.NGRAM: line.copy()}
        self._steps = {mode: np.full(MOST_ROWS - 1, float(USUAL_PRIOR)) for mode in self._rates}
        self._tokens = {mode: self._sums(mode) for mode in self._rates}

    def told(self, mode: Mode, rows: int, accepted: Sequence[int]) -> None:
        """A tree of so many rows had these accepted, the root not counted."""
        rates, steps = self._rates[mode][: rows - 1], self._steps[mode][: rows - 1]
        hits = np.zeros(rows - 1)
        hits[np.asarray(accepted, dtype=np.int64) - 1] = 1
        np.minimum(steps + 1, USUAL_MEMORY, out=steps)
        rates += (hits - rates) / steps
        self._tokens[mode] = self._sums(mode)

    def tokens(self, mode: Mode) -> list[float]:
        """Accepted rows besides the root in a tree of 1, 2, ... MOST_ROWS rows."""
        return self._tokens[mode]

    def _sums(self, mode: Mode) -> list[float]:
        return [0.0, *np.cumsum(self._rates[mode]).tolist()]


class Adaptation:
    """Mode and size of one sequence's steps, chosen before each step and told what came of it."""

    def __init__(self, costs: StepCosts, usual: UsualAcceptance) -> None:
        self._costs, self._usual = costs, usual
        self._accepted = dict.fromkeys(Mode, OWN_PRIOR)
        self._expected = dict.fromkeys(Mode, OWN_PRIOR)
        self._emitted = 0
        self._try_at = dict.fromkeys(Mode, TRY_FIRST)  # emitted tokens
        self._try_after = dict.fromkeys(Mode, TRY_AGAIN)
        self._allowance = ALLOWED_AT_FIRST

    def choose(self, most: Mapping[Mode, int], beside: Beside = ALONE) -> Choice:
        """The next step.

        most: rows that there may be, root included, of each mode that is at hand; fewer than two: none.
        """
        if not self._costs.ready or beside.rows + 1 > MOST_ROWS:
            return PLAIN
        plain = self._costs.seconds(beside.rows + 1, beside.drafted)
        best = {
            mode: found
            for mode, rows in most.items()
            if mode is not Mode.PLAIN and (found := self._best(mode, rows, beside, plain)) is not None
        }
        if not best:
            return PLAIN
        waiting = min(best, key=lambda mode: self._try_at[mode])
        if self._emitted >= self._try_at[waiting]:
            return best[waiting][1]
        rate, choice = max(best.values(), key=lambda found: found[0])
        return choice if rate > WORTH_IT * (beside.tokens + 1) / plain else PLAIN

    def told(
        self, mode: Mode, rows: int, seconds: float, accepted: Sequence[int], beside: Beside = ALONE
    ) -> None:
        """What came of a step.

        Args:
            rows: the sequence had, root included.
            seconds: of the whole step, what `StepCosts.note` returned.
            accepted: numbers of the accepted rows in the sequence's tree, the root (0) not among them.
        """
        emitted = len(accepted) + 1
        self._emitted += emitted
        if rows > 1:
            self._learn(mode, rows, accepted)
            plain = self._costs.seconds(beside.rows + 1, beside.drafted)
            self._allowance += emitted - seconds / plain
            self._try_after[mode] = TRY_AGAIN if accepted else min(2 * self._try_after[mode], TRY_AGAIN_MOST)
            self._try_at[mode] = self._emitted + self._try_after[mode]
        self._allowance = min(self._allowance + ALLOWED_PER_TOKEN * emitted, ALLOWED_MOST)

    def _learn(self, mode: Mode, rows: int, accepted: Sequence[int]) -> None:
        keep = 1 - 1 / OWN_MEMORY
        expected = self._usual.tokens(mode)[rows - 1]
        self._expected[mode] = keep * self._expected[mode] + expected
        self._accepted[mode] = keep * self._accepted[mode] + len(accepted)
        self._usual.told(mode, rows, accepted)

    def _best(self, mode: Mode, most: int, beside: Beside, plain: float) -> tuple[float, Choice] | None:
        """(tokens for each second, the mode's best size) of what can be afforded if nothing is accepted."""
        most = min(most, MOST_ROWS - beside.rows, GROW_BY * self._costs.most_rows)
        level = self._accepted[mode] / self._expected[mode]
        drafted, usual = mode.drafted or beside.drafted, self._usual.tokens(mode)
        best: tuple[float, Choice] | None = None
        for rows in (*(size for size in SIZES if size < most), most):
            seconds = self._costs.seconds(beside.rows + rows, drafted)
            if rows > 1 and seconds / plain - 1 <= self._allowance:
                tokens = min(1 + level * usual[rows - 1], rows)
                rate = (beside.tokens + tokens) / seconds
                if best is None or rate > best[0]:
                    best = rate, Choice(mode, rows, tokens)
        return best


def _middle(measured: deque[float]) -> float:
    return sorted(measured)[len(measured) // 2]


def _curve(known: Mapping[int, float]) -> list[float]:
    """Straight lines between known numbers of rows; beyond the last one it grows as it did up to there."""
    rows = sorted(known)
    seconds = [known[n] for n in rows]
    power = GROWTH
    if len(rows) > 1:
        power = math.log(max(seconds[-1] / seconds[0], 1.0)) / math.log(rows[-1] / rows[0])
    every = np.arange(MOST_ROWS + 1)
    curve = np.interp(every, rows, seconds) * np.maximum(every / rows[-1], 1) ** power
    values: list[float] = curve.tolist()
    return values
