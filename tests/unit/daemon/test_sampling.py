from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.sampling import Sampler, logprobs, uniform
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import Sampling

Logits = npt.NDArray[np.float32]

LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]
HISTORY = [7, 0, 0, 1]
N_DRAWS = 4000

#: Chi-square values that a right sampler passes with 99.9 %, by degrees of freedom.
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def row(values: Sequence[float]) -> Logits:
    return np.array(values, dtype=np.float32)


def greedy(values: Sequence[float], history: Sequence[int] = (), **parameters: Any) -> int:
    return Sampler(Sampling(**parameters), 1).sample(row(values), history, 0)


def draws(
    values: Sequence[float],
    *,
    seed: int = 1,
    history: Sequence[int] = (),
    banned: Sequence[int] = (),
    **parameters: Any,
) -> list[int]:
    sampler, logits = Sampler(Sampling(**parameters), seed), row(values)
    return [sampler.sample(logits, history, n, banned) for n in range(N_DRAWS)]


def support(values: Sequence[float], history: Sequence[int] = (), **parameters: Any) -> set[int]:
    """The ids that are ever drawn."""
    return set(draws(values, history=history, **parameters))


def exact_distribution(
    values: Sequence[float], history: Sequence[int], banned: Sequence[int], sampling: Sampling
) -> dict[int, float]:
    """The documented order in plain Python."""
    logits = dict(enumerate(values))
    for id, bias in sampling.logit_bias:
        logits[id] += bias
    window = history[max(0, len(history) - sampling.penalty_window) :]
    for id, count in Counter(window).items():
        factor = sampling.repetition_penalty
        logits[id] = logits[id] / factor if logits[id] > 0 else logits[id] * factor
        logits[id] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for id in banned:
        del logits[id]
    order = sorted(logits, key=lambda id: (-logits[id], id))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp((logits[id] - logits[order[0]]) / sampling.temperature) for id in order]
    total = sum(weights)
    kept: dict[int, float] = {}
    for id, weight in zip(order, weights, strict=True):
        if sum(kept.values()) / total >= sampling.top_p:
            break
        kept[id] = weight
    kept = {id: weight for id, weight in kept.items() if weight >= sampling.min_p}
    return {id: weight / sum(kept.values()) for id, weight in kept.items()}


# ----- the distribution


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 1.8, "penalty_window": 1},
        {"frequency_penalty": 0.6},
        {"presence_penalty": 1.1},
        {"logit_bias": ((7, 4.0), (0, -2.0))},
        {
            "logit_bias": ((1, 1.0),),
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
            "presence_penalty": -0.3,
            "temperature": 1.2,
            "top_k": 6,
            "top_p": 0.85,
            "min_p": 0.05,
        },
        {"banned": [0, 3]},
    ],
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_exact_distribution(parameters: dict[str, Any], over: str) -> None:
    parameters = {"temperature": 1.0, **parameters}
    banned = parameters.pop("banned", [])
    sampling = Sampling(**parameters)
    expected = exact_distribution(LOGITS, HISTORY, banned, sampling)
    if over == "positions":
        drawn = draws(LOGITS, seed=3, history=HISTORY, banned=banned, **parameters)
    else:
        logits = row(LOGITS)
        drawn = [Sampler(sampling, seed).sample(logits, HISTORY, 5, banned) for seed in range(N_DRAWS)]
    counts = Counter(drawn)
    assert set(counts) <= set(expected)
    chi_square = sum((counts[id] - N_DRAWS * p) ** 2 / (N_DRAWS * p) for id, p in expected.items())
    assert chi_square < CHI_SQUARE_999[len(expected) - 1]


def test_uniform_numbers_are_splitmix64() -> None:
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [uniform(1234567, n) for n in range(4)] == [(output >> 11) / 2**53 for output in outputs]
    assert all(0 <= uniform(seed, n) < 1 for seed in (0, 2**64 - 1) for n in (0, 2**31 - 1))


def test_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    # Four equal logits: quarter q of [0, 1) is the id of rank q.
    sampler, logits = Sampler(Sampling(temperature=1.0), 11), row([0, 0, 0, 0])
    for n in range(100):
        assert sampler.sample(logits, (), n) == int(uniform(11, n) * 4)


@pytest.mark.parametrize(
    ("number", "expected"), [(0.0, 1), (math.nextafter(0.25, 0), 1), (0.25, 2), (0.75, 5), (1 - 2**-53, 5)]
)
def test_draw_at_the_edges(monkeypatch: pytest.MonkeyPatch, number: float, expected: int) -> None:
    monkeypatch.setattr("slotd.daemon.sampling.uniform", lambda seed, n: number)
    values = [-math.inf, 0, 0, -math.inf, 0, 0, -math.inf]
    assert Sampler(Sampling(temperature=1.0), 1).sample(row(values), (), 0) == expected


