"""Whole models with rows of whole numbers: the same bits for a row in any company, near the exact logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.rows import Kind, Rows
from tests.bench.synthetic_gguf import write_synthetic
from tests.gpu.same_bits import SHAPES, cuda_engine, decode, ids, prefill
from tests.gpu.test_model import path_to, random_tree

CONTEXTS = (1, 64, 513)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    return write_synthetic(path, SHAPES[request.param], seed=7)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return cuda_engine(model, "f16", math="q8")


def test_a_row_alone_is_the_row_in_company(engine: Engine) -> None:
    for context in CONTEXTS:
        base, _ = prefill(engine, ids(context))
        tokens = ids(64, seed=context)
        alone = decode(engine, engine.fork(base), tokens)
        for n in (2, 7, 16, 23, 32, 64):
            together = engine.forward(Rows.chain(base, tokens[:n], logits="all"), Kind.STEP).logits
            assert [row.tobytes() for row in together] == alone[:n], (context, n)
        engine.drop(base)


def test_a_row_of_a_tree_is_its_path_alone(engine: Engine) -> None:
    base, _ = prefill(engine, ids(64))
    parents, tokens = random_tree(23, 5), ids(23, seed=6)
    logits = engine.forward(Rows.tree(base, tokens, parents), Kind.STEP).logits
    for row in range(23):
        alone = decode(engine, engine.fork(base), [tokens[i] for i in path_to(parents, row)])
        assert logits[row].tobytes() == alone[-1], row


def test_the_size_of_prompt_pieces_does_not_matter(engine: Engine) -> None:
    tokens = ids(1000)
    results = []
    for chunk in (2048, 192, 64, 300):
        sequence, logits = prefill(engine, tokens, chunk)
        results.append((logits.tobytes(), *decode(engine, sequence, ids(2, seed=1))))
    assert len(set(results)) == 1


def test_logits_are_near_the_exact_ones(model: Path, engine: Engine) -> None:
    """Prompts are computed exactly, steps are not."""
    results = []
    for one in (engine, cuda_engine(model, "f16")):
        sequence, prompt = prefill(one, ids(300))
        (step,) = decode(one, sequence, [77])
        results.append((prompt, np.frombuffer(step, np.float32)))
    (prompt, rounded), (same, plain) = results
    assert prompt.tobytes() == same.tobytes()
    off = np.linalg.norm(rounded - plain) / np.linalg.norm(plain)
    assert 0 < off < 0.1, off
