"""Attention over pages against a float64 formula: chains, trees, any page order, stored types, exact bits."""

from __future__ import annotations

import itertools
from array import array

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.kv.batches import build_batch
from slotd.daemon.kv.element_types import KV_TYPES, kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.pages import pages_for
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops import numpy_attention
from slotd.daemon.ops.kv_blocks import as_float32, write_stored
from slotd.daemon.ops.numpy_ops import NumpyOps
from slotd.daemon.ops.rotation import rotate_back
from slotd.daemon.ops.tq3_blocks import is_rotated
from slotd.daemon.rows import Rows
from slotd.daemon.sequence import Sequence

Array = npt.NDArray[np.float32]
LAYERS, HEADS, GROUPS, DIM, VALUE_DIM = 2, 6, 2, 16, 8


class Context:
    """A sequence with `committed` random tokens in storage, in pages of a given order."""

    def __init__(
        self,
        committed: int,
        n: int,
        *,
        k: str = "f32",
        v: str = "f32",
        order: str = "up",
        heads: tuple[int, int] = (HEADS, GROUPS),
        dims: tuple[int, int] = (DIM, VALUE_DIM),
    ) -> None:
        self.memory = DeviceMemory()
        n_head, n_group = heads
        dim, value_dim = dims
        self.types = {"k": kv_type(k), "v": kv_type(v)}
        self.store = PageStore(self.memory, KvShape(LAYERS, n_group, dim, value_dim, *self.types.values()))
        rng = np.random.default_rng(0)
        total = committed + n
        self.q = rng.standard_normal((n, n_head, dim), dtype=np.float32) * 2
        self.k = rng.standard_normal((total, n_group, dim), dtype=np.float32)
        self.v = rng.standard_normal((total, n_group, value_dim), dtype=np.float32)
        self.sequence = Sequence()
        pages = self.store.allocate(2 * pages_for(total))
        table = {"up": pages, "down": pages[::-1], "apart": pages[::2] + pages[1::2]}[order]
        self.sequence.pages = table[: pages_for(total)]
        for index, page in enumerate(self.sequence.pages):
            self.store.prepare(page, 0, 64)
            for offset, place in enumerate(range(64 * index, min(committed, 64 * index + 64))):
                key, value = self.store.place(page, offset)
                write_stored(self.k[place], key[1])
                write_stored(self.v[place], value[1])
        self.sequence.tokens = array("i", [0] * committed)
        self.committed = committed

    def attend(self, ops: NumpyOps, rows: Rows) -> Array:
        batch = build_batch(rows, self.store)
        first = self.committed
        ops.kv_write(1, self.k[first : first + len(rows)], self.v[first : first + len(rows)], batch)
        out: Array = ops.attend(1, self.q[: len(rows)].copy(), batch, self.q.shape[-1] ** -0.5)
        return out

    def expected(self, row: int, places: list[int]) -> npt.NDArray[np.float64]:
        """Float64 attention of one row over the given places, through the stored types."""
        out = np.empty((HEADS, self.v.shape[-1]))
        stored_k, stored_v = self._stored(self.k, "k"), self._stored(self.v, "v")
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            k, v = stored_k[places, group], stored_v[places, group]
            scores = k @ self.q[row, head].astype(np.float64) * k.shape[-1] ** -0.5
            weights = np.exp(scores - scores.max())
            out[head] = weights @ v / weights.sum()
        return out.ravel()

    def _stored(self, x: Array, plane: str) -> npt.NDArray[np.float64]:
        kind = self.types[plane]
        stored = np.empty((*x.shape[:-1], kind.items(x.shape[-1])), kind.dtype)
        write_stored(x, stored)
        read = as_float32(self.memory, stored)
        if is_rotated(stored):
            rotated, read = read, np.empty_like(x)
            rotate_back(self.memory, rotated, read)
        return read.astype(np.float64)


