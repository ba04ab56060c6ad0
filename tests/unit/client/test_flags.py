"""Shared flags: what they become."""

from __future__ import annotations

from typing import Any

import pytest

from slotd.client.flags import EngineArgs, engine_args, sampling_params
from slotd.client.params import DEFAULTS, INT31
from slotd.protocol.errors import ConfigError

GIVEN: dict[str, Any] = {
    "max_tokens": -1,
    "temp": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": -1,
    "logit_bias": (),
    "stop": (),
}


def test_without_flags_the_params_are_the_defaults() -> None:
    assert sampling_params(GIVEN) == DEFAULTS


def test_given_values() -> None:
    given = GIVEN | {
        "max_tokens": 3,
        "repeat_last_n": -1,
        "seed": 5,
        "logit_bias": ("7:-5", "8:1.5"),
        "stop": ("a",),
    }
    params = sampling_params(given)
    assert params["max_tokens"] == 3
    assert params["penalty_window"] == INT31
    assert params["seed"] == 5
    assert params["logit_bias"] == {7: -5.0, 8: 1.5}
    assert params["stop"] == ["a"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temp", -1.0, "temperature is -1.0; allowed is"),
        ("max_tokens", 0, "max_tokens is 0; allowed is"),
        ("seed", -2, "seed is -2"),
        ("logit_bias", ("7",), "--logit-bias 7: it is written ID:BIAS"),
        ("logit_bias", ("7:x",), "--logit-bias 7:x"),
        ("logit_bias", ("7:nan",), "--logit-bias 7:nan"),
        ("logit_bias", ("7:1", "7:2"), "once for each id"),
        ("logit_bias", ("a:1",), "logit_bias is"),
        ("stop", ("",), "stop is"),
    ],
)
def test_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sampling_params(GIVEN | {name: value})


def test_engine_flags() -> None:
    assert EngineArgs().argv() == []
    engine = engine_args(
        {
            "max_ctx": 64,
            "chunk": 8,
            "cache_type_k": "f16",
            "cache_type_v": "f32",
            "parallel": 2,
            "exact": True,
            "math": "exact",
            "memory_limit": "1GiB",
            "slots": 12,
            "oom_policy": "seed",
            "host_cache": "0",
            "prefill_pool_trim_tokens": 0,
            "slot_dir": "d",
            "slot_bytes": "2GiB",
            "device": "cpu",
            "idle_unload": 2.5,
            "model": "ignored",
        }
    )
    assert engine.argv() == [
        "--max-ctx=64",
        "-ctk",
        "f16",
        "-ctv",
        "f32",
        "--device=cpu",
        "--math=exact",
        "--exact",
        "--chunk=8",
        "--parallel=2",
        "--slots=12",
        "--memory-limit=1GiB",
        "--oom-policy=seed",
        "--host-cache=0",
        "--prefill-pool-trim-tokens=0",
        "--slot-dir=d",
        "--slot-bytes=2GiB",
        "--idle-unload=2.5",
    ]
    assert engine.deciding() == engine.argv()[:8]


def test_thinking_flags() -> None:
    assert sampling_params(GIVEN | {"think": None, "thinking_budget": -1}) == DEFAULTS
    params = sampling_params(GIVEN | {"think": False, "thinking_budget": 9})
    assert (params["think"], params["thinking_budget"]) == (False, 9)
    with pytest.raises(ConfigError, match="thinking_budget is 0"):
        sampling_params(GIVEN | {"thinking_budget": 0})