def test_same_seed_same_ids_other_seed_other_ids() -> None:
    first = draws(LOGITS, seed=5, temperature=1.0)
    assert draws(LOGITS, seed=5, temperature=1.0) == first
    assert draws(LOGITS, seed=6, temperature=1.0) != first


def test_draw_depends_on_the_position_only_not_on_earlier_calls() -> None:
    sampler = Sampler(Sampling(temperature=1.0), 5)
    forwards = [sampler.sample(row(LOGITS), (), n) for n in range(50)]
    backwards = [sampler.sample(row(LOGITS), (), n) for n in reversed(range(50))]
    assert forwards == backwards[::-1]


# ----- greedy


def test_defaults_are_greedy_and_equal_logits_go_to_the_lower_id() -> None:
    assert greedy([1, 3, 2]) == 1
    assert greedy([1, 3, 3, 3]) == 1
    assert greedy([-math.inf, -5, -math.inf]) == 1


def test_tiny_temperature_is_greedy_too() -> None:
    assert support([1.0, 1.1, 0.9], temperature=1e-9) == {1}
    assert support([1.0, 1.0, 0.9], temperature=1e-9) == {0, 1}
    assert support([1.0, 1.0001], temperature=1e-9) == {0, 1}  # it counts as 0.001


def test_equal_logits_at_the_edge_of_top_k_go_to_the_lower_ids() -> None:
    assert support([0, 1, 1, 2, 1], temperature=1.0, top_k=3) == {1, 2, 3}
    assert support([0, 0, 0, 0, 0], temperature=1.0, top_p=0.5) == {0, 1, 2}
    assert support([-1, 0, 0], temperature=1.0, min_p=1.0) == {1, 2}


# ----- every parameter has its effect


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"logit_bias": ((2, 1.5),)}, 2),
        ({"repetition_penalty": 2.0}, 1),
        ({"frequency_penalty": 0.6}, 1),
        ({"presence_penalty": 1.1}, 1),
        ({"repetition_penalty": 2.0, "penalty_window": 0}, 0),
        ({"frequency_penalty": 0.6, "penalty_window": 1}, 0),
        ({"frequency_penalty": 0.4}, 1),
        ({"presence_penalty": 0.6}, 0),  # once, however often the token stands there
    ],
)
def test_greedy_choice_with(parameters: dict[str, Any], expected: int) -> None:
    assert greedy([2.0, 1.3, 1.0], [0, 0], **parameters) == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.5}, {0, 1, 2}),
        ({"min_p": 0.76}, {0}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_ids_that_can_be_drawn_with(parameters: dict[str, Any], expected: set[int]) -> None:
    values = [math.log(p) for p in (0.4001, 0.3, 0.2001, 0.0998)]
    assert support(values, **{"temperature": 1.0, **parameters}) == expected


def test_negative_logits_are_multiplied_by_the_repetition_penalty() -> None:
    assert greedy([-1.0, -1.5], [0]) == 0
    assert greedy([-1.0, -1.5], [0], repetition_penalty=2.0) == 1


def test_penalties_count_the_last_tokens_only() -> None:
    history = [0] * 10 + [1] * 3
    assert greedy([2.0, 1.9], history, frequency_penalty=0.01, penalty_window=3) == 0
    assert greedy([2.0, 1.9], history, frequency_penalty=0.02, penalty_window=256) == 1


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda ids: array("i", ids), lambda ids: np.array(ids, np.int32)]
)
def test_history_may_be_any_sequence_of_ids(kind: Any) -> None:
    assert greedy([2.0, 1.3], kind([0, 0]), presence_penalty=1.0) == 1
    assert greedy([2.0, 1.3], kind([]), presence_penalty=1.0) == 0


def test_extreme_repetition_penalty_is_no_fault_of_the_model() -> None:
    assert greedy([10.0, 20.0, -math.inf], [0, 2], repetition_penalty=1e-300) == 0
    assert support([10.0, 20.0, -math.inf], [0, 2], temperature=1.0, repetition_penalty=1e-45) == {0}
    assert greedy([-3e38, -3.1e38], [0], repetition_penalty=100.0) == 1


def test_banned_ids_are_not_chosen() -> None:
    sampler = Sampler(Sampling(), 1)
    assert sampler.sample(row([3, 2, 1]), (), 0, banned=frozenset([0])) == 1
    assert 0 not in draws([3, 2, 1], temperature=2.0, banned=[0])
    lifted = Sampler(Sampling(logit_bias=((0, 1000.0),)), 1)
    assert lifted.sample(row([3, 2, 1]), (), 0, banned=(0,)) == 1


