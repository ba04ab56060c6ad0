"""The choice among candidates is the choice from the whole row, or none."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from slotd.daemon import sampling as module
from slotd.daemon.candidates import Logits, View
from slotd.daemon.ops.cuda_sample import (
    ADJUSTMENT,
    HEAD,
    MOST_ADJUSTMENTS,
    MOST_VOCAB,
    SampleLayout,
    can_be_looked_at,
    pack,
    unpack,
)  # fmt: skip
from slotd.daemon.sampling import Sampler, candidate_logprobs, logprobs, logprobs_view
from slotd.protocol.messages import Sampling
from tests.fakes.far_outputs import look_at

N_VOCAB = 700

TEMPERATURES = ({}, {"temperature": 1e-9}, {"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 2.0})
CUTS = (
    {}, {"top_k": 1}, {"top_k": 15}, {"top_k": 16}, {"top_k": 17}, {"top_k": 300}, {"top_p": 0.1},
    {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999}, {"min_p": 0.3}, {"min_p": 1e-3},
    {"top_k": 200, "top_p": 0.9}, {"top_p": 0.9, "min_p": 0.02}, {"top_k": 100, "min_p": 1e-4},
    {"top_k": 40, "top_p": 0.99, "min_p": 0.01},
)  # fmt: skip
PENALTIES = (
    {},
    {"logit_bias": ((3, 4.5), (N_VOCAB - 1, -2.0))},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.4, "penalty_window": 20},
    {"repetition_penalty": 1e-45, "logit_bias": ((5, 1.0),)},
)


def rows() -> list[Logits]:
    """Peaked, flat, tied, with few that are possible, with zeros of both signs, all equal."""
    rng = np.random.default_rng(5)
    normal = rng.normal(0, 3, N_VOCAB)
    few = np.where(rng.random(N_VOCAB) < 0.01, normal, -np.inf)
    few[7] = 0
    zeros = np.where(rng.random(N_VOCAB) < 0.5, 0.0, -0.0)
    shapes = [normal, rng.normal(0, 0.3, N_VOCAB), np.round(normal), few, zeros, np.ones(N_VOCAB)]
    return [row.astype(np.float32) for row in shapes]


def all_parameters() -> list[dict[str, Any]]:
    return [a | b | c for a, b, c in itertools.product(TEMPERATURES, CUTS, PENALTIES)]


def test_picks_are_those_of_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CANDIDATES", 16)
    rng = np.random.default_rng(6)
    told = asked = 0
    for number, parameters in enumerate(all_parameters()):
        sampler = Sampler(Sampling(**parameters), number)
        history, banned = rng.integers(0, N_VOCAB, 30).tolist(), ((), (3, 9))[number % 2]
        for n, row in enumerate(rows()):
            candidates = look_at(row, sampler.view(n, history, banned))
            assert candidates is not None
            place = sampler.pick(candidates, n)
            asked += 1
            if place is not None:
                told += 1
                expected = sampler.sample(row, history, n, banned)
                assert candidates.ids[place] == expected, (parameters, n)
    assert told > 0.6 * asked  # and rows of 16 candidates out of 700 are not easy ones


def test_all_values_as_candidates_always_tell() -> None:
    for number, parameters in enumerate(all_parameters()):
        sampler = Sampler(Sampling(**parameters), number)
        for n, row in enumerate(rows()):
            candidates = look_at(row, sampler.view(n, [1, 2, 3]))
            assert candidates is not None
            place = sampler.pick(candidates, n)
            assert place is not None
            assert candidates.ids[place] == sampler.sample(row, [1, 2, 3], n), (parameters, n)


def test_an_uncertain_total_is_an_answer_only_if_it_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four equal values of which two are known, and numbers around the edges of their shares."""
    row = np.zeros(4, np.float32)
    monkeypatch.setattr(module, "MOST_CANDIDATES", 2)
    sampler = Sampler(Sampling(temperature=1.0), 1)
    candidates = look_at(row, sampler.view(0, ()))
    assert candidates is not None
    picks = {}
    for number in (0.0, 0.2, 0.25 - 1e-12, 0.25, 0.3, 0.5 - 1e-12, 0.5, 0.9):
        monkeypatch.setattr(module, "uniform", lambda seed, n, number=number: number)
        picks[number] = sampler.pick(candidates, 0)
    assert list(picks.values()) == [0, 0, None, None, 1, None, None, None]


