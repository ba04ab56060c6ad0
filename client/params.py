"""The parameters of an answer: one table of names, types and ranges for flags, `/params`, jobs and files.

The names are keyword arguments of `Client.generate`. The daemon checks ranges as well, but only when a
request reaches it; here a person or a job file hears at once which value is wrong and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slotd.protocol.errors import ConfigError

#: Checked values by name, ready to be passed on as keyword arguments.
ParamDict = dict[str, Any]

INT31 = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_IDS = 64
MAX_BIASES = 1024

#: What the command line starts from: llama.cpp's defaults. The daemon's own default is greedy decoding.
DEFAULTS: ParamDict = {
    "max_tokens": None,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.0,
    "penalty_window": 64,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": None,
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table. `check` takes a JSON value and returns it normalised, or raises ValueError."""

    check: Callable[[Any], Any]
    limit: str  # what is allowed, for messages


def integer(low: int, high: int, *, none: bool = False) -> Parameter:
    def check(value: Any) -> int | None:
        if value is None and none:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError
        return value

    return Parameter(check, f"a whole number, {low} to {high}" + (", or null" if none else ""))


def real(low: float, high: float, *, above: bool = False) -> Parameter:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not low <= value <= high or (above and value == low):  # NaN and infinity fail the range
            raise ValueError
        return float(value)

    return Parameter(check, f"a number, {'above ' if above else ''}{low:g} to {high:g}")


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT31


def _check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _check_stop(value: Any) -> list[str]:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError
    return list(stops)


def _check_stop_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_STOP_IDS or not all(map(is_token, value)):
        raise ValueError
    return list(value)


def _check_logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise ValueError
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key
        if not is_token(token) or token in biases:  # twice: "7" and "07"
            raise ValueError
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 1000:
            raise ValueError
        biases[token] = float(bias)
    return biases


PARAMETERS: Mapping[str, Parameter] = {
    "max_tokens": integer(1, INT31, none=True),
    "temperature": real(0, 100),
    "top_k": integer(0, INT31),
    "top_p": real(0, 1, above=True),
    "min_p": real(0, 1),
    "repetition_penalty": real(0, 100, above=True),
    "penalty_window": integer(0, INT31),
    "frequency_penalty": real(-100, 100),
    "presence_penalty": real(-100, 100),
    "logit_bias": Parameter(
        _check_logit_bias, f"an object of token id to bias (-1000 to 1000), at most {MAX_BIASES}"
    ),
    "seed": integer(0, 2**64 - 1, none=True),
    "stop": Parameter(
        _check_stop, f"a text or a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters"
    ),
    "stop_ids": Parameter(_check_stop_ids, f"a list of at most {MAX_STOP_IDS} token ids"),
    "logprobs": integer(0, 20),
    "min_tokens": integer(0, INT31),
    "ignore_eos": Parameter(_check_flag, "true or false"),
}


def check(name: str, value: Any) -> Any:
    """The checked form of one value. ConfigError names the parameter, the value and what is allowed."""
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise ConfigError(f"parameter {name!r} is not supported; known are {', '.join(PARAMETERS)}")
    try:
        return parameter.check(value)
    except ValueError:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        raise ConfigError(f"{name} is {shown[:80]}; allowed is {parameter.limit}") from None


def check_all(values: Any) -> ParamDict:
    """`check` for every entry of a JSON object, and whether they go together."""
    if not isinstance(values, Mapping):
        raise ConfigError("params is not an object of name to value")
    params = {name: check(name, value) for name, value in values.items()}
    least, most = params.get("min_tokens", 0), params.get("max_tokens")
    if most is not None and least > most:
        raise ConfigError(f"min_tokens is {least}, above max_tokens {most}")
    return params


def parse_assignment(text: str) -> tuple[str, Any]:
    """``name=value`` as typed by a person: the value is JSON, or plain text where JSON fails."""
    name, equals, raw = text.partition("=")
    name, raw = name.strip(), raw.strip()
    if not equals or not name:
        raise ConfigError(f"{text!r} is not NAME=VALUE")
    value: Any
    try:
        value = json.loads(raw)
    except ValueError:
        value = None if raw.lower() in ("none", "off") else raw
    return name, check(name, value)


def effective(params: ParamDict, seed: int | None) -> ParamDict:
    """The parameters as an answer really used them: `params` with the seed that was drawn."""
    return {**params, "seed": seed if seed is not None else params.get("seed")}
