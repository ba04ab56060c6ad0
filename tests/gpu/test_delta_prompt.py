"""kernels/delta_prompt.cu: the chunked delta rule of prompts against float64, and that cuts change no bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.delta_rig import (
    BIG,
    SIZES,
    Numbers,
    Part,
    Rig,
    Sizes,
    assert_bits,
    assert_close,
    chain,
    random_matrices,
    recurrent,
)

LIMIT = 3e-5


def prompt(n: int, committed: int, matrices: np.ndarray | None = None) -> Part:
    return Part(chain(n), matrices, write=True, committed=committed)


def check(s: Sizes, parts: list[Part], strongest: float = 1.0, columns: int = 0) -> None:
    numbers = Numbers.random(s, sum(map(len, parts)), np.random.default_rng(11), strongest)
    rig = Rig(s)
    if columns:
        rig.delta.columns = columns
    o, written = rig.run_prompt(parts, numbers)
    start = 0
    for number, part in enumerate(parts):
        rows = slice(start, start + len(part))
        expected, last = recurrent(part, numbers.take(rows), s)
        assert_close(o[rows], expected, LIMIT, f"part {number} o", floor=0.05)
        assert_close(written[number], last, LIMIT, f"part {number} matrices")
        start += len(part)


@pytest.mark.parametrize("strongest", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("s", SIZES, ids=str)
def test_against_the_recurrence(s: Sizes, strongest: float) -> None:
    rng = np.random.default_rng(12)
    check(s, [prompt(64, 0), prompt(128, 64, random_matrices(s, rng))], strongest)
    check(
        s,
        [prompt(200, 0), prompt(150, 100, random_matrices(s, rng)), prompt(1, 64), prompt(70, 5)],
        strongest,
    )


@pytest.mark.parametrize("columns", [32, 64])
def test_the_big_shape(columns: int) -> None:
    rng = np.random.default_rng(13)
    check(BIG, [prompt(135, 61, random_matrices(BIG, rng))], columns=columns)


def test_keys_that_are_all_alike() -> None:
    """Every row rewrites the same direction: the triangular system is at its worst."""
    s, rng = SIZES[6], np.random.default_rng(14)
    numbers = Numbers.random(s, 128, rng, 0.001)
    numbers.k[:] = numbers.k[:1]
    numbers.beta[:] = 0.999
    part = prompt(128, 0, random_matrices(s, rng))
    o, (written,) = Rig(s).run_prompt([part], numbers)
    expected, last = recurrent(part, numbers, s)
    assert_close(o, expected, 1e-4, "o", floor=0.05)
    assert_close(written, last, 1e-4, "matrices")


@pytest.mark.parametrize("s", [SIZES[0], SIZES[3], SIZES[4], SIZES[6]], ids=str)
def test_cuts_and_neighbours_change_no_bit(s: Sizes) -> None:
    rng = np.random.default_rng(15)
    part, other = prompt(300, 20, random_matrices(s, rng)), prompt(90, 0)
    numbers = Numbers.random(s, 390, rng)
    mine = numbers.take(slice(0, 300))
    rig = Rig(s)
    whole, (behind,) = rig.run_prompt([part], mine)
    for most_blocks in (1, 16):
        again, (same,) = rig.run_prompt([part], mine, most_blocks=most_blocks)
        assert_bits(again, whole, f"{most_blocks} blocks in a launch")
        assert_bits(same, behind, f"state, {most_blocks} blocks in a launch")
    together, (beside, _) = rig.run_prompt([part, other], numbers)
    assert_bits(together[:300], whole, "beside another sequence")
    assert_bits(beside, behind, "state, beside another sequence")
    matrices, at, pieces = part.matrices, 20, []
    for end in (64, 128, 256, 320):  # multiples of 64
        piece, (matrices,) = rig.run_prompt(
            [prompt(end - at, at, matrices)], mine.take(slice(at - 20, end - 20))
        )
        pieces.append(piece)
        at = end
    assert_bits(np.concatenate(pieces), whole, "in pieces")
    assert_bits(matrices, behind, "state, in pieces")


def test_both_widths_give_the_same_bits() -> None:
    s, rng = SIZES[6], np.random.default_rng(16)
    part, numbers, rig = (
        prompt(192, 0, random_matrices(SIZES[6], rng)),
        Numbers.random(SIZES[6], 192, rng),
        Rig(s),
    )
    found = []
    for rig.delta.columns in (32, 64):
        found.append(rig.run_prompt([part], numbers))
    assert_bits(found[0][0], found[1][0], "o")
    assert_bits(found[0][1][0], found[1][1][0], "matrices")


def test_rows_that_are_not_blocks_take_the_recurrent_form() -> None:
    """A device without room for the chunked form walks all rows; the same bits as step by step."""
    s, rng = SIZES[4], np.random.default_rng(17)
    part, numbers, rig = prompt(150, 30), Numbers.random(SIZES[4], 150, rng), Rig(s)
    o, (behind,) = rig.run_prompt([part], numbers, chunked=False)
    front, (state,) = rig.run_prompt([prompt(34, 30)], numbers.take(slice(0, 34)))
    assert_bits(o[:34], front, "rows in front of the first block")
    for first in (34, 98):
        rows = slice(first, min(first + 64, 150))
        n = rows.stop - rows.start
        piece, (state,) = rig.run_delta([Part(chain(n), state, write=True)], numbers.take(rows), chains=True)
        assert_bits(o[rows], piece, f"rows from {first}")
    assert_bits(behind, state, "state")
