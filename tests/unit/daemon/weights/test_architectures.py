"""Hyper-parameters and tensor tables: what is read, and every refusal by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.models.registry import MODELS
from slotd.daemon.weights.architectures import ARCHITECTURES, HyperParameters, expected_tensors
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ModelError
from tests.fakes.tiny_gguf import write_tiny_llama


def hyper(path: Path, **options: Any) -> HyperParameters:
    with open_model(write_tiny_llama(path / "m.gguf", **options)) as model:
        return model.hyper


def refusal(path: Path, **options: Any) -> str:
    write_tiny_llama(path / "m.gguf", **options)
    with pytest.raises(ModelError) as caught:
        open_model(path / "m.gguf")
    message = str(caught.value)
    assert message.startswith(f"{path / 'm.gguf'}: ")
    return message.removeprefix(f"{path / 'm.gguf'}: ")


# ----- what is read


def test_tiny_model(tmp_path: Path) -> None:
    assert hyper(tmp_path) == HyperParameters(
        arch="llama",
        n_layer=2,
        n_embd=64,
        n_ff=96,
        n_head=4,
        n_head_kv=2,
        head_dim=16,
        value_dim=16,
        n_vocab=320,
        n_ctx_train=512,
        rope_base=10000.0,
        rope_dims=16,
        rope_freqs=False,
        rms_eps=float(np.float32(1e-5)),
        tied=False,
        bos_id=1,
        eos_id=2,
        add_bos=False,
        stop_ids=frozenset({0, 2}),
    )


@pytest.mark.model
def test_default_model(default_model: Path) -> None:
    with open_model(default_model) as model:
        found = model.hyper
        assert len(model.header.tensors) == 272
    assert (found.n_layer, found.n_embd, found.n_ff, found.n_vocab) == (30, 576, 1536, 49152)
    assert (found.n_head, found.n_head_kv, found.head_dim, found.value_dim) == (9, 3, 64, 64)
    assert (found.n_ctx_train, found.rope_base, found.rope_dims, found.tied) == (8192, 1e5, 64, True)
    assert (found.bos_id, found.eos_id, found.add_bos, found.stop_ids) == (1, 2, False, {0, 2})


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    absent = dict.fromkeys(["llama.rope.freq_base", "llama.rope.dimension_count"])
    found = hyper(tmp_path, n_head_kv=4, metadata=absent | {"llama.attention.head_count_kv": None})
    assert (found.rope_base, found.rope_dims, found.n_head_kv) == (10000.0, 16, 4)


def test_heads_of_their_own_width(tmp_path: Path) -> None:
    keys = {
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 24,
        "llama.rope.dimension_count": 4,
    }
    rng = np.random.default_rng(0)
    tensors = {
        f"blk.{layer}.{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for layer in range(2)
        for name, shape in {
            "attn_q": (4 * 8, 64), "attn_k": (2 * 8, 64), "attn_v": (2 * 24, 64), "attn_output": (64, 4 * 24),
        }.items()
    }  # fmt: skip
    found = hyper(tmp_path, metadata=keys, tensors=tensors)
    assert (found.head_dim, found.value_dim, found.rope_dims) == (8, 24, 4)


def test_tied_model(tmp_path: Path) -> None:
    found = hyper(tmp_path, tied=True)
    assert found.tied
    assert "output.weight" not in expected_tensors(found)


def test_rope_freqs(tmp_path: Path) -> None:
    assert hyper(tmp_path, tensors={"rope_freqs.weight": np.ones(8, np.float32)}).rope_freqs
    wrong = refusal(tmp_path, tensors={"rope_freqs.weight": np.ones(9, np.float32)})
    assert wrong == "tensor rope_freqs.weight has shape [9], it must be [8]"


def test_without_a_tokenizer(tmp_path: Path) -> None:
    found = hyper(tmp_path, tokenizer=False, n_vocab=100)
    assert (found.n_vocab, found.bos_id, found.eos_id, found.stop_ids) == (100, None, None, frozenset())
    assert not found.add_bos


def test_scaling_without_effect_is_accepted(tmp_path: Path) -> None:
    hyper(tmp_path, metadata={"llama.rope.scaling.type": "none"})
    hyper(tmp_path, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0})
    hyper(tmp_path, metadata={"llama.expert_count": 0, "llama.attention.causal": True})


def test_every_architecture_has_its_code_and_is_in_readme() -> None:
    """One list: a file that `slotd inspect` takes has a model class, whose ops every backend has."""
    assert set(MODELS) == set(ARCHITECTURES)
    readme = (Path(__file__).parents[4] / "README.md").read_text("utf-8")
    (limits,) = re.findall(
        r"^- Models: GGUF files of architectures (.*?),\s+with any", readme, re.MULTILINE | re.DOTALL
    )
    assert set(re.findall(r"`(\w+)`", limits)) == set(ARCHITECTURES)
    assert "on the CPU and on CUDA" in " ".join(limits.split())


def test_expected_tensors_follow_the_table(tmp_path: Path) -> None:
    found = hyper(tmp_path)
    names = expected_tensors(dataclasses.replace(found, n_layer=3))
    assert len(names) == 3 + 3 * len(ARCHITECTURES["llama"].layer_tensors(found, 0))
    assert names["blk.2.ffn_down.weight"] == (96, 64)


# ----- refusals of keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": None}, "key general.architecture is missing"),
        (
            {"general.architecture": "\x1b[2J"},
            r"architecture '\x1b[2J' is not supported (supported: llama, qwen3, qwen35)",
        ),
        ({"general.type": "adapter"}, "general.type is 'adapter', only 'model' can be run"),
        (
            {"split.count": 3},
            "key split.count is 3: a model split over several files is not supported, merge them into one",
        ),
        ({"llama.expert_count": 8}, "key llama.expert_count is 8 (mixture of experts), only 0 is supported"),
        (
            {"llama.attention.sliding_window": 4096},
            "key llama.attention.sliding_window is 4096, only 0 is supported",
        ),
        ({"llama.rope.scale_linear": 0.5}, "key llama.rope.scale_linear is 0.5, only 1 is supported"),
        (
            {"llama.rope.scaling.type": "yarn"},
            "key llama.rope.scaling.type is 'yarn', only 'none' is supported",
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            "key llama.rope.scaling.type is 'linear', only 'none' is supported",
        ),
        ({"llama.attention.causal": False}, "key llama.attention.causal is false, only true is supported"),
        ({"llama.block_count": None}, "key llama.block_count is missing"),
        ({"llama.block_count": 0}, "key llama.block_count is 0, the limit is 1 to 2147483647"),
        ({"llama.block_count": -1}, "key llama.block_count is -1, the limit is 1 to 2147483647"),
        ({"llama.block_count": 2**31}, "key llama.block_count is 2147483648, the limit is 1 to 2147483647"),
        (
            {"llama.block_count": 2**31 - 1},
            "key llama.block_count is 2147483647, the file has only 21 tensors",
        ),
        ({"llama.embedding_length": "64"}, "key llama.embedding_length must be an integer, it is a str: 64"),
        (
            {"llama.attention.head_count": [4, 4]},
            "key llama.attention.head_count must be an integer, it is an array of integers",
        ),
        (
            {"llama.attention.head_count_kv": 3},
            "key llama.attention.head_count_kv is 3, which does not divide head_count 4",
        ),
        ({"llama.attention.head_count": 5}, "key llama.attention.key_length is missing"),
        (
            {"llama.rope.dimension_count": 15},
            "key llama.rope.dimension_count is 15, it must be even and at most 16 (the width of a head)",
        ),
        (
            {"llama.rope.dimension_count": 18},
            "key llama.rope.dimension_count is 18, it must be even and at most 16 (the width of a head)",
        ),
        ({"llama.rope.freq_base": 0.0}, "key llama.rope.freq_base is 0.0, it must be above 0"),
        ({"llama.rope.freq_base": float("nan")}, "key llama.rope.freq_base is nan, it must be above 0"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "key llama.attention.layer_norm_rms_epsilon is missing",
        ),
        ({"llama.context_length": 0}, "key llama.context_length is 0, the limit is 1 to 2147483647"),
        (
            {"tokenizer.ggml.tokens": ["a", "b", "c"]},
            "tensor token_embd.weight has 320 rows, key tokenizer.ggml.tokens has 3 tokens",
        ),
    ],
)
def test_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    assert refusal(tmp_path, metadata=keys) == message


# ----- refusals of tensors


def test_missing_tensors(tmp_path: Path) -> None:
    gone = dict.fromkeys(["blk.0.ffn_up.weight", "blk.1.attn_q.weight"])
    assert refusal(tmp_path, tensors=gone) == (
        "tensor blk.0.ffn_up.weight is missing (and 1 more); the file has 19 tensors, this model needs 21"
    )
    assert refusal(tmp_path, tensors={"token_embd.weight": None}) == "tensor token_embd.weight is missing"


def test_extra_tensors(tmp_path: Path) -> None:
    extra = np.ones((4, 64), np.float32)
    assert refusal(tmp_path, tensors={"blk.0.ffn_router.weight": extra}) == (
        "tensor blk.0.ffn_router.weight is not part of this model; "
        "the file has 22 tensors, this model needs 21"
    )
    # More blocks in the file than the key says.
    assert refusal(tmp_path, n_layer=3, metadata={"llama.block_count": 2}) == (
        "tensor blk.2.attn_norm.weight is not part of this model (and 8 more); "
        "the file has 30 tensors, this model needs 21"
    )


def test_unsupported_tensors(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    assert refusal(tmp_path, tensors=bias) == "tensor blk.0.attn_q.bias: bias tensors are not supported"
    both = {"blk.0.attn_qkv.weight": np.ones((128, 64), np.float32)}
    assert refusal(tmp_path, tensors=both).startswith(
        "tensor blk.0.attn_q.weight is not part of this model (and 2 more); "
    )


def test_shapes(tmp_path: Path) -> None:
    flat = {"token_embd.weight": np.ones(64, np.float32)}
    assert refusal(tmp_path, tensors=flat) == "tensor token_embd.weight has shape [64]"
    turned = {"blk.1.ffn_down.weight": np.ones((96, 64), np.float32)}
    assert refusal(tmp_path, tensors=turned) == (
        "tensor blk.1.ffn_down.weight has shape [64, 96], it must be [96, 64]"
    )
