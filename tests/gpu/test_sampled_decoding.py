"""Sampled tokens of a whole model on the GPU: those of the logits, whatever stands beside them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.backend import HostOutputs
from slotd.daemon.cuda_backend import CudaBackend
from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.link import Flags, Submit
from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice
from slotd.daemon.next_token import NextTokens
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model
from slotd.protocol.messages import Prompt, Sampling
from tests.bench.synthetic_gguf import Shape, write_synthetic

N_VOCAB, STEPS, PROMPT = 33_024, 20, 40

#: A random model is flat: at 0.4 its nucleus has the size of a real one's at 0.8, at 1 more than a third.
FIELDS: list[dict[str, Any]] = [
    {"sampling": Sampling(temperature=0.4, top_p=0.95, seed=1)},
    {"sampling": Sampling(temperature=0.4, seed=2), "logprobs": 5},
    {"sampling": Sampling(temperature=1.0, top_k=40, seed=3), "logprobs": 20},
    {"sampling": Sampling(temperature=0.4, min_p=0.1, repetition_penalty=1.3, seed=4), "logprobs": 1},
    {"sampling": Sampling(frequency_penalty=0.5, presence_penalty=0.2)},
    {"sampling": Sampling(logit_bias=((5, 3.0), (N_VOCAB - 1, 40.0)))},
    {"min_tokens": 9, "stop": tuple(range(300))},
    {"logprobs": 3},
    {"sampling": Sampling(temperature=20.0, seed=5)},  # flat: most rows are read
    {},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    shape = Shape(3, 576, 1536, 9, 3, 64, N_VOCAB, 8192, 1e5, "Q4_1", tied=True)
    path = write_synthetic(Path(tmp_path_factory.mktemp("models")) / "small.gguf", shape, seed=7)
    with open_model(path) as file:
        return Engine(file, CudaBackend(CudaMemory(CupyDevice())), k_type="f16", v_type="f16", max_ctx=1024)


def started(engine: Engine, number: int) -> Job:
    """A job whose prompt is computed but for its last token."""
    ids = np.random.default_rng(number).integers(300, 30_000, PROMPT).astype(np.int32)
    command = Prompt(ids=ids.tolist(), n_gen=500, **({"sampling": Sampling()} | FIELDS[number]))
    job = Job(Submit(f"r{number}", command, Flags(), 0.0, ids), 1024, frozenset(), time.monotonic)
    job.sequence = engine.open()
    engine.forward(Rows.chain(job.sequence, ids[:-1].tolist(), logits="none"), Kind.PROMPT)
    engine.commit(job.sequence, range(PROMPT - 1))
    return job


def watch_fetches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of rows of each fetch of logits."""
    runner, fetched = engine._runner, list[int]()
    fetch = runner.fetch  # type: ignore[attr-defined]

    def watched(logits: Any, n: int) -> Any:
        fetched.append(n)
        return fetch(logits, n)

    monkeypatch.setattr(runner, "fetch", watched)
    return fetched


def step(engine: Engine, jobs: list[Job]) -> Any:
    """The outputs of one row of each job."""
    last = [job.history[-1] for job in jobs]
    outputs = engine.forward(Rows.next_tokens([job.running_sequence for job in jobs], last), Kind.STEP)
    for row, job in enumerate(jobs):
        engine.commit(job.running_sequence, [row])
    return outputs


def test_tokens_are_those_of_the_logits_and_those_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [started(engine, number) for number in range(len(FIELDS))]
    read, fetched = [0] * len(jobs), watch_fetches(engine, monkeypatch)
    scores: dict[int, list[Any]] = {number: [] for number in range(len(jobs))}
    for _ in range(STEPS):
        outputs = step(engine, jobs)
        tokens, found = NextTokens(jobs, outputs), []
        for number in range(len(jobs)):
            fetched.clear()
            found.append(tokens.of(number))
            read[number] += len(fetched)
        here = HostOutputs(outputs.logits, outputs.rows)  # behind all: what was fetched once is kept
        for number, (job, (token, logprobs)) in enumerate(zip(jobs, found, strict=True)):
            expected, expected_logprobs = NextTokens([job], here, number).of(0)
            assert token == expected, (number, FIELDS[number])
            for got, want in zip(logprobs, expected_logprobs, strict=True):
                assert [id for id, _ in got.top] == [id for id, _ in want.top], FIELDS[number]
                assert got.logprob == pytest.approx(want.logprob, rel=1e-6, abs=1e-12)
                assert dict(got.top) == pytest.approx(dict(want.top), rel=1e-6, abs=1e-12)
            scores[number].append(logprobs)
            job.take(token)
    print("rows read:", read)
    assert sum(read[:8]) <= 8, read
    assert read[8] > STEPS // 2, read
    assert read[9] == 0, read
    for number, together in enumerate(jobs):
        alone = started(engine, number)
        for _ in range(STEPS):
            token, logprobs = NextTokens([alone], step(engine, [alone])).of(0)
            assert logprobs == scores[number][len(alone.produced)]
            alone.take(token)
        assert alone.produced == together.produced, FIELDS[number]
        engine.close(alone.running_sequence)
        engine.close(together.running_sequence)


def test_nothing_is_foreseen_for_sampled_tokens_and_greedy_ones_still_are(engine: Engine) -> None:
    """Even where the tokens are the best ones: what runs behind a step would hold up its candidates."""
    steps = engine._runner._steps  # type: ignore[attr-defined]
    foreseen = {}
    for number in (7, 9):
        job = started(engine, number)
        foreseen[number] = 0
        for _ in range(STEPS):
            outputs = step(engine, [job])
            foreseen[number] += steps._ahead is not None
            job.take(NextTokens([job], outputs).of(0)[0])
        engine.close(job.running_sequence)
    assert foreseen[7] == 0, foreseen
    assert foreseen[9] >= STEPS - 2, foreseen


def test_logits_that_a_prompt_leaves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    job = started(engine, 2)
    rows = Rows.chain(job.running_sequence, [job.history[-1]], logits="last")
    outputs = engine.forward(rows, Kind.PROMPT)
    fetched = watch_fetches(engine, monkeypatch)
    token, _ = NextTokens([job], outputs).of(0)
    assert fetched == []
    assert token == NextTokens([job], HostOutputs(outputs.logits, outputs.rows)).of(0)[0]
    engine.close(job.running_sequence)
