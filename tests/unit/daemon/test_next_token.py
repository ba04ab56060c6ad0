"""Which outputs a job reads for its next token: logits are left where they lie when less tells."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from slotd.daemon.backend import HostOutputs
from slotd.daemon.job import Job
from slotd.daemon.link import Flags, Submit
from slotd.daemon.next_token import NextTokens
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import Prompt, Sampling
from tests.fakes.far_outputs import FarOutputs

LOGITS = np.array([[0, 1, 2, 3, 2], [4, 9, 1, 9, 0], [np.nan, 1, 2, 3, 4]], np.float32)


def job(**fields: Any) -> Job:
    command = Prompt(ids=[1], n_gen=4, **({"sampling": Sampling(temperature=0.0)} | fields))
    submit = Submit("a", command, Flags(), time.monotonic(), np.array([1], np.int32))
    return Job(submit, 100, frozenset({3}), time.monotonic)


MANY: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"logprobs": 1, "sampling": Sampling(temperature=1.0, seed=3)},
    {"logprobs": 3, "sampling": Sampling(temperature=0.5, repetition_penalty=1.5, seed=4)},
    {"min_tokens": 2},
    {"sampling": Sampling(temperature=0.0, logit_bias=((4, 5.0),))},
    {"sampling": Sampling(temperature=0.0, repetition_penalty=2.0)},
    {"sampling": Sampling(temperature=0.5, top_k=1)},
    {"sampling": Sampling(temperature=2.0, seed=5)},
]


@pytest.mark.parametrize(("row", "token"), [(0, 3), (1, 1)])
def test_greedy_asks_for_nothing(row: int, token: int) -> None:
    outputs = FarOutputs(LOGITS)
    assert NextTokens([job()], outputs, row).of(0) == (token, ())
    assert (outputs.reads, outputs.asked) == (0, [])


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"logprobs": 2}, 3),
        ({"min_tokens": 2}, 2),  # 3 ends the answer and is banned
        ({"sampling": Sampling(temperature=0.0, logit_bias=((4, 5.0),))}, 4),
        ({"sampling": Sampling(temperature=0.0, repetition_penalty=2.0)}, 3),
        ({"sampling": Sampling(temperature=0.5, top_k=1)}, 3),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_everything_else_asks_for_candidates(fields: dict[str, Any], token: int) -> None:
    outputs = FarOutputs(LOGITS)
    assert NextTokens([job(**fields)], outputs).of(0)[0] == token
    assert (outputs.reads, len(outputs.asked)) == (0, 1)
    outputs.silent = {0}
    assert NextTokens([job(**fields)], outputs).of(0)[0] == token
    assert outputs.reads == 1


@pytest.mark.parametrize("fields", MANY, ids=str)
def test_answers_are_those_of_logits_at_hand(fields: dict[str, Any]) -> None:
    far, here = FarOutputs(LOGITS), HostOutputs(LOGITS, np.arange(3))
    for row in (0, 1):
        token, scores = NextTokens([job(**fields)], far, row).of(0)
        expected, expected_scores = NextTokens([job(**fields)], here, row).of(0)
        assert token == expected
        assert [score.logprob for score in scores] == pytest.approx([s.logprob for s in expected_scores])
        assert [dict(s.top) for s in scores] == [pytest.approx(dict(s.top)) for s in expected_scores]
    assert far.reads == 0


def test_all_rows_are_asked_for_at_once() -> None:
    rng = np.random.default_rng(3)
    jobs = [job(**fields) for fields in [*MANY, {}]]
    logits = rng.normal(0, 2, (9, 5)).astype(np.float32)
    here = HostOutputs(logits, np.arange(9))
    expected = [NextTokens([one], here, row).of(0)[0] for row, one in enumerate(jobs)]
    outputs = FarOutputs(logits)
    tokens = NextTokens(jobs, outputs)
    for index, one in enumerate(jobs):
        one.take(tokens.of(index)[0])
    assert [one.produced[0] for one in jobs] == expected
    (views,) = outputs.asked
    assert sorted({view.row for view in views}) == list(range(8))  # the ninth is plainly greedy
    # The choice and the log-probabilities share a view where they look at the same numbers.
    assert [len([v for v in views if v.row == row]) for row in range(8)] == [1, 1, 2, 1, 1, 1, 1, 1]


def test_a_row_without_an_answer_touches_no_other() -> None:
    jobs = [job(sampling=Sampling(temperature=1.0, seed=1)) for _ in range(3)]
    outputs = FarOutputs(LOGITS)
    tokens = NextTokens(jobs, outputs)
    outputs.silent = {0}
    tokens.of(0)
    assert outputs.reads == 1
    tokens.of(1)
    assert outputs.reads == 1
    with pytest.raises(RequestError, match="nonfinite"):
        tokens.of(2)
    assert len(outputs.asked) == 1


def test_a_penalty_without_a_window_is_none() -> None:
    outputs = FarOutputs(LOGITS)
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, penalty_window=0)
    assert NextTokens([job(sampling=sampling)], outputs).of(0) == (3, ())
    assert (outputs.reads, outputs.asked) == (0, [])


def test_logits_without_a_best_one_are_an_error_that_shows_the_value() -> None:
    with pytest.raises(RequestError, match="nonfinite") as caught:
        NextTokens([job()], FarOutputs(LOGITS), 2).of(0)
    assert caught.value.fields == {"value": "nan", "at": 0}
