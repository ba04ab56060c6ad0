"""The words of a line, JSON strings, and values without a declared kind.

What is wrong with a value is a `BadValue` here and in `values`; the callers turn it into the error of
their side. Writers give the shortest text that reads back as the same value.
"""

from __future__ import annotations

import json
import math
import operator
import re
from itertools import islice

from slotd.protocol.errors import Value

# A word is a JSON string, key=JSON string, or a run without blanks. Possessive repeats keep a hostile
# line of 16 MiB linear. A quote anywhere else in a word is an ordinary character.
_WORD = re.compile(r'(?:[A-Za-z_][A-Za-z0-9_]*+=)?"[^"\\]*+(?:\\.[^"\\]*+)*+"(?![^ \t])|[^ \t]++')
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INT = re.compile(r"-?[0-9]+")
_REAL = re.compile(r"-?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")

_LONGEST_SHOWN = 40  # characters of a refused value that the error repeats


class BadValue(ValueError):
    """A value that its field does not allow; `fields` name it as an error line does."""

    def __init__(self, **fields: Value) -> None:
        super().__init__(" ".join(f"{key}={value}" for key, value in fields.items()))
        self.fields: dict[str, Value] = fields


def shown(text: str) -> Value:
    """A refused value as errors repeat it: shortened, and as a number when it is one."""
    text = text[:_LONGEST_SHOWN]
    if not is_real(text):
        return text
    number = int(text) if is_integer(text) else float(text)
    return number if str(number) == text else text


# --------------------------------------------------------------------------------------------------
# Words and JSON strings


def split_words(line: str, most: int | None = None) -> list[str]:
    """The words of a line (blank- or tab-separated, JSON strings whole), at most `most` of them."""
    return [match.group() for match in islice(_WORD.finditer(line), most)]


def split_field(word: str) -> tuple[str, str] | None:
    """``key=value`` as its two halves, the value still as written; None for any other word."""
    key, equals, value = word.partition("=")
    return (key, value) if equals and _KEY.fullmatch(key) else None


def unquote(text: str, name: str) -> str:
    """The text itself, or what it says when it starts as a JSON string does.

    Raises:
        BadValue: it starts with a quote and is no JSON string.
    """
    if not text.startswith('"'):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        raise BadValue(field=name, value=shown(text), reason="not_a_json_string") from None
    return str(value)


def quote(text: str) -> str:
    """The text as a JSON string; what is not printable (lone surrogates too) becomes an escape."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def write_text(text: str) -> str:
    """The text as one word: as it is when that reads back, else as a JSON string."""
    # isprintable is false for control characters, surrogates and every blank but the ASCII space.
    plain = text and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain else quote(text)


def read_value(text: str, name: str) -> Value:
    """An untyped value: JSON string, int, finite float, or the text itself."""
    if text.startswith('"'):
        return unquote(text, name)
    if not is_real(text):
        return text
    try:
        number = int(text) if is_integer(text) else float(text)
    except ValueError:  # more digits than int() takes
        raise BadValue(field=name, value=shown(text)) from None
    if isinstance(number, float) and not math.isfinite(number):
        raise BadValue(field=name, value=shown(text))
    return number


def write_value(value: Value, name: str) -> str:
    """An untyped value; text that would read as a number is quoted."""
    if isinstance(value, str):
        return quote(value) if is_real(value) else write_text(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadValue(field=name, value=str(value))
        return repr(float(value))
    try:
        return str(operator.index(value))
    except (TypeError, ValueError):  # no number at all, or more digits than str() gives
        raise BadValue(field=name, reason="no_value") from None


def is_key(text: str) -> bool:
    """Whether the text can stand before an equals sign."""
    return _KEY.fullmatch(text) is not None


def is_integer(text: str) -> bool:
    """Whether the text is an integer of any size."""
    return _INT.fullmatch(text) is not None


def is_real(text: str) -> bool:
    """Whether the text is a decimal number, an exponent allowed: no names, underscores, other digits."""
    return _REAL.fullmatch(text) is not None


def has_surrogate(text: str) -> bool:
    """Whether the text has half of a surrogate pair, which UTF-8 cannot say."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
