"""The two forms of the delta rule, and the convolution along ancestors, on random numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.ops.numpy_delta_net import BLOCK, ancestors, blocks, chain, chunk, convolve, decays, unit

Array = npt.NDArray[np.float32]
N_HEADS, SIZE = 6, 16


def inputs(seed: int, n: int, decay: float) -> tuple[Array, ...]:
    """q, k, v, g, beta of n rows; keys of length 1, matrices lose up to `decay` of the logarithm in a row."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, n, N_HEADS, SIZE), dtype=np.float32)
    g = -decay * rng.random((n, N_HEADS), dtype=np.float32)
    return unit(q) * np.float32(SIZE**-0.5), unit(k), v, g, rng.random((n, N_HEADS), dtype=np.float32)


@pytest.mark.parametrize("decay", [0, 0.1, 1, 50])
@pytest.mark.parametrize("n", [BLOCK, 16, 7, 1])
def test_the_chunked_form_is_the_recurrent_one(decay: float, n: int) -> None:
    """Also where the decay of a block is far below what a float32 can hold."""
    m = np.random.default_rng(9).standard_normal((N_HEADS, SIZE, SIZE), dtype=np.float32)
    one, other = m.copy(), m.copy()
    out_one, out_other = np.empty((2, n, N_HEADS, SIZE), np.float32)
    given = inputs(3, n, decay)
    chain(one, *given, out_one)
    chunk(other, *given, out_other)
    np.testing.assert_allclose(out_other, out_one, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


def test_the_recurrent_form_is_the_formula() -> None:
    q, k, v, g, beta = (x.astype(np.float64) for x in inputs(4, 5, 0.5))
    m, out = np.zeros((N_HEADS, SIZE, SIZE)), np.empty((5, N_HEADS, SIZE))
    chain(m, q, k, v, g, beta, out)
    expected = np.zeros((N_HEADS, SIZE, SIZE))
    for row in range(5):
        for head in range(N_HEADS):
            decayed = np.exp(g[row, head]) * expected[head]
            d = beta[row, head] * (v[row, head] - decayed.T @ k[row, head])
            expected[head] = decayed + np.outer(k[row, head], d)
            np.testing.assert_allclose(out[row, head], expected[head].T @ q[row, head], rtol=1e-12)
    np.testing.assert_allclose(m, expected, rtol=1e-12)


def test_blocks_start_and_end_at_absolute_multiples() -> None:
    assert [(b.start, b.stop) for b in blocks(0, 130)] == [(0, 64), (64, 128), (128, 130)]
    assert [(b.start, b.stop) for b in blocks(100, 100)] == [(0, 28), (28, 92), (92, 100)]
    assert [(b.start, b.stop) for b in blocks(63, 1)] == [(0, 1)]


def test_taps_lie_on_the_ancestors() -> None:
    """Rows 0 1 2 of a tree: 1 and 2 are children of 0. Numbers 0 1 2 are the committed inputs."""
    places = ancestors(np.array([-1, 0, 0, 2], np.int32), 4)
    assert places.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [2, 3, 5, 6]]
    given = np.random.default_rng(1).standard_normal((7, 5)).astype(np.float32)
    kernel = np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    expected = np.einsum("ktc,ct->kc", given[places], kernel)
    np.testing.assert_allclose(
        convolve(given, places, kernel), expected / (1 + np.exp(-expected)), rtol=1e-5, atol=1e-6
    )


def test_softplus_of_large_numbers() -> None:
    a = np.array([[-100, 0, 19.9, 20.1, 1e4]], np.float32)
    g = decays(a, np.full(5, -2, np.float32), np.zeros(5, np.float32))
    np.testing.assert_allclose(g, -2 * np.logaddexp(0, a.astype(np.float64)), rtol=1e-6, atol=1e-30)
