"""Synthetic drafts: those of published shapes, and small ones for any target, can be loaded and propose."""

from __future__ import annotations

import math
from pathlib import Path

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.draft_file import expected_draft_tensors, open_draft, target_layers
from slotd.daemon.weights.reader import open_model
from tests.bench.draft_shapes import DRAFTS, draft_of, draft_tensors
from tests.bench.model_shapes import PRESETS, cut_down
from tests.bench.synthetic_gguf import write_synthetic, write_synthetic_draft


def test_the_draft_of_the_27b() -> None:
    """About as large as the published one, and it reads the layers that its rule gives."""
    shape, target = DRAFTS["qwen35-27b-draft"], PRESETS["qwen35-27b"]
    n_parameters = sum(math.prod(spec.shape) for spec in draft_tensors(shape))
    assert 1.6e9 < n_parameters < 1.8e9
    assert (shape.n_embd, shape.n_vocab) == (target.n_embd, target.n_vocab)
    assert max(shape.layers) < target.n_layer


def test_a_small_draft_for_a_hybrid(tmp_path: Path) -> None:
    target = cut_down(PRESETS["qwen35-27b"], layers=4, width=256, vocab=512)
    shape = draft_of(target)
    path = write_synthetic_draft(tmp_path / "draft.gguf", shape)
    with open_draft(path) as draft:
        assert target_layers(draft.parameters, 4) == shape.layers == (0, 2)
        assert set(expected_draft_tensors(draft.parameters, 0)) == {
            spec.name for spec in draft_tensors(shape)
        }
    with open_model(write_synthetic(tmp_path / "target.gguf", target)) as file:
        engine = Engine(file, NumpyBackend(), draft=path)
    assert engine.drafts, engine.drafting.refusal
    text = engine.open()
    engine.forward(Rows.chain(text, list(range(70))), Kind.PROMPT)
    engine.commit(text, range(70))
    found = engine.propose([text], [5], 15, 8)
    assert found is not None
    assert found.ids.shape == (1, 15, 8)
    assert (found.logprobs[0, :, 0] < 0).all()
