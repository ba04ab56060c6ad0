"""Forward and commit over rows: P19, P20, P27, P28 of the reference, and rows of several sequences.

In exact mode everything is compared bit by bit; by default up to float32 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from tests.fakes.row_calls import FEW, N_CTX, N_VOCAB, TOKENS, Logits, filled, root_path, run, trees
from tests.fakes.tiny_gguf import write_tiny_llama

lengths = st.one_of(st.integers(1, 200), st.sampled_from([1, 63, 64, 65, 127, 128, 129]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, one block, and 2 kv heads for 6 heads, so that groups are of three."""
    path = tmp_path_factory.mktemp("rows") / "tiny.gguf"
    return write_tiny_llama(path, n_embd=192, n_head=6, n_head_kv=2, n_ctx=N_CTX, n_vocab=N_VOCAB)


#: By K/V type: rounding to float16 turns a difference in the last bit of a float32 into one of 2^-11. In a
#: block it may become a whole step, so blocks are compared in exact mode only.
TOLERANCE = {"f32": 1e-4, "f16": 2e-3}

EXACT_RIGS = ("f32-exact", "f16-exact", "q8_0-exact", "q4_0-exact")


@dataclass(frozen=True)
class Rig:
    """An engine, and what "the same" means for it."""

    engine: Engine
    exact: bool
    tolerance: float

    def assert_same(self, actual: Logits, expected: Logits) -> None:
        if self.exact:
            assert actual.tobytes() == expected.tobytes()
        else:
            largest = np.abs(expected).max()
            np.testing.assert_allclose(actual, expected, rtol=self.tolerance, atol=self.tolerance * largest)

    def assert_same_stored(self, sequence: Sequence, expected: Sequence) -> None:
        assert sequence.tokens == expected.tokens
        if self.exact:
            assert stored(self.engine, sequence) == stored(self.engine, expected)


@pytest.fixture(scope="module", params=["f32", "f16", *EXACT_RIGS])
def rig(request: pytest.FixtureRequest, model: Path) -> Rig:
    kv, _, exact = request.param.partition("-")
    with open_model(model) as file:
        return Rig(
            Engine(file, NumpyBackend(exact=bool(exact)), k_type=kv, v_type=kv),
            bool(exact),
            TOLERANCE.get(kv, 0),
        )


only_exact = pytest.mark.parametrize("rig", EXACT_RIGS, indirect=True)


