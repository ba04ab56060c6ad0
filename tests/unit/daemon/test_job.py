from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slotd.daemon.account import PARTS
from slotd.daemon.job import Job, Phase
from slotd.daemon.link import Flags, Key, Submit
from slotd.daemon.sequence import Sequence
from slotd.protocol.messages import Prompt, Restore, Sampling, Snap

IDS = [5, 6, 7, 8]
EOS = frozenset({2})


def job(
    command: Prompt | None = None, *, key: Key = "j", ids: list[int] = IDS, max_ctx: int = 64, **fields: Any
) -> Job:
    command = command or Prompt(ids=ids, **{"n_gen": 3, **fields})
    submit = Submit(key, command, Flags(), 100.0, np.asarray(ids, np.int32))
    return Job(submit, max_ctx, EOS, lambda: 100.0)


def taken(made: Job, *tokens: int) -> Job:
    for token in tokens:
        made.take(token)
    return made


def test_a_new_job_waits_and_has_nothing() -> None:
    made = job()
    assert (made.phase, made.sequence, made.prefilled, made.reused, made.produced) == (
        Phase.WAITING, None, 0, 0, [],
    )  # fmt: skip
    assert made.restore_slot is None


def test_history_is_prompt_and_answer() -> None:
    assert taken(job(), 30, 31).history.tolist() == [*IDS, 30, 31]


def test_prefilled_counts_prompt_tokens_only() -> None:
    made = job()
    made.sequence = Sequence()
    made.sequence.tokens.extend(IDS[:3])
    assert made.prefilled == 3
    made.sequence.tokens.extend([8, 30, 31])
    assert made.prefilled == 4


def test_the_slot_of_a_restore() -> None:
    assert job(Restore(slot=3, ids=IDS, n_gen=1)).restore_slot == 3


def test_a_snapshot_is_due_only_when_it_was_asked_for() -> None:
    assert job().snap_done
    assert not job(snap=Snap(2, 0)).snap_done


# ----- endings


@pytest.mark.parametrize(
    ("tokens", "fields", "ending"),
    [
        ([], {}, None),
        ([30, 31], {}, None),
        ([30, 31, 32], {}, ("length", {"limit": "n_gen"})),
        ([30, 2], {}, ("stop", {"stop": 2})),
        ([30, 31, 2], {}, ("stop", {"stop": 2})),  # the last one that is allowed: the text has ended
        ([30, 2], {"ignore_eos": True}, None),
        ([30, 31], {"stop": (31, 40)}, ("stop", {"stop": 31})),
        ([30, 2], {"stop": (31,)}, ("stop", {"stop": 2})),
        ([30, 31], {"stop": (31,), "ignore_eos": True}, ("stop", {"stop": 31})),
        ([2], {"stop": (2,), "ignore_eos": True}, ("stop", {"stop": 2})),
        ([31, 30], {"stop": (31,)}, None),  # only the last token ends an answer
    ],
)
def test_what_ends_an_answer(tokens: list[int], fields: dict[str, Any], ending: object) -> None:
    assert taken(job(**fields), *tokens).ending() == ending


def test_the_context_ends_an_answer_that_was_made_to_fit() -> None:
    made = job(n_gen=100, fit=True, max_ctx=6)
    assert made.n_gen == 2
    assert taken(made, 30).ending() is None
    assert taken(made, 31).ending() == ("length", {"limit": "max_ctx"})


def test_an_answer_that_just_fits_ends_by_n_gen() -> None:
    assert taken(job(n_gen=2, max_ctx=6), 30, 31).ending() == ("length", {"limit": "n_gen"})


def test_nothing_ends_an_answer_before_min_tokens() -> None:
    made = job(min_tokens=2, stop=(31,))
    assert made.banned_at(len(made.produced)) == {2, 31}
    assert taken(made, 30).banned_at(len(made.produced)) == {2, 31}
    assert taken(made, 30).banned_at(len(made.produced)) == frozenset()
    assert job().banned_at(0) == frozenset()


def test_what_is_ignored_is_not_banned() -> None:
    assert job(min_tokens=2, stop=(31,), ignore_eos=True).banned_at(0) == {31}


# ----- seed and summary


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_given_seed_stays(seed: int) -> None:
    made = job(sampling=Sampling(temperature=1.0, seed=seed))
    assert made.seed == made.sampler.seed == seed


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {job().seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_summary_is_in_wire_order() -> None:
    made = taken(job(sampling=Sampling(seed=9)), 30)
    made.reused = 2
    summary = made.summary(epoch=4)
    assert list(summary) == [
        "prompt",
        "reused",
        "gen",
        "epoch",
        "seed",
        "wall_s",
        *(f"{part}_s" for part in PARTS),
        *("drafted", "accepted", "acceptance", "mode"),
    ]
    assert list(summary.values())[:5] == [4, 2, 1, 4, 9]


def test_the_report_names_the_request_only_when_it_has_a_name() -> None:
    report = job().report()
    counts = {"prompt": 4, "at": 0, "reused": 0, "gen": 0}
    drafts = {"drafted": 0, "accepted": 0, "acceptance": 0.0, "mode": "plain"}
    assert report == {"id": "j", "phase": "waiting", **counts, **drafts}
    assert job(key=7).report()["id"] is None
