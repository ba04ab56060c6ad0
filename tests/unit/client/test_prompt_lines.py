"""Lines into turns."""

from __future__ import annotations

import pytest

from slotd.client.prompt_lines import TurnReader


def turns(*lines: str) -> list[str]:
    reader = TurnReader()
    return [turn for line in lines if (turn := reader.feed(line + "\n")) is not None]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["hi"], ["hi"]),
        (["hi", "", "   ", "there"], ["hi", "there"]),
        (["  indented "], ["  indented "]),
        (['"""', "a", "", "b", '"""'], ["a\n\nb"]),
        (['"""a', 'b"""'], ["a\nb"]),
        (['"""one line"""', "next"], ["one line", "next"]),
        (['"""', '"""', "next"], ["next"]),
        (['"""', "  ", '"""'], []),
        (['say """ please'], ['say """ please']),
        (['"""', "/quit", '"""'], ["/quit"]),
    ],
)
def test_turns(lines: list[str], found: list[str]) -> None:
    assert turns(*lines) == found


def test_crlf_is_no_part_of_a_turn() -> None:
    assert TurnReader().feed("hi\r\n") == "hi"


def test_open_blocks_and_drop() -> None:
    reader = TurnReader()
    assert reader.feed('"""') is None
    assert reader.open
    reader.drop()
    assert not reader.open
    assert reader.feed("plain") == "plain"


def test_only_blocks_are_quoted() -> None:
    reader = TurnReader()
    assert reader.feed('"""/x"""') == "/x"
    assert reader.quoted
    assert reader.feed("/x") == "/x"
    assert not reader.quoted


def test_a_pasted_text_of_several_lines_is_one_turn() -> None:
    assert TurnReader().feed("a\nb") == "a\nb"
    assert TurnReader().feed('"""a\nb"""') == "a\nb"
