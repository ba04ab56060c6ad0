"""Synthetic qwen models: names, shapes, types and keys are those of the published files."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.client.chat_template import ChatTemplate
from slotd.client.tokenizer import Tokenizer
from slotd.daemon.weights.block_types import block_type
from slotd.daemon.weights.reader import open_model
from slotd.protocol.gguf_header import Header, parse_header
from tests.bench.model_shapes import PRESETS, Q4_K_M, UNEVEN, Shape, cut_down, tensors
from tests.bench.synthetic_gguf import write_synthetic

QWEN = [name for name in PRESETS if name.startswith("qwen")]

#: Parameters of the model cards, in 1e9: all, and without the embedding and what is tied to it.
CARDS = {
    "qwen3-0.6b": (0.596, 0.44),
    "qwen3-1.7b": (1.72, 1.41),
    "qwen3-4b": (4.02, 3.6),
    "qwen3-8b": (8.19, 6.95),
    "qwen3-14b": (14.77, 13.2),
    "qwen3-32b": (32.76, 31.2),
    "qwen35-0.8b": (0.752, None),
    "qwen35-2b": (1.88, None),
    "qwen35-4b": (4.206, None),
    "qwen35-9b": (8.954, None),
    "qwen35-27b": (26.896, None),
}

#: (channels of the convolution, width of the value heads)
LINEAR = {
    "qwen35-0.8b": (6144, 2048),
    "qwen35-2b": (6144, 2048),
    "qwen35-4b": (8192, 4096),
    "qwen35-9b": (8192, 4096),
    "qwen35-27b": (10240, 6144),
}


def small(name: str, **changes: Any) -> Shape:
    return dataclasses.replace(cut_down(PRESETS[name], layers=8, width=256, vocab=512), **changes)


class Written:
    """A file that was just written, and that the daemon takes for a whole model."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path = write_synthetic(path / "m.gguf", shape, seed=4)
        with open_model(self.path) as file:
            assert file.hyper.arch == shape.arch
        self._raw = self.path.read_bytes()
        self.header: Header = parse_header(self._raw, "m.gguf")
        self.shapes = {name: tuple(info.shape) for name, info in self.header.tensors.items()}
        self.kinds = {name: block_type(info.type_id).name for name, info in self.header.tensors.items()}
        start = len(shape.arch) + 1
        self.keys = {key[start:]: value for key, value in self.header.metadata.items()
                     if key.startswith(shape.arch + ".")}  # fmt: skip

    def numbers(self, name: str) -> Any:
        info = self.header.tensors[name]
        return np.frombuffer(
            self._raw, np.float32, math.prod(info.shape), self.header.data_start + info.offset
        ).reshape(info.shape[::-1])


@pytest.mark.parametrize(("name", "card"), CARDS.items())
def test_sizes_are_those_of_the_model_cards(name: str, card: tuple[float, float | None]) -> None:
    shape = PRESETS[name]
    sizes = {spec.name: math.prod(spec.shape) for spec in tensors(shape)}
    total = sum(sizes.values()) / 1e9
    assert total == pytest.approx(card[0], rel=0.002)
    if card[1] is not None:
        ends = sizes["token_embd.weight"] + sizes.get("output.weight", 0)
        assert total - ends / 1e9 == pytest.approx(card[1], rel=0.01)
    if shape.linear is not None:
        assert (shape.linear.channels, shape.linear.inner) == LINEAR[name]


def test_every_qwen_preset_is_in_these_tables() -> None:
    assert set(QWEN) == set(CARDS)
    assert {name for name in QWEN if PRESETS[name].linear is not None} == set(LINEAR)


def test_numbers_of_tensors() -> None:
    big = PRESETS["qwen35-27b"]
    assert len(list(tensors(big))) == 851
    assert len(list(tensors(dataclasses.replace(big, n_mtp=1)))) == 866
    assert len(list(tensors(PRESETS["qwen35-0.8b"]))) == 320
    assert len(list(tensors(PRESETS["qwen3-0.6b"]))) == 28 * 11 + 2


