"""Command <-> line, as `grammar.VERBS` says.

The first word decides. One of the spellings is that verb; any other word followed by an integer is a bare
prompt; a word that looks like a path is a bare prompt with a fault; the rest is an unknown command.
"""

from __future__ import annotations

from typing import Any

from slotd.protocol import grammar, values, words
from slotd.protocol.errors import LocalProtocolError, RequestError, Value
from slotd.protocol.grammar import FIELDS, Field, Verb
from slotd.protocol.messages import (
    Cancel,
    Command,
    Drop,
    Generate,
    LoadSnapshot,
    Prompt,
    Sampling,
    SnapshotThin,
    Unsupported,
)
from slotd.protocol.words import BadValue

# More words than any line with distinct fields has; a hostile line is not cut into millions of them.
_MOST_WORDS = 64

# --------------------------------------------------------------------------------------------------
# Line -> command


def parse_command(line: str) -> Command:
    """The command a line says.

    Args:
        line: one line without its newline.

    Raises:
        RequestError: `unknown_command`, `bad_args` or `bad_id`; its fields name the culprit. It carries
            the id of the line when that is valid, except for CANCEL, whose id names another request.
    """
    parts = words.split_words(line, _MOST_WORDS)
    found = _recognise(parts)
    if found is None:
        raise RequestError("unknown_command", {"verb": _first_word(parts)}, id=_read_id(parts))
    verb, used = found
    try:
        return _read_command(verb, parts[used:])
    except BadValue as error:
        code = "bad_id" if error.fields.get("field") == "id" and "value" in error.fields else "bad_args"
        raise RequestError(code, error.fields, id=_own_id(verb, parts), verb=verb.name) from None


def refuse(code: str, text: str, fields: dict[str, Value] | None = None) -> RequestError:
    """The error for a line that was not fit to be parsed; `text` is what can be read of it.

    Its id and verb are taken from the text where they stand there, so that the error reaches its request.
    """
    parts = words.split_words(text, _MOST_WORDS)
    found = _recognise(parts)
    if found is None:
        return RequestError(code, fields, id=_read_id(parts))
    return RequestError(code, fields, id=_own_id(found[0], parts), verb=found[0].name)


def _recognise(parts: list[str]) -> tuple[Verb, int] | None:
    """The verb and how many words spell it."""
    found = grammar.find_verb(parts)
    if found is not None or not parts:
        return found
    first = parts[0]
    if (len(parts) > 1 and words.is_integer(parts[1])) or _looks_like_path(first):
        return grammar.PROMPT, 0
    return None


def _looks_like_path(word: str) -> bool:
    return word == "-" or word.startswith('"') or "/" in word or "." in word


def _first_word(parts: list[str]) -> str:
    return parts[0][:40] if parts else ""


def _read_id(parts: list[str]) -> str | None:
    """The first valid id of the line."""
    for part in parts:
        if part.startswith("id="):
            try:
                text = words.unquote(part.removeprefix("id="), "id")
            except BadValue:
                continue
            if values.is_request_id(text):
                return text
    return None


def _own_id(verb: Verb, parts: list[str]) -> str | None:
    return None if verb.message is Cancel else _read_id(parts)


def _read_command(verb: Verb, parts: list[str]) -> Command:
    if not verb.supported:
        return _read_unsupported(verb, parts)
    attributes, used = _read_words(verb, parts)
    named = _read_fields(verb, parts[used:])
    attributes |= {name: value for name, value in named.items() if not FIELDS[name].sampling}
    if any(FIELDS[name].sampling for name in named):
        attributes["sampling"] = Sampling(**{k: v for k, v in named.items() if FIELDS[k].sampling})
    command = verb.message(**attributes)
    _check(command)
    return command


def _read_unsupported(verb: Verb, parts: list[str]) -> Unsupported:
    ids = [part for part in parts if part.startswith("id=")]
    named = _read_fields(verb, ids)
    return Unsupported(name=verb.name, needs_stream_end=verb.ends_stream, id=named.get("id"))


