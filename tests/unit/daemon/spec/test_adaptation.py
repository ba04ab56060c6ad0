"""Whether guessing pays: on simulated costs and acceptance, in plain steps of one second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from slotd.daemon.spec import adaptation
from slotd.daemon.spec.adaptation import ALONE, PLAIN, Adaptation, Beside, Mode, StepCosts, UsualAcceptance

ANSWER = 256
MOST = {Mode.CHAIN: 8, Mode.TREE: 23, Mode.NGRAM: 23}

Cost = Callable[[int], float]
#: Chance that the next node of the best path is accepted, by mode, from an emitted token on.
Chances = list[tuple[int, dict[Mode, float]]]


@dataclass
class Machine:
    """What steps cost: by rows, a draft, and what the first step of a number of rows takes longer."""

    rows: Cost
    draft: float = 0.0
    first: float = 0.0
    noise: float = 0.0
    seen: set[int] = field(default_factory=set)
    costs: StepCosts = field(default_factory=StepCosts)
    usual: UsualAcceptance = field(default_factory=UsualAcceptance)


def chances(chain: float, tree: float, ngram: float) -> dict[Mode, float]:
    return {Mode.CHAIN: chain, Mode.TREE: tree, Mode.NGRAM: ngram}


NOTHING = [(0, chances(0, 0, 0))]
LITTLE = [(0, chances(0.2, 0.3, 0.1))]
SOME = [(0, chances(0.6, 0.7, 0.3))]
MUCH = [(0, chances(0.85, 0.9, 0.5))]
COPYING = [(0, chances(0.5, 0.6, 0.97))]
FADING = [(0, chances(0.8, 0.8, 0)), (128, chances(0, 0, 0))]

MACHINES = {
    "a GPU": lambda: Machine(lambda n: 1 + 0.012 * (n - 1), draft=0.25, first=50),
    "NumPy": lambda: Machine(lambda n: 1 + 0.29 * (n - 1), draft=0.3),
    "NumPy, large draft": lambda: Machine(lambda n: 1 + 0.29 * (n - 1), draft=1.0),
    "rows are free": lambda: Machine(lambda n: 1.0, draft=0.2),
    "rows save nothing": lambda: Machine(float, draft=0.2),
    "rows cost more than steps": lambda: Machine(lambda n: n**1.5, draft=1.0),
}


def answer(machine: Machine, text: Chances, seed: int = 0) -> tuple[float, Counter[Mode]]:
    """Seconds for an answer, without what was prepared once, and the steps of each mode."""
    rng = np.random.default_rng(seed)
    decides = Adaptation(machine.costs, machine.usual)
    emitted, whole = 0, 0.0
    modes: Counter[Mode] = Counter()
    while emitted < ANSWER:
        choice = decides.choose(MOST)
        chance = next(found for start, found in reversed(text) if emitted >= start)
        accepted: list[int] = []
        row = 1
        while row < min(choice.rows, ANSWER - emitted) and rng.random() < chance[choice.mode]:
            accepted.append(row)
            row += int(rng.integers(1, 4)) if choice.mode is Mode.TREE else 1
        draft = machine.draft if choice.mode.drafted else 0.0
        seconds = (machine.rows(choice.rows) + draft) * (1 + machine.noise * rng.uniform(-1, 1))
        whole += seconds
        if choice.rows not in machine.seen:
            machine.seen.add(choice.rows)
            seconds += machine.first
        counted = machine.costs.note(choice.rows, seconds, draft)
        decides.told(choice.mode, choice.rows, counted, accepted)
        emitted += 1 + len(accepted)
        modes[choice.mode] += 1
    return whole, modes


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", [NOTHING, LITTLE, SOME, MUCH, COPYING, FADING])
def test_no_answer_loses_more_than_3_percent(machine: str, text: Chances) -> None:
    for seed in range(4):
        here = MACHINES[machine]()
        for number in range(4):
            seconds, _ = answer(here, text, 10 * seed + number)
            assert seconds <= 1.03 * ANSWER


@pytest.mark.parametrize("machine", ["a GPU", "NumPy", "NumPy, large draft"])
def test_timers_that_jump_by_10_percent_cost_no_more_on_average(machine: str) -> None:
    seconds = []
    for seed in range(8):
        here = MACHINES[machine]()
        here.noise = 0.1
        seconds += [answer(here, text, seed)[0] for text in (NOTHING, LITTLE, NOTHING)]
    assert np.mean(seconds) <= 1.03 * ANSWER


def test_a_text_that_changes_from_answer_to_answer() -> None:
    here = MACHINES["NumPy"]()
    for seed, text in enumerate([MUCH, NOTHING, COPYING, NOTHING, FADING, NOTHING] * 3):
        assert answer(here, text, seed)[0] <= 1.03 * ANSWER


@pytest.mark.parametrize(
    ("machine", "text", "best", "speedup"),
    [
        ("a GPU", MUCH, Mode.TREE, 3),
        ("a GPU", COPYING, Mode.NGRAM, 6),
        ("NumPy", COPYING, Mode.NGRAM, 1.7),
        ("NumPy", NOTHING, Mode.PLAIN, 0.97),
        ("NumPy, large draft", SOME, Mode.PLAIN, 0.97),
        ("rows save nothing", MUCH, Mode.PLAIN, 0.97),
    ],
)
def test_what_pays_is_found_and_used(machine: str, text: Chances, best: Mode, speedup: float) -> None:
    here = MACHINES[machine]()
    results = [answer(here, text, seed) for seed in range(6)][2:]  # the first two learn
    assert np.mean([ANSWER / seconds for seconds, _ in results]) >= speedup
    steps: Counter[Mode] = sum((modes for _, modes in results), Counter())
    assert steps.most_common(1)[0][0] is best


def test_nothing_is_tried_before_plain_steps_were_measured() -> None:
    costs = StepCosts()
    decides = Adaptation(costs, UsualAcceptance())
    for _ in range(adaptation.STEPS_FIRST):
        assert decides.choose(MOST) == PLAIN
        decides.told(Mode.PLAIN, 1, costs.note(1, 1.0), [])
    assert decides.choose(MOST).rows > 1


@pytest.mark.parametrize("most", [{}, {Mode.PLAIN: 1}, {Mode.CHAIN: 1, Mode.NGRAM: 0}])
def test_without_a_draft_there_is_nothing_to_choose(most: dict[Mode, int]) -> None:
    decides = Adaptation(measured(), UsualAcceptance())
    assert decides.choose(most) == PLAIN


def measured(rows: int = 23, seconds: float = 1.2) -> StepCosts:
    costs = StepCosts()
    for _ in range(5):
        costs.note(1, 1.0)
        costs.note(rows, seconds)
    return costs


def test_rows_of_others_count() -> None:
    """A step is full at 64 rows, and what it takes is taken from all."""
    decides = Adaptation(measured(64, 1.2), UsualAcceptance())
    assert decides.choose({Mode.NGRAM: 23}, Beside(rows=60, tokens=5)).rows <= 4
    assert decides.choose({Mode.NGRAM: 23}, Beside(rows=63, tokens=5)) == PLAIN
    assert decides.choose({Mode.NGRAM: 23}, Beside(rows=64, tokens=5)) == PLAIN
    steep = Adaptation(measured(8, 2.0), UsualAcceptance())
    assert steep.choose({Mode.NGRAM: 4}).rows > 1
    assert steep.choose({Mode.NGRAM: 4}, Beside(rows=4, tokens=9.0)) == PLAIN


def test_a_draft_that_runs_anyway_costs_nothing_more() -> None:
    costs = measured()
    costs.note(8, 3.0, draft=2.0)
    decides = Adaptation(costs, UsualAcceptance())
    assert decides.choose({Mode.CHAIN: 8}) == PLAIN
    assert decides.choose({Mode.CHAIN: 8}, Beside(rows=8, tokens=2.0, drafted=True)).mode is Mode.CHAIN
    assert decides.choose({Mode.CHAIN: 8}, ALONE) == PLAIN


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = measured(9, 3.0)
    assert costs.seconds(5) == 2.0
    assert costs.seconds(27) == pytest.approx(3 * 3**0.5)  # it grew with the square root from 1 to 9
    assert costs.seconds(1, drafted=True) == 1 + adaptation.DRAFT_COST
    costs.note(5, 2.7, draft=0.7)
    assert costs.seconds(1, drafted=True) == 1.7
    assert (costs.seconds(5), costs.most_rows) == (2.0, 9)


def test_what_was_prepared_once_is_no_cost() -> None:
    costs = measured(9, 3.0)
    assert costs.note(5, 80.0) == 2.0
    assert costs.seconds(5) == 2.0
    assert costs.note(5, 80.0, draft=50.0) == 30.0 + adaptation.DRAFT_COST
    assert costs.seconds(1, drafted=True) == 1.0 + adaptation.DRAFT_COST
    assert costs.note(5, 80.0, draft=50.0) == 80.0  # the second time it is what it costs


def test_one_slow_step_of_many_changes_nothing() -> None:
    costs = measured(9, 3.0)
    costs.note(9, 500.0)
    assert costs.seconds(9) == 3.0


def test_what_is_usual_is_learned_row_by_row() -> None:
    usual = UsualAcceptance()
    before = usual.tokens(Mode.TREE)
    for _ in range(4 * adaptation.USUAL_MEMORY):
        usual.told(Mode.TREE, 5, [1, 3])
    after = usual.tokens(Mode.TREE)
    assert after[:5] == pytest.approx([0, 1, 1, 2, 2], abs=0.1)
    assert after[63] - after[4] == pytest.approx(before[63] - before[4])
    assert usual.tokens(Mode.CHAIN)[1] == 0.7
