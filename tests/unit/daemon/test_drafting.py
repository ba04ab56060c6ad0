"""The engine with a draft: what it proposes, what it knows of a sequence, and that all goes on without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.draft_rows import Proposals
from slotd.daemon.engine import Engine
from slotd.daemon.memory import DeviceMemory, Faults, OutOfDeviceMemory
from slotd.daemon.numpy_backend import NumpyRunner
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model
from tests.fakes.dflash_formula import Formula
from tests.fakes.draft_rig import IDS, ask, assert_as, bits, drafting_engine, features_of, take, text_of
from tests.fakes.tiny_draft import BLOCK, draft_weights, write_tiny_draft

QWEN35 = Path(__file__).parents[2] / "golden" / "data" / "qwen35.gguf"

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_draft(tmp_path_factory.mktemp("draft") / "draft.gguf")


@pytest.fixture
def make(tiny_llama: Path, draft: Path) -> Make:
    return partial(drafting_engine, model=tiny_llama, draft=draft)


# ----- numbers


@pytest.mark.parametrize("depth", [1, 4, 7])
@pytest.mark.parametrize("n", [1, 57, 63, 64, 130])
def test_proposals_are_those_of_the_formula(make: Make, n: int, depth: int, tiny_llama: Path) -> None:
    engine = make()
    with open_model(tiny_llama) as file:
        embedding, head = file.dequantise("token_embd.weight"), file.dequantise("output.weight")
    formula = Formula(draft_weights(64, 2, 11, lucebox=True), embedding, head)
    expected = formula.logprobs(features_of(engine, n), 0, 7, depth + 1)
    assert_as(ask(engine, text_of(engine, n), depth=depth), expected)


def test_a_draft_of_a_hybrid_reads_the_same_layers(make: Make, tmp_path: Path) -> None:
    with open_model(QWEN35) as file:
        n_embd, n_layer, n_vocab = file.hyper.n_embd, file.hyper.n_layer, file.hyper.n_vocab
        embedding = file.dequantise("token_embd.weight")
        head = embedding if file.hyper.tied else file.dequantise("output.weight")
    layers = (0, n_layer - 1)
    path = write_tiny_draft(tmp_path / "draft.gguf", n_embd=n_embd, layers=layers, n_vocab=n_vocab)
    engine = make(model=QWEN35, draft=path)
    features = features_of(engine, 70)
    outputs = engine.forward(Rows.chain(engine.open(), IDS[:70], logits="all"), Kind.PROMPT)
    assert isinstance(engine._loaded, NumpyRunner)
    again = engine._loaded.model.logits(
        features[:, n_embd:]
    )  # what the last layer leaves is what the head reads
    np.testing.assert_allclose(again, outputs.logits, rtol=0, atol=1e-4 * np.abs(again).max())
    formula = Formula(draft_weights(n_embd, 2, 11, lucebox=True), embedding, head)
    text = text_of(engine, 40, [10])
    take(engine, text, IDS[40:43], Kind.STEP)
    assert_as(ask(engine, text), formula.logprobs(features[:43], 0, 7, BLOCK))


def test_of_a_tree_the_accepted_path_becomes_context(make: Make) -> None:
    engine = make()
    text = text_of(engine, 60)
    ids = IDS[60:65]
    engine.forward(
        Rows.tree(text, [ids[0], 9, ids[1], 8, ids[2], ids[3], 7, ids[4]], [-1, 0, 0, 1, 2, 4, 4, 5]),
        Kind.STEP,
    )
    engine.commit(text, [0, 2, 4, 5, 7])
    assert bits(ask(engine, text)) == bits(ask(engine, text_of(engine, 65)))


def test_sequences_side_by_side(make: Make) -> None:
    engine = make()
    texts = [text_of(engine, n) for n in (3, 64, 130)]
    together = ask(engine, *texts)
    for i, text in enumerate(texts):
        alone = ask(engine, text)
        assert bits(alone) == bits(Proposals(together.ids[i : i + 1], together.logprobs[i : i + 1]))


def test_the_temperature_of_extraction(make: Make) -> None:
    engine = make()
    text = text_of(engine, 20)
    plain = engine.propose([text], [7], 3, 320)
    cold = engine.propose([text], [7], 3, 320, temperature=0.5)
    assert plain is not None and cold is not None  # noqa: PT018
    assert (plain.ids == cold.ids).all()
    wanted = 2 * plain.logprobs - np.log(np.exp(2 * plain.logprobs).sum(-1, keepdims=True))
    np.testing.assert_allclose(cold.logprobs, wanted, rtol=0, atol=1e-4)


# ----- everything goes on without it


@pytest.mark.parametrize("site", ["draft:1", "draft:2"])
def test_no_memory_for_a_proposal(make: Make, site: str) -> None:
    engine = make(memory=DeviceMemory(faults=Faults.parse(site)))
    text = text_of(engine, 70)
    answers = [engine.propose([text], [7], 3, 4) for _ in range(2)]
    assert [answer is None for answer in answers] == [site == "draft:1", site == "draft:2"]
    take(engine, text, IDS[70:80])
    assert text.draft.start == 70  # what it knew is gone, what comes it takes in
    ask(engine, text)


def test_no_memory_for_a_context(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    plain = make(draft=None)
    store = engine.drafting._store
    assert store is not None

    def full(n: int, after: int | None = None) -> list[int]:
        raise OutOfDeviceMemory("draft", n, 0)

    with monkeypatch.context() as patch:
        patch.setattr(store, "allocate", full)
        text = text_of(engine, 70)
        assert text.draft is None
        assert engine.propose([text], [7], 3, 4) is None
    other = text_of(plain, 70)
    same = [
        e.forward(Rows.chain(t, [5]), Kind.STEP).logits.tobytes() for e, t in ((engine, text), (plain, other))
    ]
    assert same[0] == same[1]


@pytest.mark.parametrize("where", ["begin", "after"])
def test_no_memory_for_features(make: Make, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target computes as if there were no draft."""
    engine, plain = make(), make(draft=None)
    assert isinstance(engine._loaded, NumpyRunner)
    features = engine._loaded.features
    assert features is not None
    memory, empty = engine.memory, engine.memory.empty
    begun = False

    def short(shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if kwargs.get("tag") == "draft" and where == "begin":
            raise OutOfDeviceMemory("prefill_compute", 1, 0)
        if where == "after" and features._rows is not None and shape[-1] == 96:
            raise OutOfDeviceMemory("prefill_compute", 1, 0)
        return empty(shape, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "empty", short)
        text = text_of(engine, 70)
    assert text.draft is None
    other = text_of(plain, 70)
    same = [
        e.forward(Rows.chain(t, [5]), Kind.STEP).logits.tobytes() for e, t in ((engine, text), (plain, other))
    ]
    assert same[0] == same[1]


def test_a_draft_that_does_not_fit_is_not_there(make: Make, tmp_path: Path) -> None:
    engine = make(draft=write_tiny_draft(tmp_path / "wide.gguf", n_embd=128))
    assert not engine.drafts
    assert "hidden size is 128, the target's is 64" in str(engine.drafting.refusal)
    text = text_of(engine, 20)
    assert engine.propose([text], [7], 3, 4) is None
    assert text.draft is None
    missing = make(draft=tmp_path / "none.gguf")
    assert "there is no such file" in str(missing.drafting.refusal)
    assert (missing.drafts, make(draft=None).drafting.refusal) == (False, None)


def test_no_memory_for_the_draft_itself(make: Make) -> None:
    engine = make(memory=DeviceMemory(faults=Faults.parse("draft_load:1")))
    assert not engine.drafts
    assert "site=draft_load" in str(engine.drafting.refusal)
    text_of(engine, 20)
    engine.park()
    engine.unpark()
    assert engine.drafts
    assert engine.drafting.refusal is None


def test_parked_and_back(make: Make) -> None:
    engine = make()
    text = text_of(engine, 150)
    expected = bits(ask(engine, text))
    weights = engine.memory.live("draft")
    engine.park()
    assert not engine.drafts
    assert engine.memory.live("draft") < weights
    assert engine.propose([text], [7], 3, 4) is None
    engine.unpark()
    assert bits(ask(engine, text)) == expected


def test_another_file_in_its_place_is_refused(make: Make, tmp_path: Path) -> None:
    path = write_tiny_draft(tmp_path / "draft.gguf")
    engine = make(draft=path)
    engine.park()
    write_tiny_draft(path, seed=12)
    engine.unpark()
    assert not engine.drafts
    assert "the file has changed" in str(engine.drafting.refusal)


def test_a_depth_beyond_the_block_is_a_mistake(make: Make) -> None:
    engine = make()
    assert engine.drafting.block_size == BLOCK
    text = text_of(engine, 20)
    for depth in (0, BLOCK):
        with pytest.raises(ValueError, match=f"a depth of {depth} with blocks of {BLOCK}"):
            engine.propose([text], [7], depth, 4)


# ----- kinds of drafts


def test_windows_causal_blocks_and_the_other_dialect(make: Make, tmp_path: Path, tiny_llama: Path) -> None:
    with open_model(tiny_llama) as file:
        embedding, head = file.dequantise("token_embd.weight"), file.dequantise("output.weight")
    plain = Formula(draft_weights(64, 2, 11, lucebox=True), embedding, head)
    windows = {"attention.sliding_window": 70, "attention.sliding_window_pattern": [False, True]}
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        (windows, {"window": 70, "sliding": frozenset({1})}),
        ({"attention.sliding_window": 5}, {"window": 5, "sliding": frozenset({0, 1})}),
        ({"attention.causal": True}, {"causal": True}),
    ]
    for i, (keys, fields) in enumerate(kinds):
        named = {f"dflash.{key}": value for key, value in keys.items()}
        path = write_tiny_draft(tmp_path / str(i), dialect="llama.cpp", metadata=named)
        engine = make(draft=path)
        expected = dataclasses.replace(plain, **fields).logprobs(features_of(engine, 150), 0, 7, BLOCK)
        assert_as(ask(engine, text_of(engine, 150)), expected)


def test_an_embedding_and_a_vocabulary_of_its_own(make: Make, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    embedding, head = (rng.standard_normal((n, 64), dtype=np.float32) for n in (320, 100))
    ids = np.sort(rng.choice(320, 100, replace=False))
    tensors = {"token_embd.weight": embedding, "output.weight": head, "d2t": ids}
    engine = make(draft=write_tiny_draft(tmp_path / "own.gguf", tensors=tensors))
    expected = Formula(draft_weights(64, 2, 11, lucebox=True), embedding, head)
    found = ask(engine, text_of(engine, 80))
    rows = np.searchsorted(ids, found.ids)
    assert_as(
        Proposals(rows.astype(np.int32), found.logprobs),
        expected.logprobs(features_of(engine, 80), 0, 7, BLOCK),
    )
    assert (ids[rows] == found.ids).all()
