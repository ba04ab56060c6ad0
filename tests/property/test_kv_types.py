"""K/V types, in all pairs: stored bytes are made once and only ever copied (P52), and the pair runs (P53)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.kv.element_types import KV_TYPES
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.kv_formats import TQ3_PARTNERS
from slotd.daemon.weights.reader import open_model
from tests.fakes.row_calls import run
from tests.fakes.tiny_gguf import write_tiny_llama

TOKENS = np.random.default_rng(7).integers(0, 300, 400).tolist()
#: A tree and a path of it whose rows have to move.
PARENTS = [-1, 0, 0, 2, 1, 3, 5, -1]
PATH = [0, 2, 3, 5, 6]
#: Relative error of normally distributed numbers in each type.
ERRORS = {
    "f32": 0.0,
    "f16": 0.0002,
    "bf16": 0.0017,
    "q8_0": 0.0054,
    "q4_0": 0.086,
    "q4_1": 0.078,
    "q5_0": 0.043,
    "q5_1": 0.038,
    "tq3_0": 0.184,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of four blocks, which is one group of tq3_0."""
    path = tmp_path_factory.mktemp("kv") / "tiny.gguf"
    return write_tiny_llama(path, n_embd=256, n_head=2, n_head_kv=1)


@pytest.fixture(scope="module")
def expected(model: Path) -> npt.NDArray[np.float32]:
    """Logits with K and V in float32."""
    with open_model(model) as file:
        engine = Engine(file, NumpyBackend(exact=True))
    return run(engine, engine.open(), TOKENS[:80])


PAIRS = [
    (k, v)
    for k, v in itertools.product(KV_TYPES, KV_TYPES)
    if (k != "tq3_0" or v in TQ3_PARTNERS["K"]) and (v != "tq3_0" or k in TQ3_PARTNERS["V"])
]


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    k_type, v_type = request.param
    return k_type, v_type


@pytest.fixture
def engine(pair: tuple[str, str], model: Path) -> Engine:
    with open_model(model) as file:
        return Engine(file, NumpyBackend(exact=True), k_type=pair[0], v_type=pair[1])


def stored(engine: Engine, sequence: Sequence, n: int) -> list[bytes]:
    """Each of the first n places as stored bytes, K then V."""
    places = [engine.store.place(sequence.pages[i // 64], i % 64) for i in range(n)]
    return [k.tobytes() + v.tobytes() for k, v in places]


def test_p52_stored_bytes_survive_slots_copies_and_moves(engine: Engine) -> None:
    plain = engine.open()
    run(engine, plain, TOKENS[:100])
    before = stored(engine, plain, 100)
    engine.snapshot(0, plain)
    kept = engine.fork(plain, 70)
    assert np.isfinite(run(engine, plain, TOKENS[100:140])).all()  # the shared page is copied before this
    assert stored(engine, plain, 100) == before

    restored = engine.restore(0)
    assert stored(engine, restored, 100) == before
    run(engine, restored, TOKENS[100:140])
    assert stored(engine, restored, 140) == stored(engine, plain, 140)

    engine.forward(Rows.tree(kept, TOKENS[200:208], PARENTS), Kind.STEP)
    rows = stored(engine, kept, 78)
    engine.commit(kept, PATH)
    assert stored(engine, kept, 75) == [*before[:70], *(rows[70 + row] for row in PATH)]
    assert stored(engine, engine.restore(0), 100) == before


def test_p53_a_pair_changes_the_logits_as_much_as_it_rounds(
    engine: Engine, pair: tuple[str, str], expected: npt.NDArray[np.float32]
) -> None:
    """Not more, and not less: each type is used, for its own plane."""
    sequence = engine.open()
    found = run(engine, sequence, TOKENS[:80])
    stored_k, stored_v = engine.store.place(sequence.pages[0], 0)
    assert (stored_k.dtype, stored_v.dtype) == tuple(KV_TYPES[name].dtype for name in pair)
    error = np.sqrt(np.square(found - expected).mean() / np.square(expected).mean())
    rounding = np.hypot(ERRORS[pair[0]], ERRORS[pair[1]])
    assert rounding <= error <= 3 * rounding
