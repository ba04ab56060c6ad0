"""What rows of activations become before a product, and which product takes them."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops import cuda_linear
from slotd.daemon.ops.cuda_linear import Prepared, room_for
from slotd.daemon.ops.cuda_linear_q8 import IntegerRows, has_whole_numbers, multiply_integers
from slotd.daemon.ops.cuda_weights import TILE_COLUMNS, Matrix

#: Rows for either kind of product.
Rows = Prepared | IntegerRows

#: Rows of so few numbers are multiplied as pairs: models that small feel the rounding to 11 bits (logits of
#: SmolLM2 were off by 0.03), and what they take is launches, not products.
PAIRED_WIDTH = 2048


class RowKind(Enum):
    """How rows are prepared for a product."""

    HALVES = "16-bit numbers"
    PAIRS = "16-bit numbers and what rounding left over"
    INTEGERS = "8-bit whole numbers"


def row_kind(weight: Matrix, math: str, of_step: bool) -> RowKind:
    """What rows a weight is multiplied with.

    Args:
        math: exact, q8 or fast.
        of_step: rows of a step, not of a prompt.
    """
    if math == "q8" and of_step and has_whole_numbers(weight):
        return RowKind.INTEGERS
    return RowKind.PAIRS if math != "fast" and weight.n_in <= PAIRED_WIDTH else RowKind.HALVES


def room(memory: Ledger, kind: RowKind, n: int, width: int) -> Rows:
    """Memory for n prepared rows of `width` numbers."""
    segments = -(-width // TILE_COLUMNS)
    if kind is RowKind.INTEGERS:
        codes = memory.empty((segments, n, TILE_COLUMNS), np.uint8)
        scale, sums16 = memory.empty((segments, n, 4, 4)), memory.empty((segments, n, 4, 4), np.int32)
        return IntegerRows(codes, scale, sums16, n, n)
    paired = kind is RowKind.PAIRS
    n_room = room_for(2 * n if paired else n)
    halves = memory.empty((segments * 8 * n_room * 64,), np.uint8)
    return Prepared(halves, memory.empty((n_room,)), n, n_room, paired)


def multiply(x: Rows, weight: Matrix, y: Any, *, add: bool) -> None:
    """y = x weight^T, or y += it. y: float32 [x.n, weight.n_out], rows contiguous."""
    if isinstance(x, Prepared):
        cuda_linear.multiply(x, weight, y, add=add)
    else:
        multiply_integers(x, weight, y, add=add)
