"""The parameters of an answer: one table of names, types and ranges for flags, `/params`, jobs and files.

The names are keyword arguments of `Client.generate`. The daemon checks ranges as well, but only when a
request reaches it; here a person or a job file hears at once which value is wrong and what is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slotd.protocol.errors import ConfigError

#: Checked values by name, ready to be passed on as keyword arguments.
ParamDict = dict[str, Any]

#: Slots of the daemon for prefixes of prompts, unless said otherwise: all that it has by default.
PREFIX_SLOTS = 8

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
    none: str = ""  # what None means, where it is allowed


def integer(low: int, high: int, *, none: str = "") -> Parameter:
    def check(value: Any) -> int | None:
        if value is None and none:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError
        return value

    return Parameter(check, f"a whole number, {low} to {high}", none)


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


def _check_optional_flag(value: Any) -> bool | None:
    return None if value is None else _check_flag(value)


def _check_template_args(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return dict(value)


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
    "max_tokens": integer(1, INT31, none="no limit"),
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
    "seed": integer(0, 2**64 - 1, none="random"),
    "stop": Parameter(
        _check_stop, f"a text or a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters"
    ),
    "stop_ids": Parameter(_check_stop_ids, f"a list of at most {MAX_STOP_IDS} token ids"),
    "logprobs": integer(0, 20),
    "min_tokens": integer(0, INT31),
    "ignore_eos": Parameter(_check_flag, "true or false"),
    "think": Parameter(_check_optional_flag, "true or false", none="as the chat template has it"),
    "thinking_budget": integer(1, INT31, none="no limit"),
    "template_args": Parameter(_check_template_args, "an object of variables of the chat template"),
}

#: Spelling of the command line, without dashes -> the name here, where they differ.
_FLAG_NAMES = {
    "n": "max_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
    "s": "seed",
}

#: What a typed -1 stands for.
_MINUS_ONE: ParamDict = {
    "max_tokens": None,
    "seed": None,
    "penalty_window": INT31,
    "thinking_budget": None,
    "think": None,
}

_ASSIGNED = re.compile(r"(-{0,2}[A-Za-z][\w-]*)\s*=\s*")
_NEXT = re.compile(r"\s" + _ASSIGNED.pattern)


def check(name: str, value: Any, *, typed: bool = False) -> Any:
    """The checked form of one value. ConfigError names the parameter, the value and what is allowed.

    Args:
        typed: a person typed it, on a command line or in the chat, where -1 stands for null.
    """
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise ConfigError(f"parameter {name!r} is not supported; known are {', '.join(PARAMETERS)}")
    try:
        return parameter.check(value)
    except ValueError:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        none = f", or {'-1' if typed else 'null'} for {parameter.none}" if parameter.none else ""
        raise ConfigError(f"{name} is {shown[:80]}; allowed is {parameter.limit}{none}") from None


def check_all(values: Any, *, typed: bool = False) -> ParamDict:
    """`check` for every entry of a JSON object, and whether they go together."""
    if not isinstance(values, Mapping):
        raise ConfigError("params is not an object of name to value")
    params = {name: check(name, value, typed=typed) for name, value in values.items()}
    least, most = params.get("min_tokens", 0), params.get("max_tokens")
    if most is not None and least > most:
        raise ConfigError(f"min_tokens is {least}, above max_tokens {most}")
    return params


def parse_assignments(text: str) -> ParamDict:
    """``name=value name=value ...`` as typed by a person.

    A name may be spelled as its flag on the command line. A value is JSON, or plain text up to the next
    ``name=`` where JSON fails. ConfigError names what is wrong.
    """
    found: ParamDict = {}
    rest = text.strip()
    while rest:
        match = _ASSIGNED.match(rest)
        if match is None:
            raise ConfigError(f"{rest!r} is not NAME=VALUE")
        value, rest = _split_value(rest[match.end() :])
        name = match[1].lstrip("-").replace("-", "_")
        name = _FLAG_NAMES.get(name, name)
        if name in found:
            raise ConfigError(f"{name} is given twice")
        found[name] = check(name, _MINUS_ONE.get(name, -1) if value == -1 else value, typed=True)
    return found


def _split_value(text: str) -> tuple[Any, str]:
    """The value that `text` begins with, and the assignments behind it."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        rest = text[end:].lstrip()
        if not rest or (text[end].isspace() and _ASSIGNED.match(rest)):
            return value, rest
    except ValueError:
        pass
    following = _NEXT.search(text)
    end = len(text) if following is None else following.start()
    raw = text[:end].strip()
    return (None if raw.lower() in ("none", "off") else raw), text[end:].strip()


def shown(name: str, value: Any) -> str:
    """A value for a person, who may type it back except where it is in words."""
    if value is None and name in PARAMETERS:
        return PARAMETERS[name].none
    return json.dumps(value, ensure_ascii=False)


def effective(params: ParamDict, seed: int | None) -> ParamDict:
    """The parameters as an answer really used them: `params` with the seed that was drawn."""
    return {**params, "seed": seed if seed is not None else params.get("seed")}
