"""Keys and tensors of qwen3 and qwen35 files: what is read, what is left out, and every refusal by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.kv.numpy_need import numpy_need
from slotd.daemon.weights.architectures import expected_tensors
from slotd.daemon.weights.delta_net import DeltaNet
from slotd.daemon.weights.inspection import inspect_file
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ModelError
from tests.fakes.changed_gguf import write_changed
from tests.fakes.tiny_gguf import write_tiny_llama

DATA = Path(__file__).parents[3] / "golden" / "data"
QWEN3, QWEN35, MTP = DATA / "qwen3.gguf", DATA / "qwen35.gguf", DATA / "qwen35-mtp.gguf"

#: Without the list of layers that newer converters write.
INTERVAL: dict[str, Any] = {"qwen35.attention.recurrent_layers": None}


def refusal(path: Path, source: Path, **changes: Any) -> str:
    write_changed(path / "m.gguf", source, **changes)
    with pytest.raises(ModelError) as caught:
        open_model(path / "m.gguf")
    return str(caught.value).removeprefix(f"{path / 'm.gguf'}: ")


def test_qwen3() -> None:
    with open_model(QWEN3) as model:
        h = model.hyper
    assert (h.n_layer, h.n_head, h.n_head_kv, h.head_dim, h.value_dim) == (4, 4, 2, 32, 32)
    assert (h.rope_base, h.rope_dims, h.tied, h.delta_net) == (1e6, 32, True, None)
    assert h.attention_layers == (0, 1, 2, 3)


def test_qwen35() -> None:
    with open_model(QWEN35) as model:
        h = model.hyper
    assert h.delta_net == DeltaNet((0, 1, 2, 4, 5, 6), 4, 16, 2, 6)
    assert (h.n_layer, h.attention_layers, h.n_nextn, h.tied) == (8, (3, 7), 0, False)
    assert (h.rope_base, h.rope_dims, h.head_dim) == (1e7, 8, 32)
    assert h.delta_net.channels == 160
    assert h.delta_net.state_bytes == 4 * 6 * (3 * 160 + 6 * 16 * 16)


@pytest.mark.parametrize(
    ("shape", "n_tensors"),
    [
        ({"n_layer": 64, "layers": 48, "value_heads": 48, "tied": False}, 851),  # 27B
        ({"n_layer": 24, "layers": 18, "value_heads": 16, "tied": True}, 320),  # 0.8B
    ],
)
def test_published_models_have_so_many_tensors(shape: dict[str, Any], n_tensors: int) -> None:
    with open_model(QWEN35) as model:
        h, n_layer = model.hyper, shape["n_layer"]
    net = DeltaNet(tuple(i for i in range(n_layer) if (i + 1) % 4), 4, 128, 16, shape["value_heads"])
    assert len(net.layers) == shape["layers"]
    published = dataclasses.replace(h, n_layer=n_layer, tied=shape["tied"], delta_net=net)
    assert len(expected_tensors(published)) == n_tensors
    state_mib = net.state_bytes / 2**20
    assert round(state_mib, 1) == (149.6 if n_tensors == 851 else 19.3)


def test_blocks_for_further_tokens_are_left_out() -> None:
    with open_model(MTP) as model:
        h = model.hyper
        assert (h.n_layer, h.n_nextn, h.attention_layers) == (4, 1, (3,))
        assert not any(name.startswith("blk.4.") for name in expected_tensors(h))
    found = inspect_file(MTP, numpy_need)
    assert (found.runnable, found.left_out) == (True, 15)
    assert "1 for further tokens (MTP), 15 tensors: not used" in found.to_text()
    assert found.memory is not None
    assert 0 < found.memory.weights < 4 * found.parameters
    assert found.memory.state == 4 * 3 * (3 * 128 + 4 * 16 * 16)
    assert "recurrent     3 layers" in found.to_text()


def test_such_a_block_may_be_of_any_type_and_has_known_tensors(tmp_path: Path) -> None:
    extra = {"blk.4.ffn_router.weight": np.ones((4, 64), np.float32)}
    assert refusal(tmp_path, MTP, tensors=extra).startswith(
        "tensor blk.4.ffn_router.weight is not part of this model; "
    )
    nan = {"blk.4.nextn.enorm.weight": np.full(64, np.nan, np.float32)}
    with open_model(write_changed(tmp_path / "nan.gguf", MTP, tensors=nan)):
        pass


def test_tensors_of_such_a_block_that_not_every_file_has(tmp_path: Path) -> None:
    """An embedding and an output of its own; and no norm in front of the output, for which the model's is."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        f"blk.4.nextn.{name}.weight": rng.standard_normal((320, 64), dtype=np.float32)
        for name in ("embed_tokens", "shared_head_head")
    }
    tensors["blk.4.nextn.shared_head_norm.weight"] = None
    found = inspect_file(write_changed(tmp_path / "m.gguf", MTP, tensors=tensors), numpy_need)
    assert (found.runnable, found.left_out) == (True, 16)


