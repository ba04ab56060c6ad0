"""What was guessed for one answer, and how it went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slotd.daemon.rows import MAX_STEP_ROWS
from slotd.daemon.spec.adaptation import Adaptation, Mode
from slotd.protocol.errors import Value

#: Verified steps after which a tree may have twice as many rows again.
STEPS_TO_GROW = 32

#: After repeated failures a job goes without drafts for so many steps at most, then tries again.
LONGEST_REST = 64


@dataclass(slots=True)
class Drafts:
    """Counts of one answer, and what its next drafts are allowed.

    Attributes:
        steps: steps that verified a draft.
        drafted: tokens that were guessed in them.
        accepted: those that the target chose too.
        modes: steps of each mode.
        most_rows: of a tree, its root included.
        rest: so many steps go without a draft.
        failures: since the last draft that worked.
        good_steps: verified steps since `most_rows` changed.
        adaptation: chooses mode and size; None: nobody has asked yet.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    modes: Counter[Mode] = field(default_factory=Counter)
    most_rows: int = MAX_STEP_ROWS
    rest: int = 0
    failures: int = 0
    good_steps: int = 0
    adaptation: Adaptation | None = None

    def rests(self) -> bool:
        """Whether this step goes without a draft; counts it."""
        resting = self.rest > 0
        self.rest -= resting
        return resting

    def failed(self) -> None:
        """A draft could not be made or verified: the next steps go without, twice as many every time."""
        self.rest = min(1 << self.failures, LONGEST_REST)
        self.failures += 1

    def shrink(self, most_rows: int) -> None:
        """There was no memory for more rows."""
        self.most_rows, self.good_steps = most_rows, 0

    def verified(self, mode: Mode, drafted: int, accepted: int) -> None:
        """A step has verified a draft."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.modes[mode] += 1
        self.failures = 0
        self.good_steps += 1
        if self.good_steps >= STEPS_TO_GROW and self.most_rows < MAX_STEP_ROWS:
            self.shrink(min(2 * self.most_rows, MAX_STEP_ROWS))

    def report(self) -> dict[str, Value]:
        """For [done] and STATUS, in wire order.

        `acceptance`: tokens of a step that verified a draft, the one behind the accepted ones included.
        """
        acceptance = (self.steps + self.accepted) / self.steps if self.steps else 0.0
        mode = self.modes.most_common(1)[0][0] if self.modes else Mode.PLAIN
        return {
            "drafted": self.drafted, "accepted": self.accepted, "acceptance": round(acceptance, 3),
            "mode": mode.value,
        }  # fmt: skip
