"""qwen models on the GPU: beside NumPy, the same bits in any company, from slots, after commits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from tests.bench.model_shapes import PRESETS, cut_down
from tests.bench.synthetic_gguf import write_synthetic
from tests.gpu.device_numbers import HeldModel
from tests.gpu.same_bits import cuda_engine, decode
from tests.gpu.test_model import path_to, random_tree

DATA = Path(__file__).parents[1] / "golden" / "data"


def run(engine: Engine, sequence: Sequence, tokens: list[int], piece: int, kind: Kind) -> np.ndarray:
    """Commit tokens in pieces; the logits of all."""
    found = []
    for start in range(0, len(tokens), piece):
        rows = Rows.chain(sequence, tokens[start : start + piece], logits="all")
        found.append(engine.forward(rows, kind).logits)
        engine.commit(sequence, range(len(rows)))
    return np.concatenate(found)


PIECES = [(150, Kind.PROMPT), (64, Kind.PROMPT), (7, Kind.PROMPT), (16, Kind.STEP), (1, Kind.STEP)]


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "qwen35-mtp"])
def test_golden_models(name: str) -> None:
    """Beside NumPy with weights as the device has them. Heads of 32 numbers: only K/V of float32 take them.

    Rounding the weights to halves alone moves logits of qwen35 by 0.07 of their spread: its gated norm makes
    much of little. NumPy is held against the golden logits in tests/golden.
    """
    path = DATA / f"{name}.gguf"
    with np.load(DATA / f"{name}.npz") as file:
        tokens = file["input_ids"].tolist()
    with open_model(path) as model:
        host = Engine(HeldModel.of(model), NumpyBackend())
    engine = cuda_engine(path, "f32", max_ctx=256)
    expected = run(host, host.open(), tokens, 64, Kind.PROMPT)
    worst = {}
    for piece, kind in PIECES:
        got = run(engine, engine.open(), tokens, piece, kind)
        worst[piece, kind.name] = float(np.abs(got - expected).max() / expected.std())
    print(f"{name}: largest errors of the logits' spread {worst}")
    assert max(worst.values()) < 2e-3, worst


@pytest.fixture(scope="module", params=["golden", "cut"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The golden model, and one with the heads of the published ones."""
    if request.param == "golden":
        return cuda_engine(DATA / "qwen35.gguf", "f32", max_ctx=512)
    return cuda_engine(cut_model(tmp_path_factory.mktemp("models") / "cut.gguf"), "q8_0", max_ctx=1024)


def cut_model(path: Path) -> Path:
    return write_synthetic(path, cut_down(PRESETS["qwen35-27b"], layers=4, width=1024, vocab=4096), seed=3)


def test_a_model_with_published_heads_beside_numpy(tmp_path: Path) -> None:
    path = cut_model(tmp_path / "cut.gguf")
    with open_model(path) as file:
        host = Engine(file, NumpyBackend(), k_type="f16", v_type="f16", max_ctx=512)
    device = cuda_engine(path, "f16", max_ctx=512)
    tokens = np.random.default_rng(1).integers(300, 4000, 200).tolist()
    expected = run(host, host.open(), tokens, 128, Kind.PROMPT)
    for piece, kind in ((200, Kind.PROMPT), (64, Kind.PROMPT), (23, Kind.STEP)):
        error = np.abs(run(device, device.open(), tokens, piece, kind) - expected).max() / expected.std()
        print(f"{kind.name} in pieces of {piece}: {error:.4f}")
        assert error < 0.05, (piece, kind)


def some_ids(engine: Engine, n: int, seed: int) -> list[int]:
    n_vocab = engine.hyper.n_vocab
    return np.random.default_rng(seed).integers(10, n_vocab - 10, n).tolist()


