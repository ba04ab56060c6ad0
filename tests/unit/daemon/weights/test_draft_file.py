"""Files of drafts: both dialects say the same, and what cannot run is refused with the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.drafters import draft_for
from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.draft_file import (
    DraftParameters,
    check_fit,
    open_draft,
    own_ids,
    target_layers,
)
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ModelError
from tests.fakes.tiny_draft import write_tiny_draft

LUCEBOX, LLAMA = "qwen35-dflash-draft", "dflash"


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> HyperParameters:
    with open_model(tiny_llama) as file:
        return file.hyper


def parameters(path: Path) -> DraftParameters:
    with open_draft(path) as file:
        return file.parameters


def test_both_dialects_say_the_same(tmp_path: Path) -> None:
    found = [
        parameters(write_tiny_draft(tmp_path / dialect, dialect=dialect))
        for dialect in ("lucebox", "llama.cpp")
    ]
    names = {"arch": "", "fc": "", "hidden_norm": ""}
    assert dataclasses.replace(found[0], **names) == dataclasses.replace(found[1], **names)
    assert found[1].target_layers == (0, 1)  # the file says 1 and 2
    assert (found[0].block_size, found[0].mask_id, found[0].n_features) == (8, 3, 2)


def test_the_shipped_draft(default_model: Path) -> None:
    with open_model(default_model) as file:
        path = draft_for(file.identity)
        assert path is not None
        with open_draft(path) as draft:
            check_fit(draft, file.hyper)
            assert draft.parameters.target_layers == (1, 8, 14, 20, 27)
            assert (draft.parameters.block_size, draft.parameters.mask_id) == (16, 4)


@pytest.mark.parametrize(
    ("n", "n_layer", "layers"),
    [
        (1, 30, (15,)),
        (5, 64, (1, 16, 31, 46, 61)),
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 48, (1, 12, 23, 34, 45)),
    ],
)
def test_layers_that_a_file_does_not_name(
    tmp_path: Path, n: int, n_layer: int, layers: tuple[int, ...]
) -> None:
    key = f"{LUCEBOX}.dflash.target_layer_ids"
    path = write_tiny_draft(tmp_path / "draft", layers=tuple(range(n)), metadata={key: None})
    assert target_layers(parameters(path), n_layer) == layers


def test_weights_count_more_than_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tiny_draft(tmp_path / "draft", metadata={f"{LUCEBOX}.dflash.n_target_layers": 5})
    assert parameters(path).n_features == 2
    assert "the weights count" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "sliding"),
    [(None, {0, 1}), ([True, False], {0}), ([0, 1], {1}), (2, {0}), (1, {0, 1})],
)
def test_sliding_layers(tmp_path: Path, pattern: Any, sliding: set[int]) -> None:
    keys = {f"{LUCEBOX}.attention.sliding_window": 32, f"{LUCEBOX}.attention.sliding_window_pattern": pattern}
    found = parameters(write_tiny_draft(tmp_path / "draft", metadata=keys))
    assert (found.window, found.sliding) == (32, frozenset(sliding))


BIG, FC, NARROW = (np.zeros(shape, np.float32) for shape in ((64, 64), (64, 100), (32, 64)))


@pytest.mark.parametrize(
    ("dialect", "metadata", "tensors", "reason"),
    [
        ("lucebox", {"general.architecture": "llama"}, {}, "architecture 'llama' is not a draft"),
        ("lucebox", {f"{LUCEBOX}.dflash.block_size": 1}, {}, "block_size is 1, the limit is 2 to 64"),
        ("lucebox", {f"{LUCEBOX}.dflash.block_size": 65}, {}, "block_size is 65, the limit is 2 to 64"),
        ("lucebox", {f"{LUCEBOX}.dflash.block_size": None}, {}, "block_size is missing"),
        ("lucebox", {f"{LUCEBOX}.dflash.mask_token_id": None}, {}, "mask_token_id is missing"),
        ("lucebox", {f"{LUCEBOX}.rope.freq_base": None}, {}, "rope.freq_base is missing"),
        ("lucebox", {f"{LUCEBOX}.rope.scaling.type": "yarn"}, {}, "rope.scaling.type is 'yarn'"),
        ("lucebox", {f"{LUCEBOX}.final_logit_softcapping": 30.0}, {}, "softcapping is 30, only 0"),
        ("llama.cpp", {f"{LLAMA}.logit_scale": 0.5}, {}, "logit_scale is 0.5, only 1 is supported"),
        ("lucebox", {f"{LUCEBOX}.embedding_scale": 2.0}, {}, "embedding_scale is 2, only 1 is supported"),
        ("lucebox", {f"{LUCEBOX}.dflash.context_kv_layer_norm": True}, {}, "context_kv_layer_norm is true"),
        ("lucebox", {f"{LUCEBOX}.dflash.target_layer_ids": [0, 1, 2]}, {}, "the weights read 2 layers"),
        ("lucebox", {f"{LUCEBOX}.dflash.target_layer_ids": [1, 1]}, {}, "they must be different, from 0 on"),
        ("llama.cpp", {f"{LLAMA}.target_layers": [0, 1]}, {}, "they must be different, from 1 on"),
        ("lucebox", {f"{LUCEBOX}.attention.head_count_kv": 3}, {}, "head_count_kv is 3, it must divide 4"),
        ("lucebox", {f"{LUCEBOX}.block_count": 3}, {}, "tensor blk.2.attn_norm.weight is missing"),
        (
            "lucebox",
            {f"{LUCEBOX}.attention.sliding_window": 8, f"{LUCEBOX}.attention.sliding_window_pattern": [True]},
            {},
            "it must be a number, or say it for each of 2 layers",
        ),
        ("lucebox", {}, {"dflash.fc.weight": None}, "tensor dflash.fc.weight is missing"),
        ("lucebox", {}, {"dflash.fc.weight": FC}, "no multiple of the hidden size"),
        ("lucebox", {}, {"blk.1.attn_q.weight": NARROW}, r"shape \[64, 32\], it must be"),
        ("lucebox", {}, {"blk.1.attn_q.bias": np.zeros(64, np.float32)}, "is not part of a draft"),
        ("lucebox", {}, {"output_norm.weight": np.full(64, np.nan, np.float32)}, "is not finite"),
        ("lucebox", {}, {"dflash.domino.gru.weight": BIG}, "the Domino head of a draft is not supported"),
        ("lucebox", {}, {"dflash.aux_hidden_norm.0.weight": BIG}, "a norm for each target layer"),
        ("lucebox", {}, {"blk.0.attn_gate.weight": BIG}, "gated attention"),
        ("lucebox", {}, {"output.weight": BIG, "d2t": np.zeros(64, np.float32)}, "must be of integers"),
    ],
)  # fmt: skip
def test_what_is_no_draft_is_refused(
    tmp_path: Path, dialect: str, metadata: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    path = write_tiny_draft(tmp_path / "draft", dialect=dialect, metadata=metadata, tensors=tensors)
    with pytest.raises(ModelError, match=reason):
        open_draft(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"n_embd": 128}, "its hidden size is 128, the target's is 64"),
        ({"layers": (0, 2)}, "it reads target layer 2, the target has 2 layers"),
        ({"n_vocab": 321}, "its vocabulary has 321 tokens, the target's 320"),
        ({"metadata": {f"{LUCEBOX}.dflash.mask_token_id": 320}}, "its mask token is 320, the target has 320"),
        ({"tensors": {"output.weight": BIG}}, "its output matrix has 64 rows, the target 320 tokens"),
        ({"tensors": {"token_embd.weight": BIG}}, "its tables have 64 rows, the target 320 tokens"),
        (
            {"tensors": {"output.weight": BIG, "d2t": np.arange(64, dtype=np.int64) * 7}},
            "its output matrix gives token 441, the target has 320 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: HyperParameters, options: dict[str, Any], reason: str
) -> None:
    path = write_tiny_draft(tmp_path / "draft", **options)
    with open_draft(path) as file, pytest.raises(ModelError, match=f"does not fit the target: {reason}"):
        check_fit(file, target)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_of_an_own_vocabulary(tmp_path: Path, dtype: type) -> None:
    """Either the ids, or what is to be added to the row."""
    ids = np.sort(np.random.default_rng(1).choice(320, 64, replace=False)).astype(dtype)
    for i, stored in enumerate((ids, ids - np.arange(64, dtype=dtype))):
        tensors = {"output.weight": BIG, "d2t": stored}
        with open_draft(write_tiny_draft(tmp_path / str(i), tensors=tensors)) as file:
            assert np.array_equal(own_ids(file), ids)
    first = {"output.weight": BIG, "d2t": np.zeros(64, dtype)}
    with open_draft(write_tiny_draft(tmp_path / "first", tensors=first)) as file:
        assert np.array_equal(own_ids(file), np.arange(64))
    twice = {"output.weight": BIG, "d2t": -np.arange(64, dtype=dtype)}
    with (
        open_draft(write_tiny_draft(tmp_path / "twice", tensors=twice)) as file,
        pytest.raises(ModelError, match="an id of its own"),
    ):
        own_ids(file)
