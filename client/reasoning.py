"""The thought at the beginning of an answer, divided from the answer itself. Pure text.

A model that reasons writes ``<think>``, its thought, ``</think>`` and then the answer. Many chat templates
open the thought themselves: then the answer begins inside it and only the closing tag is generated. Later
tags are text like any other. As the templates do with earlier turns, line ends next to the tags are dropped.
"""

from __future__ import annotations

import enum

OPEN, CLOSE = "<think>", "</think>"

#: What ends a thought that used up its budget, as models end their own.
CLOSING = f"\n{CLOSE}\n\n"

#: What commands say of an answer that ended inside its thought.
ONLY_A_THOUGHT = "a thought and no answer: -n makes room, --thinking-budget bounds the thought"


class _Place(enum.Enum):
    BEFORE = "before"  # nothing but white space so far, or the beginning of the opening tag
    INSIDE = "inside"
    BEHIND = "behind"  # the tag is closed, only line ends since
    ANSWER = "answer"


def opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt ends with the opening of a thought."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplit:
    """Takes the text of an answer in pieces, cut anywhere, and gives (thought, answer) that is certain.

    Args:
        opened: whether the prompt has opened the thought.
    """

    def __init__(self, *, opened: bool) -> None:
        self._place = _Place.INSIDE if opened else _Place.BEFORE
        self._begun = False  # the thought has text
        self._held = ""

    @property
    def inside(self) -> bool:
        """Whether the thought is open."""
        return self._place is _Place.INSIDE

    @property
    def answering(self) -> bool:
        """Whether the answer has begun: tags are text from here on."""
        return self._place is _Place.ANSWER

    def add(self, text: str) -> tuple[str, str]:
        """What `text` makes certain; the beginning of a tag and line ends before one wait for more."""
        self._held += text
        thought = ""
        if self._place is _Place.BEFORE:
            self._look_for_opening()
        if self._place is _Place.INSIDE:
            thought = self._take_thought()
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._place = _Place.ANSWER
        answer = ""
        if self._place is _Place.ANSWER:
            answer, self._held = self._held, ""
        return thought, answer

    def close(self) -> str:
        """The thought ends here, tag or not: the rest of it. The answer follows."""
        rest = self._begin(self._held.rstrip("\n"))
        self._place, self._held = _Place.BEHIND, ""
        return rest

    def finish(self) -> tuple[str, str]:
        """No more text comes: what was held back."""
        if self._place is _Place.INSIDE:
            return self.close(), ""
        rest, self._held = self._held, ""
        return "", rest if self._place is _Place.BEFORE else ""

    def _look_for_opening(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._place, self._held = _Place.INSIDE, text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._place = _Place.ANSWER

    def _take_thought(self) -> str:
        thought, tag, behind = self._held.partition(CLOSE)
        if tag:
            self._place, self._held = _Place.BEHIND, behind
            return self._begin(thought.rstrip("\n"))
        possible = next((n for n in range(len(CLOSE) - 1, 0, -1) if thought.endswith(CLOSE[:n])), 0)
        certain = thought[: len(thought) - possible].rstrip("\n")
        self._held = thought[len(certain) :]
        return self._begin(certain)

    def _begin(self, thought: str) -> str:
        """Without the line ends that follow the opening tag."""
        if not self._begun:
            thought = thought.lstrip("\n")
            self._begun = bool(thought)
        return thought