@pytest.mark.parametrize("committed", [0, 5, 64, 130])
def test_rows_of_trees_are_their_paths_and_commits_follow_them(hybrid: Engine, committed: int) -> None:
    base = hybrid.open()
    if committed:
        run(hybrid, base, some_ids(hybrid, committed, 1), 64, Kind.PROMPT)
    for n in (2, 7, 23, 64):
        parents, tokens = random_tree(n, n), some_ids(hybrid, n, seed=n)
        tree = hybrid.fork(base)
        logits = hybrid.forward(Rows.tree(tree, tokens, parents), Kind.STEP).logits.copy()
        row = n - 1
        path = path_to(parents, row)
        alone = hybrid.fork(base)
        plain = decode(hybrid, alone, [tokens[i] for i in path])
        for at, expected in zip(path, plain, strict=True):
            assert logits[at].tobytes() == expected, (n, at)
        hybrid.forward(Rows.tree(tree, tokens, parents), Kind.STEP)
        hybrid.commit(tree, path)
        behind = some_ids(hybrid, 6, seed=99)
        assert decode(hybrid, tree, behind) == decode(hybrid, alone, behind), n
        hybrid.close(tree)
        hybrid.close(alone)


def test_sequences_side_by_side_slots_and_pieces(hybrid: Engine) -> None:
    texts = [some_ids(hybrid, n, seed=n) for n in (1, 63, 64, 200)]
    sequences = [hybrid.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        run(hybrid, sequence, text, 64, Kind.PROMPT)
    tokens = some_ids(hybrid, 4, seed=5)
    together = hybrid.forward(Rows.next_tokens(sequences, tokens), Kind.STEP).logits.copy()
    for sequence, text, token, expected in zip(sequences, texts, tokens, together, strict=True):
        for piece in (64, 128, 1024):
            other = hybrid.open()
            run(hybrid, other, text, piece, Kind.PROMPT)
            hybrid.snapshot(0, other, None)
            restored = hybrid.restore(0)
            assert decode(hybrid, other, [token]) == [expected.tobytes()], (len(text), piece)
            assert decode(hybrid, restored, [token]) == [expected.tobytes()], (len(text), piece)
            hybrid.close(other)
            hybrid.close(restored)
        hybrid.close(sequence)


def greedy(engine: Engine, sequence: Sequence, token: int, n: int) -> list[int]:
    """The next n tokens, each the best behind the one before."""
    found = []
    for _ in range(n):
        ids, finite = engine.forward(Rows.next_tokens([sequence], [token]), Kind.STEP).greedy()
        engine.commit(sequence, [0])
        assert finite[0]
        token = int(ids[0])
        found.append(token)
    return found


def test_foreseen_steps_leave_the_states_of_those_that_were_not(hybrid: Engine) -> None:
    base, other = hybrid.open(), hybrid.open()
    run(hybrid, base, some_ids(hybrid, 60, 1), 64, Kind.PROMPT)
    run(hybrid, other, some_ids(hybrid, 5, 2), 64, Kind.PROMPT)
    foreseen, plain = hybrid.fork(base), hybrid.fork(base)
    tokens, token = greedy(hybrid, foreseen, 17, 30), 17
    for expected in tokens:
        assert greedy(hybrid, plain, token, 1) == [expected]
        token = expected
        hybrid.forward(Rows.next_tokens([other], [19]), Kind.STEP)  # keeps the runner from looking ahead
        hybrid.drop(other)
    # Another token than the best, then a tree, a snapshot and a restore, where one step was foreseen.
    for then in ([23], some_ids(hybrid, 7, 3)):
        assert decode(hybrid, foreseen, then) == decode(hybrid, plain, then)
        hybrid.snapshot(0, foreseen)
        restored = hybrid.restore(0)
        expected_tokens = greedy(hybrid, plain, 29, 8)
        assert greedy(hybrid, foreseen, 29, 8) == expected_tokens
        assert greedy(hybrid, restored, 29, 8) == expected_tokens
        hybrid.close(restored)
    for sequence in (base, other, foreseen, plain):
        hybrid.close(sequence)


def test_a_state_goes_to_the_host_and_back(hybrid: Engine) -> None:
    store = hybrid.recurrence.store
    assert store is not None
    sequence = hybrid.open()
    run(hybrid, sequence, some_ids(hybrid, 100, 3), 64, Kind.PROMPT)
    data = np.zeros(store.n_bytes, np.uint8)
    store.read(sequence.state, data)
    assert data.any()
    again = np.zeros_like(data)
    store.read(store.write(data, "snapshot"), again)
    assert again.tobytes() == data.tobytes()
    hybrid.close(sequence)
