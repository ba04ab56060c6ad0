"""Gated DeltaNet layers in NumPy: short convolution, delta rule (recurrent and chunked form), gated norm.

Shapes: n rows, K taps, C channels (queries, keys, values), Hk key heads, Hv value heads, S numbers of a head.
A matrix M [Hv, S, S] maps keys to values. For each row, in this order:

    M <- exp(g) M;  d = beta (v - M^T k);  M <- M + k d^T;  o = M^T q
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import Batch, Span
from slotd.daemon.ops.interface import DeltaWeights
from slotd.daemon.ops.recurrent_state import Array, RecurrentSpan, StepInputs
from slotd.daemon.weights.delta_net import DeltaNet

#: Rows of a block in the chunked form; blocks start and end at absolute multiples of it.
BLOCK = 64

#: In front of the root of a sum of squares, so that a head of zeros stays one.
UNIT_EPSILON = np.float32(1e-6)

#: From here on softplus(x) is x.
SOFTPLUS_LINEAR = np.float32(20)


def delta_net(memory: DeviceMemory, layer: int, projected: Array, w: DeltaWeights, batch: Batch) -> Array:
    """As `interface.HybridOps.delta_net`."""
    net = w.net
    out = memory.empty((len(projected), net.n_value_heads, net.state_size))
    edges = np.cumsum([net.channels, net.value_width, net.n_value_heads])
    u, _, b, a = np.split(projected, edges, axis=1)
    g, beta = decays(a, w.a, w.dt_bias), sigmoid(b)
    for span in batch.spans:
        rows = slice(span.start, span.start + len(span.positions))
        mix_span(memory, layer, u[rows], g[rows], beta[rows], w, _recurrent(span), out[rows])
    return out.reshape(len(projected), net.value_width)


def gated_norm(y: Array, projected: Array, w: DeltaWeights) -> Array:
    """RMS norm of each head of y [n, Hv * S], times silu(z), in place -> y."""
    net = w.net
    heads = y.reshape(len(y), net.n_value_heads, net.state_size)
    scale = np.add.reduce(heads * heads, axis=-1, keepdims=True) / np.float32(net.state_size)
    heads /= np.sqrt(scale + np.float32(w.eps))
    heads *= w.norm
    heads *= silu(projected[:, net.channels : net.channels + net.value_width]).reshape(heads.shape)
    return y


def _recurrent(span: Span) -> RecurrentSpan:
    assert span.recurrent is not None
    return span.recurrent


def mix_span(
    memory: DeviceMemory, layer: int, u: Array, g: Array, beta: Array, w: DeltaWeights, span: RecurrentSpan,
    out: Array,
) -> None:  # fmt: skip
    """One sequence's rows: u [n, C], g and beta [n, Hv] -> o into out [n, Hv, S]."""
    net = w.net
    tail = np.zeros((net.conv_kernel - 1, net.channels), np.float32)
    if span.state is not None:
        tail = span.state.conv[layer]
    inputs = np.concatenate([tail, u])
    y = convolve(inputs, ancestors(span.parents, net.conv_kernel), w.conv)
    q, k, v = heads_of(y, net)
    if span.inputs is not None:
        for kept, given in zip(_layer(span.inputs, layer), (u, k, v, g, beta), strict=True):
            kept[...] = given
    k = for_value_heads(k, net)
    q = for_value_heads(q, net)
    q *= np.float32(net.state_size**-0.5)
    m = memory.empty((net.n_value_heads, net.state_size, net.state_size))
    m[...] = 0 if span.state is None else span.state.matrices[layer]
    if span.after is None:
        _walk(memory, m, span.parents, q, k, v, g, beta, out)
        return
    span.after.conv[layer] = inputs[len(inputs) - len(tail) :]
    for rows in blocks(span.length, len(u)):
        form = chunk if rows.stop - rows.start == BLOCK else chain
        form(m, q[rows], k[rows], v[rows], g[rows], beta[rows], out[rows])
    span.after.matrices[layer] = m


def _layer(inputs: StepInputs, layer: int) -> tuple[Array, ...]:
    return inputs.u[layer], inputs.k[layer], inputs.v[layer], inputs.g[layer], inputs.beta[layer]


def blocks(length: int, n: int) -> Iterator[slice]:
    """Rows behind `length` tokens, cut at absolute multiples of BLOCK."""
    start = 0
    while start < n:
        stop = min(n, start + BLOCK - (length + start) % BLOCK)
        yield slice(start, stop)
        start = stop


# ----- what stands in front of the recurrence


def ancestors(parents: npt.NDArray[np.int32], taps: int) -> npt.NDArray[np.int64]:
    """For each row the inputs under its taps, [n, taps]: numbers 0 .. taps-2 are the committed ones."""
    found = np.empty((len(parents), taps), np.int64)
    before_all = np.arange(-1, taps - 1)
    for row, parent in enumerate(parents.tolist()):
        found[row, :-1] = (before_all if parent < 0 else found[parent])[1:]
        found[row, -1] = taps - 1 + row
    return found