def test_minus_infinity_is_never_drawn() -> None:
    assert support([0, -math.inf, 0, -math.inf], temperature=100.0) == {0, 2}
    assert support([0, -math.inf, 0, -math.inf], temperature=100.0, top_k=3) == {0, 2}


def test_logits_are_not_changed() -> None:
    logits = row(LOGITS)
    sampling = Sampling(temperature=1.0, repetition_penalty=2.0, logit_bias=((0, 1.0),), top_k=2)
    Sampler(sampling, 1).sample(logits, [0], 0, (1,))
    assert logits.tolist() == LOGITS


# ----- the order


def test_bias_comes_before_the_repetition_penalty() -> None:
    # (1 + 1) / 2 = 1 < 1.25; the other way round 1 / 2 + 1 = 1.5
    assert greedy([1.0, 1.25], [0], logit_bias=((0, 1.0),), repetition_penalty=2.0) == 1


def test_repetition_penalty_comes_before_frequency_and_presence() -> None:
    # 2 / 2 - 1 = 0 < 0.25; the other way round (2 - 1) / 2 = 0.5
    assert greedy([2.0, 0.25], [0], repetition_penalty=2.0, frequency_penalty=1.0) == 1
    assert greedy([2.0, 0.25], [0], repetition_penalty=2.0, presence_penalty=1.0) == 1


def test_penalties_come_before_top_k() -> None:
    assert support([2.0, 1.0, 0.0], [0], temperature=1.0, presence_penalty=5.0, top_k=1) == {1}


def test_top_k_comes_before_top_p() -> None:
    # 0.4 and 0.3 of the two kept are 0.57 and 0.43: the first alone holds 0.5
    values = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert support(values, temperature=1.0, top_p=0.5) == {0, 1}
    assert support(values, temperature=1.0, top_p=0.5, top_k=2) == {0}


def test_temperature_comes_before_top_p_and_min_p() -> None:
    values = [math.log(p) for p in (0.6, 0.3, 0.1)]
    assert support(values, temperature=1.0, top_p=0.55) == {0}
    assert support(values, temperature=3.0, top_p=0.55) == {0, 1}
    assert support(values, temperature=1.0, min_p=0.4) == {0, 1}
    assert support(values, temperature=3.0, min_p=0.4) == {0, 1, 2}


# ----- logits that are not finite


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([0.0, math.nan, 9.0], "nan"),
        ([math.nan, 1.0, math.inf], "nan"),
        ([0.0, math.inf, 1.0], "inf"),
        ([-math.inf] * 3, "-inf"),
    ],
)
@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
@pytest.mark.parametrize("banned", [(), (1,)])
def test_nonfinite_logits_end_the_request(
    values: list[float], named: str, parameters: dict[str, Any], banned: tuple[int, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        Sampler(Sampling(**parameters), 1).sample(row(values), (), 4, banned)
    assert caught.value.code == "nonfinite"
    assert caught.value.fields == {"value": named, "at": 4}


# ----- log-probabilities


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    result = logprobs(row(LOGITS), 3, 2)
    total = math.log(sum(math.exp(value) for value in LOGITS))
    assert result.logprob == pytest.approx(LOGITS[3] - total, abs=1e-6)
    assert [id for id, _ in result.top] == [0, 1]
    assert [value for _, value in result.top] == pytest.approx([2.0 - total, 1.5 - total], abs=1e-6)
    assert float(np.float32(result.logprob)) == result.logprob


def test_logprobs_of_equal_logits_are_ordered_by_id() -> None:
    assert [id for id, _ in logprobs(row([1, 2, 1, 2, 1]), 0, 4).top] == [1, 3, 0, 2]


def test_logprobs_without_alternatives() -> None:
    result = logprobs(row([0, 0]), 1, 0)
    assert result.top == ()
    assert result.logprob == pytest.approx(-math.log(2))


def test_logprobs_leave_out_impossible_ids() -> None:
    assert [id for id, _ in logprobs(row([-math.inf, 1, -math.inf, 2]), 1, 4).top] == [3, 1]
    assert [id for id, _ in logprobs(row([1, 2]), 1, 20).top] == [1, 0]


def test_logprobs_of_huge_logits_do_not_overflow() -> None:
    assert logprobs(row([3e38, 0, -3e38]), 0, 1).logprob == 0.0


def test_logprobs_of_nonfinite_logits() -> None:
    with pytest.raises(RequestError, match="nonfinite"):
        logprobs(row([0, math.nan]), 0, 1)
