"""Event <-> line, as `event_grammar.EVENTS` says.

A line of no known form is `Unknown`, so that chatter and later daemons do no harm. A line that starts as
a known form and does not go on as one is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from slotd.protocol import values, words
from slotd.protocol.errors import LocalProtocolError, RemoteProtocolError, Value
from slotd.protocol.event_grammar import EVENTS, JSON_KINDS, EventForm
from slotd.protocol.grammar import FIELDS, INT32_MAX
from slotd.protocol.messages import Event, Json, Tokens, Unknown
from slotd.protocol.words import BadValue

_ID = FIELDS["id"]
_JSON_TAGS = {f"[{kind}]": kind for kind in JSON_KINDS}
_MOST_LEAD_WORDS = 3

_BY_LEAD: dict[str, list[EventForm]] = {}
_BY_MESSAGE: dict[type[Event], list[EventForm]] = {}
for _form in EVENTS:
    _BY_LEAD.setdefault(_form.lead, []).append(_form)
    _BY_MESSAGE.setdefault(_form.message, []).append(_form)

# The usual token line, written out: this one is parsed once for every token.
_TOKENS = re.compile(
    r"\[tok\] (?:id=([A-Za-z0-9._:-]{1,64}) )?at=([0-9]{1,18}) ids=([0-9]{1,10}(?:,[0-9]{1,10})*)"
)

# --------------------------------------------------------------------------------------------------
# Line -> event


def parse_event(line: str) -> Event:
    """The event a line (without its newline) says; `Unknown` when it is of no known form.

    Raises:
        RemoteProtocolError: the line starts as a known form, and a field is missing, malformed or repeated.
    """
    if line.startswith("[tok] "):
        match = _TOKENS.fullmatch(line)
        if match:
            ids = tuple(map(int, match[3].split(",")))
            if max(ids) <= INT32_MAX:
                return Tokens(id=match[1], at=int(match[2]), ids=ids)
    try:
        return _parse(line)
    except BadValue as error:
        raise RemoteProtocolError(f"{error} in the line {line[:200]!r}") from None


def _parse(line: str) -> Event:
    tag, _, rest = line.partition(" ")
    if tag in _JSON_TAGS:
        return _read_json(_JSON_TAGS[tag], rest)
    parts = words.split_words(line)
    found = _form_of(parts)
    return Unknown(text=line) if found is None else _read_form(*found)


def _read_json(kind: str, text: str) -> Json:
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise BadValue(field=kind, reason="not_json") from None
    if not isinstance(data, dict):
        raise BadValue(field=kind, reason="not_an_object")
    request_id = data.pop("id", None)
    if request_id is not None and not (isinstance(request_id, str) and values.is_request_id(request_id)):
        raise BadValue(field="id", value=str(request_id)[:40])
    return Json(kind=kind, data=data, id=request_id)


def _refuse_constant(text: str) -> float:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _form_of(parts: list[str]) -> tuple[EventForm, list[str]] | None:
    """The form whose lead stands at the start, and the words behind it."""
    for count in range(min(_MOST_LEAD_WORDS, len(parts)), 0, -1):
        for form in _BY_LEAD.get(" ".join(parts[:count]), ()):
            if _fits(form, parts[count:]):
                return form, parts[count:]
    return None


def _fits(form: EventForm, parts: list[str]) -> bool:
    """Whether the words go on as this form does; chatter such as ``[prefill] 512 tokens`` does not."""
    if form.words or not parts:
        return not form.first
    halves = words.split_field(parts[0])
    return halves is not None and form.first in ("", halves[0])


def _read_form(form: EventForm, parts: list[str]) -> Event:
    attributes: dict[str, Any] = dict(form.constants)
    for word in form.words:
        if not parts:
            raise BadValue(field=word.name, reason="missing")
        attributes[word.name] = values.read(parts[0], word)
        parts = parts[1:]
    texts = _split_fields(parts)
    if "id" in texts:
        attributes["id"] = values.read(words.unquote(texts.pop("id"), "id"), _ID)
    for field in form.fields:
        if field.name in texts:
            value = values.read(words.unquote(texts.pop(field.name), field.name), field)
            names = field.attributes or (field.name,)
            attributes |= zip(names, value if field.attributes else (value,), strict=True)
        elif field.required:
            raise BadValue(field=field.name, reason="missing")
    if form.open:
        attributes["fields"] = {key: words.read_value(text, key) for key, text in texts.items()}
    event = form.message(**attributes)
    _check(event)
    return event


def _split_fields(parts: list[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for part in parts:
        halves = words.split_field(part)
        if halves is None:
            raise BadValue(word=words.shown(part), reason="unexpected")
        if halves[0] in texts:
            raise BadValue(field=halves[0], reason="repeated")
        texts[halves[0]] = halves[1]
    return texts


def _check(event: Event) -> None:
    """The rule between fields."""
    if isinstance(event, Tokens) and event.logprobs and len(event.logprobs) != len(event.ids):
        raise BadValue(field="logprobs", count=len(event.logprobs), ids=len(event.ids))


# --------------------------------------------------------------------------------------------------
# Event -> line


def format_event(event: Event) -> str:
    """The line (without newline) that says an event.

    Raises:
        LocalProtocolError: a value cannot be put on the wire; the message names it.
    """
    if type(event) is Tokens and not event.logprobs and event.ids and _are_plain(event):
        head = "[tok] " if event.id is None else f"[tok] id={event.id} "
        return f"{head}at={event.at} ids={','.join(map(str, event.ids))}"
    try:
        return _format(event)
    except BadValue as error:
        raise LocalProtocolError(f"{type(event).__name__}: {error}") from None


def _are_plain(event: Tokens) -> bool:
    """Whether the numbers and the id may be written as they are."""
    in_range = event.at >= 0 and min(event.ids) >= 0 and max(event.ids) <= INT32_MAX
    return in_range and (event.id is None or values.is_request_id(event.id))


def _format(event: Event) -> str:
    if isinstance(event, Unknown):
        return _write_unknown(event)
    if isinstance(event, Json):
        return _write_json(event)
    for form in _BY_MESSAGE.get(type(event), ()):
        if all(getattr(event, name) == value for name, value in form.constants.items()):
            _check(event)
            return _write_form(form, event)
    raise BadValue(event=repr(event)[:200], reason="no_such_line")


def _write_unknown(event: Unknown) -> str:
    if event.id is not None or "\n" in event.text or words.has_surrogate(event.text):
        raise BadValue(text=event.text[:200], reason="not_one_line_of_utf8_without_id")
    return event.text


def _write_json(event: Json) -> str:
    if event.kind not in JSON_KINDS or "id" in event.data:
        raise BadValue(kind=event.kind, reason="unknown_kind_or_id_inside")
    own = {} if event.id is None else {"id": values.write(event.id, _ID)}
    try:
        text = json.dumps({**own, **event.data}, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadValue(kind=event.kind, reason=str(error)) from None
    return f"[{event.kind}] {text}"


def _write_form(form: EventForm, event: Event) -> str:
    parts = [form.lead]
    own = [] if event.id is None else [f"id={values.write(event.id, _ID)}"]
    parts += own if form.id_first else []
    parts += [values.write(getattr(event, word.name), word) for word in form.words]
    for field in form.fields:
        value = tuple(getattr(event, name) for name in field.attributes) or getattr(event, field.name)
        if field.required or value:
            parts.append(f"{field.name}={values.write(value, field)}")
    if form.open:
        parts += _write_open(form, event.fields)  # type: ignore[attr-defined]
    parts += [] if form.id_first else own
    return " ".join(parts)


def _write_open(form: EventForm, fields: Mapping[str, Value]) -> list[str]:
    taken = {"id", *(field.name for field in form.fields)}
    for key in fields:
        if key in taken or not words.is_key(key):
            raise BadValue(field=key, reason="no_key_of_this_line")
    return [f"{key}={words.write_value(value, key)}" for key, value in fields.items()]