def test_logprobs_of_candidates_are_those_of_the_row() -> None:
    for row in rows():
        for top_n in (0, 1, 5, 20):
            candidates = look_at(row, logprobs_view(0, top_n))
            assert candidates is not None
            for chosen in (0, 7, 300):
                expected = logprobs(row, chosen, top_n)
                got = candidate_logprobs(candidates, row[chosen], top_n)
                assert [id for id, _ in got.top] == [id for id, _ in expected.top]
                assert got.logprob == pytest.approx(expected.logprob, rel=1e-6, abs=1e-12)
                assert [p for _, p in got.top] == pytest.approx(
                    [p for _, p in expected.top], rel=1e-6, abs=1e-12
                )


def test_views_are_packed_one_behind_the_other() -> None:
    sampler = Sampler(Sampling(temperature=0.5, logit_bias=((9, 2.0), (4, -1.0)), presence_penalty=0.25), 1)
    plain = View(3, 64)
    views = [plain, sampler.view(5, [4, 4, 8], (2,)), sampler.view(6, [])]
    layout = SampleLayout.of(views)
    target = np.full(layout.n_bytes_in + 8, 0xAA, np.uint8)
    pack(layout, views, target)
    heads = target[: 3 * 32].view(
        [("ints", "<i4", 4), ("repetition", "<f4"), ("presence", "<f4"), ("per_temperature", "<f8")]
    )
    assert heads["ints"].tolist() == [[3, 64, 0, 0], [5, 1024, 0, 4], [6, 1024, 4, 2]]
    assert heads["presence"].tolist() == [0, 0.25, 0.25]
    assert heads["per_temperature"].tolist() == [0, 2, 2]
    adjusted = target[3 * 32 : -8].view(ADJUSTMENT)
    assert adjusted["id"].tolist() == [2, 4, 8, 9, 4, 9]
    assert adjusted["kinds"].tolist() == [4, 3, 2, 1, 1, 1]
    assert adjusted["bias"].tolist() == [0, -1, 0, 2, -1, 2]
    assert (target[-8:] == 0xAA).all()


def test_answers_are_unpacked() -> None:
    views = [View(0, 2, 1.0), View(1, 3), View(2, 3, 1.0), View(3, 3, 1.0)]
    layout = SampleLayout.of(views)
    heads = np.array([(2.5, 7, 2, 1, 1), (0, 3, 3, 1, 0), (1, 9, 3, 0, 1), (1, 4000, 0, 1, 1)], HEAD)
    lists = np.arange(4 * 3 * 3, dtype=np.float32).reshape(4, 3, 3)
    ids = lists.astype(np.int32).view(np.float32)
    lists[:, 1] = ids[:, 1]
    head_bytes, list_bytes = heads.view(np.uint8), lists.reshape(-1).view(np.uint8)
    first, second, *others = unpack(layout, views, 50, np.concatenate([head_bytes, list_bytes]))
    assert others == [None, None]  # not finite; more than there is room for
    assert first is not None
    assert second is not None
    assert (first.values.tolist(), first.ids.tolist(), first.raw.tolist()) == ([0, 1], [3, 4], [6, 7])
    assert (first.total, first.complete) == (2.5, False)
    assert second.ids.tolist() == [12, 13, 14]
    assert (second.total, second.complete) == (None, True)


def test_what_the_kernels_are_not_made_for() -> None:
    def view(ids: int) -> View:
        return Sampler(Sampling(logit_bias=((ids - 1, 1.0),)), 1).view(0, (), range(ids))

    assert can_be_looked_at(view(MOST_ADJUSTMENTS), MOST_VOCAB)
    assert not can_be_looked_at(view(MOST_ADJUSTMENTS + 1), MOST_VOCAB)
    assert not can_be_looked_at(View(0, 1), MOST_VOCAB + 1)
    assert not can_be_looked_at(view(100), 99)  # an id that is not there is an error of the host's
