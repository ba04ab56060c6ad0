"""The largest logits of rows and how likely they are, found on the GPU: what a tree of drafts is made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.kernels import kernel

#: As in kernels/topk.cu: logits of a block, and most blocks of a row.
CHUNK, MOST_CHUNKS = 2048, 128
THREADS = 256

#: How many of a row the kernels find.
WIDTHS = (8, 16)

#: Most logits of a row.
MOST_VOCAB = CHUNK * MOST_CHUNKS

#: One of the largest.
CHOICE = np.dtype([("id", "<i4"), ("logprob", "<f4")])


def topk(memory: Ledger, logits: Any, width: int, temperature: float = 1.0, out: Any = None) -> Any:
    """uint8 [n, width * 8] on the device: CHOICEs of each row, the likeliest first, equal ones by id.

    A logit that is not a number counts as -inf, and a log-probability that is none is -inf.

    Args:
        logits: float32 [n, n_vocab], width <= n_vocab <= MOST_VOCAB.
        width: one of WIDTHS.
        temperature: that of the log-probabilities.
        out: where to; default: a new array.
    """
    n, n_vocab = logits.shape
    n_chunks = -(-n_vocab // CHUNK)
    largest = memory.empty((n, n_chunks, width), np.uint64)
    weights = memory.empty((n, n_chunks, 2))
    out = memory.empty((n, width * CHOICE.itemsize), np.uint8) if out is None else out
    per_temperature = np.float32(1 / temperature)
    args = (logits, n_vocab, per_temperature, largest, weights)
    kernel(f"topk_chunks_{width}").launch((n_chunks, n), THREADS, args, pdl=True)
    rest = (largest, weights, n_chunks, per_temperature, out)
    kernel(f"topk_rows_{width}").launch(n, THREADS, rest, pdl=True)
    return out
