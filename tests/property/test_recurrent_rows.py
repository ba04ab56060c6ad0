"""Rows of a model with recurrent layers: P19, P20, P27, P28 of the reference, and where a state can be had.

In exact mode what took the same way has the same bits. A prompt that is cut inside of a block of 64 takes
another way: there, and by default, results are equal up to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from tests.fakes.row_calls import FEW, TOKENS, Logits, filled, root_path, run, trees

DATA = Path(__file__).parents[1] / "golden" / "data"
cuts = st.one_of(st.integers(1, 149), st.sampled_from([1, 63, 64, 65, 127, 128, 149]))


@dataclass(frozen=True)
class Rig:
    """An engine, and what "the same" means for it."""

    engine: Engine
    exact: bool

    def assert_same(self, actual: Logits, expected: Logits) -> None:
        if self.exact:
            assert actual.tobytes() == expected.tobytes()
        else:
            assert_close(actual, expected)

    def assert_same_state(self, actual: Sequence, expected: Sequence) -> None:
        assert actual.tokens == expected.tokens
        self.assert_same(state_of(actual), state_of(expected))


def assert_close(actual: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3 * max(1, np.abs(expected).max()))


def state_of(sequence: Sequence) -> Logits:
    flat: Logits = np.zeros(0, np.float32) if sequence.state is None else sequence.state.flat
    return flat


@pytest.fixture(
    scope="module",
    params=[("qwen35-mtp", False), ("qwen35-mtp", True), ("qwen35", True)],
    ids=["default", "exact", "more-value-heads-exact"],
)
def rig(request: pytest.FixtureRequest) -> Rig:
    name, exact = request.param
    with open_model(DATA / f"{name}.gguf") as file:
        return Rig(Engine(file, NumpyBackend(exact=exact)), exact)


@pytest.fixture(autouse=True)
def all_is_closed(rig: Rig) -> Iterator[None]:
    """Whatever a test opens is gone at its end, and with it every state."""
    yield
    assert rig.engine.memory.live("state") == 0


@pytest.mark.parametrize("piece", [1, 7, 64, 100, 128])
def test_p20_piece_size_does_not_change_logits(rig: Rig, piece: int) -> None:
    engine = rig.engine
    whole, sequence = engine.open(), engine.open()
    expected = run(engine, whole, TOKENS[:150])
    actual = run(engine, sequence, TOKENS[:150], piece=piece)
    if piece % 64:
        assert_close(actual, expected)
        assert_close(state_of(sequence), state_of(whole))
    else:
        rig.assert_same(actual, expected)
        rig.assert_same_state(sequence, whole)
    for done in (whole, sequence):
        engine.close(done)


@FEW
@given(cut=cuts)
def test_p19_restore_continues_as_if_nothing_had_happened(rig: Rig, cut: int) -> None:
    engine = rig.engine
    plain = engine.open()
    run(engine, plain, TOKENS[:cut])
    source = engine.open()
    first = run(engine, source, TOKENS[:cut])
    engine.snapshot(0, source, first[-1])
    run(engine, source, TOKENS[300:340])  # another continuation: the slot must not see it
    run(engine, source, TOKENS[340:343], Kind.STEP, 1)
    engine.close(source)

    restored = engine.restore(0)
    rig.assert_same_state(restored, plain)
    expected = run(engine, plain, TOKENS[cut:150])
    rig.assert_same(run(engine, restored, TOKENS[cut:150]), expected)
    for sequence in (plain, restored):
        engine.close(sequence)


@FEW
@given(tree=trees(most=16), length=st.integers(0, 150))
def test_p27_a_tree_row_equals_its_root_path_alone(
    rig: Rig, tree: tuple[list[int], list[int]], length: int
) -> None:
    engine = rig.engine
    ids, parents = tree
    sequence = filled(engine, TOKENS[:length])
    logits = engine.forward(Rows.tree(sequence, ids, parents), Kind.STEP).logits
    for row in range(len(ids)):
        alone = engine.fork(sequence)
        chain = Rows.chain(alone, [ids[i] for i in root_path(parents, row)])
        rig.assert_same(logits[row], engine.forward(chain, Kind.STEP).logits[0])
        engine.close(alone)
    engine.close(sequence)


@FEW
@given(tree=trees(most=16), length=st.integers(0, 150), data=st.data())
def test_p28_after_a_commit_only_the_committed_tokens_have_been_seen(
    rig: Rig, tree: tuple[list[int], list[int]], length: int, data: st.DataObject
) -> None:
    engine = rig.engine
    ids, parents = tree
    path = root_path(parents, data.draw(st.integers(-1, len(ids) - 1), label="last accepted row"))
    sequence, plain = filled(engine, TOKENS[:length]), filled(engine, TOKENS[:length])
    engine.forward(Rows.tree(sequence, ids, parents), Kind.STEP)
    engine.commit(sequence, path)
    if path:
        run(engine, plain, [ids[i] for i in path], Kind.STEP, piece=1)
        rig.assert_same_state(sequence, plain)
    more = TOKENS[200:270]
    rig.assert_same(run(engine, sequence, more), run(engine, plain, more))
    for done in (sequence, plain):
        engine.close(done)


@FEW
@given(
    parts=st.lists(st.tuples(st.integers(0, 140), trees(most=8)), min_size=2, max_size=4),
    kind=st.sampled_from(Kind),
)
def test_sequences_in_one_call_equal_each_alone(
    rig: Rig, parts: list[tuple[int, tuple[list[int], list[int]]]], kind: Kind
) -> None:
    engine = rig.engine
    calls, alone = [], []
    for length, (ids, parents) in parts:
        sequence = filled(engine, TOKENS[:length])
        chain = Rows.chain(sequence, ids, logits="all")
        calls.append(chain if kind is Kind.PROMPT else Rows.tree(sequence, ids, parents))
    for rows in calls:
        alone.append(engine.forward(rows, kind).logits)
        engine.drop(rows.sequences[0])
    rig.assert_same(engine.forward(Rows.join(calls), kind).logits, np.concatenate(alone))
    for rows in calls:
        engine.close(rows.sequences[0])


def test_a_state_is_had_where_it_was_and_nowhere_else(rig: Rig) -> None:
    engine = rig.engine
    sequence = filled(engine, TOKENS[:70])
    for length in (1, 64, 69):
        with pytest.raises(ValueError, match=f"state behind {length} of 70 tokens is not there"):
            engine.fork(sequence, length)
        with pytest.raises(ValueError, match="is not there"):
            engine.snapshot(0, sequence, length=length)
        with pytest.raises(ValueError, match="is not there"):
            engine.truncate(sequence, length)
    assert (len(sequence), len(engine.fork(sequence, 0))) == (70, 0)
    expected = run(engine, filled(engine, TOKENS[:70]), TOKENS[70:80])
    rig.assert_same(run(engine, sequence, TOKENS[70:80]), expected)
    engine.truncate(sequence, 0)
    rig.assert_same(run(engine, sequence, TOKENS[:70]), run(engine, engine.open(), TOKENS[:70]))
    for each in list(engine._sequences):
        engine.close(each)


def test_a_prompt_is_committed_as_a_whole(rig: Rig) -> None:
    engine = rig.engine
    sequence = engine.open()
    engine.forward(Rows.chain(sequence, TOKENS[:10]), Kind.PROMPT)
    with pytest.raises(ValueError, match=r"^3 of 10 rows of a prompt: recurrent layers commit all or none$"):
        engine.commit(sequence, range(3))
    engine.commit(sequence, [])
    assert sequence.state is None
    engine.close(sequence)


operations = st.one_of(
    st.tuples(st.just("prompt"), st.integers(1, 90)),
    st.tuples(st.just("tree"), trees(most=8), st.integers(-1, 7)),
    st.sampled_from([("restore", "device"), ("restore", "host"), ("fork",), ("drop",)]),
)


@FEW
@given(history=st.lists(operations, min_size=2, max_size=7))
def test_any_history_ends_where_its_committed_tokens_do(
    rig: Rig, history: list[tuple[str, Any, Any]]
) -> None:
    """Prompts, accepted paths, slots that come back, forks and dropped rows, in any order."""
    engine, sequence = rig.engine, rig.engine.open()
    engine.host_tier.budget = 1 << 20
    for name, *what in history:
        if name == "prompt":
            run(engine, sequence, TOKENS[len(sequence) : len(sequence) + what[0]])
        elif name == "tree":
            (ids, parents), accepted = what
            engine.forward(Rows.tree(sequence, ids, parents), Kind.STEP)
            engine.commit(sequence, root_path(parents, min(accepted, len(ids) - 1)))
        elif name == "drop":
            engine.forward(Rows.chain(sequence, [1, 2, 3]), Kind.PROMPT)
            engine.drop(sequence)
        else:
            source = sequence
            if name == "restore":
                engine.snapshot(0, source, tier=what[0])
            else:
                sequence = engine.fork(source)
            run(engine, source, [7, 8, 9], Kind.STEP)  # what comes behind must not be seen
            engine.close(source)
            sequence = engine.restore(0) if name == "restore" else sequence
    alone = filled(engine, sequence.tokens.tolist())
    if len(alone):
        assert_close(state_of(sequence), state_of(alone))
    more = TOKENS[200:210]
    assert_close(run(engine, sequence, more), run(engine, alone, more))
    for done in (sequence, alone):
        engine.close(done)
