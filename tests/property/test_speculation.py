"""Speculation changes what a step costs, never what is said (P17, P18, P23, P24, P29, P30)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.backend import HostOutputs
from slotd.daemon.job import Job
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.link import Emit, Flags, Key, Submit
from slotd.daemon.next_token import NextTokens
from slotd.daemon.rows import Kind
from slotd.daemon.spec.tree import DraftTree, build_tree, chain, root_only
from slotd.daemon.speculation import Drafter
from slotd.daemon.walk import paths_of, walk
from slotd.protocol.messages import Prompt, Sampling, Snapshot
from tests.fakes.drafters import ChainDrafter, TreeDrafter, guess_at_random, replay
from tests.fakes.scheduler_rig import SchedulerRig
from tests.fakes.tiny_gguf import write_tiny_llama

TEXTS: list[list[int]] = np.random.default_rng(5).integers(3, 320, (3, 45)).tolist()
N_VOCAB, N_GEN = 320, 40

#: Ways to choose tokens: everything that a plain answer knows has to mean the same here.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "greedy, penalties": {"sampling": Sampling(temperature=0.0, repetition_penalty=1.3, penalty_window=8)},
    "greedy, logprobs": {"sampling": Sampling(temperature=0.0), "logprobs": 3},
    "greedy, min_tokens": {"sampling": Sampling(temperature=0.0), "min_tokens": 30},
    "sampled": {"sampling": Sampling(temperature=0.8, seed=7)},
    "sampled, cut": {"sampling": Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=8)},
    "sampled, penalties": {
        "sampling": Sampling(
            temperature=0.9, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.1, seed=9
        ),
        "logprobs": 2,
    },
    "sampled, bias": {"sampling": Sampling(temperature=0.7, logit_bias=((17, 4.0), (40, -3.0)), seed=10)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("speculation") / "tiny.gguf")


@cache
def plain(model: Path, way: str, stop: tuple[int, ...] = ()) -> list[list[int]]:
    """The answers to TEXTS without speculation."""
    rig = SchedulerRig(model, eos_ids=stop)
    return [rig.answer(number, text, N_GEN, **WAYS[way]) for number, text in enumerate(TEXTS)]


def emitted(rig: SchedulerRig, key: Key) -> list[Emit]:
    return [message for message in rig.messages if isinstance(message, Emit) and message.key == key]


def scores(rig: SchedulerRig, key: int) -> list[Any]:
    """The log-probabilities of an answer, each with its token."""
    return [
        (token, score)
        for message in emitted(rig, key)
        for token, score in zip(message.ids, message.logprobs, strict=True)
    ]


def drafters(answers: list[list[int]]) -> dict[str, Drafter]:
    """Drafts of every kind for recorded answers."""
    texts = dict(enumerate(answers))
    never = replay(texts, 7, wrong_from=0)
    return {
        "right": ChainDrafter(replay(texts, 7)),
        "wrong": ChainDrafter(never),
        "right for two": ChainDrafter(replay(texts, 7, wrong_from=2)),
        "random": ChainDrafter(guess_at_random(N_VOCAB, 5, 3)),
        "tree": TreeDrafter(replay(texts, 6), N_VOCAB, 4),
        "tree of the best": TreeDrafter(replay(texts, 6, wrong_from=3), N_VOCAB, 5, rank=0),
        "tree at random": TreeDrafter(guess_at_random(N_VOCAB, 4, 6), N_VOCAB, 7),
    }


@pytest.mark.parametrize("way", WAYS)
def test_p17_p18_p29_p30_any_draft_gives_the_plain_text(model: Path, way: str) -> None:
    """One after the other and side by side, with the log-probabilities of plain decoding."""
    expected = plain(model, way)
    unspeculated = SchedulerRig(model)
    for number, text in enumerate(TEXTS):
        unspeculated.answer(number, text, N_GEN, **WAYS[way])
    for name, drafter in drafters(expected).items():
        rig = SchedulerRig(model, drafters=[drafter])
        assert rig.answer(0, TEXTS[0], N_GEN, **WAYS[way]) == expected[0], name
        for number in (1, 2):
            rig.prompt(number, TEXTS[number], N_GEN, **WAYS[way])
        rig.until(1, 2)
        assert [rig.tokens(number) for number in range(3)] == expected, name
        for number in range(3):
            if WAYS[way].get("logprobs"):
                assert scores(rig, number) == scores(unspeculated, number), name
            assert len(rig.done(number).account) == len(unspeculated.done(number).account)


def test_p18_a_draft_that_is_always_right_is_accepted_whole(model: Path) -> None:
    answer = plain(model, "greedy")[0]
    rig = SchedulerRig(model, drafters=[ChainDrafter(replay({0: answer}, 7))])
    assert rig.answer(0, TEXTS[0], N_GEN) == answer
    steps = [call.rows[0] for call in rig.engine.calls if call.kind is Kind.STEP]
    assert steps == [8, 8, 8, 8, 7]  # 39 tokens behind the first one, which the prompt gives
    account = rig.done(0).account
    assert (account["drafted"], account["accepted"], account["mode"]) == (34, 34, "chain")


@pytest.mark.parametrize("name", ["right", "wrong", "right for two", "random", "tree", "tree at random"])
def test_p23_the_counts_sum_to_the_answer(model: Path, name: str) -> None:
    """Each step draws one token beside those that it accepts, and the prompt gives the first."""
    answers = plain(model, "greedy")
    rig = SchedulerRig(model, drafters=[drafters(answers)[name]])
    for number, text in enumerate(TEXTS):
        before = len(rig.engine.calls)
        rig.answer(number, text, N_GEN)
        steps = [call.rows[0] for call in rig.engine.calls[before:] if call.kind is Kind.STEP]
        account = rig.done(number).account
        assert 1 + len(steps) + account["accepted"] == account["gen"] == N_GEN
        assert account["drafted"] == sum(steps) - len(steps)
        verified = sum(n > 1 for n in steps)
        assert account["acceptance"] == round((verified + account["accepted"]) / verified, 3)  # type: ignore[operator]
    totals = rig.states()[-1]["totals"]
    assert totals["drafted_tokens"] >= totals["accepted_tokens"] > 0 or name in (
        "wrong",
        "random",
        "tree at random",
    )


@pytest.mark.parametrize("cut", range(1, 12))
def test_p17_an_end_inside_a_block(model: Path, cut: int) -> None:
    """By a stop id, by n_gen and by a cancel: nothing behind it is said, and the place is the right one."""
    answers = plain(model, "greedy")
    answer = answers[0]
    end = answer[cut]
    upto = answer.index(end) + 1
    rig = SchedulerRig(model, drafters=[ChainDrafter(replay({"n": answer, "s": answer, "e": answer}, 7))])
    assert rig.answer("n", TEXTS[0], cut) == answer[:cut]
    assert dict(rig.done("n").reason) == {"limit": "n_gen"}
    assert rig.answer("s", TEXTS[0], N_GEN, stop=(end,)) == answer[:upto]
    assert (rig.done("s").status, dict(rig.done("s").reason)) == ("stop", {"stop": end})
    retained = rig.scheduler._retained.get("s")
    assert retained is not None
    # What ends an answer is said, not computed: as after plain decoding.
    assert retained.sequence.tokens.tolist() == [*TEXTS[0], *answer[: upto - 1]]
    assert retained.pending == (end,)
    ended = SchedulerRig(model, eos_ids=[end], drafters=[ChainDrafter(replay({"e": answer}, 7))])
    assert ended.answer("e", TEXTS[0], N_GEN) == answer[:upto]
    held = SchedulerRig(model, eos_ids=[end])
    expected = held.answer("e", TEXTS[0], N_GEN, min_tokens=cut + 4)
    held = SchedulerRig(model, eos_ids=[end], drafters=[ChainDrafter(replay({"e": expected}, 7))])
    assert held.answer("e", TEXTS[0], N_GEN, min_tokens=cut + 4) == expected


def test_p24_a_chain_is_a_tree_with_a_budget_of_its_length(model: Path) -> None:
    """The same tokens are verified, step by step."""
    answers = dict(enumerate(plain(model, "greedy")))
    calls = []
    for drafter in (
        ChainDrafter(replay(answers, 6, wrong_from=4), budget=6),
        TreeDrafter(replay(answers, 6, wrong_from=4), N_VOCAB, 1, rank=0, width=1, budget=6),
    ):
        rig = SchedulerRig(model, drafters=[drafter])
        rig.answer(0, TEXTS[0], N_GEN)
        calls.append(rig.engine.calls)
    assert calls[0] == calls[1]


def test_the_next_request_goes_on_where_a_speculated_one_ended(model: Path) -> None:
    """What was accepted is in the cache as if it had been computed token by token (P28)."""
    answers = plain(model, "greedy")
    rig = SchedulerRig(model, drafters=[drafters(answers)["tree"]])
    first = rig.answer(0, TEXTS[0], N_GEN)
    longer = [*TEXTS[0], *first, 9, 9]
    expected = SchedulerRig(model).answer(1, longer, N_GEN)
    follow = SchedulerRig(model, drafters=[TreeDrafter(guess_at_random(N_VOCAB, 3, 2), N_VOCAB, 3)])
    follow.answer(0, TEXTS[0], N_GEN)
    assert follow.answer(1, longer, N_GEN) == expected
    assert follow.done(1).account["reused"] == len(TEXTS[0]) + N_GEN - 1


def test_many_jobs_share_64_rows(model: Path) -> None:
    """Trees shrink until they fit, the largest first; nobody goes without a row."""
    texts = np.random.default_rng(6).integers(3, 320, (9, 20)).tolist()
    alone = [SchedulerRig(model).answer(0, text, 24) for text in texts]
    rig = SchedulerRig(model, parallel=9, drafters=[TreeDrafter(guess_at_random(N_VOCAB, 6, 1), N_VOCAB, 2)])
    for number, text in enumerate(texts):
        rig.prompt(number, text, 24)
    rig.until(*range(9))
    assert [rig.tokens(number) for number in range(9)] == alone
    most = max(sum(call.rows) for call in rig.engine.calls if call.kind is Kind.STEP)
    assert most == 64 - 64 % 9 or most == 64


def test_places_of_a_tree_never_leave_the_pages_of_a_request(model: Path) -> None:
    """An answer up to the last position of the context, in trees of the largest size."""
    text = TEXTS[0][: PAGE - 5]
    limit = 2 * PAGE - 1
    with_room = SchedulerRig(model)
    with_room.engine.max_ctx = limit
    expected = with_room.answer(0, text, 500)
    assert len(expected) == limit - len(text)
    rig = SchedulerRig(model, drafters=[TreeDrafter(replay({0: expected}, 20), N_VOCAB, 2, budget=63)])
    rig.engine.max_ctx = limit
    assert rig.answer(0, text, 500) == expected
    assert dict(rig.done(0).reason) == {"limit": "max_ctx"}


# ----- with recurrent layers

HYBRID = Path(__file__).parents[1] / "golden" / "data" / "qwen35-mtp.gguf"


@pytest.mark.parametrize("way", ["greedy", "sampled, penalties"])
def test_p28_recurrent_states_follow_the_accepted_path(way: str) -> None:
    """Answers side by side, and what is computed behind them: in a slot, and as the next turn."""
    plainly = SchedulerRig(HYBRID)
    expected = [plainly.answer(n, text[:20], 20, **WAYS[way]) for n, text in enumerate(TEXTS)]
    n_vocab = plainly.engine.hyper.n_vocab
    texts = dict(enumerate(expected))
    for drafter in (
        ChainDrafter(replay(texts, 7, wrong_from=3)),
        TreeDrafter(replay(texts, 5), n_vocab, 3),
        TreeDrafter(guess_at_random(n_vocab, 5, 4), n_vocab, 5),
    ):
        rig = SchedulerRig(HYBRID, drafters=[drafter])
        for number, text in enumerate(TEXTS):
            rig.prompt(number, text[:20], 20, **WAYS[way])
        rig.until(0, 1, 2)
        assert [rig.tokens(number) for number in range(3)] == expected
        for number in range(3):
            assert rig.scheduler._retained.get(number) is not None
        longer = [*TEXTS[2][:20], *expected[2], 7]
        fresh = SchedulerRig(HYBRID).answer("fresh", longer, 1, logprobs=5)
        rig.scheduler._decoding._speculation._drafters = ()
        assert rig.answer("next", longer, 1, logprobs=5) == fresh
        assert rig.done("next").account["reused"] == 39


def test_field_report_24_a_slot_of_a_speculated_answer_holds_its_states() -> None:
    """The next tokens have the log-probabilities that they have without slot and guess, bit by bit."""
    text, found = TEXTS[0][:20], []
    for drafters in ([], [TreeDrafter(guess_at_random(300, 5, 4), 300, 5)]):
        rig = SchedulerRig(HYBRID, drafters=drafters)
        answer = rig.answer("a", text, 20)
        rig.put("s", Snapshot(slot=3))
        rig.until("s")
        again = rig.answer("b", [*text, *answer, 5], 8, slot=3, logprobs=3)
        found.append((answer, again, [(m.ids, m.logprobs) for m in emitted(rig, "b")]))
        assert rig.done("b").account["reused"] == 40
    flat = [[pair for ids, scores in each[2] for pair in zip(ids, scores, strict=True)] for each in found]
    assert found[0][:2] == found[1][:2]
    assert flat[0] == flat[1]


# ----- the law of what is drawn

TOY = np.array([[2.0, 1.0, 0.0, -1.0], [0.0, 2.5, 1.0, 0.5], [1.0, 1.0, 1.2, 0.0], [-1.0, 0.5, 0.0, 2.0]])
TEMPERATURE, DRAWS = 0.8, 4000

#: 99.9 % of chi-square with 15 degrees of freedom.
MOST_CHI_SQUARE = 37.7


def toy_job(seed: int) -> Job:
    command = Prompt(ids=[0], n_gen=9, sampling=Sampling(temperature=TEMPERATURE, seed=seed))
    job = Job(Submit("a", command, Flags(), 0.0, np.array([0], np.int32)), 99, frozenset(), lambda: 0.0)
    job.take(0)
    return job


def drawn_by(tree_behind: Callable[[int], DraftTree], best_only: bool = False) -> float:
    """Chi-square of pairs of tokens behind token 0, against the law of the model."""
    counts = np.zeros((4, 4))
    for seed in range(DRAWS):
        job = toy_job(seed)
        while len(job.produced) < 3:
            tree = tree_behind(job.produced[-1])
            logits = TOY[tree.tokens].astype(np.float32)
            tokens = NextTokens(
                [job] * len(tree), HostOutputs(logits, np.arange(len(tree))), 0, paths_of([tree])
            )
            found = walk(job, tree, tokens, 0)
            taken = found.tokens
            if best_only:  # a walk that follows the best token and draws the last one only
                row = tree.child(0, int(np.argmax(TOY[job.produced[-1]])))
                taken = taken[:1] if row is None else (int(tree.tokens[row]), tokens.of(row)[0])
            for token in taken:
                job.take(token)
        counts[job.produced[1], job.produced[2]] += 1
    law = np.exp(TOY / TEMPERATURE)
    law /= law.sum(axis=1, keepdims=True)
    expected = DRAWS * law[0][:, None] * law
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("name", ["plain", "chain", "tree", "wrong"])
def test_p30_field_report_37_tokens_are_drawn_by_the_law_of_the_model(name: str) -> None:
    """A vocabulary of 4, 4,000 pairs at temperature 0.8; the draft is greedy, the target draws."""
    best = [int(np.argmax(row)) for row in TOY]
    trees: dict[str, Callable[[int], DraftTree]] = {
        "plain": root_only,
        "chain": lambda root: chain(root, [best[root], best[best[root]]]),
        "tree": lambda root: build_tree(
            root, np.array([[best[root], 3, 0], [2, 1, 3]], np.int32),
            np.array([[-0.1, -2, -3], [-0.5, -1, -2]], np.float32), 8,
        ),
        "wrong": lambda root: chain(root, [int(np.argmin(TOY[root])), 0]),
    }  # fmt: skip
    assert drawn_by(trees[name]) < MOST_CHI_SQUARE
    if name == "chain":
        assert drawn_by(trees[name], best_only=True) > 10 * MOST_CHI_SQUARE


def test_field_report_39_the_seed_decides_the_text_whatever_guesses(model: Path) -> None:
    """The same seed twice: the same text; another one: another text; with each kind of draft."""
    texts: set[tuple[int, ...]] = set()
    for seed in (1, 1, 2):
        sampling = Sampling(temperature=1.0, seed=seed)
        plainly = SchedulerRig(model).answer(0, TEXTS[0], 30, sampling=sampling)
        for drafter in drafters([plainly]).values():
            assert (
                SchedulerRig(model, drafters=[drafter]).answer(0, TEXTS[0], 30, sampling=sampling) == plainly
            )
        texts.add(tuple(plainly))
    assert len(texts) == 2
