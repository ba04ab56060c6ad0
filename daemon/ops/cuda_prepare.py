"""Rows of activations on the GPU: embedding, norm and gate, prepared for the linear kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.cuda_linear import Prepared, room_for
from slotd.daemon.ops.cuda_weights import TILE_COLUMNS, Matrix
from slotd.daemon.ops.kernels import kernel

EMBED_THREADS = 256


@dataclass(frozen=True, slots=True)
class Picked:
    """Some rows of an array.

    Attributes:
        x: float32 [n, m].
        source: int32 [k] on the device, the rows.
    """

    x: Any
    source: Any


def threads_for(width: int) -> int:
    """Threads of the block that works on one row: they depend on the width only, and so do the sums."""
    return min(1024, max(128, -(-width // 8 // 32) * 32))


def embed(memory: Ledger, tokens: Any, table: Matrix) -> Any:
    """Rows of the table for tokens int32 [n] on the device -> float32 [n, n_in]; zeros for a negative one."""
    (part,) = table.parts
    x = memory.empty((len(tokens), table.n_in), np.float32)
    args = (tokens, part.tiles, part.row_scale, part.format.number, table.n_segments, table.n_in, x)
    kernel("repack_embed").launch(len(tokens), EMBED_THREADS, args, pdl=True)
    return x


def norm(memory: Ledger, x: Any, weight: Any, eps: float) -> Prepared:
    """x / sqrt(mean(x^2) + eps) * weight, prepared. x: float32 [n, m] or Picked."""
    source = None
    if isinstance(x, Picked):
        x, source = x.x, x.source
    n, width = len(x if source is None else source), x.shape[1]
    out = _room(memory, n, width)
    args = (x, source, x.strides[0] // 4, weight, np.float32(eps), width, out.room, out.halves, out.scale)
    kernel("prepare_norm").launch(n, threads_for(width), args, smem=4 * width, pdl=True)
    return out


def swiglu(memory: Ledger, gate_up: Any) -> Prepared:
    """silu(gate) * up, prepared. gate_up: float32 [n, 2 m], gate in the first half."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = _room(memory, n, width)
    args = (gate_up, width, out.room, out.halves, out.scale)
    kernel("prepare_swiglu").launch(n, threads_for(width), args, smem=4 * width, pdl=True)
    return out


def prepare(memory: Ledger, x: Any) -> Prepared:
    """x as it is, prepared. x: float32 [n, m]."""
    n, width = x.shape
    out = _room(memory, n, width)
    args = (x, x.strides[0] // 4, width, out.room, out.halves, out.scale)
    kernel("prepare_rows").launch(n, threads_for(width), args, smem=4 * width, pdl=True)
    return out


def _room(memory: Ledger, n: int, width: int) -> Prepared:
    room, segments = room_for(n), -(-width // TILE_COLUMNS)
    halves = memory.empty((segments * 8 * room * 64,), np.uint8)
    return Prepared(halves, memory.empty((room,), np.float32), n, room)
