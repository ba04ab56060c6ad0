"""kernels/attention_256.cu: heads of 256 numbers, steps and prompts, in the shapes of the hybrid models."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.attention_rig import Rig, Timeline, queries
from tests.gpu.test_attention import (
    TQ3_PAIRS,
    TYPES,
    alone,
    assert_close,
    assert_same_bits,
    make_call,
    make_rig,
)
from tests.gpu.test_attention_prompt import pieces

SHAPES = ("27b", "4b", "0.8b")


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_at_every_kind_of_length(shape: str) -> None:
    rig = make_rig(shape, "q8_0", "f16")
    for committed, n in itertools.product((0, 63, 64, 511, 513, 1025), (1, 2, 5)):
        call = make_call(rig, committed, n, 1, tree=n > 1)
        assert_close(rig.run([call]), rig.expected([call]), 3e-3, (committed, n))


@pytest.mark.parametrize("n", [2, 16, 23, 64])
def test_trees_and_chains(n: int) -> None:
    rig = make_rig("27b")
    for committed, tree in itertools.product((60, 700), (False, True)):
        call = make_call(rig, committed, n, 2, tree)
        assert_close(rig.run([call]), rig.expected([call]), 2e-3, (committed, tree))


@pytest.mark.parametrize(("k_type", "v_type"), [*itertools.product(TYPES, TYPES), *TQ3_PAIRS])
def test_every_pair_of_types(k_type: str, v_type: str) -> None:
    rig = make_rig("0.8b", k_type, v_type)
    for n in (1, 3, 6):
        call = make_call(rig, 130, n, 4, tree=n > 1)
        assert_close(rig.run([call]), rig.expected([call]), 4e-3, n)
    call = make_call(rig, 90, 140, 5)
    assert_close(rig.run([call], step=False), rig.expected([call]), 4e-3, "prompt")


@pytest.mark.parametrize(
    ("kv_type", "committed"),
    [*itertools.product(("f16", "q8_0", "tq3_0"), (63, 513, 1100)), ("bf16", 513), ("q5_1", 513)],
)
def test_bits_of_a_row_do_not_depend_on_its_neighbours(kv_type: str, committed: int) -> None:
    """One row alone = each row of trees: both step kernels, whole splits and single tiles."""
    rig = make_rig("27b", kv_type, kv_type)
    for n in (2, 23, 64):
        call = make_call(rig, committed, n, 5, tree=True)
        together = rig.run([call])
        for row in (0, n - 1):
            assert_same_bits(rig.run([alone(call, row)])[0], together[row], (n, row))
        rig.most_single = 0
        assert_same_bits(rig.run([call], bucket=64, context=250_000), together, "splits in one piece")
        rig.most_single = 200


def test_sequences_side_by_side() -> None:
    rig = make_rig("27b", "q8_0", "q4_0")
    calls = [
        make_call(rig, committed, n, 7, tree)
        for committed, n, tree in ((0, 1, False), (700, 20, True), (63, 7, False), (1500, 1, False))
    ]
    separate = np.concatenate([rig.run([call]) for call in calls])
    assert_same_bits(rig.run(calls, bucket=32), separate)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    rig = make_rig("27b", "q8_0", "f16")
    call, broken = (make_call(rig, 100, 5, 9) for _ in range(2))
    broken.q[2] = np.nan
    broken.rows.v[4] = np.inf
    clean, spoiled = rig.run([call]), rig.run([broken])
    for row in (0, 1, 3):
        assert_same_bits(spoiled[row], clean[row], row)
    assert np.isnan(spoiled[2]).all()
    assert not np.isfinite(spoiled[4]).any()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_piece_size_of_a_prompt_changes_no_bit(kv_type: str) -> None:
    rig = make_rig("4b", kv_type, kv_type)
    rng = np.random.default_rng(3)
    timeline, q = Timeline.random(rig.shape, 700, rng), queries(rig.shape, 700, rng)
    timeline.v *= 10.0 ** rng.integers(-3, 3, (700, 1, 1))
    whole = pieces(rig, timeline, q, 2048)
    for size in (64, 77, 333):
        assert_same_bits(pieces(rig, timeline, q, size), whole, size)


def test_a_prompt_against_numpy_and_the_step() -> None:
    rig = make_rig("27b", "q8_0", "q8_0")
    for committed, n in ((0, 1), (63, 129), (700, 300)):
        call = make_call(rig, committed, n, 1)
        assert_close(rig.run([call], step=False), rig.expected([call]), 3e-3, (committed, n))
    call = make_call(rig, 600, 40, 5)
    assert_close(rig.run([call], step=False), rig.run([call]), 2e-3)


def test_queries_behind_which_their_gates_stand() -> None:
    """The same bits as without gates, from rows that have them."""
    for step, kv_type in ((True, "q8_0"), (False, "f16")):
        rig = make_rig("0.8b", kv_type, kv_type)
        call = make_call(rig, 300, 5, 11)
        gated = Rig(replace(rig.shape, gated=True), rig.device, rig.seed)
        assert_same_bits(gated.run([call], step=step), rig.run([call], step=step), step)
