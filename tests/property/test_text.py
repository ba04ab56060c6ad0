"""Properties of streamed text: where a stream is cut changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from slotd.client.detokenizer import Detokenizer, StopStrings
from slotd.client.tokenizer import Tokenizer
from tests.fakes.tiny_gguf import FIRST_BYTE_TOKEN, tokenizer_keys

TOKENIZER = Tokenizer.from_metadata(tokenizer_keys(320))

# Few letters, so that stops overlap each other and themselves.
TEXT = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
EDGES = st.lists(st.integers(0, 20), max_size=8)

# Ids of whole characters and of loose bytes, so that many characters are broken.
IDS = st.lists(
    st.one_of(
        st.integers(0, TOKENIZER.vocab_size - 1).map(lambda id: [id]),
        st.characters(codec="utf-8").map(lambda c: [FIRST_BYTE_TOKEN + byte for byte in c.encode()]),
    ),
    max_size=12,
).map(lambda parts: [id for part in parts for id in part])


def bounds(length: int, edges: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of the pieces that `edges` cut a sequence of this length into."""
    inside = sorted(min(edge, length) for edge in edges)
    return list(zip([0, *inside], [*inside, length], strict=True))


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop) of the match that begins first, the longest of several, in the whole text."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a stop's beginning, but not the whole stop."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(ids=IDS, edges=EDGES)
def test_pieces_of_a_stream_join_to_the_whole_text(ids: list[int], edges: list[int]) -> None:
    for special in (False, True):
        detokenizer = Detokenizer(TOKENIZER, special=special)
        pieces = [detokenizer.add(ids[start:end]) for start, end in bounds(len(ids), edges)]
        assert "".join(pieces) + detokenizer.finish() == TOKENIZER.decode(ids, special=special)


@given(text=st.text(max_size=40))
def test_encoded_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, parse_special=False)) == text


@given(text=TEXT, stops=STOPS, edges=EDGES)
@example(text="aaba", stops=["b", "abb"], edges=[3])  # an undecided match moves with what is held
@settings(max_examples=300)
def test_stop_strings_end_the_text_as_a_search_of_the_whole_does(
    text: str, stops: list[str], edges: list[int]
) -> None:
    stream = StopStrings(stops)
    pieces = [stream.add(text[start:end])[0] for start, end in bounds(len(text), edges)]
    shown = "".join(pieces) + stream.finish()
    match = first_match(text, stops)
    assert stream.stopped_by == (match[1] if match else None)
    assert shown == (text[: match[0]] if match else text)


@given(text=TEXT, stops=STOPS, edges=EDGES)
@settings(max_examples=300)
def test_stop_strings_hold_back_what_may_begin_one_and_nothing_else(
    text: str, stops: list[str], edges: list[int]
) -> None:
    stream, shown = StopStrings(stops), ""
    for start, end in bounds(len(text), edges):
        visible, stopped_by = stream.add(text[start:end])
        shown += visible
        match = first_match(text[:end], stops)
        open_from = end - possible_beginning(text[:end], stops)
        if match is None:
            assert (shown, stopped_by) == (text[:open_from], None)
        elif match[0] < open_from:  # nothing can begin before it or grow longer than it
            assert (shown, stopped_by) == (text[: match[0]], match[1])
        else:
            assert (shown, stopped_by) == (text[:open_from], None)
