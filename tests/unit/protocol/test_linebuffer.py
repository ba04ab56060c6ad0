"""Bytes -> lines: the same lines however the bytes are cut."""

from __future__ import annotations

import time

import pytest

from slotd.protocol.linebuffer import DEFAULT_MAX_LINE, BadLine, LineBuffer

Items = list[str | BadLine]


def feed_all(pieces: list[bytes], max_line: int = DEFAULT_MAX_LINE) -> Items:
    buffer = LineBuffer(max_line)
    items = [item for piece in pieces for item in buffer.feed(piece)]
    return items + buffer.end()


CASES: list[tuple[bytes, int, Items]] = [
    (b"", 10, []),
    (b"a\nb\n", 10, ["a", "b"]),
    (b"a\nb", 10, ["a", "b"]),
    (b"\n\n", 10, ["", ""]),
    (b"a\r\nb\r", 10, ["a", "b"]),
    (b"a\rb\n\r\r\n", 10, ["a\rb", "\r"]),
    ("é\n€".encode(), 10, ["é", "€"]),
    (b"ab\xffc\nd\n", 10, [BadLine("bad_utf8", "ab\ufffdc"), "d"]),
    (b"\xc3\n\xa9\n", 10, [BadLine("bad_utf8", "\ufffd"), BadLine("bad_utf8", "\ufffd")]),
    (b"1234567890\n1234567890\r\nx", 10, ["1234567890", "1234567890", "x"]),
    (b"12345678901\nx\n", 10, [BadLine("line_too_long", ""), "x"]),
    (b"12345678901", 10, [BadLine("line_too_long", "")]),
    (b"12345678901\r\nx\n", 10, [BadLine("line_too_long", ""), "x"]),
    (b"a b cdefghijklmnop\nx\n", 10, [BadLine("line_too_long", "a b"), "x"]),
    (b"a b cd ef gh ij kl mn\nx\n", 10, [BadLine("line_too_long", "a b cd ef"), "x"]),
    (b"a b\xff cdefghijklmnop\nx\n", 10, [BadLine("line_too_long", "a b\ufffd"), "x"]),
    (b'a "b cdefghijklmnop\nx\n', 10, [BadLine("line_too_long", "a"), "x"]),
    (b"a" * 99 + b"\n" + b"b" * 99 + b"\nc", 10, [BadLine("line_too_long", "")] * 2 + ["c"]),
    (b"a" * 99, 10, [BadLine("line_too_long", "")]),
]


@pytest.mark.parametrize(("data", "max_line", "expected"), CASES, ids=[repr(case[0][:24]) for case in CASES])
def test_every_cut_gives_the_same_lines(data: bytes, max_line: int, expected: Items) -> None:
    assert feed_all([data], max_line) == expected
    assert feed_all([data[i : i + 1] for i in range(len(data))], max_line) == expected
    for cut in range(len(data) + 1):
        assert feed_all([data[:cut], data[cut:]], max_line) == expected


def test_a_line_that_is_too_long_is_given_up_before_it_ends() -> None:
    buffer = LineBuffer(10)
    assert buffer.feed(b"0123456789") == []
    assert buffer.feed(b"ab") == [BadLine("line_too_long", "")]
    assert buffer.feed(b"c" * 1000) == []
    assert buffer.feed(b"\nnext\n") == ["next"]


def test_end_gives_each_line_once() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"a\nb") == ["a"]
    assert buffer.end() == ["b"]
    assert buffer.end() == []


def test_end_inside_a_line_that_was_given_up() -> None:
    buffer = LineBuffer(3)
    assert buffer.feed(b"abcdef") == [BadLine("line_too_long", "")]
    assert buffer.end() == []


def test_a_long_line_in_small_pieces_is_not_searched_again() -> None:
    buffer, pieces, began = LineBuffer(), 130_000, time.perf_counter()
    for _ in range(pieces):
        buffer.feed(b"x" * 64)
    assert buffer.feed(b"\n") == ["x" * 64 * pieces]
    assert time.perf_counter() - began < 10  # a fraction of a second; searching it again takes minutes


def test_what_is_kept_of_a_line_without_end_is_bounded() -> None:
    buffer = LineBuffer(100)
    for _ in range(50):
        buffer.feed(b"x" * 1000)
    assert len(buffer._partial) <= 100
