"""The error tree, and what the package offers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import slotd.protocol
from slotd.protocol import errors
from slotd.protocol.errors import CODES, RequestError

CLASSES = {
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
}


def test_every_error_is_a_slotd_error() -> None:
    assert all(issubclass(cls, errors.SlotdError) for cls in CLASSES)
    assert issubclass(errors.LocalProtocolError, errors.ProtocolError)
    assert issubclass(errors.RemoteProtocolError, errors.ProtocolError)
    assert issubclass(errors.DaemonTimeoutError, errors.DaemonError)


def test_the_docstring_draws_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = {name for name in re.findall(r"\w+", errors.__doc__) if name.endswith("Error")}
    assert drawn == {cls.__name__ for cls in CLASSES}


def test_the_package_offers_every_error() -> None:
    assert {cls.__name__ for cls in CLASSES} <= set(slotd.protocol.__all__)


def test_codes_are_sorted_words() -> None:
    assert list(CODES) == sorted(CODES)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", code) for code in CODES)


def test_every_code_that_the_protocol_raises_is_listed() -> None:
    folder = Path(errors.__file__).parent
    text = "".join(
        path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.name != "errors.py"
    )
    raised = set(re.findall(r'RequestError\("(\w+)"', text)) | set(re.findall(r'BadLine\("(\w+)"', text))
    assert {"unknown_command", "line_too_long", "bad_utf8"} <= raised <= set(CODES)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RequestError("busy"), "busy (too many requests are queued)"),
        (RequestError("empty_slot", {"slot": 4}), "empty_slot slot=4 (the slot holds nothing)"),
        (RequestError("of_tomorrow", {"x": 1.5}), "of_tomorrow x=1.5"),
    ],
)
def test_a_request_error_says_code_fields_and_meaning(error: RequestError, text: str) -> None:
    assert str(error) == text


def test_a_request_error_keeps_its_own_copy_of_the_fields() -> None:
    fields: dict[str, errors.Value] = {"slot": 4}
    error = RequestError("empty_slot", fields, id="r1", verb="RESTORE")
    fields["slot"] = 5
    assert (error.code, error.fields, error.id, error.verb) == ("empty_slot", {"slot": 4}, "r1", "RESTORE")
