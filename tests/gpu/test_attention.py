"""kernels/attention.cu: right against NumPy, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slotd.daemon.ops.cuda_attention_shape import AttentionShape
from slotd.daemon.weights.kv_formats import TQ3_PARTNERS
from tests.gpu.attention_rig import Call, CupyDevice, Rig, Timeline, path_to, queries, random_parents

SHAPES = {"smollm": (9, 3, 64), "23b": (40, 8, 128), "one": (1, 1, 128), "mqa": (16, 1, 64)}

#: Tested by test_attention_256.py.
WIDE_HEADS = {"27b": (24, 4, 256), "4b": (16, 4, 256), "0.8b": (8, 2, 256)}
TYPES = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
TQ3_PAIRS = [("tq3_0", v) for v in TQ3_PARTNERS["K"]] + [
    (k, "tq3_0") for k in TQ3_PARTNERS["V"] if k != "tq3_0"
]
CONTEXTS = (0, 1, 62, 63, 64, 65, 127, 500, 511, 512, 513, 1025, 5000)


def make_rig(
    shape: str, k_type: str = "f16", v_type: str = "f16", device: object = None, seed: int = 0
) -> Rig:
    n_head, n_head_kv, dim = (SHAPES | WIDE_HEADS)[shape]
    return Rig(AttentionShape(n_head, n_head_kv, dim, dim, k_type, v_type), device or CupyDevice(), seed)


def make_call(rig: Rig, committed: int, n: int, seed: int, tree: bool = False, spread: float = 1.0) -> Call:
    rng = np.random.default_rng((seed, committed, n))
    timeline = Timeline.random(rig.shape, committed + n, rng)
    parents = random_parents(n, rng) if tree else None
    q = queries(rig.shape, n, rng, spread)
    return Call(timeline.take(slice(committed)), timeline.take(slice(committed, None)), q, parents)


def alone(call: Call, row: int) -> Call:
    """A row decoded by itself after its path was committed."""
    parents = call.parents or list(range(-1, len(call.rows) - 1))
    path = path_to(row, parents)
    return Call(call.committed + call.rows.take(path[:-1]), call.rows.take([row]), call.q[[row]])


def assert_close(got: np.ndarray, expected: np.ndarray, limit: float, what: object = "") -> None:
    worst = float(np.abs(got - expected).max())
    assert worst < limit, (
        f"{what}: off by {worst} at {np.unravel_index(np.abs(got - expected).argmax(), got.shape)}"
    )


def assert_same_bits(got: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    differing = got.view(np.uint32) != expected.view(np.uint32)
    first = np.argwhere(differing)[:5].tolist()
    assert not differing.any(), f"{what}: {differing.sum()} of {differing.size} words differ, at {first}"


@pytest.mark.parametrize("shape", SHAPES)
def test_one_row_at_every_kind_of_length(shape: str) -> None:
    rig = make_rig(shape)
    for committed in CONTEXTS:
        call = make_call(rig, committed, 1, 1)
        assert_close(rig.run([call]), rig.expected([call]), 2e-3, committed)


@pytest.mark.parametrize("shape", ["smollm", "23b"])
@pytest.mark.parametrize("n", [2, 7, 16, 23, 64])
def test_trees_and_chains(shape: str, n: int) -> None:
    rig = make_rig(shape)
    for committed, tree in itertools.product((0, 60, 700), (False, True)):
        call = make_call(rig, committed, n, 2, tree)
        assert_close(rig.run([call]), rig.expected([call]), 2e-3, (committed, tree))


def test_sharp_scores() -> None:
    rig = make_rig("23b")
    call = make_call(rig, 700, 5, 3, True, spread=8.0)
    assert_close(rig.run([call]), rig.expected([call]), 2e-2)


@pytest.mark.parametrize(("k_type", "v_type"), list(itertools.product(TYPES, TYPES)))
def test_every_pair_of_types(k_type: str, v_type: str) -> None:
    for shape, n in (("smollm", 1), ("23b", 6)):
        rig = make_rig(shape, k_type, v_type)
        call = make_call(rig, 570, n, 4, tree=n > 1)
        assert_close(rig.run([call]), rig.expected([call]), 4e-3, (shape, n))


@pytest.mark.parametrize(("k_type", "v_type"), TQ3_PAIRS)
def test_rotated_types(k_type: str, v_type: str) -> None:
    rig = make_rig("23b", k_type, v_type)
    for n in (1, 6):
        call = make_call(rig, 570, n, 4, tree=n > 1)
        together = rig.run([call])
        assert_close(together, rig.expected([call]), 4e-3, n)
        assert_same_bits(rig.run([alone(call, n - 1)])[0], together[n - 1], n)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("shape", ["smollm", "23b"])
@pytest.mark.parametrize("committed", [1, 63, 64, 511, 512, 513, 5000])
def test_bits_of_a_row_do_not_depend_on_its_neighbours(shape: str, kv_type: str, committed: int) -> None:
    """One row alone = each row of trees of 2 .. 64 rows, over tile and page edges, siblings included."""
    rig = make_rig(shape, kv_type, kv_type)
    for n in (2, 7, 16, 23, 64):
        call = make_call(rig, committed, n, 5, tree=True)
        together = rig.run([call])
        for row in sorted({0, 1, n // 2, n - 2, n - 1}):
            assert_same_bits(rig.run([alone(call, row)])[0], together[row], (n, row))


def test_chains_are_decoded_one_by_one() -> None:
    rig = make_rig("23b")
    call = make_call(rig, 440, 64, 6)
    together = rig.run([call])
    for row in (0, 7, 8, 63):
        assert_same_bits(rig.run([alone(call, row)])[0], together[row], row)


def test_sequences_side_by_side() -> None:
    rig = make_rig("smollm")
    calls = [
        make_call(rig, committed, n, 7, tree)
        for committed, n, tree in ((0, 1, False), (700, 20, True), (63, 7, False), (1500, 1, False))
    ]
    together = rig.run(calls, bucket=32)
    separate = np.concatenate([rig.run([call]) for call in calls])
    assert_same_bits(together, separate)


def test_graph_bucket_page_numbers_and_repetition_change_nothing() -> None:
    rig = make_rig("23b")
    call = make_call(rig, 900, 3, 8, True)
    first = rig.run([call])
    for bucket in (4, 16, 64):
        assert_same_bits(rig.run([call], bucket=bucket), first, bucket)
    assert_same_bits(rig.run([call], context=250_000), first, "another context bucket")
    rig.most_single = 0
    assert_same_bits(rig.run([call]), first, "splits in one piece")
    for seed in (1, 2):
        assert_same_bits(make_rig("23b", seed=seed).run([call]), first, "other pages")


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    rig = make_rig("smollm")
    call = make_call(rig, 100, 23, 9, True)
    clean = rig.run([call])
    broken = make_call(rig, 100, 23, 9, True)
    parents = broken.parents or []
    broken.q[5] = np.nan
    broken.rows.v[6] = np.inf
    broken.rows.k[7] = np.nan
    spoiled = rig.run([broken])
    for row in range(23):
        path = path_to(row, parents)
        if row != 5 and 6 not in path and 7 not in path:
            assert_same_bits(spoiled[row], clean[row], row)
    assert np.isnan(spoiled[5]).all()
    assert not np.isfinite(spoiled[6]).any()
    assert np.isnan(spoiled[7]).all()


def test_a_long_context() -> None:
    rig = make_rig("one")
    call = make_call(rig, 140_000, 1, 10)
    assert_close(rig.run([call]), rig.expected([call]), 1e-3)
    few = make_call(rig, 140_000, 3, 10, True)
    assert_same_bits(rig.run([alone(few, 2)])[0], rig.run([few])[2])
