"""Checkpoints of drafts as GGUF files: every value in its place, and what is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import quants

from slotd.daemon.weights import convert_draft as conversion
from slotd.daemon.weights.convert_draft import convert_draft
from slotd.daemon.weights.reader import GgufFile, open_gguf
from slotd.protocol.errors import ConfigError, ModelError
from tests.fakes.draft_checkpoint import HIDDEN, VOCAB, write_checkpoint, write_safetensors

KINDS = ["DFlash", "DFlash2", "DSpark"]


def place(name: str) -> str:
    """Where a tensor of the checkpoint is in the file; written out, not taken from what is tested."""
    whole = {
        "fc": "dflash.fc", "hidden_norm": "dflash.hidden_norm", "norm": "output_norm",
        "markov_head.markov_w1": "dflash.dspark.markov.w1", "embed_tokens": "token_embd",
        "markov_head.markov_w2": "dflash.dspark.markov.w2", "lm_head": "output",
        "candidate_selector.hidden_projection": "selector_hidden",
    }  # fmt: skip
    odd = {
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "confidence_head.proj.weight": "dflash.dspark.confidence.weight",
        "confidence_head.proj.bias": "dflash.dspark.confidence.bias",
        "d2t": "d2t",
    }
    if name in odd:
        return odd[name]
    stem = name.removesuffix(".weight")
    if not stem.startswith("layers."):
        return whole[stem] + ("" if "markov" in stem else ".weight")
    _, i, part = stem.split(".", 2)
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "attention_conv.base_kernel": "attn_conv_base",
        "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.base_kernel": "ffn_conv_base",
        "mlp_conv.kernel_projection": "ffn_conv_proj",
    }  # fmt: skip
    return f"blk.{i}.{parts[part]}" + ("" if part.endswith("base_kernel") else ".weight")


def converted(tmp_path: Path, matrices: str = "f16") -> GgufFile:
    convert_draft(tmp_path / "in", tmp_path / "out.gguf", matrices)
    return open_gguf(tmp_path / "out.gguf")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_value_is_in_its_place(kind: str, dtype: str, tmp_path: Path) -> None:
    values = write_checkpoint(tmp_path / "in", kind, dtype=dtype)
    with converted(tmp_path) as file:
        assert set(file.header.tensors) == {place(name) for name in values}
        for name, value in values.items():
            got = file.dequantise(place(name))
            vector = value.ndim != 2 or len(value) == 1
            expected = value if vector else value.astype(np.float16).astype(np.float32)
            assert got.shape == value.shape
            assert got.tobytes() == expected.tobytes()
            assert file.block_type(place(name)).name == ("F32" if vector else "F16")


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_as_q8_0_tables_as_f16(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_AT_A_TIME", 1000)  # several pieces for each matrix
    values = write_checkpoint(tmp_path / "in", kind)
    tables = ("codebook", "markov")
    with converted(tmp_path, "q8_0") as file:
        for name, value in values.items():
            if value.ndim == 2 and len(value) > 1:
                table = any(part in name for part in tables)
                assert file.block_type(place(name)).name == ("F16" if table else "Q8_0")
                kind_of = conversion.MATRIX_TYPES["q8_0"]
                if not table:
                    assert file.tensor(place(name)).tobytes() == quants.quantize(value, kind_of).tobytes()


def test_the_keys_of_a_dflash_draft(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    with converted(tmp_path) as file:
        found = {k: v for k, v in file.header.metadata.items() if not k.startswith("general.")}
        assert file.header.metadata["general.architecture"] == "dflash-draft"
        assert list(found.pop("dflash-draft.dflash.target_layer_ids")) == [1, 3, 5]
        eps = found.pop("dflash-draft.attention.layer_norm_rms_epsilon")
    assert eps == pytest.approx(1e-6)
    assert found == {
        f"dflash-draft.{key}": value
        for key, value in {
            "context_length": 4096, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
            "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
            "attention.value_length": 32, "rope.freq_base": 1e6, "vocab_size": 320,
            "dflash.n_target_layers": 3, "dflash.block_size": 8, "dflash.mask_token_id": 7,
        }.items()
    }  # fmt: skip


NEWER = {
    "block_size": None, "rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048, "is_causal": False,
    "dflash_config": {
        "block_size": 16, "mask_token_id": 9, "target_layer_ids": [0, 2, 4], "final_logit_softcapping": 20.0,
        "output_multiplier": 0.25, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 8,
        "selector_top_k": 16,
    },
}  # fmt: skip


def test_keys_as_newer_checkpoints_have_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", "DFlash2", config=NEWER)
    with converted(tmp_path) as file:
        keys = {key.removeprefix("dflash-draft."): value for key, value in file.header.metadata.items()}
        assert list(keys.pop("attention.sliding_window_pattern")) == [True, False]
        assert list(keys.pop("dflash.target_layer_ids")) == [0, 2, 4]
    expected = {
        "rope.freq_base": 5e5, "attention.sliding_window": 2048, "attention.causal": False,
        "dflash.block_size": 16, "dflash.mask_token_id": 9, "final_logit_softcapping": 20.0,
        "logit_scale": 0.25, "dflash.conv_kernel_size": 2, "dflash.conv_group_size": 16,
        "dflash.selector_rank": 8, "dflash.selector_top_k": 16,
    }  # fmt: skip
    assert {key: keys[key] for key in expected} == expected


def test_the_keys_of_dspark_and_a_bias_that_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "in", "DSpark", config={"sample_from_anchor": True},
        tensors={"confidence_head.proj.bias": None},
    )  # fmt: skip
    with converted(tmp_path) as file:
        keys = {key.removeprefix("dflash-draft.dflash."): v for key, v in file.header.metadata.items()}
        assert file.dequantise("dflash.dspark.confidence.bias").tolist() == [0]
    expected = {
        "sample_from_anchor": True, "dspark.enabled": 1, "dspark.markov_rank": 8, "dspark.vocab_size": 320,
        "dspark.confidence.enabled": 1, "dspark.confidence_dim": HIDDEN + 8,
    }  # fmt: skip
    assert {key: keys[key] for key in expected} == expected


def test_target_layers_that_are_not_named_follow_the_rule(tmp_path: Path) -> None:
    own = {"mask_token_id": 7}
    write_checkpoint(tmp_path / "in", config={"dflash_config": own, "num_target_layers": 36})
    with converted(tmp_path) as file:
        assert list(file.header.integers("dflash-draft.dflash.target_layer_ids")) == [1, 17, 33]


def test_an_embedding_an_output_and_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    own = {
        "embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN), np.float32),
        "lm_head.weight": rng.standard_normal((100, HIDDEN), np.float32),
        "d2t": np.arange(100, dtype=np.int64) * 2, "t2d": np.zeros(VOCAB, np.float32),
    }  # fmt: skip
    values = write_checkpoint(tmp_path / "in", tensors=own)
    with converted(tmp_path) as file:
        assert file.block_type("d2t").name == "I64"
        assert file.tensor("d2t").tobytes() == own["d2t"].tobytes()
        for name in ("embed_tokens.weight", "lm_head.weight"):
            assert file.dequantise(place(name)).shape == values[name].shape
        assert "t2d" not in file.header.tensors


def test_shards_and_names_below_model(tmp_path: Path) -> None:
    values = write_checkpoint(tmp_path / "in", dtype="F32")
    (tmp_path / "in" / "model.safetensors").unlink()
    names = sorted(values)
    for number, part in enumerate((names[::2], names[1::2])):
        shard = {f"model.{name}": ("F32", values[name]) for name in part}
        write_safetensors(tmp_path / "in" / f"model-{number}.safetensors", shard)
    with converted(tmp_path) as file:
        assert set(file.header.tensors) == {place(name) for name in values}


Q = "layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("DFlash", {"hidden_size": None}, "hidden_size is missing"),
        ("DFlash", {"hidden_size": "64"}, "hidden_size is '64', it must be of type int"),
        ("DFlash", {"num_hidden_layers": True}, "num_hidden_layers is True, it must be of type int"),
        ("DFlash", {"vocab_size": 2**40}, "vocab_size is 1099511627776, the limit is 1 to 2097152"),
        ("DFlash", {"rope_theta": None}, "rope_theta is missing"),
        ("DFlash", {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0, it must be above 0"),
        ("DFlash", {"block_size": 1}, "block_size is 1, it must be 2 or more"),
        ("DFlash", {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "mask_token_id is missing"),
        ("DFlash", {"dflash_config": {"mask_token_id": 320}}, "mask_token_id is 320, the vocabulary has 320"),
        (
            "DFlash",
            {"dflash_config": {"target_layer_ids": [1, 3]}},
            "target_layer_ids is [1, 3], it must be 3",
        ),
        ("DFlash", {"dflash_config": {"target_layer_ids": ["1"]}}, "target_layer_ids must be a list"),
        ("DFlash", {"dflash_config": [1]}, "dflash_config is not an object"),
        ("DFlash", {"attention_bias": True}, "attention_bias is True, only False is supported"),
        ("DFlash", {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ("DFlash", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("DFlash", {"rope_scaling": {"type": "linear"}}, "type is 'linear'"),
        ("DFlash", {"quantization_config": {"bits": 4}}, "quantization_config: convert the checkpoint"),
        ("DFlash", {"layer_types": ["full_attention"]}, "layer_types is ['full_attention'], it must name 2"),
        ("DFlash", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        (
            "DFlash",
            {"intermediate_size": 128},
            "mlp.gate_proj.weight has shape [96, 64], it must be [128, 64]",
        ),
        (
            "DFlash2",
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]}},
            "conv_kernel_size",
        ),
        ("DSpark", {"markov_rank": None}, "markov_rank is missing"),
        ("DSpark", {"markov_head_type": "gated"}, "markov_head_type is 'gated', only 'vanilla'"),
    ],
)
def test_a_config_that_is_refused(kind: str, config: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", kind, config=config)
    with pytest.raises(ModelError) as error:
        converted(tmp_path)
    assert said in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("kind", "tensors", "said"),
    [
        ("DFlash", {Q: None}, f"tensor {Q} is missing"),
        ("DFlash", {"fc.weight": None}, "tensor fc.weight is missing"),
        ("DFlash", {"fc.weight": np.zeros((64, 100), np.float32)}, "fc.weight is missing, or not 64 wide"),
        ("DFlash", {Q: np.zeros((2, 64), np.float32)}, f"tensor {Q} has shape [2, 64], it must be [128, 64]"),
        ("DFlash", {"layers.2.mlp.up_proj.weight": np.zeros((96, 64), np.float32)}, "not part of a DFlash"),
        ("DFlash", {"layers.0.self_attn.q_proj.bias": np.zeros(128, np.float32)}, "q_proj.bias is not part"),
        ("DFlash", {"norm.weight": np.full(HIDDEN, np.nan, np.float32)}, "norm.weight has NaN or infinity"),
        ("DFlash", {"fc.weight": np.full((64, 192), 1e6, np.float32)}, "has a value that F16 does not hold"),
        ("DFlash", {"norm.weight": np.zeros(HIDDEN, np.int64)}, "norm.weight cannot be of type I64"),
        ("DFlash2", {"candidate_selector.successor_codebook": None}, "successor_codebook is missing"),
        ("DFlash2", {"layers.1.mlp_conv.base_kernel": None}, "layers.1.mlp_conv.base_kernel is missing"),
        ("DSpark", {"markov_head.markov_w2.weight": None}, "markov_head.markov_w2.weight is missing"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_refused(kind: str, tensors: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", kind, tensors=tensors)
    with pytest.raises(ModelError) as error:
        converted(tmp_path)
    assert said in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")
    write_checkpoint(tmp_path / "in", tensors={"norm.weight": np.full(HIDDEN, np.inf, np.float32)})
    with pytest.raises(ModelError, match="has NaN or infinity"):
        convert_draft(tmp_path / "in", out)
    assert out.read_bytes() == b"before"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out.gguf"}


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"nowhere/x\.gguf: cannot be written: No such file"):
        convert_draft(tmp_path / "in", tmp_path / "nowhere" / "x.gguf")
    with pytest.raises(ConfigError, match="--type q4_0: it must be q8_0 or f16"):
        convert_draft(tmp_path / "in", tmp_path / "x.gguf", "q4_0")
