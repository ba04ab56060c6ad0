from __future__ import annotations

from array import array

import pytest

from slotd.client.boundaries import PAGE, Cuts, Markers, detect_markers, find_cuts

END, START, SYSTEM, USER, LINE = 91, 90, 80, 81, 5
CHATML = Markers((END,), (START,), ((START, SYSTEM),))

#: [start] system a [end] line [start] user a a [end] line [start] ...
HEAD = [START, SYSTEM, LINE, 1, END, LINE, START]
TURN = [USER, LINE, 2, 2, END, LINE, START]


class FakeTokenizer:
    """Every word of `known` is one token; other text is one token for each character."""

    def __init__(self, template: str | None, known: dict[str, int]) -> None:
        self.chat_template = template
        self.known = known

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            word = next((word for word in self.known if text.startswith(word)), text[0])
            ids.append(self.known.get(word, ord(text[0])))
            text = text[len(word) :]
        return ids


def cuts(ids: list[int], markers: Markers | None = CHATML) -> Cuts:
    return find_cuts(array("i", ids), markers)


def test_a_cut_lies_just_behind_the_opening_of_a_turn() -> None:
    found = cuts(HEAD + TURN + TURN)
    assert found.at == (7, 14, 21)
    assert [(HEAD + TURN + TURN)[at - 1] for at in found.at] == [START] * 3


def test_the_target_is_the_second_to_last_cut_or_the_only_one() -> None:
    assert cuts(HEAD + TURN + TURN).target == 14
    assert cuts(HEAD + TURN).target == 7
    assert cuts(HEAD + [USER, LINE, 2]).target == 7


@pytest.mark.parametrize(("separators", "found"), [(0, True), (1, True), (4, True), (5, False)])
def test_the_opening_is_looked_for_within_four_tokens(separators: int, found: bool) -> None:
    ids = [START, SYSTEM, 1, END, *[LINE] * separators, START, USER]
    assert (cuts(ids).at != ()) is found


def test_an_end_marker_has_no_second_opening() -> None:
    assert cuts([START, SYSTEM, END, END, START, USER]).at == (5,)


def test_no_system_message_no_cuts_at_turns() -> None:
    assert cuts([START, USER, 1, END, LINE, START, 7]) == Cuts((), None)
    assert cuts([99, *HEAD]).at == (8,)  # one token in front, as BOS is
    assert cuts([99, 99, *HEAD]) == Cuts((), None)


def test_without_markers_prefixes_are_cut_at_pages() -> None:
    assert cuts([1] * PAGE, None) == Cuts((), None)  # the last token is always computed
    assert cuts([1] * (PAGE + 1), None) == Cuts((PAGE,), PAGE)
    assert cuts([1] * (3 * PAGE), None) == Cuts((PAGE, 2 * PAGE), 2 * PAGE)
    assert cuts([START, USER, *[1] * 200]) == Cuts((64, 128, 192), 192)  # markers, but no system turn


def test_markers_of_several_tokens() -> None:
    xml = Markers((60, 47, 61), (60, 61), ((60, 61, SYSTEM),), separator=2)
    ids = [60, 61, SYSTEM, 1, 60, 47, 61, LINE, 60, 61, USER, 60, 47, 62, 60, 61, 3, 60, 47, 61, 60, 61]
    assert cuts(ids, xml).at == (10, 22)  # 60 47 62 is no end of a turn


def test_llama_3_headers() -> None:
    header, eot = 128006, 128009
    llama = Markers((eot,), (header,), ((header, 9125),))
    ids = [128000, header, 9125, 128007, 271, 1, eot, header, 882, 128007, 271, 2, eot, header, 78191]
    assert cuts(ids, llama) == Cuts((8, 14), 8)


def test_markers_are_detected_from_template_and_vocabulary() -> None:
    chatml = {"<|im_start|>": 1, "<|im_end|>": 2, "system": 9}
    found = detect_markers(FakeTokenizer("{{ '<|im_start|>' }}", chatml))
    assert found is not None
    assert (found.end, found.start, found.system[0]) == ((2,), (1,), (1, 9))
    llama = {"<|start_header_id|>": 1, "<|eot_id|>": 2, "system": 9}
    found = detect_markers(FakeTokenizer("<|start_header_id|>", llama))
    assert found is not None
    assert (found.end, found.start) == ((2,), (1,))


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (None, {"<|im_start|>": 1, "<|im_end|>": 2}),  # no template
        ("[INST]", {"<|im_start|>": 1, "<|im_end|>": 2}),  # one of another family
        ("<|im_start|>", {"<|im_start|>": 1}),  # a marker that is ordinary text
    ],
)
def test_no_markers(template: str | None, known: dict[str, int]) -> None:
    assert detect_markers(FakeTokenizer(template, known)) is None


@pytest.mark.parametrize(
    "markers", [((), (1,), ((1,),)), ((1,), (), ((1,),)), ((1,), (1,), ()), ((1,), (1,), ((),))]
)
def test_empty_markers_are_refused(
    markers: tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]],
) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Markers(*markers)
