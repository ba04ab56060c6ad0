"""What property tests of rows call an engine with: drawn trees, chains in pieces, filled sequences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from slotd.daemon.engine import Engine
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence

N_VOCAB, N_CTX = 320, 512
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, N_CTX).tolist()

Logits = npt.NDArray[np.float32]

FEW = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
tokens = st.integers(0, N_VOCAB - 1)


@st.composite
def trees(draw: st.DrawFn, most: int) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a forest of 1 to `most` rows, every row's parent an earlier one or none."""
    n = draw(st.integers(1, most))
    parents = [draw(st.integers(-1, row - 1)) for row in range(n)]
    return draw(st.lists(tokens, min_size=n, max_size=n)), parents


def root_path(parents: list[int], row: int) -> list[int]:
    """From the root of a row down to the row; none for row -1."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def run(
    engine: Engine, sequence: Sequence, ids: list[int], kind: Kind = Kind.PROMPT, piece: int = N_CTX
) -> Logits:
    """Commit `ids` in pieces; logits of all of them."""
    parts = []
    for start in range(0, len(ids), piece):
        rows = Rows.chain(sequence, ids[start : start + piece], logits="all")
        parts.append(engine.forward(rows, kind).logits)
        engine.commit(sequence, range(len(rows)))
    return np.concatenate(parts)


def filled(engine: Engine, ids: list[int]) -> Sequence:
    sequence = engine.open()
    if ids:
        run(engine, sequence, ids)
    return sequence
