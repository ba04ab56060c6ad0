"""Rows of activations on the GPU: embedding, norm and gate, prepared for the linear kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.cuda_linear import Prepared
from slotd.daemon.ops.cuda_rows import RowKind, Rows, room
from slotd.daemon.ops.cuda_weights import TILE_COLUMNS, Matrix
from slotd.daemon.ops.kernels import kernel
from slotd.daemon.weights.architectures import HyperParameters
from slotd.protocol.errors import ConfigError

EMBED_THREADS = 256

WARP = 32

#: Most warps of a block, and most segments of a warp, by kernel; of the others MOST_ROUNDS.
MOST_WARPS, MOST_ROUNDS = 32, 3
_MORE_ROUNDS = {"swiglu": 4, "taken": 4}


def most_width(what: str) -> int:
    """Most numbers of a row that the kernel `what` takes."""
    return TILE_COLUMNS * MOST_WARPS * _MORE_ROUNDS.get(what, MOST_ROUNDS)


def check_widths(h: HyperParameters) -> None:
    """Raises ConfigError: a model with rows that are wider than the kernels take."""
    widths = [("norm", "embedding", h.n_embd), ("swiglu", "feed-forward", h.n_ff)]
    widths.append(("rows", "attention", h.n_head * h.value_dim))
    if h.delta_net is not None:
        widths.append(("delta", "recurrent", h.delta_net.value_width))
    for what, name, width in widths:
        if width > most_width(what):
            raise ConfigError(f"{name} rows of {width} numbers: CUDA takes up to {most_width(what)}")


@dataclass(frozen=True, slots=True)
class Picked:
    """Some rows of an array.

    Attributes:
        x: [n, m], float32 or, to be taken as they are, float16 with m a multiple of four.
        source: int32 [k] on the device, the rows.
    """

    x: Any
    source: Any


def embed(memory: Ledger, tokens: Any, table: Matrix) -> Any:
    """Rows of the table for tokens int32 [n] on the device -> float32 [n, n_in]; zeros for a negative one."""
    (part,) = table.parts
    x = memory.empty((len(tokens), table.n_in), np.float32)
    args = (tokens, part.tiles, part.row_scale, part.format.number, table.n_segments, table.n_in, x)
    kernel("repack_embed").launch(len(tokens), EMBED_THREADS, args, pdl=True)
    return x


def norm(memory: Ledger, x: Any, weight: Any, eps: float, kind: RowKind = RowKind.HALVES) -> Rows:
    """x / sqrt(mean(x^2) + eps) * weight, prepared. x: float32 [n, m] or Picked."""
    source = None
    if isinstance(x, Picked):
        x, source = x.x, x.source
    n, width = len(x if source is None else source), x.shape[1]
    out = room(memory, kind, n, width)
    _launch("norm", out, width, (x, source, x.strides[0] // 4, weight, np.float32(eps), width))
    return out


def swiglu(memory: Ledger, gate_up: Any, kind: RowKind = RowKind.HALVES) -> Rows:
    """silu(gate) * up, prepared. gate_up: float32 [n, 2 m], gate in the first half."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = room(memory, kind, n, width)
    _launch("swiglu", out, width, (gate_up, width))
    return out


def prepare(memory: Ledger, x: Any, kind: RowKind = RowKind.HALVES) -> Rows:
    """x as it is, prepared. x: float32 [n, m]."""
    n, width = x.shape
    out = room(memory, kind, n, width)
    _launch("rows", out, width, (x, x.strides[0] // 4, width))
    return out


def taken(memory: Ledger, rows: Picked) -> Rows:
    """Rows of halves as they are, prepared."""
    n, width = len(rows.source), rows.x.shape[1]
    out = room(memory, RowKind.HALVES, n, width)
    rounds = rounds_for("taken", width)
    warps = -(-width // (TILE_COLUMNS * rounds))
    args = (rows.x, rows.source, rows.x.strides[0] // 2, width, _target(out))
    kernel(f"prepare_taken_{rounds}").launch(n, warps * WARP, args, pdl=True)
    return out


def gate(memory: Ledger, y: Any, qkv: Any, head_dim: int, kind: RowKind = RowKind.HALVES) -> Rows:
    """y * sigmoid(gate), prepared. y: float32 [n, heads * head_dim]; qkv: [n, m], gates behind queries."""
    n, width = y.shape
    out = room(memory, kind, n, width)
    _launch("gate", out, width, (y, qkv, qkv.strides[0] // 4, head_dim, width))
    return out


def head_norm(
    memory: Ledger, o: Any, projected: Any, first: int, weight: Any, eps: float,
    kind: RowKind = RowKind.HALVES,
) -> Rows:  # fmt: skip
    """o / sqrt(mean(o^2) + eps) * weight * silu(z), prepared; the mean over each head.

    o: float32 [n, m]. projected: float32 [n, l], z its columns from `first` on. weight: float32 [S], the
    same for each head of S = 16, 32, 64 or 128 numbers.
    """
    n, width = o.shape
    out, z, stride = room(memory, kind, n, width), projected.data.ptr + 4 * first, projected.strides[0] // 4
    _launch("delta", out, width, (o, z, stride, weight, np.float32(eps), len(weight), width))
    return out


def rounds_for(what: str, width: int) -> int:
    """Segments that a warp of the kernel `what` takes of a row.

    Raises:
        ValueError: a wider row than it takes, see `check_widths`.
    """
    if width > most_width(what):
        raise ValueError(f"rows of {width} numbers: {what} takes up to {most_width(what)}")
    return -(-width // (TILE_COLUMNS * MOST_WARPS))


class _Halves(ctypes.Structure):
    _fields_ = (
        ("halves", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("room", ctypes.c_int32),
        ("paired", ctypes.c_int32),
    )  # fmt: skip


class _Integers(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("sums16", ctypes.c_uint64),
        ("room", ctypes.c_int32),
    )  # fmt: skip


def _launch(what: str, out: Rows, width: int, args: tuple[Any, ...]) -> None:
    rounds = rounds_for(what, width)
    warps = -(-width // (TILE_COLUMNS * rounds))
    chosen = kernel(f"prepare_{what}_{rounds if isinstance(out, Prepared) else f'q8_{rounds}'}")
    chosen.launch(out.n, warps * WARP, (*args, _target(out)), pdl=True)


def _target(out: Rows) -> ctypes.Structure:
    if isinstance(out, Prepared):
        return _Halves(out.halves.data.ptr, out.scale.data.ptr, out.room, out.paired)
    return _Integers(out.codes.data.ptr, out.scale.data.ptr, out.sums16.data.ptr, out.room)
