"""Which K/V types a model can have, and what a token takes in them."""

from __future__ import annotations

import dataclasses
import itertools
import re
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
        if k == "tq3_0":
            pair, partners = f"K type {k} does not go with V type {v}", "f16, bf16, q4_0, q8_0, tq3_0"
        else:
            pair = f"V type {v} does not go with K type {k}"
            partners = "f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, tq3_0"
        message = f"^{pair}; it does with -ct{'v' if k == 'tq3_0' else 'k'} of one of: {partners}$"
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
            f"^{plane} type {name} needs heads of a multiple of 32 numbers: llama.attention.{key} is 80, "
            "which f32, f16, bf16 can have$"
        )
        with pytest.raises(ConfigError, match=message):
            check_kv_formats(odd, name, name)
        check_kv_formats(odd, *((name, "f32") if plane == "V" else ("f32", name)))


@pytest.mark.parametrize("pair", [("f32", "tq9"), ("tq9", "f32")])
def test_unknown_types_are_refused_in_both_planes(hyper: HyperParameters, pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="'tq9' is not a K/V type"):
        check_kv_formats(hyper, *pair)


def test_what_a_refusal_names_can_be_used_at_once(hyper: HyperParameters) -> None:
    """On models of any heads: each type that it names instead is taken, nothing is refused after it."""
    refusals = 0
    for head_dim, value_dim in itertools.product((64, 80, 128), repeat=2):
        model = dataclasses.replace(hyper, head_dim=head_dim, value_dim=value_dim)
        for k, v in itertools.product(KV_NAMES, KV_NAMES):
            said = refusal(model, k, v)
            if said is None:
                continue
            refusals += 1
            (listed,) = re.findall(r"(?:one of: |, which )((?:\w+, )*\w+)", said)
            for name in listed.split(", "):
                if "-ctk" in said:
                    named = (name, v)
                elif "-ctv" in said:
                    named = (k, name)
                else:  # heads: a type of this plane, beside one that goes with all of those
                    named = (name, "f16") if said[0] == "K" else ("f16", name)
                assert refusal(model, *named) is None, (said, named)
    assert refusals > 100


def refusal(model: HyperParameters, k: str, v: str) -> str | None:
    try:
        check_kv_formats(model, k, v)
    except ConfigError as error:
        return str(error)
    return None


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
