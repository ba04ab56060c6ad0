"""Gated DeltaNet calls on the device, and the formulas in float64.

A call is a list of `Part`s: the rows of one sequence. States lie between guard bands; layers that are not
looked at hold NaN and must keep it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slotd.daemon.ops.cuda_delta import ConvWeights, CudaDelta, Inputs, RowTables, Sequences
from slotd.daemon.ops.delta_plan import Piece, pack_tables, plan_prompt
from slotd.daemon.ops.tree_order import walk_order
from tests.gpu.attention_rig import CupyDevice

N_LAYER, LAYER = 3, 1
EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    n_key_heads: int
    n_value_heads: int
    state_size: int
    conv_kernel: int = 4

    @property
    def channels(self) -> int:
        return (2 * self.n_key_heads + self.n_value_heads) * self.state_size


#: Hk = Hv, Hv = 3 Hk, every head width, and odd numbers of heads.
SIZES = [
    Sizes(2, 6, 16), Sizes(2, 2, 16), Sizes(1, 3, 16, 2), Sizes(1, 3, 32), Sizes(2, 2, 64, 3),
    Sizes(3, 3, 128), Sizes(2, 6, 128),
]  # fmt: skip
BIG = Sizes(16, 48, 128)


@dataclass
class Numbers:
    """q (scaled, of length S^-1/2), k, v, g, beta of rows: float32 [n, heads, ..]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray

    @classmethod
    def random(cls, s: Sizes, n: int, rng: np.random.Generator, strongest: float = 1.0) -> Numbers:
        def unit(x: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).sum(-1, keepdims=True) + EPSILON)

        q, k = (unit(rng.standard_normal((n, s.n_key_heads, s.state_size))) for _ in range(2))
        g = -strongest * rng.uniform(0, 1, (n, s.n_value_heads)) ** 3
        if strongest > 50 and n > 3:
            g[2] = -1000.0  # everything is forgotten
        arrays = (
            q * s.state_size**-0.5, k, rng.standard_normal((n, s.n_value_heads, s.state_size)), g,
            rng.uniform(0.02, 1, (n, s.n_value_heads)),
        )  # fmt: skip
        return cls(*(x.astype(np.float32) for x in arrays))

    def take(self, rows: Any) -> Numbers:
        return Numbers(*(x[rows] for x in self.arrays()))

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    @classmethod
    def join(cls, parts: SequenceOf[Numbers]) -> Numbers:
        return cls(*(np.concatenate(x) for x in zip(*(part.arrays() for part in parts), strict=True)))


@dataclass
class Part:
    """The rows of one sequence: parents (-1: committed end), matrices and tail (None: zero)."""

    parents: list[int]
    matrices: np.ndarray | None = None  # [Hv, S, S]
    tail: np.ndarray | None = None  # [K - 1, channels]
    write: bool = False
    committed: int = 5

    def __len__(self) -> int:
        return len(self.parents)

    def path(self, row: int) -> list[int]:
        """Ancestors of a row, itself last."""
        path = [row]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        return path


def chain(n: int) -> list[int]:
    return [row - 1 for row in range(n)]


def random_tree(n: int, rng: np.random.Generator) -> list[int]:
    return [-1, *(int(rng.integers(max(-1, row - 6), row)) for row in range(1, n))]


