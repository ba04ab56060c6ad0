"""The ops of `interface.Ops` on a CUDA device: our own kernels on one stream, memory from the ledger.

Nothing here waits for the device or reads from it, and all that changes between two calls of one shape is in
the packed batch: a call can be captured into a graph and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops import cuda_prepare
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceBatch, StepSpace
from slotd.daemon.ops.cuda_attention import HeadNorms as NormAddresses
from slotd.daemon.ops.cuda_linear import Prepared
from slotd.daemon.ops.cuda_prepare import Picked
from slotd.daemon.ops.cuda_recurrent import PromptRecurrence, StepRecurrence
from slotd.daemon.ops.cuda_rows import RowKind, Rows, multiply, row_kind
from slotd.daemon.ops.cuda_unpack import Cublas
from slotd.daemon.ops.cuda_weights import Matrix, WeightLoader
from slotd.daemon.ops.interface import DeltaWeights, HeadNorms, Heads, RopeStyle
from slotd.daemon.weights.reader import GgufFile

#: Positions whose angles are worked out at a time.
ROPE_BLOCK = 16384


@dataclass(frozen=True, slots=True)
class CudaCall:
    """The rows of a call.

    Attributes:
        attention: the kernels for the model's heads.
        batch: where the call's arrays lie.
        space: scratch of step attention; None for a prompt.
        held: arrays that these addresses are of.
        recurrent: of a model with recurrent layers.
    """

    attention: CudaAttention
    batch: DeviceBatch
    space: StepSpace | None
    held: Any = None
    recurrent: StepRecurrence | PromptRecurrence | None = None


@dataclass(frozen=True, slots=True)
class Angles:
    """cos and sin by position, float32 [max_ctx, dims / 2, 2] on the device."""

    table: Any
    dims: int


class CudaOps:
    """The ops of `interface.Ops`.

    Args:
        memory: the ledger of the device.
        math: how weights are multiplied: exact, q8 or fast.

    Raises:
        ConfigError: fast, and there is no cuBLAS.
    """

    loaders = 1  # one stream, and the copies fill the bus

    def __init__(self, memory: Ledger, math: str = "exact") -> None:
        self.memory = memory
        self.math = math
        self._cublas = Cublas(memory) if math == "fast" else None
        self._in_step = False
        self._loader: WeightLoader | None = None

    # ----- weights

    def matrix(self, file: GgufFile, *names: str) -> Matrix:
        if self._loader is None:
            self._loader = WeightLoader(self.memory)
        return self._loader.matrix(file, *names)

    def vector(self, file: GgufFile, *names: str) -> Any:
        values = np.concatenate([file.dequantise(name) for name in names])
        vector = self.memory.empty(values.shape, np.float32, tag=file.memory_tag)
        vector.set(values)
        return vector

    def loaded(self) -> None:
        """All weights are there: let the buffers of the loader go."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def rope_table(self, base: float, dims: int, divisors: Any, max_ctx: int) -> Angles:
        frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        if divisors is not None:
            frequencies /= divisors.astype(np.float64)
        table = self.memory.empty((max_ctx, dims // 2, 2), np.float32, tag="weights")
        for start in range(0, max_ctx, ROPE_BLOCK):
            stop = min(max_ctx, start + ROPE_BLOCK)
            angles = np.arange(start, stop, dtype=np.float64)[:, None] * frequencies
            table[start:stop].set(np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32))
        return Angles(table, dims)

    # ----- rows

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is computed inside are rows of a step, not of a prompt: only q8 makes a difference."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _kind(self, weight: Matrix) -> RowKind:
        return row_kind(weight, self.math, self._in_step)

    def embed(self, tokens: Any, table: Matrix) -> Any:
        return cuda_prepare.embed(self.memory, tokens, table)

    def norm_linear(self, x: Any, norm: Any, eps: float, weight: Matrix) -> Any:
        prepared = cuda_prepare.norm(self.memory, x, norm, eps, self._kind(weight))
        y = self.memory.empty((prepared.n, weight.n_out))
        self._multiply(prepared, weight, y, add=False)
        return y

    def add_linear(self, x: Any, y: Any, weight: Matrix) -> None:
        prepared = cuda_prepare.prepare(self.memory, y, self._kind(weight))
        self._multiply(prepared, weight, x, add=True)

    def add_swiglu_linear(self, x: Any, gate_up: Any, weight: Matrix) -> None:
        prepared = cuda_prepare.swiglu(self.memory, gate_up, self._kind(weight))
        self._multiply(prepared, weight, x, add=True)

    def add_gated_linear(self, x: Any, y: Any, qkv: Any, heads: Heads, weight: Matrix) -> None:
        prepared = cuda_prepare.gate(self.memory, y, qkv, heads.head_dim, self._kind(weight))
        self._multiply(prepared, weight, x, add=True)

    def delta_net(self, layer: int, projected: Any, weights: DeltaWeights, batch: CudaCall) -> Any:
        assert batch.recurrent is not None
        return batch.recurrent.layer(layer, projected, weights, batch.batch)

    def add_delta_linear(self, x: Any, y: Any, projected: Any, weights: DeltaWeights, weight: Matrix) -> None:
        prepared = cuda_prepare.head_norm(
            self.memory, y, projected, weights.net.channels, weights.norm, weights.eps, self._kind(weight)
        )
        self._multiply(prepared, weight, x, add=True)

    def _multiply(self, x: Rows, weight: Matrix, y: Any, *, add: bool) -> None:
        if self._cublas is not None and isinstance(x, Prepared) and self._cublas.suits(x, weight):
            self._cublas.multiply(x, weight, y, add=add)
        else:
            multiply(x, weight, y, add=add)

    def rope_store(
        self, layer: int, qkv: Any, heads: Heads, rope: Angles, style: RopeStyle, batch: CudaCall,
        norms: HeadNorms | None = None,
    ) -> Any:  # fmt: skip
        batch.attention.rope_store(
            layer, qkv.data.ptr, batch.batch, rope.table.data.ptr, rope.dims, style,
            None if norms is None else NormAddresses(norms.q.data.ptr, norms.k.data.ptr, norms.eps),
        )  # fmt: skip
        return qkv

    def attend(self, layer: int, q: Any, batch: CudaCall, scale: float) -> Any:
        shape = batch.attention.shape
        out = self.memory.empty((len(q), shape.n_head * shape.value_dim))
        batch.attention.attend(layer, q.data.ptr, out.data.ptr, batch.batch, scale, batch.space)
        return out

    def logits(self, x: Any, norm: Any, eps: float, weight: Matrix) -> Any:
        return self.norm_linear(x, norm, eps, weight)

    def pick(self, x: Any, rows: Any) -> Picked:
        """Some rows of x for `logits`. rows: int [k] in host memory."""
        return Picked(x, cupy.asarray(rows, dtype=cupy.int32))
