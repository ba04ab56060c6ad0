"""Thoughts: what of an answer is one, whatever the pieces, and what templates make of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from slotd.client.chat_template import ChatTemplate
from slotd.client.reasoning import ReasoningSplit, opens_thought
from slotd.protocol.errors import ConfigError
from tests.fakes.qwen_templates import QWEN3, QWEN35
from tests.fakes.tiny_gguf import CHATML

USER = {"role": "user", "content": "Why?"}
HEAD = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

#: (the prompt opened the thought, text of the model, thought, answer)
CASES = [
    (True, "Hm.\nSo.\n</think>\n\nYes.", "Hm.\nSo.", "Yes."),
    (True, "\nHm.</think>Yes.\n\n", "Hm.", "Yes.\n\n"),
    (True, "</think>\n\nYes.", "", "Yes."),
    (True, "\n\n</think>\n\nYes.", "", "Yes."),
    (True, "Hm, no end", "Hm, no end", ""),
    (True, "Hm\n\n", "Hm", ""),
    (True, "Hm </thin", "Hm </thin", ""),
    (True, "a < b </ c </think d </think>\n</think>", "a < b </ c </think d ", "</think>"),
    (True, "<think>\nHm\n</think>\n\nYes.", "<think>\nHm", "Yes."),
    (True, "", "", ""),
    (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (False, "\n <think>Hm.</think> Yes.", "Hm.", " Yes."),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (False, "<think>\nHm", "Hm", ""),
    (False, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    (False, "  Yes.", "", "  Yes."),
    (False, "<thinking> is a word", "", "<thinking> is a word"),
    (False, "<thi", "", "<thi"),
    (False, " \n", "", " \n"),
    (False, "a</think>b", "", "a</think>b"),
]


def split(opened: bool, pieces: list[str]) -> tuple[str, str]:
    divided = ReasoningSplit(opened=opened)
    parts = [divided.add(piece) for piece in pieces] + [divided.finish()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(("opened", "text", "thought", "answer"), CASES)
def test_the_pieces_make_no_difference(opened: bool, text: str, thought: str, answer: str) -> None:
    assert split(opened, [text]) == (thought, answer)
    assert split(opened, list(text)) == (thought, answer)
    for cuts in itertools.combinations(range(1, len(text)), 2):
        edges = [0, *cuts, len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
        assert split(opened, pieces) == (thought, answer), pieces


def test_what_is_certain_comes_at_once() -> None:
    """Progress is seen while the model thinks, and the answer is not held up behind it."""
    divided = ReasoningSplit(opened=True)
    assert divided.add("First, <") == ("First, ", "")
    assert divided.inside
    assert divided.add("br>\n") == ("<br>", "")
    assert divided.add("Then</thi") == ("\nThen", "")
    assert divided.add("nk>\n") == ("", "")
    assert not divided.inside
    assert divided.add("\nY") == ("", "Y")
    assert divided.add("\n</think>") == ("", "\n</think>")


def test_a_thought_that_the_client_closes() -> None:
    divided = ReasoningSplit(opened=True)
    assert divided.add("Hm\n</th") == ("Hm", "")
    assert divided.close() == "\n</th"
    assert divided.add("\n\nYes") == ("", "Yes")
    assert divided.finish() == ("", "")


# ----- templates


def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplate(source).render(messages, **variables)


@pytest.mark.parametrize(
    ("source", "variables", "tail", "opened"),
    [
        (QWEN3, {}, "", False),
        (QWEN3, {"enable_thinking": True}, "", False),
        (QWEN3, {"enable_thinking": False}, EMPTY_THOUGHT, False),
        (QWEN35, {}, "<think>\n", True),
        (QWEN35, {"enable_thinking": True}, "<think>\n", True),
        (QWEN35, {"enable_thinking": False}, EMPTY_THOUGHT, False),
    ],
)
def test_thinking_on_and_off(source: str, variables: dict[str, bool], tail: str, opened: bool) -> None:
    assert ChatTemplate(source).has_thoughts
    prompt = render(source, [USER], **variables)
    assert prompt == HEAD + tail
    assert opens_thought(prompt) is opened


@pytest.mark.parametrize("source", [QWEN3, QWEN35])
def test_thoughts_of_earlier_turns_are_left_out(source: str) -> None:
    answer = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    for earlier in (answer, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}):
        prompt = render(source, [USER, earlier, USER], enable_thinking=False)
        assert "Hm." not in prompt
        assert "assistant\nYes.<|im_end|>" in prompt
        answering = render(source, [USER, earlier], add_generation_prompt=False)
        assert "<think>\nHm.\n</think>\n\nYes." in answering  # after the last question it stays: a tool loop


def test_variables_that_a_template_reads() -> None:
    assert {"messages", "enable_thinking", "add_generation_prompt"} <= ChatTemplate(QWEN35).variables
    assert "message" not in ChatTemplate(QWEN35).variables  # its own
    template = ChatTemplate(CHATML)
    assert not template.has_thoughts
    with pytest.raises(ConfigError, match="does not read 'enable_thinking'"):
        template.check_extra(["enable_thinking"])
    with pytest.raises(ConfigError, match="'messages' is set by the client"):
        ChatTemplate(QWEN35).check_extra(["messages"])