def random_matrices(s: Sizes, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((s.n_value_heads, s.state_size, s.state_size)).astype(np.float32)


def random_tail(s: Sizes, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((s.conv_kernel - 1, s.channels)).astype(np.float32)


@dataclass
class Rig:
    """One shape on one device."""

    sizes: Sizes
    device: Any = field(default_factory=CupyDevice)
    delta: CudaDelta = field(init=False)

    def __post_init__(self) -> None:
        self.delta = CudaDelta(self.sizes, N_LAYER, self.device.limits, self.device.find)

    # ----- blocks

    def up(self, data: Any, dtype: Any) -> Any:
        return self.device.upload(np.asarray(data, dtype))

    def at(self, block: Any) -> int:
        return int(self.device.address(block))

    def poison(self, *shape: int) -> Any:
        return self.up(np.full(shape, np.nan), np.float32)

    def down(self, block: Any, *shape: int) -> np.ndarray:
        return np.array(self.device.download(block, np.float32)).reshape(shape)

    def state(self, part: Part) -> Any:
        """A state block: layer LAYER from the part, the others NaN."""
        flat = np.full(self.delta.state_bytes // 4, np.nan, np.float32)
        tail, matrices = self.views(flat)
        tail[...] = 0 if part.tail is None else part.tail
        matrices[...] = 0 if part.matrices is None else part.matrices
        return self.up(flat, np.float32)

    def views(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s = self.sizes
        tail, matrices = self.delta.tail_offset(LAYER) // 4, self.delta.matrix_offset(LAYER) // 4
        n_tail, n_matrices = (s.conv_kernel - 1) * s.channels, s.n_value_heads * s.state_size**2
        return (
            flat[tail : tail + n_tail].reshape(-1, s.channels),
            flat[matrices : matrices + n_matrices].reshape(s.n_value_heads, s.state_size, s.state_size),
        )

    def only_layer(self, block: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tail and matrices of a written block; raises AssertionError when another layer was written."""
        flat = self.down(block, -1)
        tail, matrices = (view.copy() for view in self.views(flat))
        for view in self.views(flat):
            view[...] = np.nan
        assert np.isnan(flat).all(), "another layer's state was written"
        return tail, matrices

    def sequences(self, parts: SequenceOf[Part], lengths: list[int] | None = None) -> Placed:
        """States and tables of the parts; those without matrices and tail read address 0."""
        blank = [part.matrices is None and part.tail is None for part in parts]
        old = [None if none else self.state(part) for none, part in zip(blank, parts, strict=True)]
        new = [self.poison(self.delta.state_bytes // 4) if part.write else None for part in parts]
        starts = np.cumsum([0, *map(len, parts)])[:-1]
        held = [
            self.up([0 if x is None else self.at(x) for x in old], np.uint64),
            self.up([0 if x is None else self.at(x) for x in new], np.uint64),
            self.up(starts, np.int32),
            self.up([len(part) for part in parts] if lengths is None else lengths, np.int32),
            self.up([len(parts)], np.int32),
        ]
        return Placed(Sequences(*map(self.at, held)), old, new, held)

    def inputs(self, n: Numbers, u: np.ndarray | None = None) -> tuple[Inputs, list[Any]]:
        held = [self.up(x, np.float32) for x in (n.k, n.v, n.g, n.beta)]
        if u is not None:
            held.append(self.up(u, np.float32))
        return Inputs(self.at(held[4]) if u is not None else 0, *map(self.at, held[:4])), held

    # ----- calls

    def run_delta(
        self, parts: SequenceOf[Part], numbers: Numbers, *, chains: bool = False, padding: int = 0
    ) -> tuple[np.ndarray, list[np.ndarray | None]]:
        """The recurrent form: o [rows, Hv, S], matrices that were written."""
        s, n = self.sizes, len(numbers.q)
        placed = self.sequences(parts)
        inputs, held = self.inputs(numbers)
        order = [visit for part in parts for visit in walk_order(part.parents)]
        q, out, walk = (
            self.up(numbers.q, np.float32),
            self.poison(n + padding, s.n_value_heads, s.state_size),
            None,
        )
        if not chains:
            walk = self.up(order + [-1] * padding, np.int32)
        self.delta.delta(
            LAYER, self.at(q), inputs, self.at(out), placed.sequences,
            self.at(walk) if walk is not None else 0, max(map(len, parts)), len(parts), early=False,
        )  # fmt: skip
        o = self.down(out, n + padding, s.n_value_heads, s.state_size)
        assert np.isnan(o[n:]).all(), "padding was written"
        written = [None if x is None else self.only_layer_matrices(x) for x in placed.new]
        for block in held:
            self.device.download(block)
        return o[:n], written

    def run_prompt(
        self, parts: SequenceOf[Part], numbers: Numbers, *, chunked: bool = True, most_blocks: int = 4
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """A prompt call: o [rows, Hv, S] and the matrices behind each part. All parts must write."""
        s, n = self.sizes, len(numbers.q)
        placed = self.sequences(parts)
        inputs, held = self.inputs(numbers)
        starts = np.cumsum([0, *map(len, parts)])[:-1].tolist()
        pieces = [
            Piece(start, len(part), part.committed, 0 if old is None else self.at(old), self.at(new))
            for start, part, old, new in zip(starts, parts, placed.old, placed.new, strict=True)
        ]
        launches = plan_prompt(pieces, chunked=chunked, most_blocks=most_blocks)
        packed, places = pack_tables(launches)
        tables, q = self.up(packed, np.uint8), self.up(numbers.q, np.float32)
        most = max((launch.n_blocks for launch in launches), default=0)
        work = self.poison(most * self.delta.work_bytes // 4)
        out = self.poison(n, s.n_value_heads, s.state_size)
        self.delta.delta_prompt(
            LAYER, self.at(q), inputs, self.at(out), self.at(work), self.at(tables), launches, places
        )
        o = self.down(out, n, s.n_value_heads, s.state_size)
        for block in [*held, work, q, tables]:
            self.device.download(block)
        return o, [self.only_layer_matrices(x) for x in placed.new]

    def only_layer_matrices(self, block: Any) -> np.ndarray:
        tail, matrices = self.only_layer(block)
        assert np.isnan(tail).all(), "the tail was written"
        return matrices

    def tables(self, parts: SequenceOf[Part], padding: int) -> tuple[RowTables, list[Any]]:
        sequence, positions, ancestors = [], [], []
        for number, part in enumerate(parts):
            for row in range(len(part)):
                path = (
                    part.path(row) if any(p != r - 1 for r, p in enumerate(part.parents)) else range(row + 1)
                )
                sequence.append(number)
                positions.append(part.committed + len(path) - 1)
                line = np.full(64, 255, np.uint8)
                line[: min(64, len(path))] = list(path)[:64] if len(path) <= 64 else 255
                ancestors.append(line)
        ancestors += [np.full(64, 255, np.uint8)] * padding
        held = [
            self.up(sequence + [0] * padding, np.int32), self.up(positions + [-1] * padding, np.int32),
            self.up([part.committed for part in parts], np.int32), self.up(ancestors, np.uint8),
        ]  # fmt: skip
        return RowTables(*map(self.at, held)), held

    def run_conv(
        self, parts: SequenceOf[Part], projected: np.ndarray, weights: ConvNumbers, *, step: bool,
        padding: int = 0, keep_u: bool = True,
    ) -> tuple[Numbers, np.ndarray, list[np.ndarray | None]]:  # fmt: skip
        """q, k, v, g, beta; u as kept; tails that were written."""
        s, n = self.sizes, len(projected)
        placed, (rows, held) = self.sequences(parts), self.tables(parts, padding)
        total = n + padding
        x = self.up(np.concatenate([projected, np.full((padding, projected.shape[1]), np.nan)]), np.float32)
        w = [self.up(each, np.float32) for each in (weights.taps, weights.a, weights.dt_bias)]
        widths = [s.channels, s.n_key_heads * s.state_size, s.n_value_heads * s.state_size]
        widths += [s.n_value_heads, s.n_value_heads]
        blocks = [self.poison(total, width) for width in widths]
        q = self.poison(total, widths[1])
        addresses = [self.at(block) for block in blocks]
        if not keep_u:
            addresses[0] = 0
        self.delta.conv(
            LAYER, self.at(x), ConvWeights(*map(self.at, w)), self.at(q), Inputs(*addresses),
            placed.sequences, rows, total, step=step,
        )  # fmt: skip
        found = [
            self.down(b, total, width) for b, width in zip([q, *blocks], [widths[1], *widths], strict=True)
        ]
        for array in found:
            assert np.isnan(array[n:]).all(), "padding was written"
        q_found, u, k, v, g, beta = (array[:n] for array in found)
        tails = [None if x is None else self.only_tail(x) for x in placed.new]
        for block in held:
            self.device.download(block)
        heads = (n, -1, s.state_size)
        return Numbers(q_found.reshape(heads), k.reshape(heads), v.reshape(heads), g, beta), u, tails

    def only_tail(self, block: Any) -> np.ndarray:
        tail, matrices = self.only_layer(block)
        assert np.isnan(matrices).all(), "the matrices were written"
        return tail


@dataclass
class Placed:
    """Sequences on the device; `held` keeps their blocks alive."""

    sequences: Sequences
    old: list[Any]
    new: list[Any]
    held: list[Any]


@dataclass
class ConvNumbers:
    taps: np.ndarray
    a: np.ndarray
    dt_bias: np.ndarray

    @classmethod
    def random(cls, s: Sizes, rng: np.random.Generator) -> ConvNumbers:
        return cls(
            rng.standard_normal((s.channels, s.conv_kernel)).astype(np.float32),
            -rng.uniform(0.02, 8, s.n_value_heads).astype(np.float32),
            rng.standard_normal(s.n_value_heads).astype(np.float32),
        )


# ----- the formulas


def recurrent(part: Part, numbers: Numbers, s: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """o [n, Hv, S] of the rows and the matrix behind the last one, float64."""
    root = np.zeros((s.n_value_heads, s.state_size, s.state_size))
    if part.matrices is not None:
        root = part.matrices.astype(np.float64)
    left: dict[int, np.ndarray] = {-1: root}
    out = []
    heads = np.arange(s.n_value_heads) % s.n_key_heads
    for row, parent in enumerate(part.parents):
        q, k, v, g, beta = (x[row].astype(np.float64) for x in numbers.arrays())
        q, k = q[heads], k[heads]
        m = np.exp(g)[:, None, None] * left[parent]
        d = beta[:, None] * (v - np.einsum("hkv,hk->hv", m, k))
        m = m + k[:, :, None] * d[:, None, :]
        left[row] = m
        out.append(np.einsum("hkv,hk->hv", m, q))
    return np.array(out), left[len(part) - 1]


def convolved(part: Part, projected: np.ndarray, w: ConvNumbers, s: Sizes) -> tuple[Numbers, np.ndarray]:
    """q, k, v, g, beta and the inputs behind the last row, float64."""
    x = projected.astype(np.float64)
    channels, n_taps, heads = s.channels, s.conv_kernel, (len(x), -1, s.state_size)
    tail = np.zeros((n_taps - 1, channels)) if part.tail is None else part.tail.astype(np.float64)
    y = np.empty((len(x), channels))
    for row in range(len(x)):
        history = np.concatenate([tail, x[part.path(row), :channels]])[-n_taps:]
        y[row] = (history * w.taps.T).sum(0)
    y /= 1 + np.exp(-y)
    width = s.n_key_heads * s.state_size
    q, k, v = (each.reshape(heads) for each in np.split(y, [width, 2 * width], axis=1))
    q, k = (each / np.sqrt((each * each).sum(-1, keepdims=True) + EPSILON) for each in (q, k))
    b, a = np.split(x[:, channels + s.n_value_heads * s.state_size :], 2, axis=1)
    g = w.a * np.logaddexp(0, a + w.dt_bias)
    last = np.concatenate([tail, x[part.path(len(x) - 1), :channels]])[-(n_taps - 1) :]
    return Numbers(q * s.state_size**-0.5, k, v, g, 1 / (1 + np.exp(-b))), last


def assert_close(
    got: np.ndarray, expected: np.ndarray, limit: float, what: str = "", floor: float = 1e-3
) -> None:
    """Largest error at most limit * (largest number of the same row, or floor); prints where it is."""
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    axes = tuple(range(1, got.ndim))
    scale = np.maximum(np.abs(expected).max(axis=axes, keepdims=True), floor)
    error = np.abs(got - expected) / scale
    where = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    bad = int((~(error <= limit)).sum())
    assert not bad, (
        f"{what}: {bad} of {error.size} off, worst {error[where]:.3g} (limit {limit}) at {where}: "
        + (f"got {got[where]}, expected {expected[where]}")
    )


def assert_bits(got: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    different = np.argwhere(got.view(np.uint32) != expected.view(np.uint32))
    assert not len(different), (
        f"{what}: {len(different)} of {got.size} differ, first at {different[:3].tolist()}"
    )
