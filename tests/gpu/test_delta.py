"""kernels/delta.cu: the recurrent delta rule on chains and trees, and commits, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from slotd.daemon.ops.cuda_delta import Inputs
from tests.gpu.delta_rig import (
    BIG,
    LAYER,
    N_LAYER,
    SIZES,
    Numbers,
    Part,
    Rig,
    Sizes,
    assert_bits,
    assert_close,
    chain,
    random_matrices,
    random_tail,
    random_tree,
    recurrent,
)

#: The hardware's 2^x is off by 1e-7 in each of up to 64 rows.
LIMIT = 1e-5


def check(
    s: Sizes, parts: list[Part], strongest: float = 1.0, *, chains: bool = False, padding: int = 0
) -> None:
    rng = np.random.default_rng(5)
    numbers = Numbers.random(s, sum(map(len, parts)), rng, strongest)
    o, written = Rig(s).run_delta(parts, numbers, chains=chains, padding=padding)
    start = 0
    for number, part in enumerate(parts):
        rows = slice(start, start + len(part))
        expected, last = recurrent(part, numbers.take(rows), s)
        assert_close(o[rows], expected, LIMIT, f"part {number} o", floor=0.05)
        matrices = written[number]
        if part.write:
            assert matrices is not None
            assert_close(matrices, last, LIMIT, f"part {number} matrices")
        start += len(part)


@pytest.mark.parametrize("strongest", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("s", SIZES, ids=str)
def test_step(s: Sizes, strongest: float) -> None:
    rng = np.random.default_rng(6)
    single = [Part([-1], random_matrices(s, rng), write=True) for _ in range(3)] + [Part([-1], write=True)]
    check(s, single, strongest, padding=4)
    trees = [Part(random_tree(n, rng), random_matrices(s, rng) if n % 2 else None) for n in (1, 9, 2, 31)]
    check(s, trees, strongest, padding=5)
    check(s, [Part(chain(23), random_matrices(s, rng), write=True)], strongest)
    check(s, [Part(chain(63), write=True), Part(chain(17), write=True)], strongest, chains=True)


@pytest.mark.parametrize("shape", ["full", "star", "comb", "random"])
def test_trees_of_64(shape: str) -> None:
    s, rng = SIZES[6], np.random.default_rng(7)
    parents = {
        "full": [-1, *((row - 1) // 2 for row in range(1, 64))],
        "star": [-1] * 64,
        "comb": [-1, *(row - 1 - (row % 2 == 0) for row in range(1, 64))],
        "random": random_tree(64, rng),
    }[shape]
    check(s, [Part(parents, random_matrices(s, rng))])


def test_the_big_shape() -> None:
    rng = np.random.default_rng(8)
    check(BIG, [Part(random_tree(23, rng), random_matrices(BIG, rng))], padding=1)
    check(BIG, [Part([-1], random_matrices(BIG, rng), write=True) for _ in range(11)])


@pytest.mark.parametrize("s", [SIZES[0], SIZES[3], SIZES[4], SIZES[6]], ids=str)
def test_a_row_depends_on_its_path_only(s: Sizes) -> None:
    rng = np.random.default_rng(9)
    part, other = Part(random_tree(23, rng), random_matrices(s, rng)), Part(random_tree(11, rng))
    numbers = Numbers.random(s, 34, rng)
    rig = Rig(s)
    together, _ = rig.run_delta([other, part], numbers, padding=3)
    assert_bits(rig.run_delta([other, part], numbers)[0], together, "again")
    mine = numbers.take(slice(11, None))
    assert_bits(rig.run_delta([part], mine)[0], together[11:], "alone")
    for row in (0, 9, 17, 22):
        path, matrices = part.path(row), part.matrices
        for at in path:
            o, (matrices,) = rig.run_delta([Part([-1], matrices, write=True)], mine.take([at]))
        assert_bits(o[0], together[11 + row], f"row {row} step by step")
        as_chain, (behind,) = rig.run_delta(
            [Part(chain(len(path)), part.matrices, write=True)], mine.take(path), chains=True
        )
        assert_bits(as_chain[-1], together[11 + row], f"row {row} as a chain")
        assert behind is not None
        assert matrices is not None
        assert_bits(behind, matrices, f"state behind row {row}")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("s", [SIZES[0], SIZES[2], SIZES[4], SIZES[6]], ids=str)
def test_commit_replays_a_path(s: Sizes, in_place: bool) -> None:
    """All layers at once, several sequences, paths of any length, none included."""
    rng = np.random.default_rng(10)
    parts = [
        Part(random_tree(n, rng), random_matrices(s, rng), random_tail(s, rng), True) for n in (12, 1, 7, 5)
    ]
    rows = [11, 0, 3, None]  # ends of the paths; the last one's is empty
    paths = [[] if row is None else part.path(row) for part, row in zip(parts, rows, strict=True)]
    n, rig = sum(map(len, parts)), Rig(s)
    numbers, u = Numbers.random(s, n, rng), rng.standard_normal((n, s.channels)).astype(np.float32)
    held, room = [], n + 2
    for array in (u, numbers.k, numbers.v, numbers.g, numbers.beta):
        layers = np.full((N_LAYER, room, *array.shape[1:]), 0.25, np.float32)
        layers[LAYER, :n] = array
        held.append(rig.up(layers, np.float32))
    placed = rig.sequences(parts, [len(path) for path in paths])
    if in_place:
        placed.new = placed.old
        placed.held.append(rig.up([rig.at(block) for block in placed.old], np.uint64))
        placed.sequences.write = rig.at(placed.held[-1])
    path_rows = np.full(n, -1, np.int32)
    starts = np.cumsum([0, *map(len, parts)])[:-1]
    for first, path in zip(starts, paths, strict=True):
        path_rows[first : first + len(path)] = path
    path_block = rig.up(path_rows, np.int32)
    rig.delta.delta_commit(
        Inputs(*map(rig.at, held)), room, placed.sequences, rig.at(path_block), len(parts) + 2
    )
    for first, part, path, block in zip(starts, parts, paths, placed.new, strict=True):
        tail, matrices = rig.views(rig.down(block, -1))
        expected = part.matrices
        for at in path:
            _, (expected,) = rig.run_delta([Part([-1], expected, write=True)], numbers.take([first + at]))
        assert expected is not None
        assert part.tail is not None
        assert_bits(matrices, expected, f"matrices behind {path}")
        inputs = np.concatenate([part.tail, u[[first + at for at in path]]]) if path else part.tail
        assert_bits(tail, inputs[len(inputs) - len(part.tail) :].copy(), f"tail behind {path}")
    for block in held:
        rig.device.download(block)
