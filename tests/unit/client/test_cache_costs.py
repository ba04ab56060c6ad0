from __future__ import annotations

import pytest

from slotd.client.cache_costs import Costs, Recent
from slotd.client.cache_entries import as_bytes, shared_tokens


def test_what_starting_from_tokens_saves() -> None:
    assert Costs().saved(10) == 10  # nothing is measured: more is better
    assert Costs(prefill=100.0, restore=0.5).saved(200) == pytest.approx(1.5)
    assert Costs(prefill=100.0, restore=0.5, load=0.01).saved(200, cold=True) == pytest.approx(-0.5)


def test_rates_are_running_means() -> None:
    costs = Costs().measure_prefill(100, 1.0)
    assert costs.prefill == 100
    assert costs.measure_prefill(200, 1.0).prefill == pytest.approx(130)
    assert costs.measure_prefill(31, 1.0) == costs  # too few to say anything
    assert costs.measure_prefill(100, 0.0) == costs
    assert costs.measure_restore(0.2).restore == pytest.approx(0.2)
    assert costs.measure_restore(-1.0) == costs


def tokens(*values: int) -> bytes:
    return as_bytes(values)


def test_what_the_daemon_probably_still_has() -> None:
    recent = Recent(2)
    recent.add(tokens(*range(30)))
    assert recent.expected(tokens(*range(40))) == 30
    assert recent.expected(tokens(*range(20))) == 19  # the last token is computed in any case
    assert recent.expected(tokens(*range(10))) == 0  # too short for the daemon
    recent.add(tokens(*[7] * 20))
    recent.add(tokens(*[8] * 20))
    assert recent.expected(tokens(*range(40))) == 0  # only the last two are kept
    recent.clear()
    assert recent.expected(tokens(*[8] * 30)) == 0


def test_trust_grows_with_right_guesses_and_halves_with_a_wrong_one() -> None:
    recent = Recent()
    recent.add(tokens(*range(100)))
    prompt = tokens(*range(120))
    before = recent.trust
    assert recent.worth(prompt) == int(100 * before)
    recent.judge(100, 100)
    assert before < recent.trust < 1
    recent.judge(0, 0)  # nothing was expected
    assert recent.expected(prompt) == 100
    recent.judge(100, 99)
    assert recent.trust < 0.5
    assert recent.expected(prompt) == 0


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [((), (), 0), ((1,), (2,), 0), ((1, 2, 3), (1, 2, 4), 2), ((1, 2), (1, 2, 3), 2), ((256,), (1,), 0)],
)
def test_shared_tokens(a: tuple[int, ...], b: tuple[int, ...], shared: int) -> None:
    assert shared_tokens(tokens(*a), tokens(*b)) == shared_tokens(tokens(*b), tokens(*a)) == shared