def stored(engine: Engine, sequence: Sequence) -> bytes:
    """The committed K and V as stored bytes."""
    places = [engine.store.place(sequence.pages[i // 64], i % 64) for i in range(len(sequence))]
    return b"".join(k.tobytes() + v.tobytes() for k, v in places)


@FEW
@given(length=lengths, pieces=st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_p20_piece_size_does_not_change_logits(rig: Rig, length: int, pieces: list[int]) -> None:
    engine = rig.engine
    whole = engine.open()
    expected = run(engine, whole, TOKENS[:length], Kind.PROMPT)
    for piece in pieces:
        sequence = engine.open()
        rig.assert_same(run(engine, sequence, TOKENS[:length], Kind.PROMPT, piece=piece), expected)
        rig.assert_same_stored(sequence, whole)
        engine.close(sequence)
    engine.close(whole)


@pytest.mark.parametrize("cut", [1, 64, 99, 100, 128, 149, 150])
def test_p19_restore_continues_as_if_nothing_had_happened(rig: Rig, cut: int) -> None:
    """Prefill in pieces of 100, snapshot at every kind of cut: 1, page edge, piece edge, len-1, len."""
    engine = rig.engine
    plain = engine.open()
    expected = run(engine, plain, TOKENS[:150], Kind.PROMPT, piece=100)
    answer = run(engine, plain, TOKENS[150:170], Kind.STEP, piece=1)

    source = engine.open()
    first = run(engine, source, TOKENS[:cut], Kind.PROMPT, piece=100)
    engine.snapshot(0, source, first[-1])
    run(engine, source, TOKENS[300:340], Kind.PROMPT)  # another continuation: the slot must not see it
    engine.close(source)

    restored = engine.restore(0)
    kept = engine.slots[0].logits
    assert kept is not None
    rig.assert_same(kept, expected[cut - 1])
    if cut < 150:
        rest = run(engine, restored, TOKENS[cut:150], Kind.PROMPT, piece=100)
        rig.assert_same(rest, expected[cut:])
    rig.assert_same(run(engine, restored, TOKENS[150:170], Kind.STEP, piece=1), answer)
    for sequence in (plain, restored):
        engine.close(sequence)


@FEW
@given(tree=trees(most=20), length=st.integers(0, 150))
def test_p27_a_tree_row_equals_its_root_path_alone(
    rig: Rig, tree: tuple[list[int], list[int]], length: int
) -> None:
    engine = rig.engine
    ids, parents = tree
    sequence = filled(engine, TOKENS[:length])
    logits = engine.forward(Rows.tree(sequence, ids, parents), Kind.STEP).logits
    for row in range(len(ids)):
        path = root_path(parents, row)
        alone = engine.fork(sequence)
        chain = Rows.chain(alone, [ids[i] for i in path])
        rig.assert_same(logits[row], engine.forward(chain, Kind.STEP).logits[0])
        engine.close(alone)
    engine.close(sequence)


@FEW
@given(tree=trees(most=20), length=st.integers(0, 150), data=st.data())
def test_p28_after_a_commit_only_the_committed_tokens_have_been_seen(
    rig: Rig, tree: tuple[list[int], list[int]], length: int, data: st.DataObject
) -> None:
    engine = rig.engine
    ids, parents = tree
    row = data.draw(st.integers(0, len(ids) - 1), label="last accepted row")
    path = root_path(parents, row)
    sequence = filled(engine, TOKENS[:length])
    engine.forward(Rows.tree(sequence, ids, parents), Kind.STEP)
    engine.commit(sequence, path)

    plain = filled(engine, TOKENS[:length])
    run(engine, plain, [ids[i] for i in path], Kind.STEP, piece=1)
    rig.assert_same_stored(sequence, plain)
    more = TOKENS[200:270]
    rig.assert_same(run(engine, sequence, more, Kind.PROMPT), run(engine, plain, more, Kind.PROMPT))
    for done in (sequence, plain):
        engine.close(done)


@FEW
@given(
    parts=st.lists(st.tuples(st.integers(0, 140), trees(most=12)), min_size=2, max_size=4),
    kind=st.sampled_from(Kind),
)
def test_sequences_in_one_call_equal_each_alone(
    rig: Rig, parts: list[tuple[int, tuple[list[int], list[int]]]], kind: Kind
) -> None:
    engine = rig.engine
    calls = []
    for length, (ids, parents) in parts:
        sequence = filled(engine, TOKENS[:length])
        chain = Rows.chain(sequence, ids, logits="all")
        calls.append(chain if kind is Kind.PROMPT else Rows.tree(sequence, ids, parents))
    alone = []
    for rows in calls:
        alone.append(engine.forward(rows, kind).logits)
        engine.drop(rows.sequences[0])
    rig.assert_same(engine.forward(Rows.join(calls), kind).logits, np.concatenate(alone))
    for rows in calls:
        engine.close(rows.sequences[0])


@only_exact
@FEW
@given(length=lengths, cuts=st.lists(st.integers(0, 200), min_size=1, max_size=3))
def test_forks_are_copies_on_write(rig: Rig, length: int, cuts: list[int]) -> None:
    """Whatever forks and their source write afterwards, each sees its own tokens only."""
    engine = rig.engine
    source = filled(engine, TOKENS[:length])
    before = stored(engine, source)
    family = [source] + [engine.fork(source, min(cut, length)) for cut in cuts]
    for number, member in enumerate(family):
        run(engine, member, TOKENS[300 + number : 370 + number], Kind.PROMPT, piece=33)
    for number, member in enumerate(family):
        kept = len(member) - 70
        alone = filled(engine, TOKENS[:kept])
        run(engine, alone, TOKENS[300 + number : 370 + number], Kind.PROMPT)
        assert stored(engine, member) == stored(engine, alone)
        shared = len(before) // length * kept
        assert stored(engine, member)[:shared] == before[:shared]
        engine.close(alone)
    for member in family:
        engine.close(member)
    assert engine.store.pages.n_used == len(held_by_slots(engine))


def held_by_slots(engine: Engine) -> set[int]:
    return {page for slot in engine.slots.values() for page in slot.pages}
