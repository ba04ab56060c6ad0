"""Engines with a tiny draft, texts in them, and what the draft says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slotd.daemon.draft_rows import Proposals
from slotd.daemon.engine import Engine
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.numpy_backend import NumpyBackend, NumpyRunner
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence as Text
from slotd.daemon.weights.reader import open_model
from tests.fakes.tiny_draft import BLOCK

IDS = np.random.default_rng(5).integers(0, 320, 600).tolist()


def drafting_engine(
    model: Path, draft: Path | None, *, memory: DeviceMemory | None = None, **options: Any
) -> Engine:
    """An engine in exact mode."""
    with open_model(model) as file:
        return Engine(file, NumpyBackend(memory, exact=True), draft=draft, **options)


def take(engine: Engine, text: Text, ids: Sequence[int], kind: Kind = Kind.PROMPT) -> None:
    """Compute and commit."""
    engine.forward(Rows.chain(text, ids), kind)
    engine.commit(text, range(len(ids)))


def text_of(engine: Engine, n: int, pieces: Sequence[int] = ()) -> Text:
    """A new sequence with the first n of IDS, in pieces of these lengths and one with the rest."""
    text = engine.open()
    for piece in [*pieces, n - sum(pieces)]:
        take(engine, text, IDS[len(text) : len(text) + piece])
    return text


def ask(engine: Engine, *texts: Text, token: int = 7, depth: int = BLOCK - 1) -> Proposals:
    """The draft's answer."""
    found = engine.propose(texts, [token] * len(texts), depth, 8)
    assert found is not None
    return found


def bits(found: Proposals) -> bytes:
    return found.ids.tobytes() + found.logprobs.tobytes()


def features_of(engine: Engine, n: int) -> np.ndarray:
    """What the layers of the target say about the first n of IDS, [n, features]."""
    text = engine.open()
    engine.forward(Rows.chain(text, IDS[:n]), Kind.PROMPT)
    assert isinstance(engine._loaded, NumpyRunner)
    assert engine._loaded.features is not None
    features = engine._loaded.features.rows(np.arange(n)).copy()
    engine.close(text)
    return features


def assert_as(found: Proposals, logprobs: np.ndarray) -> None:
    """The best of one sequence are those of full log-probabilities."""
    best = np.argsort(-logprobs, axis=1)[:, : found.ids.shape[2]]
    assert found.ids[0].tolist() == best.tolist()
    np.testing.assert_allclose(found.logprobs[0], np.take_along_axis(logprobs, best, 1), rtol=0, atol=1e-4)