def ancestors(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@pytest.fixture(params=[False, True], ids=["default", "exact"])
def exact(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(
    ("committed", "n"), [(0, 1), (0, 70), (1, 1), (63, 1), (64, 1), (63, 3), (130, 140), (300, 1)]
)
@pytest.mark.parametrize("order", ["up", "down", "apart"])
def test_chain(exact: bool, committed: int, n: int, order: str) -> None:
    context = Context(committed, n, order=order)
    out = context.attend(NumpyOps(context.memory, exact), Rows.chain(context.sequence, [0] * n))
    for row in range(n):
        expected = context.expected(row, list(range(committed + row + 1)))
        np.testing.assert_allclose(out[row], expected, rtol=2e-5, atol=2e-6)


TREES = {
    "star": [-1] * 9,
    "mixed": [-1, 0, 0, 1, 2, -1, 5, 3, 7, 4],
    "long": [-1, *range(30), 4, 31, 32, 10],
    "forest of chains": [-1, 0, 1, 2, -1, 4, 5, 6],
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("committed", [0, 5, 50, 62, 64, 190])
def test_tree(exact: bool, name: str, committed: int) -> None:
    parents = TREES[name]
    context = Context(committed, len(parents), order="apart")
    rows = Rows.tree(context.sequence, [0] * len(parents), parents)
    out = context.attend(NumpyOps(context.memory, exact), rows)
    for row in range(len(parents)):
        places = list(range(committed)) + [committed + other for other in ancestors(parents, row)]
        np.testing.assert_allclose(out[row], context.expected(row, places), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("k", KV_TYPES)
@pytest.mark.parametrize("v", KV_TYPES)
def test_keys_and_values_are_read_back_through_the_stored_type(exact: bool, k: str, v: str) -> None:
    """All pairs; the row's own key and value too."""
    for rows in (lambda s: Rows.chain(s, [0] * 5), lambda s: Rows.tree(s, [0] * 5, [-1, 0, 0, 1, 2])):
        dims = (128, 256) if "tq3_0" in (k, v) else (64, 32)
        context = Context(100, 5, k=k, v=v, order="apart", dims=dims)
        call = rows(context.sequence)
        out = context.attend(NumpyOps(context.memory, exact), call)
        for row in range(5):
            path = ancestors(call.parents.tolist(), row)
            places = list(range(100)) + [100 + other for other in path]
            np.testing.assert_allclose(out[row], context.expected(row, places), rtol=2e-5, atol=2e-6)


def test_exact_bits_do_not_depend_on_neighbours_or_pages() -> None:
    whole = Context(60, 80)
    together = whole.attend(NumpyOps(whole.memory, True), Rows.chain(whole.sequence, [0] * 80))
    for order, piece in itertools.product(("up", "down", "apart"), (1, 3, 64)):
        context = Context(60, 80, order=order)
        ops = NumpyOps(context.memory, True)
        for start in range(0, 80, piece):
            rows = Rows.chain(context.sequence, [0] * min(piece, 80 - start))
            q, context.q = context.q, context.q[start:]
            out = context.attend(ops, rows)
            context.q = q
            assert out.tobytes() == together[start : start + piece].tobytes()
            context.sequence.tokens.extend([0] * len(rows))
            context.committed += len(rows)


def test_exact_bits_of_one_head_do_not_depend_on_neighbours() -> None:
    """With one head and one row the tile sums are a plain vector, which NumPy would add in pairs."""
    context = Context(4000, 2, heads=(1, 1))
    ops = NumpyOps(context.memory, True)
    together = context.attend(ops, Rows.chain(context.sequence, [0, 0]))
    assert context.attend(ops, Rows.chain(context.sequence, [0])).tobytes() == together[:1].tobytes()


def test_scratch_is_bounded_by_working_in_blocks(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(500, 120)
    rows = Rows.chain(context.sequence, [0] * 120)
    whole = context.attend(NumpyOps(context.memory, exact), rows)
    monkeypatch.setattr(numpy_attention, "SCORE_BYTES", 64 * 1024)
    memory = DeviceMemory()
    context.store._memory = memory
    in_blocks = context.attend(NumpyOps(memory, exact), rows)
    np.testing.assert_allclose(in_blocks, whole, rtol=1e-5, atol=1e-6)
    assert memory.trim() < 400 * 1024


@pytest.mark.parametrize("sick", [[0, 3], [1, 2]])
def test_values_that_nobody_may_see_do_not_matter(exact: bool, sick: list[int]) -> None:
    """A masked NaN would still be a NaN: 0 * NaN. Other branches of a tree never come near a row."""
    context = Context(20, 4)
    root = 20 + sick[0]
    context.k[root] = context.v[root] = np.nan
    rows = Rows.tree(context.sequence, [0] * 4, [-1, -1, 1, 0])
    out = context.attend(NumpyOps(context.memory, exact), rows)
    assert [row for row in range(4) if np.isnan(out[row]).all()] == sick
    assert np.isfinite(np.delete(out, sick, axis=0)).all()


def test_large_scores_do_not_overflow(exact: bool) -> None:
    context = Context(70, 2)
    context.q *= 1e4
    out = context.attend(NumpyOps(context.memory, exact), Rows.chain(context.sequence, [0, 0]))
    np.testing.assert_allclose(out[1], context.expected(1, list(range(72))), rtol=1e-3, atol=1e-3)
