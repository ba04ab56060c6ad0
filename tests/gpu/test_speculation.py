"""Answers with guesses on the GPU are those without, token by token and bit by bit (field report 48)."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.draft_sources import NgramDrafter
from slotd.daemon.engine import Engine
from slotd.daemon.link import Emit, Finished, Flags, Submit, ToFront
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.speculation import Drafter
from slotd.protocol.messages import Prompt, Sampling
from tests.bench.model_shapes import PRESETS, cut_down
from tests.bench.synthetic_gguf import Shape, write_synthetic
from tests.fakes.drafters import ChainDrafter, TreeDrafter, guess_at_random, replay
from tests.gpu.same_bits import cuda_engine

N_VOCAB, N_GEN, MAX_CTX = 33_024, 48, 2048
TEXTS: list[list[int]] = np.random.default_rng(8).integers(300, 30_000, (4, 90)).tolist()
TEXTS[1] = [*TEXTS[1][:30]] * 3

#: Of the four requests that run at once.
WAYS: list[dict[str, Any]] = [
    {"sampling": Sampling(temperature=0.0)},
    {"sampling": Sampling(temperature=0.0, repetition_penalty=1.2), "logprobs": 3},
    {"sampling": Sampling(temperature=0.4, top_p=0.95, seed=1)},
    {"sampling": Sampling(temperature=0.4, frequency_penalty=0.5, seed=2), "logprobs": 2, "min_tokens": 9},
]

Answer = list[tuple[int, Any]]


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = Path(tmp_path_factory.mktemp("models")) / "small.gguf"
    if request.param == "llama":
        shape = Shape(3, 576, 1536, 9, 3, 64, N_VOCAB, 8192, 1e5, "Q4_1", tied=True)
        write_synthetic(path, shape, seed=7)
    else:
        write_synthetic(path, cut_down(PRESETS["qwen35-27b"], layers=4, width=1024, vocab=N_VOCAB), seed=7)
    return cuda_engine(path, "f16", max_ctx=MAX_CTX)


def answers(engine: Engine, drafters: SequenceOf[Drafter], adapts: bool = False) -> tuple[list[Answer], int]:
    """All four at once: tokens with their log-probabilities; and how many guesses were accepted."""
    found: list[Answer] = [[] for _ in TEXTS]
    ended: list[Finished] = []

    def deliver(message: ToFront) -> None:
        if isinstance(message, Emit):
            assert isinstance(message.key, int)
            assert message.at == len(found[message.key])
            scores = message.logprobs or (None,) * len(message.ids)
            found[message.key] += zip(message.ids, scores, strict=True)
        elif isinstance(message, Finished):
            ended.append(message)

    scheduler = Scheduler(
        engine, deliver, chunk=512, parallel=4, max_stall=0.06, eos_ids=frozenset(), drafters=drafters,
        adapts=adapts,
    )  # fmt: skip
    for number, (text, way) in enumerate(zip(TEXTS, WAYS, strict=True)):
        command = Prompt(ids=text, n_gen=N_GEN, **way)
        ids = np.array(text, np.int32)
        scheduler.put(Submit(number, command, Flags(), time.monotonic(), ids))
    while len(ended) < len(TEXTS):
        assert scheduler.turn()
    assert [each.status for each in ended] == ["length"] * len(TEXTS)
    while scheduler._retained.drop_oldest():
        pass
    return found, sum(int(str(each.account["accepted"])) for each in ended)


def test_field_report_48_any_guess_gives_the_plain_answers(engine: Engine) -> None:
    expected, _ = answers(engine, [])
    texts = {number: [token for token, _ in answer] for number, answer in enumerate(expected)}
    n_vocab = engine.hyper.n_vocab
    guesses: dict[str, tuple[Drafter, bool]] = {
        "right": (ChainDrafter(replay(texts, 7)), True),
        "right for two": (ChainDrafter(replay(texts, 7, wrong_from=2)), True),
        "wrong": (ChainDrafter(replay(texts, 7, wrong_from=0)), False),
        "tree": (TreeDrafter(replay(texts, 6), n_vocab, 4), True),
        "tree of 63": (TreeDrafter(replay(texts, 12), n_vocab, 5, budget=63), True),
        "tree at random": (TreeDrafter(guess_at_random(n_vocab, 5, 6), n_vocab, 7), False),
        "n-grams": (NgramDrafter(22), False),
    }
    for name, (drafter, hits) in guesses.items():
        for adapts in (False, True):
            found, accepted = answers(engine, [drafter], adapts)
            for number, (got, want) in enumerate(zip(found, expected, strict=True)):
                same = next(
                    (i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None
                )
                assert same is None, f"{name}, adapts {adapts}, request {number}: other from token {same} on"
            assert accepted > 0 or not hits or adapts, name
