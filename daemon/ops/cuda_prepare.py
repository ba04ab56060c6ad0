"""Rows of activations on the GPU: embedding, norm and gate, prepared for the linear kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.cuda_linear import Prepared, room_for
from slotd.daemon.ops.cuda_weights import TILE_COLUMNS, Matrix
from slotd.daemon.ops.kernels import kernel

EMBED_THREADS = 256

WARP = 32

#: Warps of a block that prepares segments without a norm; most of one with.
BLOCK_WARPS, MOST_WARPS = 4, 32


@dataclass(frozen=True, slots=True)
class Picked:
    """Some rows of an array.

    Attributes:
        x: float32 [n, m].
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


def norm(memory: Ledger, x: Any, weight: Any, eps: float) -> Prepared:
    """x / sqrt(mean(x^2) + eps) * weight, prepared. x: float32 [n, m] or Picked, m at most 16384."""
    source = None
    if isinstance(x, Picked):
        x, source = x.x, x.source
    n, width = len(x if source is None else source), x.shape[1]
    out = _room(memory, n, width)
    segments = -(-width // TILE_COLUMNS)
    wide = segments > MOST_WARPS
    args = (x, source, x.strides[0] // 4, weight, np.float32(eps), width, _target(out))
    warps = -(-segments // 2) if wide else segments
    kernel("prepare_norm_wide" if wide else "prepare_norm").launch(n, warps * WARP, args, pdl=True)
    return out


def swiglu(memory: Ledger, gate_up: Any) -> Prepared:
    """silu(gate) * up, prepared. gate_up: float32 [n, 2 m], gate in the first half."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = _room(memory, n, width)
    kernel("prepare_swiglu").launch(
        _grid(n, width), BLOCK_WARPS * WARP, (gate_up, width, _target(out)), pdl=True
    )
    return out


def prepare(memory: Ledger, x: Any) -> Prepared:
    """x as it is, prepared. x: float32 [n, m]."""
    n, width = x.shape
    out = _room(memory, n, width)
    args = (x, x.strides[0] // 4, width, _target(out))
    kernel("prepare_rows").launch(_grid(n, width), BLOCK_WARPS * WARP, args, pdl=True)
    return out


class _Target(ctypes.Structure):
    _fields_ = (("halves", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("room", ctypes.c_int32))


def _target(out: Prepared) -> _Target:
    return _Target(out.halves.data.ptr, out.scale.data.ptr, out.room)


def _grid(n: int, width: int) -> tuple[int, int]:
    return -(-width // (TILE_COLUMNS * BLOCK_WARPS)), n


def _room(memory: Ledger, n: int, width: int) -> Prepared:
    room, segments = room_for(n), -(-width // TILE_COLUMNS)
    halves = memory.empty((segments * 8 * room * 64,), np.uint8)
    return Prepared(halves, memory.empty((segments, room), np.float32), n, room)
