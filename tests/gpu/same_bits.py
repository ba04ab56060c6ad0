"""The check that the bits of a row do not depend on the rows beside it, for whole models on the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from slotd.daemon.cuda_backend import CudaBackend
from slotd.daemon.engine import Engine
from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.reader import open_model
from tests.bench.synthetic_gguf import Shape

N_VOCAB = 33_024
CONTEXTS = (1, 63, 64, 511, 512, 513, 5000)
COUNTS = (2, 7, 16, 23, 64)

SHAPES = {
    "mix": Shape(4, 1024, 2816, 8, 2, 128, N_VOCAB, 8192, 1e6, "Q4_K_M"),
    "small": Shape(3, 576, 1536, 9, 3, 64, N_VOCAB, 8192, 1e5, "Q4_1", tied=True),
}


def cuda_engine(path: Path, kv: str, max_ctx: int = 8192, math: str = "exact") -> Engine:
    with open_model(path) as file:
        return Engine(
            file, CudaBackend(CudaMemory(CupyDevice()), math), k_type=kv, v_type=kv, max_ctx=max_ctx
        )


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(300, 30_000, n).tolist()


def prefill(engine: Engine, tokens: list[int], chunk: int = 2048) -> tuple[Sequence, np.ndarray]:
    """A sequence that holds the tokens, and the logits behind them."""
    sequence = engine.open()
    logits = np.empty(0)
    for start in range(0, len(tokens), chunk):
        rows = Rows.chain(sequence, tokens[start : start + chunk])
        logits = engine.forward(rows, Kind.PROMPT).logits[-1]
        engine.commit(sequence, range(len(rows)))
    return sequence, logits


def decode(engine: Engine, sequence: Sequence, tokens: list[int]) -> list[bytes]:
    """Tokens one by one: the bits of the logits behind each."""
    found = []
    for token in tokens:
        found.append(engine.forward(Rows.chain(sequence, [token]), Kind.STEP).logits[0].tobytes())
        engine.commit(sequence, [0])
    return found


def rows_unlike_alone(
    engine: Engine, contexts: Iterable[int] = CONTEXTS, counts: Iterable[int] = COUNTS
) -> list[tuple[int, int, int]]:
    """Where a row of a chain has other bits than the same row decoded alone: (context, rows, row).

    Empty is right.
    """
    unlike = []
    for context in contexts:
        base, _ = prefill(engine, ids(context))
        tokens = ids(max(counts), seed=context)
        alone = decode(engine, engine.fork(base), tokens)
        for n in counts:
            rows = Rows.chain(base, tokens[:n], logits="all")
            together = engine.forward(rows, Kind.STEP).logits
            unlike += [(context, n, i) for i, row in enumerate(together) if row.tobytes() != alone[i]]
        engine.drop(base)
    return unlike
