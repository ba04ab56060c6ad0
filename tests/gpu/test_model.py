"""Whole models on the GPU: against NumPy, and the same bits for a row in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from tests.bench.synthetic_gguf import write_synthetic
from tests.gpu.same_bits import CONTEXTS, SHAPES, cuda_engine, decode, ids, prefill, rows_unlike_alone


@pytest.fixture(scope="module", params=sorted(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    return write_synthetic(path, SHAPES[request.param], seed=7, outlier=3)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def even_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the outlier, beside which float32 and halves soon go different ways."""
    path = tmp_path_factory.mktemp("models") / f"even-{request.param}.gguf"
    return write_synthetic(path, SHAPES[request.param], seed=7)


@pytest.fixture(scope="module", params=["f16", "q8_0", "q4_0"])
def engine(request: pytest.FixtureRequest, model: Path) -> Engine:
    return cuda_engine(model, request.param)


def random_tree(n: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [-1 if i == 0 else int(rng.integers(max(-1, i - 6), i)) for i in range(n)]


def path_to(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_logits_are_those_of_numpy(even_model: Path, kv: str) -> None:
    with open_model(even_model) as file:
        host = Engine(file, NumpyBackend(), k_type=kv, v_type=kv, max_ctx=1024)
    device = cuda_engine(even_model, kv, 1024)
    tokens = ids(300)
    expected = host.forward(Rows.chain(host.open(), tokens, logits="all"), Kind.PROMPT).logits
    got = device.forward(Rows.chain(device.open(), tokens, logits="all"), Kind.PROMPT).logits
    error = np.abs(got - expected).max() / expected.std()
    assert error < 0.1, error
    margins = np.diff(np.sort(expected, axis=1)[:, -2:], axis=1)[:, 0]
    clear = margins > 0.2 * expected.std()
    assert (got.argmax(axis=1) == expected.argmax(axis=1))[clear].all()
    sequence, _ = prefill(device, tokens[:299])
    step = device.forward(Rows.chain(sequence, tokens[299:]), Kind.STEP)
    assert np.abs(step.logits[0] - expected[299]).max() / expected.std() < 0.1
    ids_, finite = step.greedy()
    assert finite.all()
    assert ids_[0] == step.logits[0].argmax()


def test_fast_prompts_are_near_the_exact_ones(even_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotd.daemon.ops.cuda_unpack.LEAST_WEIGHTS", 1)
    tokens = ids(600)
    found = []
    for math in ("exact", "fast"):
        engine = cuda_engine(even_model, "f16", 1024, math)
        rows = Rows.chain(engine.open(), tokens, logits="all")
        found.append(engine.forward(rows, Kind.PROMPT).logits)
    error = np.abs(found[1] - found[0]).max() / found[0].std()
    assert 0 < error < 0.1, error  # 0: the library was not used


def test_a_row_of_a_chain_is_its_path_alone(engine: Engine) -> None:
    """test_fold_order.py shows that this check sees an order of sums that depends on the launch."""
    assert rows_unlike_alone(engine) == []


def test_a_row_of_a_tree_is_its_path_alone(engine: Engine) -> None:
    for context in CONTEXTS:
        base, _ = prefill(engine, ids(context))
        for n in (7, 23, 64):
            parents, tokens = random_tree(n, context), ids(n, seed=n)
            logits = engine.forward(Rows.tree(base, tokens, parents), Kind.STEP).logits
            for row in range(0, n, 1 if n < 64 else 7):
                path = path_to(parents, row)
                alone = decode(engine, engine.fork(base), [tokens[i] for i in path])
                assert logits[row].tobytes() == alone[-1], (context, n, row)


def test_a_committed_path_goes_on_like_plain_decoding(engine: Engine) -> None:
    for context in (1, 62, 511, 5000):
        base, _ = prefill(engine, ids(context))
        parents, tokens = random_tree(23, context + 1), ids(23, seed=4)
        path = path_to(parents, 22)
        tree, plain = engine.fork(base), engine.fork(base)
        engine.forward(Rows.tree(tree, tokens, parents), Kind.STEP)
        engine.commit(tree, path)
        decode(engine, plain, [tokens[i] for i in path])
        after = ids(10, seed=5)
        assert decode(engine, tree, after) == decode(engine, plain, after), context


def test_sequences_together_are_each_alone(engine: Engine) -> None:
    bases = [prefill(engine, ids(n, seed=n))[0] for n in (1, 64, 700, 5000)]
    tokens = [ids(n, seed=9) for n in (1, 5, 3, 1)]
    parts = [Rows.chain(base, t, logits="all") for base, t in zip(bases, tokens, strict=True)]
    together = [row.tobytes() for row in engine.forward(Rows.join(parts), Kind.STEP).logits]
    alone = [
        bits for base, t in zip(bases, tokens, strict=True) for bits in decode(engine, engine.fork(base), t)
    ]
    assert together == alone


def test_the_size_of_prompt_pieces_does_not_matter(engine: Engine) -> None:
    tokens = ids(5000)
    results = []
    for chunk in (2048, 192, 64, 2048):
        sequence, logits = prefill(engine, tokens, chunk)
        results.append((logits.tobytes(), *decode(engine, sequence, ids(2, seed=1))))
    assert len(set(results)) == 1


def greedy(engine: Engine, sequence: Sequence, token: int, n: int) -> list[int]:
    """n tokens of plain greedy decoding behind `token`: from the third on they are foreseen."""
    found = []
    for _ in range(n):
        outputs = engine.forward(Rows.next_tokens([sequence], [token]), Kind.STEP)
        engine.commit(sequence, [0])
        token = int(outputs.greedy()[0][0])
        found.append(token)
    return found


def test_foreseen_steps_are_those_that_were_not(engine: Engine) -> None:
    """Other rows in between keep the runner from looking ahead; the tokens are the same."""
    for context in (1, 60, 500, 4080):  # over page edges, and into the next context bucket
        base, _ = prefill(engine, ids(context))
        other, _ = prefill(engine, ids(5))
        foreseen = greedy(engine, engine.fork(base), 7, 40)
        plain, token, sequence = [], 7, engine.fork(base)
        for _ in range(40):
            token = greedy(engine, sequence, token, 1)[0]
            plain.append(token)
            engine.forward(Rows.next_tokens([other], [9]), Kind.STEP)
            engine.drop(other)
        assert foreseen == plain, context


def test_what_was_foreseen_for_another_text_is_not_used(engine: Engine) -> None:
    base, _ = prefill(engine, ids(100))
    sequence = engine.fork(base)
    tokens = greedy(engine, sequence, 7, 8)
    # Another token than the best, a snapshot in between, a shorter text that grows again to the same length.
    wrong = decode(engine, sequence, [11])
    assert wrong == decode(engine, rebuilt(engine, base, [7, *tokens[:7]]), [11])
    engine.snapshot(0, sequence)
    after = greedy(engine, sequence, 12, 6)
    assert after == greedy(engine, rebuilt(engine, base, [7, *tokens[:7], 11]), 12, 6)
    engine.truncate(sequence, 104)
    for token in ids(len(tokens) + 7, seed=8):
        decode(engine, sequence, [token])
    expected = rebuilt(engine, base, [7, *tokens[:3], *ids(len(tokens) + 7, seed=8)])
    assert greedy(engine, sequence, 3, 5) == greedy(engine, expected, 3, 5)
    restored = engine.restore(0)
    assert decode(engine, restored, [12]) == decode(engine, rebuilt(engine, base, [7, *tokens[:7], 11]), [12])


def rebuilt(engine: Engine, base: Sequence, tokens: list[int]) -> Sequence:
    """A sequence of its own with these tokens behind a base, computed one by one."""
    sequence = engine.fork(base)
    decode(engine, sequence, tokens)
    return sequence


def test_four_sequences_that_are_decoded_together(engine: Engine) -> None:
    bases = [prefill(engine, ids(n, seed=n))[0] for n in (1, 64, 700, 63)]
    alone = [greedy(engine, engine.fork(base), 7, 20) for base in bases]
    sequences, tokens = [engine.fork(base) for base in bases], [7] * 4
    together: list[list[int]] = [[] for _ in bases]
    for _ in range(20):
        outputs = engine.forward(Rows.next_tokens(sequences, tokens), Kind.STEP)
        for row, sequence in enumerate(sequences):
            engine.commit(sequence, [row])
        tokens = outputs.greedy()[0].tolist()
        for row, token in enumerate(tokens):
            together[row].append(token)
    assert together == alone
