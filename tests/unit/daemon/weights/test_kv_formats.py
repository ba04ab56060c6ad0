"""Which K/V types a model can have, and what a token takes in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.kv_formats import KV_NAMES, check_kv_formats, kv_bytes_per_token
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ConfigError


@pytest.fixture
def hyper(tiny_llama: Path) -> HyperParameters:
    with open_model(tiny_llama) as file:
        return dataclasses.replace(file.hyper, head_dim=64, value_dim=96)


@pytest.mark.parametrize("k", KV_NAMES)
@pytest.mark.parametrize("v", KV_NAMES)
def test_heads_of_whole_blocks_take_every_pair(hyper: HyperParameters, k: str, v: str) -> None:
    check_kv_formats(hyper, k, v)
    assert kv_bytes_per_token(hyper, k, v) > 0


def test_bytes_per_token(hyper: HyperParameters) -> None:
    heads = hyper.n_layer * hyper.n_head_kv
    assert kv_bytes_per_token(hyper, "q8_0", "q4_1") == heads * (2 * 34 + 3 * 20)
    assert kv_bytes_per_token(hyper, "bf16", "f32") == heads * (64 * 2 + 96 * 4)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_other_heads_are_refused_by_type_key_and_limit(hyper: HyperParameters, name: str) -> None:
    for field, plane, key in (("head_dim", "K", "key_length"), ("value_dim", "V", "value_length")):
        odd = dataclasses.replace(hyper, **{field: 80})
        check_kv_formats(odd, "f16", "bf16")
        message = (
            f"^{plane} type {name} needs heads of a multiple of 32 numbers: llama.attention.{key} is 80$"
        )
        with pytest.raises(ConfigError, match=message):
            check_kv_formats(odd, name, name)
        check_kv_formats(odd, *((name, "f32") if plane == "V" else ("f32", name)))


@pytest.mark.parametrize("pair", [("f32", "tq3_0"), ("tq3_0", "f32")])
def test_unknown_types_are_refused_in_both_planes(hyper: HyperParameters, pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="tq3_0"):
        check_kv_formats(hyper, *pair)
