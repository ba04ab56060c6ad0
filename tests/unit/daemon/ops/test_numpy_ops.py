"""The NumPy ops against plain float64 formulas, and the promises of exact mode."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.kv.batches import build_batch
from slotd.daemon.kv.element_types import kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.interface import Heads, RopeStyle
from slotd.daemon.ops.numpy_ops import BIG_WEIGHT, CHECKED_ROWS, NumpyOps
from slotd.daemon.rows import Rows
from slotd.daemon.sequence import Sequence
from slotd.protocol.errors import ConfigError

F32 = npt.NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture(params=[False, True], ids=["default", "exact"])
def ops(request: pytest.FixtureRequest) -> NumpyOps:
    return NumpyOps(DeviceMemory(), exact=request.param)


def test_embed(ops: NumpyOps) -> None:
    table = normal(10, 4)
    assert (ops.embed(np.array([3, 0, 9, 3], dtype=np.int32), table) == table[[3, 0, 9, 3]]).all()


def test_rms_norm(ops: NumpyOps) -> None:
    x, weight = normal(3, 64), normal(64, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(ops.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_needs_its_epsilon(ops: NumpyOps) -> None:
    assert (ops.rms_norm(np.zeros((1, 8), np.float32), np.ones(8, np.float32), 1e-5) == 0).all()


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize(("n_out", "n_in"), [(33, 20), (520, 512)])
def test_linear(ops: NumpyOps, n: int, n_out: int, n_in: int) -> None:
    x, weight = normal(n, n_in), normal(n_out, n_in, seed=1)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    y = ops.linear(x, weight)
    assert (y.shape, y.dtype) == ((n, n_out), np.float32)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n_out", "n_in"), [(33, 20), (48, 160), (320, 64), (520, 512), (1024, 576)])
def test_exact_linear_does_not_see_its_neighbours(n_out: int, n_in: int) -> None:
    ops = NumpyOps(DeviceMemory(), exact=True)
    x, weight = normal(70, n_in), normal(n_out, n_in, seed=1)
    alone = [ops.linear(x[i : i + 1], weight)[0].tobytes() for i in range(70)]
    for n in (2, 3, 4, 5, 8, 31, 64, 70):
        together = ops.linear(x[:n], weight)
        assert [row.tobytes() for row in together] == alone[:n]
    assert ops.linear(x[9:16], weight)[3].tobytes() == alone[12]


def test_check_exact_passes_here() -> None:
    ops = NumpyOps(DeviceMemory(), exact=True)
    weight = normal(1024, 576)
    assert weight.size >= BIG_WEIGHT
    ops.check_exact(weight)


def test_check_exact_finds_a_blas_that_mixes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = NumpyOps(DeviceMemory(), exact=True)
    honest = ops.linear

    def mixing(x: F32, weight: F32) -> F32:
        y: F32 = honest(x, weight)
        if len(x) == CHECKED_ROWS[-1]:
            y[0, 3] = np.nextafter(y[0, 3], np.float32(np.inf))
        return y

    monkeypatch.setattr(ops, "linear", mixing)
    with pytest.raises(ConfigError, match=r"--exact cannot be kept with this BLAS \(\S+ .*\).* 1 rows"):
        ops.check_exact(normal(1024, 576))


@pytest.mark.parametrize("dims", [16, 8])
def test_rope_styles(ops: NumpyOps, dims: int) -> None:
    n, heads, head_dim = 5, 3, 16
    positions = np.array([0, 1, 7, 100, 5000])
    rotations = ops.rope_table(10000.0, dims, None, 5001).at(positions)
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    for style, first, second in (
        ("interleaved", np.arange(0, dims, 2), np.arange(1, dims, 2)),
        ("half", np.arange(dims // 2), np.arange(dims // 2, dims)),
    ):
        fused = normal(n, 40 + heads * head_dim)  # as in a fused q, k, v: the heads of two rows are apart
        x = fused[:, 40:].reshape(n, heads, head_dim)
        a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
        expected = x.astype(np.float64)
        expected[..., first], expected[..., second] = a * cos - b * sin, a * sin + b * cos
        ops.rope(x, rotations, "interleaved" if style == "interleaved" else "half")
        np.testing.assert_allclose(x, expected, atol=1e-5)


@pytest.mark.parametrize("head_dim", [4, 16, 20, 64])
@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_rope_does_not_see_its_neighbours(ops: NumpyOps, head_dim: int, style: str) -> None:
    positions = np.arange(100, 109)
    rotations = ops.rope_table(10000.0, head_dim, None, 109).at(positions)
    for heads in (1, 3):
        together = normal(9, heads, head_dim)
        alone = together.copy()
        chosen = "interleaved" if style == "interleaved" else "half"
        ops.rope(together, rotations, chosen)
        for row in range(9):
            ops.rope(alone[row : row + 1], rotations[row : row + 1], chosen)
        assert together.tobytes() == alone.tobytes()


def test_swiglu(ops: NumpyOps) -> None:
    gate_up = normal(3, 40) * 5
    gate, up = gate_up[:, :20].astype(np.float64), gate_up[:, 20:].astype(np.float64)
    np.testing.assert_allclose(ops.swiglu(gate_up), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


def test_fused_ops_are_their_parts(ops: NumpyOps) -> None:
    x, norm, weight, eps = normal(3, 8), normal(8, seed=1), normal(5, 8, seed=2), 1e-5
    expected = ops.linear(ops.rms_norm(x, norm, eps), weight)
    assert (ops.norm_linear(x, norm, eps, weight) == expected).all()
    assert (ops.logits(x, norm, eps, weight) == expected).all()
    residual, gate_up = normal(3, 5, seed=3), normal(3, 16, seed=4)
    added = residual + ops.linear(x, weight)
    ops.add_linear(residual, x, weight)
    assert (residual == added).all()
    added = residual + ops.linear(ops.swiglu(gate_up), weight)
    ops.add_swiglu_linear(residual, gate_up, weight)
    assert (residual == added).all()


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_rope_store_is_its_parts(ops: NumpyOps, style: RopeStyle) -> None:
    heads = Heads(n_head=4, n_head_kv=2, head_dim=8, value_dim=6)
    store = PageStore(ops.memory, KvShape(2, 2, 8, 6, kv_type("f32"), kv_type("f16")))
    sequence = Sequence()
    sequence.pages = store.allocate(2)
    sequence.tokens.extend([0] * 60)
    batch = build_batch(Rows.chain(sequence, [0] * 7), store)
    table = ops.rope_table(10000.0, 8, None, 100)
    qkv = normal(7, heads.row)
    expected = qkv[:, : 6 * 8].reshape(7, 6, 8).copy()
    ops.rope(expected, table.at(batch.positions), style)
    v = qkv[:, 6 * 8 :].reshape(7, 2, 6).astype(np.float16)
    q = ops.rope_store(1, qkv, heads, table, style, batch)
    assert (q == expected[:, :4]).all()
    for row, place in enumerate(range(60, 67)):
        stored_k, stored_v = store.place(sequence.pages[place // PAGE], place % PAGE)
        assert (stored_k[1] == expected[row, 4:]).all()
        assert (stored_v[1] == v[row]).all()


def test_scratch_is_in_the_ledger(ops: NumpyOps) -> None:
    y = ops.linear(normal(3, 20), normal(33, 20))
    assert ops.memory.live("scratch") >= y.nbytes
    del y
    assert ops.memory.live("scratch") == 0