def test_layers_by_name_or_by_interval(tmp_path: Path) -> None:
    """The list of newer converters goes before the interval, and includes the blocks that are left out."""
    keys = {
        "qwen35.attention.recurrent_layers": [True, True, True, False, False],
        "qwen35.full_attention_interval": 2,
    }
    with open_model(write_changed(tmp_path / "named.gguf", MTP, metadata=keys)) as model:
        assert model.hyper.attention_layers == (3,)
    keys = INTERVAL | {"qwen35.full_attention_interval": None}
    with open_model(write_changed(tmp_path / "absent.gguf", MTP, metadata=keys)) as model:
        assert model.hyper.attention_layers == (3,)


def fused(source: Path, layer: int) -> dict[str, Any]:
    with open_model(source) as model:
        parts = [f"blk.{layer}.attn_{part}.weight" for part in "qkv"]
        rows = np.concatenate([model.dequantise(part) for part in parts])
    return {**dict.fromkeys(parts), f"blk.{layer}.attn_qkv.weight": rows}


@pytest.mark.parametrize("source", [QWEN3, QWEN35])
def test_fused_query_key_and_value(tmp_path: Path, source: Path) -> None:
    path = write_changed(tmp_path / "m.gguf", source, tensors=fused(source, 3))
    with open_model(path) as model:
        assert model.hyper.fused_qkv == {3}
        assert model.hyper.qkv_names(3) == ("blk.3.attn_qkv.weight",)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"qwen35.ssm.group_count": 4},
            "key qwen35.ssm.group_count is 4, which does not divide ssm.time_step_rank 6",
        ),
        (
            {"qwen35.ssm.inner_size": 100},
            "key qwen35.ssm.inner_size is 100, it must be 96 (ssm.time_step_rank * ssm.state_size)",
        ),
        ({"qwen35.ssm.conv_kernel": None}, "key qwen35.ssm.conv_kernel is missing"),
        ({"qwen35.ssm.state_size": 0}, "key qwen35.ssm.state_size is 0, the limit is 1 to 2147483647"),
        (
            INTERVAL | {"qwen35.full_attention_interval": 1},
            "0 of 8 layers are recurrent, qwen35 needs some of both kinds",
        ),
        (
            INTERVAL | {"qwen35.full_attention_interval": 9},
            "8 of 8 layers are recurrent, qwen35 needs some of both kinds",
        ),
        (
            {"qwen35.attention.recurrent_layers": [True, False]},
            "key qwen35.attention.recurrent_layers is of 2 values, it must have 8",
        ),
        (
            {"qwen35.attention.recurrent_layers": 3},
            "key qwen35.attention.recurrent_layers must be an array of bools",
        ),
        (
            {"qwen35.rope.dimension_sections": [2, 0, 1, 0]},
            "key qwen35.rope.dimension_sections is [2, 0, 1, 0], which leaves pair 1 of 4 without a position",
        ),
        ({"qwen35.attention.value_length": 16}, "key qwen35.attention.value_length is 16, it must be 32"),
        (
            {"qwen35.nextn_predict_layers": 8},
            "key qwen35.nextn_predict_layers is 8, it must be below block_count 8",
        ),
        (
            {"qwen35.expert_count": 8},
            "key qwen35.expert_count is 8 (mixture of experts), only 0 is supported",
        ),
        (
            {"qwen35.block_count": 2**31 - 1},
            "key qwen35.block_count is 2147483647, the file has only 109 tensors",
        ),
    ],
)
def test_keys_that_do_not_fit(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    assert refusal(tmp_path, QWEN35, metadata=metadata) == message


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "qwen3next"])
def test_mixtures_of_experts_are_refused_by_name(tmp_path: Path, arch: str) -> None:
    assert refusal(tmp_path, QWEN35, metadata={"general.architecture": arch}) == (
        f"architecture '{arch}' (mixture of experts) is not supported (supported: llama, qwen3, qwen35)"
    )


def test_a_decay_that_was_not_converted(tmp_path: Path) -> None:
    raw = {"blk.1.ssm_a": np.array([-1, -2, 0.5, -1, -1, -1], np.float32)}
    assert refusal(tmp_path, QWEN35, tensors=raw) == (
        "tensor blk.1.ssm_a[2] is 0.5, it must be negative: the converter stores -exp(A_log)"
    )


def test_divisors_of_angles_are_llamas(tmp_path: Path) -> None:
    freqs = {"rope_freqs.weight": np.ones(16, np.float32)}
    assert refusal(tmp_path, QWEN3, tensors=freqs).startswith("tensor rope_freqs.weight is not part of this")


def test_llama_has_no_further_blocks(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", metadata={"llama.nextn_predict_layers": 1})
    with pytest.raises(ModelError, match=r"key llama.nextn_predict_layers is 1, only 0 is supported$"):
        open_model(path)
