"""The reference backend: NumPy, float32, scratch arrays from the ledger.

Default mode multiplies whatever stands together at once; results agree up to float32 rounding. Exact mode
makes the bits of a row independent of its neighbours: BLAS picks its kernels by the shape of a product, so
every product gets a shape that does not depend on the number of rows (or, for big weights, one above the
number from which rows are known to be independent). Everything else here works on rows or elements alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import Array, Batch
from slotd.daemon.ops.interface import DeltaWeights, HeadNorms, Heads, RopeStyle
from slotd.daemon.ops.kv_blocks import width, write_stored
from slotd.daemon.ops.numpy_attention import attend_block, plan_attention
from slotd.daemon.ops.numpy_delta_net import delta_net, gated_norm
from slotd.daemon.ops.rope import RopeTable
from slotd.daemon.ops.rotation import rotate, rotate_back
from slotd.daemon.ops.tq3_blocks import is_rotated
from slotd.daemon.weights.reader import GgufFile
from slotd.protocol.errors import ConfigError

#: Exact mode: weights of this many elements are multiplied whole. OpenBLAS has special kernels for products
#: below about a million multiplications, in which a row's bits change with the number of rows.
BIG_WEIGHT = 262_144

#: Exact mode: least rows of a product with a big weight. One row goes another way (gemv).
LEAST_ROWS = 4

#: Exact mode: rows of every product with a small weight.
BLOCK_ROWS = 8

#: Row counts at which `check_exact` compares the bits of one row.
CHECKED_ROWS = (1, 2, 3, 5, 8, 33)


class NumpyOps:
    """The ops of `interface.Ops` on host arrays, composed of small ones that do one thing each.

    A matrix is a float32 array.

    Args:
        memory: the ledger.
        exact: whether the bits of a row must not depend on the rows beside it.
    """

    def __init__(self, memory: DeviceMemory, exact: bool = False) -> None:
        self.memory = memory
        self.exact = exact

    # ----- weights

    @property
    def loaders(self) -> int:
        return 2

    def matrix(self, file: GgufFile, *names: str) -> Array:
        shapes = [file.header.tensors[name].shape for name in names]
        rows = [shape[-1] for shape in shapes]
        out = self.memory.empty((sum(rows), *reversed(shapes[0][:-1])), tag=file.memory_tag)
        first = 0
        for name, n in zip(names, rows, strict=True):
            out[first : first + n] = file.dequantise(name)
            first += n
        return out

    def vector(self, file: GgufFile, *names: str) -> Array:
        return self.matrix(file, *names)

    def rope_table(self, base: float, dims: int, divisors: Array | None, max_ctx: int) -> RopeTable:
        return RopeTable(self.memory, base, dims, divisors)  # it grows with the positions that are used

    # ----- what models are written with

    def linear(self, x: Array, weight: Array) -> Array:
        n, n_in = x.shape
        n_out = len(weight)
        if not self.exact or (weight.size >= BIG_WEIGHT and n >= LEAST_ROWS):
            return np.matmul(x, weight.T, out=self._like((n, n_out)))
        block = LEAST_ROWS if weight.size >= BIG_WEIGHT else BLOCK_ROWS
        blocks = -(-n // block)
        padded = self._like((blocks * block, n_in))
        padded[:n] = x
        padded[n:] = 0
        y = self._like((blocks * block, n_out))
        np.matmul(padded.reshape(blocks, block, n_in), weight.T, out=y.reshape(blocks, block, n_out))
        return y[:n]

    def norm_linear(self, x: Array, norm: Array, eps: float, weight: Array) -> Array:
        return self.linear(self.rms_norm(x, norm, eps), weight)

    def add_linear(self, x: Array, y: Array, weight: Array) -> None:
        x += self.linear(y, weight)

    def add_swiglu_linear(self, x: Array, gate_up: Array, weight: Array) -> None:
        x += self.linear(self.swiglu(gate_up), weight)

    def logits(self, x: Array, norm: Array, eps: float, weight: Array) -> Array:
        return self.norm_linear(x, norm, eps, weight)

    def add_gated_linear(self, x: Array, y: Array, qkv: Array, heads: Heads, weight: Array) -> None:
        gates = _queries(qkv, heads)[..., heads.head_dim :]
        x += self.linear(self.gate(y.reshape(gates.shape), gates).reshape(y.shape), weight)

    def rope_store(
        self, layer: int, qkv: Array, heads: Heads, rope: RopeTable, style: RopeStyle, batch: Batch,
        norms: HeadNorms | None = None,
    ) -> Array:  # fmt: skip
        keys_end = heads.queries + heads.n_head_kv * heads.head_dim
        q = _queries(qkv, heads)[..., : heads.head_dim]
        k = qkv[:, heads.queries : keys_end].reshape(len(qkv), heads.n_head_kv, heads.head_dim)
        v = qkv[:, keys_end:].reshape(len(qkv), heads.n_head_kv, heads.value_dim)
        if norms is not None:
            q[...] = self.rms_norm(q, norms.q, norms.eps)
            k[...] = self.rms_norm(k, norms.k, norms.eps)
        rotations = _rotations(rope, batch)
        self.rope(q, rotations, style)
        self.rope(k, rotations, style)
        self.kv_write(layer, k, v, batch)
        return q

    def store_context(
        self, kv: Array, heads: Heads, rope: RopeTable, style: RopeStyle, batch: Batch, k_norm: Array,
        eps: float,
    ) -> None:  # fmt: skip
        n_keys, row = heads.n_head_kv * heads.head_dim, heads.kv_row
        rotations = _rotations(rope, batch)
        for layer, norm in enumerate(k_norm.reshape(-1, heads.head_dim)):
            of_layer = kv[:, layer * row : (layer + 1) * row]
            k = of_layer[:, :n_keys].reshape(len(kv), heads.n_head_kv, heads.head_dim)
            v = of_layer[:, n_keys:].reshape(len(kv), heads.n_head_kv, heads.value_dim)
            k = self.rms_norm(k, norm, eps)
            self.rope(k, rotations, style)
            self.kv_write(layer, k, v, batch)

    def block_conv(self, x: Array, moving: Array, base: Array, side: int, batch: Batch) -> Array:
        _, kernel, width = base.shape
        y = self._like(x.shape)
        own = moving.reshape(len(x), 2, kernel, -1)[:, side]
        for span in batch.spans:
            rows = slice(span.start, span.start + len(span.positions))
            weights = base[side] + np.repeat(own[rows], width // own.shape[-1], axis=-1)
            np.multiply(weights[:, 0], x[rows], out=y[rows])
            for tap in range(1, min(kernel, len(weights))):
                y[rows][tap:] += weights[tap:, tap] * x[rows][:-tap]
        return y

    def add(self, x: Array, y: Array) -> None:
        x += y

    def delta_net(self, layer: int, projected: Array, weights: DeltaWeights, batch: Batch) -> Array:
        return delta_net(self.memory, layer, projected, weights, batch)

    def add_delta_linear(
        self, x: Array, y: Array, projected: Array, weights: DeltaWeights, weight: Array
    ) -> None:
        self.add_linear(x, gated_norm(y, projected, weights), weight)

    # ----- their parts

    def embed(self, tokens: npt.NDArray[np.int32], table: Array) -> Array:
        return np.take(table, tokens, axis=0, out=self._like((len(tokens), table.shape[1])), mode="clip")

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        y = np.multiply(x, x, out=self._like(x.shape))
        scale = np.add.reduce(y, axis=-1, keepdims=True)
        scale /= x.shape[-1]
        scale += np.float32(eps)
        np.sqrt(scale, out=scale)
        np.divide(x, scale, out=y)
        return np.multiply(y, weight, out=y)

    def rope(self, x: Array, rotations: Array, style: RopeStyle) -> None:
        dims = 2 * rotations.shape[-1]
        if style == "interleaved":
            # (a + ib)(cos + i sin) is the rotation, and pairs (a, b) lie in memory as complex numbers do.
            pairs = x[..., :dims].view(np.complex64)
            np.multiply(pairs, rotations[:, None], out=pairs)
            return
        a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
        cos, sin = rotations.real[:, None], rotations.imag[:, None]
        turned = np.multiply(a, sin, out=self._like(a.shape))
        a *= cos
        a -= b * sin
        b *= cos
        b += turned

    def kv_write(self, layer: int, k: Array, v: Array, batch: Batch) -> None:
        for span in batch.spans:
            for piece in span.pieces:
                write_stored(k[piece.start : piece.stop].swapaxes(0, 1), piece.k[layer])
                write_stored(v[piece.start : piece.stop].swapaxes(0, 1), piece.v[layer])

    def attend(self, layer: int, q: Array, batch: Batch, scale: float) -> Array:
        n, n_head, _ = q.shape
        value_dim = width(batch.spans[0].runs[0].v)
        blocks = batch.plans.get("attend")
        if blocks is None:
            blocks = batch.plans["attend"] = plan_attention(batch, self.exact, n_head)
        q *= np.float32(scale)
        if is_rotated(batch.spans[0].runs[0].k):
            q = rotate(self.memory, q)
        out = self._like((n, n_head, value_dim))
        for block in blocks:
            attend_block(self.memory, layer, q[block.rows], block, out[block.rows])
        if is_rotated(batch.spans[0].runs[0].v):
            rotated, out = out, self._like(out.shape)
            rotate_back(self.memory, rotated, out)
        return out.reshape(n, n_head * value_dim)

    def swiglu(self, gate_up: Array) -> Array:
        n, width = gate_up.shape
        gate, up = gate_up[:, : width // 2], gate_up[:, width // 2 :]
        y = np.negative(gate, out=self._like((n, width // 2)))
        np.exp(y, out=y)
        y += 1
        np.divide(gate, y, out=y)
        return np.multiply(y, up, out=y)

    def gate(self, y: Array, gates: Array) -> Array:
        scale = np.negative(gates, out=self._like(gates.shape))
        np.exp(scale, out=scale)
        scale += 1
        return np.divide(y, scale, out=scale)

    def check_exact(self, weight: Array) -> None:
        """Prove on one big weight that exact mode holds with this BLAS.

        Raises:
            ConfigError: the bits of a row changed with the number of rows.
        """
        x = np.random.default_rng(0).standard_normal((max(CHECKED_ROWS), weight.shape[1]), dtype=np.float32)
        expected = self.linear(x, weight)[0].tobytes()
        for n in CHECKED_ROWS:
            if self.linear(x[:n], weight)[0].tobytes() != expected:
                raise ConfigError(
                    f"--exact cannot be kept with this BLAS ({blas_name()}): "
                    f"the bits of a row change when {n} rows are multiplied at once"
                )

    def _like(self, shape: tuple[int, ...]) -> Array:
        return self.memory.empty(shape)


def _queries(qkv: Array, heads: Heads) -> Array:
    """The queries [n, H, D], or [n, H, 2 D] with their gates, as a view."""
    return qkv[:, : heads.queries].reshape(len(qkv), heads.n_head, -1)


def _rotations(rope: RopeTable, batch: Batch) -> Array:
    """cos + i sin of the rows' positions, worked out once for a call."""
    rotations = batch.plans.get(rope)
    if rotations is None:
        rotations = batch.plans[rope] = rope.at(batch.positions)
    return rotations


def blas_name() -> str:
    """Name and version of the BLAS that NumPy was built with."""
    config = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"] if config else {}
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
