"""Which K/V types a model can have, and what a token takes in them."""

from __future__ import annotations

import dataclasses
import itertools
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


@pytest.fixture
def wide(hyper: HyperParameters) -> HyperParameters:
    return dataclasses.replace(hyper, head_dim=256, value_dim=128)


#: The 61 pairs of the reference. f32, for comparisons, goes with all but tq3_0.
BLOCKED = ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
PAIRS = {
    *itertools.product(BLOCKED, (*BLOCKED, "tq3_0")),
    *(("tq3_0", v) for v in ("f16", "bf16", "q4_0", "q8_0", "tq3_0")),
}
WITH_F32 = {pair for other in (*BLOCKED, "f32") for pair in (("f32", other), (other, "f32"))}


def test_p53_61_pairs_run_and_the_others_are_refused_with_the_list(wide: HyperParameters) -> None:
    assert len(PAIRS) == 61
    for k, v in PAIRS | WITH_F32:
        check_kv_formats(wide, k, v)
        assert kv_bytes_per_token(wide, k, v) > 0
    refused = set(itertools.product(KV_NAMES, KV_NAMES)) - PAIRS - WITH_F32
    assert refused == {("f32", "tq3_0"), *(("tq3_0", v) for v in ("f32", "q4_1", "q5_0", "q5_1"))}
    for k, v in refused:
        mine, other, plane = (k, v, "K") if k == "tq3_0" else (v, k, "V")
        partners = "f16, bf16, q4_0, q8_0, tq3_0" if plane == "K" else (
            "f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, tq3_0"
        )  # fmt: skip
        message = (
            f"^{plane} type {mine} does not go with {'KV'[plane == 'K']} type {other}, only with {partners}$"
        )
        with pytest.raises(ConfigError, match=message):
            check_kv_formats(wide, k, v)


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


@pytest.mark.parametrize("pair", [("f32", "tq9"), ("tq9", "f32")])
def test_unknown_types_are_refused_in_both_planes(hyper: HyperParameters, pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="'tq9' is not a K/V type"):
        check_kv_formats(hyper, *pair)


def test_tq3_0_needs_heads_of_whole_rotations(hyper: HyperParameters, wide: HyperParameters) -> None:
    with pytest.raises(
        ConfigError, match=r"K type tq3_0 needs heads of a multiple of 128 .*key_length is 64"
    ):
        check_kv_formats(hyper, "tq3_0", "f16")
    with pytest.raises(
        ConfigError, match=r"V type tq3_0 needs heads of a multiple of 128 .*value_length is 96"
    ):
        check_kv_formats(hyper, "f16", "tq3_0")
    assert kv_bytes_per_token(wide, "tq3_0", "tq3_0") == wide.n_layer * wide.n_head_kv * (8 * 14 + 4 * 14)