def test_the_mix_of_the_27b_file() -> None:
    found = Counter()
    for spec in tensors(PRESETS["qwen35-27b"]):
        found[spec.name.split(".")[-2 if spec.name.endswith(".weight") else -1], spec.kind] += 1
    assert (found["ffn_down", "Q6_K"], found["ffn_down", "Q4_K"]) == (32, 32)
    assert (found["attn_qkv", "Q6_K"], found["attn_qkv", "Q4_K"]) == (24, 24)
    assert (found["attn_v", "Q6_K"], found["attn_v", "Q4_K"]) == (8, 8)
    assert (found["output", "Q6_K"], found["token_embd", "Q4_K"]) == (1, 1)
    for name in ("ssm_alpha", "ssm_beta", "ssm_out", "attn_gate"):
        assert found[name, "Q4_K"] == 48
    for name in ("ssm_conv1d", "ssm_norm", "ssm_a"):
        assert found[name, "F32"] == 48
    assert next(tensors(PRESETS["qwen35-4b"])).kind == "Q6_K"  # tied


def expected_qwen35(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """ggml's order of a block's sizes, by the reference for these models; written out for a width of 256."""
    ffn = {"ffn_gate.weight": (256, shape.n_ff), "ffn_up.weight": (256, shape.n_ff)}
    block = {"attn_norm.weight": (256,), "post_attention_norm.weight": (256,), **ffn}
    block["ffn_down.weight"] = (shape.n_ff, 256)
    if layer % 4 == 3 or layer == 8:
        heads = {"qwen35-27b": 6, "qwen35-0.8b": 4, "qwen35-2b": 4}.get(_name_of(shape), 4)
        block |= {
            "attn_q.weight": (256, 2 * heads * 256),
            "attn_k.weight": (256, 256),
            "attn_v.weight": (256, 256),
            "attn_output.weight": (heads * 256, 256),
            "attn_q_norm.weight": (256,),
            "attn_k_norm.weight": (256,),
        }
    else:
        n_v = {"qwen35-27b": 6, "qwen35-0.8b": 2, "qwen35-2b": 2}.get(_name_of(shape), 4)
        block |= {
            "attn_qkv.weight": (256, 4 * 128 + n_v * 128),
            "attn_gate.weight": (256, n_v * 128),
            "ssm_conv1d.weight": (4, 4 * 128 + n_v * 128),
            "ssm_a": (n_v,),
            "ssm_dt.bias": (n_v,),
            "ssm_alpha.weight": (256, n_v),
            "ssm_beta.weight": (256, n_v),
            "ssm_norm.weight": (128,),
            "ssm_out.weight": (n_v * 128, 256),
        }
    if layer == 8:
        block |= {f"nextn.{name}.weight": (256,) for name in ("enorm", "hnorm", "shared_head_norm")}
        block["nextn.eh_proj.weight"] = (512, 256)
    return block


def _name_of(shape: Shape) -> str:
    ratio = shape.linear and shape.linear.n_v_head // shape.linear.n_k_head
    return {3: "qwen35-27b", 2: "qwen35-4b", 1: "qwen35-0.8b"}[ratio or 1]


@pytest.mark.parametrize("name", [name for name in QWEN if name.startswith("qwen35")])
def test_a_small_qwen35_has_the_real_tensors_and_keys(tmp_path: Path, name: str) -> None:
    shape = small(name, n_mtp=1)
    file = Written(tmp_path, shape)
    expected = {"token_embd.weight": (256, 512), "output_norm.weight": (256,)}
    if not shape.tied:
        expected["output.weight"] = (256, 512)
    for layer in range(9):
        expected |= {f"blk.{layer}.{part}": size for part, size in expected_qwen35(shape, layer).items()}
    assert file.shapes == expected
    vectors = [tensor for tensor, kind in file.kinds.items() if kind == "F32"]
    assert set(vectors) == {n for n, s in expected.items() if len(s) == 1 or "ssm_conv1d" in n}
    found = {k.removeprefix("qwen35."): v for k, v in file.header.metadata.items() if k.startswith("qwen35.")}
    assert found["block_count"] == 9
    assert found["nextn_predict_layers"] == 1
    assert list(found["attention.recurrent_layers"]) == [True] * 3 + [False] + [True] * 3 + [False] * 2
    assert list(found["rope.dimension_sections"]) == [11, 11, 10, 0]
    assert (found["rope.dimension_count"], found["rope.freq_base"]) == (64, 1e7)
    assert (found["ssm.conv_kernel"], found["ssm.state_size"], found["full_attention_interval"]) == (
        4,
        128,
        4,
    )
    assert found["ssm.inner_size"] == 128 * found["ssm.time_step_rank"]
    assert found["attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert found["context_length"] == 262144
    check_decays(file)


def check_decays(file: Written) -> None:
    """Each head forgets, none at once; alpha has a spread of about 1."""
    a, bias = file.numbers("blk.0.ssm_a"), file.numbers("blk.0.ssm_dt.bias")
    assert (a < 0).all()
    assert (bias <= 0).all()
    alpha = np.linspace(-3, 3, 13)[:, None]
    decay = np.exp(a * np.logaddexp(0, alpha + bias))
    assert ((decay > 0.04) & (decay < 0.99999)).all()
    taps = file.numbers("blk.0.ssm_conv1d.weight")
    assert taps.shape[-1] == 4
    assert 0.4 < taps.std() < 0.6


@pytest.mark.parametrize("name", [name for name in QWEN if name.startswith("qwen3-")])
def test_a_small_qwen3_has_the_real_tensors_and_keys(tmp_path: Path, name: str) -> None:
    shape = small(name)
    group = PRESETS[name].n_head // 8
    file = Written(tmp_path, shape)
    expected = {"token_embd.weight": (256, 512), "output_norm.weight": (256,)}
    if not shape.tied:
        expected["output.weight"] = (256, 512)
    for layer in range(8):
        block = {
            "attn_norm.weight": (256,),
            "attn_q.weight": (256, group * 128),
            "attn_k.weight": (256, 128),
            "attn_v.weight": (256, 128),
            "attn_output.weight": (group * 128, 256),
            "attn_q_norm.weight": (128,),
            "attn_k_norm.weight": (128,),
            "ffn_norm.weight": (256,),
            "ffn_gate.weight": (256, shape.n_ff),
            "ffn_up.weight": (256, shape.n_ff),
            "ffn_down.weight": (shape.n_ff, 256),
        }
        expected |= {f"blk.{layer}.{part}": size for part, size in block.items()}
    assert file.shapes == expected
    found = {k.removeprefix("qwen3."): v for k, v in file.header.metadata.items() if k.startswith("qwen3.")}
    assert set(found) == {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "rope.freq_base"),
        *(
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
        ),
        "attention.layer_norm_rms_epsilon",  # and no rope.dimension_count: real files of qwen3 have none
    }
    assert (found["attention.key_length"], found["rope.freq_base"], found["context_length"]) == (
        128,
        1e6,
        40960,
    )


def test_the_tokenizer_thinks(tmp_path: Path) -> None:
    """Real splitter, tags of thoughts as tokens, fillers up to the number of rows."""
    shape = small("qwen35-27b", n_vocab=33_000, n_layer=4, weight_type="Q8_0")
    file = Written(tmp_path, shape)
    tokenizer = Tokenizer.from_metadata(file.header.metadata)
    assert file.header.metadata["tokenizer.ggml.pre"] == "qwen35"
    assert tokenizer.vocab_size == 33_000
    assert tokenizer.encode("<think></think>") == [32_768, 32_769]
    template = ChatTemplate(tokenizer.chat_template)
    assert template.has_thoughts
    assert template.render([{"role": "user", "content": "a"}], enable_thinking=False).endswith("</think>\n\n")


def test_a_file_whose_parts_are_of_other_types_each(tmp_path: Path) -> None:
    file = Written(tmp_path, small("qwen35-27b", weight_type=UNEVEN, n_layer=4, n_mtp=1))
    first = {name.removeprefix("blk.0."): kind for name, kind in file.kinds.items()}
    assert (first["attn_qkv.weight"], first["attn_gate.weight"], first["ssm_out.weight"]) == ("Q5_K",) * 3
    assert first["ssm_alpha.weight"] == first["ssm_beta.weight"] == "F32"
    attention = [file.kinds[f"blk.3.attn_{part}.weight"] for part in ("q", "k", "v", "output")]
    assert attention == ["Q4_K", "Q8_0", "Q8_0", "Q5_K"]
    assert {file.kinds[f"blk.4.ffn_{part}.weight"] for part in ("gate", "up", "down")} == {"IQ4_XS"}
    assert (file.kinds["output.weight"], file.kinds["token_embd.weight"]) == ("Q6_K", "Q4_K")


def test_a_published_shape_in_another_type(tmp_path: Path) -> None:
    for weight_type, kind in (("BF16", "BF16"), (Q4_K_M, "Q4_K")):
        shape = small("qwen35-0.8b", weight_type=weight_type, n_layer=4)
        file = Written(tmp_path, shape)
        assert file.kinds["blk.0.attn_gate.weight"] == file.kinds["blk.0.ssm_alpha.weight"] == kind
