"""kernels/conv.cu: short convolution along ancestors, unit heads, beta and g, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.delta_rig import (
    BIG,
    SIZES,
    ConvNumbers,
    Numbers,
    Part,
    Rig,
    Sizes,
    assert_bits,
    assert_close,
    chain,
    convolved,
    random_tail,
    random_tree,
)


def make(s: Sizes, parts: list[Part], seed: int = 0) -> tuple[np.ndarray, ConvNumbers]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(map(len, parts)), s.channels + s.n_value_heads * (s.state_size + 2)))
    x[:, -2 * s.n_value_heads :] *= 8  # gates: far into both ends
    if len(x) > 2:
        x[1, : s.state_size] = 0  # a query of zeros, in the taps of three rows
        x[2, -1], x[2, -s.n_value_heads - 1] = 90, -95
    return x.astype(np.float32), ConvNumbers.random(s, rng)


def check(s: Sizes, parts: list[Part], *, step: bool, padding: int = 0, keep_u: bool = True) -> None:
    x, w = make(s, parts)
    rig = Rig(s)
    got, u, tails = rig.run_conv(parts, x, w, step=step, padding=padding, keep_u=keep_u)
    if keep_u:
        assert_bits(u, np.ascontiguousarray(x[:, : s.channels]), "u")
    else:
        assert np.isnan(u).all()
    start = 0
    for number, (part, tail) in enumerate(zip(parts, tails, strict=True)):
        rows = slice(start, start + len(part))
        expected, last = convolved(part, x[rows], w, s)
        for name in ("q", "k", "v", "g", "beta"):
            assert_close(getattr(got, name)[rows], getattr(expected, name), 3e-6, f"part {number} {name}")
        if part.write:
            assert tail is not None
            assert_bits(tail, last.astype(np.float32), f"part {number} tail")
        start += len(part)


@pytest.mark.parametrize("s", SIZES, ids=str)
def test_step(s: Sizes) -> None:
    rng = np.random.default_rng(1)
    trees = [
        Part(random_tree(n, rng), tail=random_tail(s, rng) if n % 2 else None, committed=n)
        for n in (1, 9, 2, 7)
    ]
    check(s, trees, step=True, padding=5)
    check(s, [Part(random_tree(64, rng), tail=random_tail(s, rng))], step=True)
    single = [Part([-1], tail=random_tail(s, rng), write=True) for _ in range(3)] + [Part([-1], write=True)]
    check(s, single, step=True, padding=4, keep_u=False)


@pytest.mark.parametrize("s", SIZES, ids=str)
def test_prompt(s: Sizes) -> None:
    rng = np.random.default_rng(2)
    lengths = (1, 2, 7, 8, 9, 37)
    parts = [Part(chain(n), tail=random_tail(s, rng) if n % 2 else None, write=True) for n in lengths]
    check(s, parts, step=False, keep_u=False)


def test_the_big_shape() -> None:
    rng = np.random.default_rng(3)
    check(BIG, [Part(random_tree(23, rng), tail=random_tail(BIG, rng))], step=True, padding=1)
    check(BIG, [Part(chain(70), tail=random_tail(BIG, rng), write=True)], step=False)


@pytest.mark.parametrize("s", [SIZES[0], SIZES[4], SIZES[6]], ids=str)
def test_a_row_depends_on_its_path_only(s: Sizes) -> None:
    rng = np.random.default_rng(4)
    tail = random_tail(s, rng)
    other = Part(random_tree(11, rng), tail=random_tail(s, rng))
    part = Part(random_tree(21, rng), tail=tail, committed=9)
    x, w = make(s, [other, part])
    rig = Rig(s)
    together, _, _ = rig.run_conv([other, part], x, w, step=True, padding=3)
    for row in (0, 5, 20):
        path = part.path(row)
        inputs = x[[11 + r for r in path]]
        prompt, _, _ = rig.run_conv([Part(chain(len(path)), tail=tail)], inputs, w, step=False)
        lone = tail
        for at in range(len(path)):
            one, _, (lone,) = rig.run_conv(
                [Part([-1], tail=lone, write=True)], inputs[at : at + 1], w, step=True
            )
        for a, b, c in zip(
            Numbers.arrays(together), Numbers.arrays(prompt), Numbers.arrays(one), strict=True
        ):
            assert_bits(a[11 + row], b[-1], f"row {row} as a prompt")
            assert_bits(a[11 + row], c[0], f"row {row} step by step")
