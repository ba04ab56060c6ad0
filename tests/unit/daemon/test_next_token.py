"""Which outputs a job reads for its next token: logits are left where they lie when the best id is enough."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.backend import HostOutputs
from slotd.daemon.job import Job
from slotd.daemon.link import Flags, Submit
from slotd.daemon.next_token import next_token
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import Prompt, Sampling

LOGITS = np.array([[0, 1, 2, 3, 2], [4, 9, 1, 9, 0], [np.nan, 1, 2, 3, 4]], np.float32)


class CountingOutputs:
    """Host outputs that count how often logits are read."""

    def __init__(self) -> None:
        self.rows = np.arange(len(LOGITS))
        self.reads = 0

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        self.reads += 1
        return LOGITS

    def greedy(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        return HostOutputs(LOGITS, self.rows).greedy()


def job(**fields: Any) -> Job:
    command = Prompt(ids=[1], n_gen=4, **({"sampling": Sampling(temperature=0.0)} | fields))
    submit = Submit("a", command, Flags(), time.monotonic(), np.array([1], np.int32))
    return Job(submit, 100, frozenset({3}), time.monotonic)


@pytest.mark.parametrize(("row", "token"), [(0, 3), (1, 1)])
def test_greedy_reads_no_logits(row: int, token: int) -> None:
    outputs = CountingOutputs()
    assert next_token(job(), outputs, row) == (token, ())
    assert outputs.reads == 0


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
def test_everything_else_does(fields: dict[str, Any], token: int) -> None:
    outputs = CountingOutputs()
    assert next_token(job(**fields), outputs, 0)[0] == token
    assert outputs.reads == 1


def test_a_penalty_without_a_window_is_none() -> None:
    outputs = CountingOutputs()
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, penalty_window=0)
    assert next_token(job(sampling=sampling), outputs, 0) == (3, ())
    assert outputs.reads == 0


def test_logits_without_a_best_one_are_an_error_that_shows_the_value() -> None:
    with pytest.raises(RequestError, match="nonfinite") as caught:
        next_token(job(), CountingOutputs(), 2)
    assert caught.value.fields == {"value": "nan", "at": 0}
