"""The generator of random models: every type decodes to sane numbers, files repeat, slotd runs them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from slotd.client.tokenizer import Tokenizer
from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.block_types import block_type, dequantise_blocks
from slotd.daemon.weights.reader import open_model
from tests.bench.model_shapes import PRESETS, Q4_K_M, Shape
from tests.bench.random_blocks import TYPES, random_rows
from tests.bench.synthetic_gguf import write_synthetic

TINY = PRESETS["tiny"]


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_decode_to_numbers_of_the_spread_asked_for(kind: str) -> None:
    rows = np.ascontiguousarray(random_rows(kind, 64, 2048, 0.01, seed=5)).view(np.uint8)
    known = block_type(int(gguf.GGMLQuantizationType[kind]))
    assert known is not None
    values = dequantise_blocks(rows, known)
    assert values.shape == (64, 2048)
    assert np.isfinite(values).all()
    assert 0.009 < values.std() < 0.011
    assert abs(values.mean()) < 0.0005
    assert np.abs(values).max() < 0.1
    assert len(np.unique(values)) > 500


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_scales_and_minima_of_sub_blocks_differ(kind: str) -> None:
    """In a file where they are equal, code that takes one for the other goes unseen."""
    packed = random_rows(kind, 1, 256 * 200, 0.01, seed=1).reshape(200, -1)[:, 4:16]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    assert (scales >= 24).all()
    assert (scales <= 60).all()
    assert (np.abs(scales.astype(int) - minima) <= 3).all()
    assert 0.05 < (scales == minima).mean() < 0.25


def test_an_unknown_type_and_a_broken_row_are_refused() -> None:
    with pytest.raises(ValueError, match="no random weights of type Q9_9"):
        random_rows("Q9_9", 1, 256, 1.0, 0)
    with pytest.raises(ValueError, match="rows of 100 numbers"):
        random_rows("Q4_K", 1, 100, 1.0, 0)


def test_seed_and_shape_decide_every_byte(tmp_path: Path) -> None:
    def content(seed: int) -> bytes:
        return write_synthetic(tmp_path / f"{seed}.gguf", TINY, seed).read_bytes()

    assert content(3) == content(3)
    assert content(3) != content(4)


@pytest.mark.parametrize("kind", [*TYPES, Q4_K_M])
def test_a_model_of_any_type_gives_logits_of_a_few_units(tmp_path: Path, kind: str) -> None:
    shape = dataclasses.replace(TINY, weight_type=kind)
    logits = last_logits(write_synthetic(tmp_path / "model.gguf", shape, seed=2))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 5


@pytest.mark.parametrize("outlier", [None, 7])
def test_activations_stay_finite_through_64_layers(tmp_path: Path, outlier: int | None) -> None:
    shape = dataclasses.replace(TINY, n_layer=64)
    logits = last_logits(write_synthetic(tmp_path / "deep.gguf", shape, 1, outlier))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 5


def test_an_outlier_is_one_channel_of_every_norm(tmp_path: Path) -> None:
    with open_model(write_synthetic(tmp_path / "model.gguf", TINY, 1, outlier=9)) as file:
        for name in ("blk.0.attn_norm.weight", "blk.1.ffn_norm.weight"):
            norm = file.dequantise(name)
            assert np.flatnonzero(norm > 100).tolist() == [9]
    with pytest.raises(ValueError, match="256 channels"):
        write_synthetic(tmp_path / "model.gguf", TINY, 1, outlier=256)


def test_the_mix_is_that_of_llama_cpp(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, n_layer=64, n_vocab=300)
    with open_model(write_synthetic(tmp_path / "mix.gguf", shape)) as file:
        kinds = {name: file.block_type(name).name for name in file.header.tensors}
    down = Counter(kind for name, kind in kinds.items() if "ffn_down" in name)
    assert down == {"Q4_K": 32, "Q6_K": 32}
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert kinds["blk.7.attn_v.weight"] == kinds["blk.10.attn_v.weight"] == "Q6_K"
    assert kinds["blk.8.attn_v.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_K"


def test_rows_that_are_no_multiple_of_256_fall_back(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, n_embd=64, n_head=1, n_head_kv=1, weight_type="Q6_K")
    with open_model(write_synthetic(tmp_path / "narrow.gguf", shape)) as file:
        assert file.block_type("blk.0.ffn_gate.weight").name == "Q8_0"
        assert file.block_type("blk.0.ffn_down.weight").name == "Q6_K"


def test_the_tokenizer_is_valid_with_fillers(tmp_path: Path) -> None:
    shape = Shape(1, 64, 64, 1, 1, 64, 33_000, 128, 1e4, "Q8_0")
    with open_model(write_synthetic(tmp_path / "wide.gguf", shape)) as file:
        tokenizer = Tokenizer.from_metadata(file.header.metadata)
        assert file.header.metadata["tokenizer.ggml.tokens"][-1] == "[PAD32999]"
    ids = tokenizer.encode("hello world")
    assert tokenizer.decode(ids) == "hello world"
    assert max(ids) < 32_768


def last_logits(path: Path) -> np.ndarray:
    with open_model(path) as file:
        engine = Engine(file, NumpyBackend())
    outputs = engine.forward(Rows.chain(engine.open(), [5, 90, 17, 300]), Kind.PROMPT)
    return outputs.logits[0]