def convolve(inputs: Array, places: npt.NDArray[np.int64], kernel: Array) -> Array:
    """Depthwise convolution and SiLU. inputs [.., C], places [n, K], kernel [C, K] -> [n, C]."""
    y = inputs[places[:, 0]] * kernel[:, 0]
    for tap in range(1, kernel.shape[1]):
        y += inputs[places[:, tap]] * kernel[:, tap]
    return silu(y)


def heads_of(y: Array, net: DeltaNet) -> tuple[Array, Array, Array]:
    """[n, C] -> queries and keys of length 1 [n, Hk, S], values [n, Hv, S]."""
    n, size = len(y), net.state_size
    q, k, v = np.split(y, [net.key_width, 2 * net.key_width], axis=1)
    return (
        unit(q.reshape(n, net.n_key_heads, size)),
        unit(k.reshape(n, net.n_key_heads, size)),
        v.reshape(n, net.n_value_heads, size),
    )


def unit(x: Array) -> Array:
    """x / |x| along the last axis."""
    scaled: Array = x / np.sqrt(np.add.reduce(x * x, axis=-1, keepdims=True) + UNIT_EPSILON)
    return scaled


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    y: Array = 1 / (1 + np.exp(-x))
    return y


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    y: Array = x / (1 + np.exp(-x))
    return y


def decays(a: Array, scale: Array, bias: Array) -> Array:
    """g = scale * softplus(a + bias), [n, Hv]; scale is negative, exp(g) is what remains of a matrix."""
    x = a + bias
    soft = np.log1p(np.exp(np.minimum(x, SOFTPLUS_LINEAR)))
    g: Array = scale * np.where(x > SOFTPLUS_LINEAR, x, soft)
    return g


def for_value_heads(x: Array, net: DeltaNet) -> Array:
    """[.., Hk, S] -> [.., Hv, S]: value head j reads key head j % Hk."""
    return np.tile(x, (net.n_value_heads // net.n_key_heads, 1))


# ----- the recurrence


def advance(m: Array, k: Array, v: Array, g: Array, beta: Array) -> None:
    """One row's write, in place. m [.., Hv, S, S], k and v [.., Hv, S], g and beta [.., Hv]."""
    m *= np.exp(g)[..., None, None]
    d = beta[..., None] * (v - read(m, k))
    m += k[..., :, None] * d[..., None, :]


def read(m: Array, q: Array) -> Array:
    """M^T q for each head: [.., Hv, S]."""
    found: Array = np.matmul(q[..., None, :], m)[..., 0, :]
    return found


def chain(m: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, out: Array) -> None:
    """The recurrent form: rows one after the other, m in place, o into out [n, Hv, S]."""
    for row in range(len(q)):
        advance(m, k[row], v[row], g[row], beta[row])
        out[row] = read(m, q[row])


def chunk(m: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, out: Array) -> None:
    """The chunked form of `chain`: the same in exact arithmetic, as products of matrices."""
    q, k, v, g, beta = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k, v, g, beta))  # heads first
    total = np.add.accumulate(g, axis=1)
    lower = np.tri(g.shape[1], dtype=np.bool_)
    # Masked before exp: above the diagonal it would pass the largest float32.
    decay = np.exp(np.where(lower, total[:, :, None] - total[:, None, :], -np.inf))
    kept, beta = np.exp(total)[..., None], beta[..., None]
    mixed = np.matmul(beta * k, k.swapaxes(1, 2)) * decay
    written = np.concatenate([beta * v, beta * k * kept], axis=-1)
    for row in range(1, g.shape[1]):  # (I + strictly lower part of `mixed`) x = written, x in place of it
        written[:, row] -= np.matmul(mixed[:, row, None, :row], written[:, :row])[:, 0]
    u, w = np.split(written, [v.shape[-1]], axis=-1)
    residual = u - np.matmul(w, m)
    o = np.matmul(q * kept, m) + np.matmul(np.matmul(q, k.swapaxes(1, 2)) * decay, residual)
    last = total[:, -1:]
    m *= np.exp(last)[..., None]
    m += np.matmul((k * np.exp(last - total)[..., None]).swapaxes(1, 2), residual)
    out[...] = o.swapaxes(0, 1)


def _walk(
    memory: DeviceMemory, root: Array, parents: npt.NDArray[np.int32], q: Array, k: Array, v: Array,
    g: Array, beta: Array, out: Array,
) -> None:  # fmt: skip
    """Rows of a step in order, each from the matrix of its parent, which lives until the last child."""
    last_child = {parent: row for row, parent in enumerate(parents.tolist())}
    live = {-1: root}
    for row, parent in enumerate(parents.tolist()):
        if last_child[parent] == row:
            m = live.pop(parent)
        else:
            m = memory.empty(root.shape)
            m[...] = live[parent]
        advance(m, k[row], v[row], g[row], beta[row])
        out[row] = read(m, q[row])
        if row in last_child:
            live[row] = m
