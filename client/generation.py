"""The keyword arguments of a generation: their names and types, and the command they become.

Types are checked here, so that a mistake has a name before anything is sent; ranges are the daemon's to
check (it answers ``bad_args`` with the field and its limit).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from slotd.client.completion import OnProgress
from slotd.protocol.errors import ConfigError
from slotd.protocol.messages import Prompt, Restore, Sampling, Snap


class GenerationArgs(TypedDict, total=False):
    """Keyword arguments of `Client.generate`, `stream` and `chat`; all optional."""

    max_tokens: int | None  # None: until the context is full
    stop: str | Sequence[str]  # strings that end the answer and do not appear in it
    stop_ids: Sequence[int]  # token ids that end the answer beside the model's own
    temperature: float  # 0 (the default): always the best token
    top_k: int  # 0: off
    top_p: float
    min_p: float
    repetition_penalty: float
    penalty_window: int  # last tokens that the three penalties look at
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None  # None: drawn by the daemon, reported in Completion.seed
    logprobs: int  # alternatives to report with every token; 0: none
    min_tokens: int  # tokens before an end-of-text or stop id is allowed (stop strings always count)
    ignore_eos: bool
    slot: int | None  # start from this slot; the prompt must begin with its tokens
    snap: tuple[int, int] | None  # (at, slot): keep the first `at` prompt tokens in `slot`
    fit: bool | None  # over-long: generate what fits. None: True when max_tokens is None
    think: bool | None  # chats: whether the model reasons first; None: as its template has it
    template_args: Mapping[str, Any]  # chats: further variables of the chat template
    thinking_budget: int | None  # chats: tokens after which a thought that is still open is closed
    timeout: float | None  # seconds for the whole request; then it is cancelled
    on_progress: OnProgress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Checked arguments; see `GenerationArgs`. Defaults are greedy decoding until the context is full."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    slot: int | None = None
    snap: Snap | None = None
    fit: bool = True
    think: bool | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    timeout: float | None = None
    on_progress: OnProgress | None = None

    @classmethod
    def from_args(cls, verb: str, args: Mapping[str, Any]) -> Generation:
        """Check the keyword arguments of `verb`.

        Raises:
            TypeError: there is no such argument; the message names it.
            ConfigError: a value has the wrong type; the message names the argument.
        """
        for name in args:
            if name not in ARGUMENTS:
                raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}")
        if args.get("think") is not None and "enable_thinking" in (args.get("template_args") or {}):
            raise ConfigError("think is given twice: it is the template's enable_thinking")
        sampling = {name: args[name] for name in args if name in _SAMPLING}
        own = {name: args[name] for name in args if name not in _SAMPLING}
        checked = {name: _CHECKS[name](name, value) for name, value in own.items()}
        if checked.get("fit") is None:
            checked["fit"] = checked.get("max_tokens") is None
        return cls(sampling=_sampling(sampling), **checked)

    @property
    def for_chats(self) -> tuple[str, ...]:
        """Names of the arguments given that mean something for messages only."""
        given = {
            "think": self.think is not None,
            "template_args": bool(self.template_args),
            "thinking_budget": self.thinking_budget is not None,
        }
        return tuple(name for name, wanted in given.items() if wanted)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        think = {} if self.think is None else {"enable_thinking": self.think}
        return {**self.template_args, **think}

    def command(self, id: str, ids: Sequence[int], *, max_ctx: int) -> Prompt:
        """The wire command for the prompt `ids` on a daemon with a context of `max_ctx` tokens."""
        room = max_ctx if self.fit else max(0, max_ctx - len(ids))
        prompt = Prompt(
            id=id,
            ids=ids,
            n_gen=room if self.max_tokens is None else self.max_tokens,
            snap=self.snap,
            sampling=self.sampling,
            stop=self.stop_ids,
            logprobs=self.logprobs,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            fit=self.fit,
        )
        if self.slot is None:
            return prompt
        same = {each.name: getattr(prompt, each.name) for each in fields(prompt)}
        return Restore(slot=self.slot, **same)


def token_ids(name: str, value: Any) -> array[int]:
    """`value`, any sequence of integers, as int32. ConfigError names what does not fit."""
    try:
        return array("i", value)
    except (TypeError, OverflowError, ValueError) as error:
        raise ConfigError(f"{name} must be a sequence of token ids (int32): {error}") from None


def _sampling(args: Mapping[str, Any]) -> Sampling:
    return Sampling(**{name: _SAMPLING[name](name, value) for name, value in args.items()})


def _wrong(name: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"{name} must be {wanted}, not {value!r}")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _wrong(name, "an integer", value)
    number = int(value)
    if number < 0:
        raise _wrong(name, "0 or more", value)
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise _wrong(name, "a number", value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _wrong(name, "a number", value) from None
    if not math.isfinite(number):
        raise _wrong(name, "a finite number", value)
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    return value


def _optional_integer(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _optional_flag(name: str, value: Any) -> bool | None:
    return None if value is None else _flag(name, value)


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    seconds = _number(name, value)
    if seconds <= 0:
        raise _wrong(name, "more than 0 seconds", value)
    return seconds


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if strings is None or not all(isinstance(each, str) and each for each in strings):
        raise _wrong(name, "a string or a sequence of strings, none of them empty", value)
    return strings


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(token_ids(name, value))


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise _wrong(name, "a mapping of token id to number", value)
    return tuple((_integer(f"{name} id", id), _number(f"{name}[{id}]", bias)) for id, bias in value.items())


def _snap(name: str, value: Any) -> Snap | None:
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _wrong(name, "a pair (at, slot)", value)
    return Snap(at=_integer(f"{name} at", value[0]), slot=_integer(f"{name} slot", value[1]))


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, "a mapping of names to values", value)
    return dict(value)


def _budget(name: str, value: Any) -> int | None:
    tokens = _optional_integer(name, value)
    if tokens == 0:
        raise _wrong(name, "1 or more (think=False: no thought at all)", value)
    return tokens


def _callback(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise _wrong(name, "callable", value)
    return value


_SAMPLING: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "penalty_window": _integer,
    "frequency_penalty": _number,
    "presence_penalty": _number,
    "logit_bias": _bias,
    "seed": _optional_integer,
}

_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_tokens": _optional_integer,
    "stop": _strings,
    "stop_ids": _ids,
    "logprobs": _integer,
    "min_tokens": _integer,
    "ignore_eos": _flag,
    "slot": _optional_integer,
    "snap": _snap,
    "fit": _optional_flag,
    "think": _optional_flag,
    "template_args": _mapping,
    "thinking_budget": _budget,
    "timeout": _seconds,
    "on_progress": _callback,
}

#: The name of every argument.
ARGUMENTS: frozenset[str] = frozenset(GenerationArgs.__annotations__)
