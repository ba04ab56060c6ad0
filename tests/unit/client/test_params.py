"""The table of answer parameters: what is taken, what is refused, and in which words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slotd.client.generation import GenerationArgs
from slotd.client.params import (
    DEFAULTS,
    INT31,
    PARAMETERS,
    check,
    check_all,
    effective,
    parse_assignments,
    shown,
)
from slotd.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("max_tokens", None, None),
        ("max_tokens", 1, 1),
        ("temperature", 0, 0.0),
        ("temperature", 100, 100.0),
        ("top_p", 1, 1.0),
        ("min_p", 0, 0.0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("stop", "x", ["x"]),
        ("stop", None, []),
        ("logit_bias", {"7": -100}, {7: -100.0}),
        ("logprobs", 20, 20),
        ("ignore_eos", True, True),
    ],
)
def test_takes(name: str, value: Any, found: Any) -> None:
    assert check(name, value) == found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", INT31 + 1),
        ("max_tokens", True),
        ("max_tokens", 3.0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", ["x" * 513]),
        ("stop", [1]),
        ("stop_ids", ["1"]),
        ("logit_bias", {"7": 1, "07": 2}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"7": 1001}),
        ("logit_bias", {"7": math.nan}),
        ("logit_bias", [[7, 1]]),
        ("logprobs", 21),
        ("ignore_eos", 1),
    ],
)
def test_refuses_and_says_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*; allowed is "):
        check(name, value)


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'temprature' is not supported"):
        check_all({"temprature": 1})


def test_min_tokens_over_max_tokens() -> None:
    with pytest.raises(ConfigError, match="min_tokens is 5, above max_tokens 4"):
        check_all({"max_tokens": 4, "min_tokens": 5})
    assert check_all({"max_tokens": None, "min_tokens": 5})["min_tokens"] == 5


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("temperature=0.5", ("temperature", 0.5)),
        (" top_k = 3 ", ("top_k", 3)),
        ("stop=END", ("stop", ["END"])),
        ('stop=["a","b"]', ("stop", ["a", "b"])),
        ("seed=none", ("seed", None)),
        ("max_tokens=null", ("max_tokens", None)),
        ("max_tokens=-1", ("max_tokens", None)),
        ("n=-1", ("max_tokens", None)),
        ("seed=-1", ("seed", None)),
        ("temp=0.5", ("temperature", 0.5)),
        ("--top-k=3", ("top_k", 3)),
        ("repeat-penalty=1.5", ("repetition_penalty", 1.5)),
        ("repeat-last-n=-1", ("penalty_window", INT31)),
        ("stop=3 blind mice", ("stop", ["3 blind mice"])),
        ('stop="a b=c"', ("stop", ["a b=c"])),
    ],
)
def test_typed_assignments(typed: str, found: tuple[str, Any]) -> None:
    assert parse_assignments(typed) == dict([found])


def test_several_assignments_in_one_line() -> None:
    typed = 'temp=0 top-k = 3 stop=THE END seed=-1 stop_ids=[1, 2] logit_bias={"7": 1}'
    assert parse_assignments(typed) == {
        "temperature": 0.0,
        "top_k": 3,
        "stop": ["THE END"],
        "seed": None,
        "stop_ids": [1, 2],
        "logit_bias": {7: 1.0},
    }


def test_a_missing_value_is_called_by_what_is_typed() -> None:
    with pytest.raises(ConfigError, match=r"1 to 2147483647, or null for no limit$"):
        check("max_tokens", 0)
    with pytest.raises(ConfigError, match=r"1 to 2147483647, or -1 for no limit$"):
        parse_assignments("n=0")
    assert parse_assignments("think=-1 thinking_budget=-1") == {"think": None, "thinking_budget": None}
    assert [shown("max_tokens", None), shown("seed", None)] == ["no limit", "random"]
    assert [shown("seed", 3), shown("stop", ["a"])] == ["3", '["a"]']


@pytest.mark.parametrize(
    "typed",
    ["temperature", "=3", "temperature=warm", "nope=1", "temp=1 nope=1", "temp=1 temperature=1", "top_k=-1"],
)
def test_typed_assignments_refused(typed: str) -> None:
    with pytest.raises(ConfigError):
        parse_assignments(typed)


def test_every_name_is_an_argument_of_generate_and_every_default_is_allowed() -> None:
    assert set(PARAMETERS) <= set(GenerationArgs.__annotations__)
    assert check_all(DEFAULTS) == DEFAULTS


def test_effective_values_have_the_seed_that_was_drawn() -> None:
    assert effective({"seed": None, "top_k": 3}, 99) == {"seed": 99, "top_k": 3}
    assert effective({"seed": 5}, None) == {"seed": 5}
