from __future__ import annotations

import pytest

from slotd.client.detokenizer import Detokenizer, StopStrings
from slotd.client.tokenizer import Tokenizer
from slotd.protocol.errors import ConfigError, ModelError
from tests.fakes.tiny_gguf import FIRST_BYTE_TOKEN, IM_END, IM_START, tokenizer_keys


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(tokenizer_keys(320))


def byte_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE_TOKEN + byte for byte in data]


# ----- Detokenizer


def test_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([id]) for id in byte_ids("a😀é".encode())] == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.finish() == ""


def test_end_in_the_middle_of_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(byte_ids("a😀".encode()[:-1])) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.add(byte_ids(b"b")) == "b"  # a new text


def test_broken_bytes_are_replaced_as_soon_as_they_are_certain(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([id]) for id in byte_ids(b"\xf0\x9fA\xffB")] == ["", "", "\ufffdA", "\ufffd", "B"]


def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    ids = [IM_START, *tokenizer.encode("hello"), IM_END]
    assert Detokenizer(tokenizer).add(ids) == "hello"
    assert Detokenizer(tokenizer, special=True).add(ids) == "<|im_start|>hello<|im_end|>"


def test_bad_id_leaves_the_state_as_it_was(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    first, last = byte_ids("é".encode())
    detokenizer.add([first])
    with pytest.raises(ModelError):
        detokenizer.add([last, 99999])
    assert detokenizer.add([last]) == "é"


# ----- StopStrings


def test_no_stop_strings_let_everything_through() -> None:
    stops = StopStrings([])
    assert stops.add("anything") == ("anything", None)
    assert stops.finish() == ""


@pytest.mark.parametrize(
    "pieces", [["the br", "own f", "ox runs"], ["the brown fox runs"], list("the brown fox")]
)
def test_stop_string_over_the_edges_of_tokens(pieces: list[str]) -> None:
    stops = StopStrings(["own fox"])
    results = [stops.add(piece) for piece in pieces]
    assert "".join(text for text, _ in results) + stops.finish() == "the br"
    assert results[-1][1] == stops.stopped_by == "own fox"


def test_stop_string_inside_a_block_of_accepted_tokens(tokenizer: Tokenizer) -> None:
    detokenizer, stops = Detokenizer(tokenizer), StopStrings(["own fox"])
    ids = tokenizer.encode("the brown fox runs")
    results = [stops.add(detokenizer.add(ids[at : at + 8])) for at in range(0, len(ids), 8)]
    assert "".join(text for text, _ in results) == "the br"
    assert stops.stopped_by == "own fox"


def test_exactly_the_possible_beginning_is_held_back_and_released() -> None:
    stops = StopStrings(["</tool>"])
    assert stops.add("a <") == ("a ", None)
    assert stops.add("/to") == ("", None)
    assert stops.add("</t") == ("</to", None)
    assert stops.add("x") == ("</tx", None)
    assert stops.add("<<") == ("<", None)
    assert stops.finish() == "<"
    assert stops.stopped_by is None


def test_nothing_comes_after_a_stop() -> None:
    stops = StopStrings(["stop"])
    assert stops.add("a stop b") == ("a ", "stop")
    assert stops.add("more") == ("", "stop")
    assert stops.finish() == ""
    assert stops.stopped_by == "stop"


@pytest.mark.parametrize(
    ("stops", "text", "visible", "stopped_by"),
    [
        (["fox", "brown"], "a brown fox", "a ", "brown"),
        (["b", "abc"], "xabc", "x", "abc"),  # begins first although "b" ends first
        (["b", "abc"], "xabd", "xa", "b"),  # "abc" came to nothing
        (["ab", "abc"], "xabcd", "x", "abc"),  # begin together: the longest
        (["ab", "abc"], "xabd", "x", "ab"),
        (["ab", "abc"], "xab", "x", "ab"),  # decided by the end of the text
        (["aab", "ab"], "aaab", "a", "aab"),
        (["\n\n", "User:"], "one\ntwo\nUser: x", "one\ntwo\n", "User:"),
        (["é", "日本"], "日é", "日", "é"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_first_match_of_the_text_wins(
    stops: list[str], text: str, visible: str, stopped_by: str, size: int
) -> None:
    stream = StopStrings(stops)
    shown = "".join(stream.add(text[at : at + size])[0] for at in range(0, len(text), size)) + stream.finish()
    assert (shown, stream.stopped_by) == (visible, stopped_by)


def test_many_stop_strings() -> None:
    stops = StopStrings([f"<{number}>" for number in range(1000)])
    assert stops.add("<12") == ("", None)
    assert stops.add("x<999") == ("<12x", None)
    assert stops.add(">y") == ("", "<999>")


def test_long_stop_string_that_almost_matches_again_and_again() -> None:
    stops = StopStrings(["a" * 2000 + "b"])
    shown = "".join(stops.add("a")[0] for _ in range(5000))
    assert shown == "a" * 3000
    assert stops.add("b") == ("", "a" * 2000 + "b")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        StopStrings(["a", ""])