def _read_words(verb: Verb, parts: list[str]) -> tuple[dict[str, Any], int]:
    """The values by position, and how many words they took."""
    attributes: dict[str, Any] = {}
    for used, word in enumerate(verb.words):
        if used == len(parts) or _is_field(parts[used], word):
            if word.required:
                raise BadValue(field=word.name, reason="missing")
            return attributes, used
        attributes[word.name] = _read_word(verb, word, parts[used])
    return attributes, len(verb.words)


def _is_field(part: str, word: Field) -> bool:
    """Whether a word is key=value, where `word` is expected. A path may look like an unknown field."""
    halves = words.split_field(part)
    return halves is not None and (word.kind != "path" or halves[0] in FIELDS)


def _read_word(verb: Verb, word: Field, part: str) -> Any:
    if part == "-" and word is grammar.PATH:
        return None  # the prompt comes as ids=
    return values.read(words.unquote(part, word.name), word)


def _read_fields(verb: Verb, parts: list[str]) -> dict[str, Any]:
    """The key=value words as {name of the field: value}, `samp` taken apart."""
    texts: dict[str, str] = {}
    for part in parts:
        halves = words.split_field(part)
        if halves is None:
            raise BadValue(word=words.shown(part), reason="unexpected")
        _check_name(verb, halves[0], texts)
        texts[halves[0]] = words.unquote(halves[1], halves[0])
    named = {name: values.read(text, FIELDS[name]) for name, text in texts.items()}
    for name, value in named.pop("samp", {}).items():
        if name in named:
            raise BadValue(field=name, reason="also_in_samp")
        named[name] = value
    return named


def _check_name(verb: Verb, name: str, before: dict[str, str]) -> None:
    if name not in FIELDS:
        raise BadValue(field=words.shown(name), reason="unknown")
    if name not in verb.fields:
        raise BadValue(field=name, reason="not_taken")
    if name in before:
        raise BadValue(field=name, reason="repeated")


def _check(command: Command) -> None:
    """The rules between fields."""
    match command:
        case Prompt():
            _check_prompt(command)
        case SnapshotThin() if command.kv_start >= command.kv_end:
            limit = f"{command.kv_start + 1}..{grammar.KV_END.high}"
            raise BadValue(field="kv_end", value=command.kv_end, limit=limit)
        case LoadSnapshot(hash=None) | Drop(hash=None):
            raise BadValue(field="hash", reason="missing")


def _check_prompt(command: Prompt) -> None:
    if command.ids is None and command.path is None:
        raise BadValue(field="ids", reason="missing")
    if command.ids is not None and command.path is not None:
        raise BadValue(field="ids", reason="path_given")
    if command.min_tokens > command.n_gen:
        raise BadValue(field="min_tokens", value=command.min_tokens, limit=f"0..{command.n_gen}")


# --------------------------------------------------------------------------------------------------
# Command -> line


def format_command(command: Command) -> str:
    """The line (without newline) that says a command; fields with their default value are left out.

    Raises:
        LocalProtocolError: a value is not allowed; the message names the field and the limit.
    """
    verb = grammar.verb_of(command)
    if verb is None:
        raise LocalProtocolError(f"{command!r} is no command of the line protocol")
    try:
        _check(command)
        return " ".join([*verb.spellings[:1], *_write_words(verb, command), *_write_fields(verb, command)])
    except BadValue as error:
        raise LocalProtocolError(f"{verb.name}: {error}") from None


def _write_words(verb: Verb, command: Command) -> list[str]:
    parts = []
    for word in verb.words:
        value = getattr(command, word.name)
        if value is None:
            parts.append("-")
        elif word.required or value != getattr(verb.message(), word.name):
            parts.append(values.write(value, word))
    return parts


def _write_fields(verb: Verb, command: Command) -> list[str]:
    parts = []
    default = verb.message()
    for name in verb.fields:
        field = FIELDS[name]
        if field.kind == "sampler":
            continue  # written by its own names, which say more
        value = _value_of(command, field)
        # ids are not compared: an empty prompt is written, and a NumPy array has no single truth value
        if value is not None and (field.kind == "ids" or value != _value_of(default, field)):
            parts.append(f"{name}={values.write(value, field)}")
    return parts


def _value_of(command: Command, field: Field) -> Any:
    if not field.sampling:
        return getattr(command, field.name)
    assert isinstance(command, Prompt | Generate)
    return getattr(command.sampling, field.name)
