"""The next token chosen on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.kernels import kernel

#: Blocks that share a row of logits, and bytes of what each finds.
CHUNKS, BEST_BYTES = 64, 12
THREADS = 256


def greedy(memory: Ledger, logits: Any, out: Any = None) -> Any:
    """int32 [n, 2] on the device: id of the highest logit (the lowest of equals), and whether it can be used.

    logits: float32 [n, n_vocab]. It cannot when a NaN or +inf is among the logits, or nothing but -inf.
    out: where to; default: a new array.
    """
    n, n_vocab = logits.shape
    chunks = memory.empty((n * CHUNKS * BEST_BYTES,), np.uint8)
    out = memory.empty((n, 2), np.int32) if out is None else out
    kernel("greedy_chunks").launch((CHUNKS, n), THREADS, (logits, n_vocab, chunks), pdl=True)
    kernel("greedy_best").launch(n, 32, (chunks, out), pdl=True)
    return out


def take(tokens: Any, best: Any) -> None:
    """In place: tokens int32 [n <= 64] that are TAKE become the ids of `best`, int32 [n, 2]."""
    kernel("greedy_take").launch(1, 64, (tokens, best, len(tokens)), pdl=True)
