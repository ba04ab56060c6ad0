"""The operations a model is written with. One model code, several backends.

n = rows of the call, H = query heads, G = key/value heads, D = width of a query and key head, E = width of a
value head. Arrays are float32 in the backend's memory. An op returns a new array unless it says "in place".
Ops are as coarse as the fastest backend needs them: a norm belongs to the product behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from slotd.daemon.weights.delta_net import DeltaNet
from slotd.daemon.weights.reader import GgufFile

#: A float32 array of the backend.
Array = Any

#: Token ids of a call, int32 [n], where the backend wants them.
Tokens = Any

#: A weight [n_out, n_in] as the backend stores it; models only pass it on.
Matrix = Any

#: Angles by position, as the backend keeps them.
RopeTable = Any

#: What the backend's own batch builder made of the rows of a call.
CallBatch = Any

#: Which dimensions of a head turn together: interleaved = (2i, 2i+1), half = (i, i + dims/2).
RopeStyle = Literal["interleaved", "half"]


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of `qkv` is divided: H heads of D (queries), G of D (keys), G of E (values).

    gated: behind each query stand D numbers of its gate; E is D then.
    """

    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    gated: bool = False

    @property
    def queries(self) -> int:
        """Numbers in front of the keys."""
        return self.n_head * self.head_dim * (2 if self.gated else 1)

    @property
    def row(self) -> int:
        """Numbers in a row of `qkv`."""
        return self.queries + self.kv_row

    @property
    def kv_row(self) -> int:
        """Numbers of keys and values in it."""
        return self.n_head_kv * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query head and each key head: weights [D], the same for all heads, and epsilon."""

    q: Array
    k: Array
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Of one gated DeltaNet layer, beside its products.

    Attributes:
        net: its sizes.
        conv: [channels, K], the last tap is the row's own.
        a: [value heads], negative; g = a * softplus(alpha + dt_bias) is the logarithm of the decay.
        dt_bias: [value heads].
        norm: [S], of an RMS norm over each value head, with epsilon `eps`.
    """

    net: DeltaNet
    conv: Array
    a: Array
    dt_bias: Array
    norm: Array
    eps: float


class Ops(Protocol):
    """A backend. Every op may raise OutOfDeviceMemory."""

    @property
    def loaders(self) -> int:
        """How many threads may read weights at once."""
        ...

    def matrix(self, file: GgufFile, *names: str) -> Matrix:
        """Tensors [n_out, n_in] of the file, one below the other, as a weight."""
        ...

    def vector(self, file: GgufFile, *names: str) -> Array:
        """Small tensors of the file as plain float32, dimensions in numpy order, one behind the other."""
        ...

    def rope_table(self, base: float, dims: int, divisors: Array | None, max_ctx: int) -> RopeTable:
        """Angles position * base^(-2i/dims) / divisors[i], i = 0 .. dims/2 - 1, for positions below max_ctx.

        divisors: float32 [dims/2] in host memory, the model's `rope_freqs`, or None.
        """
        ...

    def embed(self, tokens: Tokens, table: Matrix) -> Array:
        """Rows of `table` [n_vocab, n_embd] for `tokens` -> [n, n_embd]."""
        ...

    def norm_linear(self, x: Array, norm: Array, eps: float, weight: Matrix) -> Array:
        """(x / sqrt(mean(x^2) + eps) * norm) weight^T. x [n, n_in], norm [n_in] -> [n, n_out]."""
        ...

    def add_linear(self, x: Array, y: Array, weight: Matrix) -> None:
        """x += y weight^T, in place. x [n, n_out], y [n, n_in]."""
        ...

    def add_swiglu_linear(self, x: Array, gate_up: Array, weight: Matrix) -> None:
        """x += (silu(gate) * up) weight^T, in place. gate_up [n, 2 n_in], gate in the first half."""
        ...

    def rope_store(
        self, layer: int, qkv: Array, heads: Heads, rope: RopeTable, style: RopeStyle, batch: CallBatch,
        norms: HeadNorms | None = None,
    ) -> Array:  # fmt: skip
        """Norm and rotate queries and keys, store keys and values at the rows' places, in the stored type.

        layer: counted among those that have K/V. qkv [n, heads.row], used up but for the gates ->
        rotated queries [n, H, D].
        """
        ...

    def attend(self, layer: int, q: Array, batch: CallBatch, scale: float) -> Array:
        """softmax(scale q K^T) V over what each row may see, itself included. q [n, H, D] -> [n, H * E].

        Head h reads key/value head h // (H / G). K and V are read back through the stored type. Uses up q.
        """
        ...

    def logits(self, x: Array, norm: Array, eps: float, weight: Matrix) -> Array:
        """As `norm_linear`, of the last layer's output: [m, n_embd] -> [m, n_vocab]."""
        ...


class DraftOps(Ops, Protocol):
    """What a DFlash draft needs beside.

    The rows of its blocks see more than what stands before them: what a row sees, the place it is written to
    and the position it is rotated for are three things, and the batch says each of them.
    """

    def linear(self, x: Array, weight: Matrix) -> Array:
        """x weight^T. x [n, n_in] -> [n, n_out]."""
        ...

    def store_context(
        self, kv: Array, heads: Heads, rope: RopeTable, style: RopeStyle, batch: CallBatch, k_norm: Array,
        eps: float,
    ) -> None:  # fmt: skip
        """Norm and rotate the keys of rows, store keys and values of every layer at the rows' places.

        kv [n, n_layer * heads.kv_row], for each layer G keys of D and G values of E, used up. k_norm
        [n_layer * D]: weights of an RMS norm over each key head, layer by layer.
        """
        ...


class BlockOps(DraftOps, Protocol):
    """What a DFlash2 draft needs beside."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
        ...

    def swiglu(self, gate_up: Array) -> Array:
        """silu(gate) * up. gate_up [n, 2 m], gate in the first half -> [n, m]."""
        ...

    def add(self, x: Array, y: Array) -> None:
        """x += y, in place."""
        ...

    def block_conv(self, x: Array, moving: Array, base: Array, side: int, batch: CallBatch) -> Array:
        """A convolution along each block, whose coefficients every row brings with it.

        y[i, c] = sum_t (base[side, t, c] + moving[i, side, t, group of c]) * x[i - t, c], with nothing before
        the first row of a block. x [n, m], moving [n, 2 * taps * groups], base [2, taps, m], side 0 or 1.
        """
        ...


class HybridOps(Ops, Protocol):
    """What models with gated attention and recurrent layers need beside."""

    def add_gated_linear(self, x: Array, y: Array, qkv: Array, heads: Heads, weight: Matrix) -> None:
        """x += (y * sigmoid(gate)) weight^T, in place. y [n, H * D], gates as they stand in qkv."""
        ...

    def delta_net(self, layer: int, projected: Array, weights: DeltaWeights, batch: CallBatch) -> Array:
        """Short convolution and delta rule of rows, each from the state of its parent.

        A prompt leaves the state behind its rows, a step what a commit needs to follow one of its paths.

        layer: counted among the recurrent ones. projected [n, channels + Hv S + 2 Hv]: queries, keys and
        values; gates z; beta; alpha -> [n, Hv * S].
        """
        ...

    def add_delta_linear(
        self, x: Array, y: Array, projected: Array, weights: DeltaWeights, weight: Matrix
    ) -> None:
        """x += (norm of each head of y * silu(z)) weight^T, in place. y [n, Hv * S], used up."""
        ...
