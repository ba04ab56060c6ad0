"""Values <-> text: one reader and one writer for every `grammar.Kind`.

Readers get the text with JSON strings already undone. Both raise `BadValue`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slotd.protocol.grammar import (
    BIAS_ID,
    FIELDS,
    FIRST_WORDS,
    SAMPLER_ORDER,
    SNAP_AT,
    SNAP_SLOT,
    Field,
    Kind,
)
from slotd.protocol.messages import Snap, TokenLogprob
from slotd.protocol.words import BadValue, has_surrogate, is_integer, is_real, quote, shown, write_text

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")

_HASH = re.compile(r"[0-9a-f]{32}")

_LONGEST_NUMBER = 64  # characters; int() and float() take more than linear time on long ones


def refused(field: Field, text: str) -> BadValue:
    """The usual `BadValue`: field, value and limit."""
    if field.kind in ("int", "real", "flag", "choice", "ids", "tokens", "numbers", "slots", "biases"):
        return BadValue(field=field.name, value=shown(text), limit=field.limit)
    return BadValue(field=field.name, value=shown(text))


def is_request_id(text: str) -> bool:
    """Whether the text is 1-64 characters of ``A-Za-z0-9._:-``."""
    return _REQUEST_ID.fullmatch(text) is not None


# --------------------------------------------------------------------------------------------------
# Numbers


def _in_range(number: float, field: Field) -> bool:
    return field.low <= number <= field.high and not (field.above and number == field.low)


def _as_int(value: object, field: Field) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise refused(field, str(value)) from None


def _read_int(text: str, field: Field) -> int:
    if len(text) > _LONGEST_NUMBER or not is_integer(text) or not _in_range(number := int(text), field):
        raise refused(field, text)
    return number


def _write_int(value: object, field: Field) -> str:
    number = _as_int(value, field)
    if not _in_range(number, field):
        raise refused(field, str(value))
    return str(number)


def _read_real(text: str, field: Field) -> float:
    if len(text) > _LONGEST_NUMBER or not is_real(text) or not _in_range(number := float(text), field):
        raise refused(field, text)
    return number


def _write_real(value: float, field: Field) -> str:
    if not _in_range(value, field):  # NaN is in no range
        raise refused(field, str(value))
    return repr(float(value))


def _read_flag(text: str, field: Field) -> bool:
    if text not in ("0", "1"):
        raise refused(field, text)
    return text == "1"


def _write_flag(value: bool, field: Field) -> str:
    return "1" if value else "0"


# --------------------------------------------------------------------------------------------------
# Words of a fixed shape


def _read_choice(text: str, field: Field) -> str:
    if text not in field.choices:
        raise refused(field, text)
    return text


def _read_name(text: str, field: Field) -> str:
    if not _NAME.fullmatch(text):
        raise refused(field, text)
    return text


def _read_request_id(text: str, field: Field) -> str:
    if not is_request_id(text):
        raise refused(field, text)
    return text


def _read_hash(text: str, field: Field) -> str:
    if not _HASH.fullmatch(text):
        raise refused(field, text)
    return text


def _read_text(text: str, field: Field) -> str:
    return text


def _write_text_field(value: str, field: Field) -> str:
    return write_text(value)


def _read_path(text: str, field: Field) -> str:
    if not text or "\0" in text or has_surrogate(text):  # names no file; open() would raise other errors
        raise refused(field, text)
    return text


def _write_path(value: str, field: Field) -> str:
    _read_path(value, field)
    return quote(value) if value in FIRST_WORDS or value == "-" else write_text(value)


# --------------------------------------------------------------------------------------------------
# Lists


def _read_ids(text: str, field: Field) -> Sequence[int]:
    if not text:
        return array("i")
    try:
        # int() alone would also take "1_000", " 5" and the digits of other scripts
        if text.encode("ascii").translate(None, b"0123456789,-"):
            raise ValueError
        return array("i", map(int, text.split(",")))
    except (ValueError, OverflowError):
        raise _first_bad(text.split(","), field) from None


def _first_bad(parts: Iterable[str], field: Field) -> BadValue:
    """The error for the first part that is no integer in range; what made the fast way fail."""
    for part in parts:
        try:
            _read_int(part, field)
        except BadValue as error:
            return error
    raise AssertionError("every part is fine")


def _write_ids(value: Sequence[int], field: Field) -> str:
    try:
        ids = array("i", iter(value))  # array() would take bytes for machine words
    except (TypeError, OverflowError):
        raise _first_bad(map(str, value), field) from None
    return ",".join(map(str, ids))


def _check_length(count: int, field: Field) -> None:
    if field.most and count > field.most:
        raise BadValue(field=field.name, count=count, most=field.most)


def _read_tokens(text: str, field: Field) -> tuple[int, ...]:
    _check_length(text.count(",") + 1, field)
    parts = text.split(",")
    return tuple(_read_int(part, field) for part in parts)


def _write_tokens(value: Sequence[int], field: Field) -> str:
    if not value:
        raise refused(field, "")
    _check_length(len(value), field)
    return _write_numbers(value, field)


def _read_numbers(text: str, field: Field) -> tuple[int, ...]:
    return _read_tokens(text, field) if text else ()


def _write_numbers(value: Sequence[int], field: Field) -> str:
    return ",".join(_write_int(number, field) for number in value)


def _read_biases(text: str, field: Field) -> tuple[tuple[int, float], ...]:
    _check_length(text.count(",") + 1, field)
    parts = text.split(",")
    biases = []
    for part in parts:
        token, colon, bias = part.partition(":")
        if not colon:
            raise refused(field, part)
        biases.append((_read_int(token, BIAS_ID), _read_real(bias, field)))
    _check_unique(biases, field)
    return tuple(biases)


def _check_unique(biases: Sequence[tuple[int, float]], field: Field) -> None:
    seen: set[int] = set()
    for token, _ in biases:
        if token in seen:
            raise BadValue(field=field.name, value=token, reason="repeated")
        seen.add(token)


def _write_biases(value: Sequence[tuple[int, float]], field: Field) -> str:
    _check_length(len(value), field)
    _check_unique(value, field)
    return ",".join(f"{_write_int(token, BIAS_ID)}:{_write_real(bias, field)}" for token, bias in value)


# --------------------------------------------------------------------------------------------------
# Small structures


def _read_snap(text: str, field: Field) -> Snap:
    at, colon, slot = text.partition(":")
    if not colon:
        raise BadValue(field=field.name, value=shown(text), reason="not_at_colon_slot")
    return Snap(_read_int(at, SNAP_AT), _read_int(slot, SNAP_SLOT))


def _write_snap(value: Snap, field: Field) -> str:
    return f"{_write_int(value.at, SNAP_AT)}:{_write_int(value.slot, SNAP_SLOT)}"


def _read_slots(text: str, field: Field) -> tuple[int, ...]:
    return () if text == "-" else _read_tokens(text, field)


def _write_slots(value: Sequence[int], field: Field) -> str:
    return _write_numbers(value, field) if value else "-"


def _read_span(text: str, field: Field) -> tuple[int, int]:
    start, comma, end = text.partition(",")
    if not comma:
        raise refused(field, text)
    return _read_int(start, field), _read_int(end, field)


def _read_sampler(text: str, field: Field) -> dict[str, Any]:
    """The sampler tail as {name: value}; seed 0 means that none is given, as version 1 has it."""
    _check_length(text.count(",") + 1, field)
    parts = text.split(",")
    values = {name: read(part, FIELDS[name]) for name, part in zip(SAMPLER_ORDER, parts, strict=False)}
    if values.get("seed") == 0:
        values["seed"] = None
    return values


def _read_progress(text: str, field: Field) -> tuple[int, int]:
    at, slash, of = text.partition("/")
    if not slash:
        raise refused(field, text)
    return _read_int(at, field), _read_int(of, field)


def _write_progress(value: tuple[int, int], field: Field) -> str:
    return "/".join(_write_int(number, field) for number in value)


def _read_logprobs(text: str, field: Field) -> tuple[TokenLogprob, ...]:
    try:
        entries = tuple(
            TokenLogprob(_logprob(own), tuple((_token(token), _logprob(lp)) for token, lp in top))
            for own, top in json.loads(text)
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise refused(field, text) from None
    return entries


def _logprob(value: object) -> float:
    """A finite number out of JSON, as float. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _token(value: object) -> int:
    """An int out of JSON. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def _write_logprobs(value: Sequence[TokenLogprob], field: Field) -> str:
    data = [[entry.logprob, entry.top] for entry in value]
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise refused(field, str(error)) from None


# --------------------------------------------------------------------------------------------------
# By kind

_READERS: dict[Kind, Callable[[str, Field], Any]] = {
    "int": _read_int,
    "real": _read_real,
    "flag": _read_flag,
    "choice": _read_choice,
    "name": _read_name,
    "text": _read_text,
    "path": _read_path,
    "request_id": _read_request_id,
    "ids": _read_ids,
    "tokens": _read_tokens,
    "numbers": _read_numbers,
    "biases": _read_biases,
    "snap": _read_snap,
    "hash": _read_hash,
    "slots": _read_slots,
    "span": _read_span,
    "sampler": _read_sampler,
    "progress": _read_progress,
    "logprobs": _read_logprobs,
}

_WRITERS: dict[Kind, Callable[[Any, Field], str]] = {
    "int": _write_int,
    "real": _write_real,
    "flag": _write_flag,
    "choice": _read_choice,  # a word that may be read may be written
    "name": _read_name,
    "text": _write_text_field,
    "path": _write_path,
    "request_id": _read_request_id,
    "ids": _write_ids,
    "tokens": _write_tokens,
    "numbers": _write_numbers,
    "biases": _write_biases,
    "snap": _write_snap,
    "hash": _read_hash,
    "slots": _write_slots,
    "span": _write_numbers,
    "progress": _write_progress,
    "logprobs": _write_logprobs,
}


def read(text: str, field: Field) -> Any:
    """The value of a field out of its text (JSON strings already undone). Raises BadValue."""
    return _READERS[field.kind](text, field)


def write(value: Any, field: Field) -> str:
    """The text of a field's value. Raises BadValue."""
    return _WRITERS[field.kind](value, field)
