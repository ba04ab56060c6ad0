"""The shipped draft against vectors of an independent float32 implementation: features and blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.config import Config
from slotd.daemon.draft_choice import choose_drafts
from slotd.daemon.draft_sources import ModelDrafter
from slotd.daemon.drafters import best_block, draft_for
from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend, NumpyRunner
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model

pytestmark = pytest.mark.model

VECTORS = np.load(Path(__file__).parent / "data" / "dflash_smollm2.npz")


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Engine:
    with open_model(default_model) as file:
        engine = Engine(file, NumpyBackend(), max_ctx=1024, draft=draft_for(file.identity))
    assert engine.drafts, engine.drafting.refusal
    return engine


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("block", [8, 16])
def test_a_block_says_what_the_vectors_say(engine: Engine, case: int, block: int) -> None:
    *prompt, anchor = VECTORS[f"case{case}_ids"].tolist()
    sequence = engine.open()
    engine.forward(Rows.chain(sequence, prompt), Kind.PROMPT)
    assert isinstance(engine._loaded, NumpyRunner)
    assert engine._loaded.features is not None
    features = engine._loaded.features.rows(np.arange(len(prompt)))
    wanted = VECTORS[f"case{case}_features"]
    # Some channels are thousands of times larger than others: each against its own size.
    assert np.abs((features - wanted) / np.abs(wanted).max(axis=0)).max() < 2e-3
    engine.commit(sequence, range(len(prompt)))
    proposals = engine.propose([sequence], [anchor], block - 1, 8)
    engine.close(sequence)
    assert proposals is not None
    logits, sums = (VECTORS[f"case{case}_bs{block}_{name}"][1:] for name in ("top_logits", "logsumexp"))
    np.testing.assert_allclose(proposals.logprobs[0], logits - sums[:, None], rtol=0, atol=1e-2)
    assert proposals.ids[0].tolist() == VECTORS[f"case{case}_bs{block}_top_ids"][1:].tolist()


def test_the_draft_is_for_this_file_alone() -> None:
    assert draft_for("0" * 32) is None


def test_the_drafts_that_come_along_have_their_best_block(engine: Engine, tmp_path: Path) -> None:
    path = engine.drafting.path
    assert path is not None
    assert best_block(path) == 8
    assert best_block(tmp_path / path.name) is None
    (drafter, _) = choose_drafts(Config(model=engine.path), engine).drafters
    assert isinstance(drafter, ModelDrafter)
    assert drafter.depth == 7
    (drafter, _) = choose_drafts(Config(model=engine.path, draft_block=12), engine).drafters
    assert isinstance(drafter, ModelDrafter)
    assert drafter.depth == 11
