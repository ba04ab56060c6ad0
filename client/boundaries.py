"""Where a prompt may be cut for the prefix cache: behind the openings of chat turns, else at pages. Pure.

A turn ends with the family's `end` marker and the next one opens with its `start` marker; the cut lies just
behind that opening, so that it is a prefix of every prompt that shares the turns before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Ids = tuple[int, ...]

#: The daemon keeps K/V in pages of so many tokens: a prefix that ends at a page edge shares whole pages.
PAGE = 64

#: Text of the end and of the start marker of a turn, by family of templates.
FAMILIES: tuple[tuple[str, str], ...] = (
    ("<|im_end|>", "<|im_start|>"),  # ChatML, Qwen
    ("<|eot_id|>", "<|start_header_id|>"),  # Llama 3
)

#: Roles that open a prompt whose head is shared by many conversations.
SYSTEM_ROLES = ("system", "developer")


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    chat_template: str | None

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers of one family of templates, as token ids; each may be several tokens.

    Attributes:
        end: ends a turn.
        start: opens a turn.
        system: openings of a system turn (start marker and role), any of which the prompt must begin with.
        separator: most tokens between `end` and `start` (a line break, mostly).
        lead: most tokens in front of the system turn (BOS).
    """

    end: Ids
    start: Ids
    system: tuple[Ids, ...]
    separator: int = 4
    lead: int = 1

    def __post_init__(self) -> None:
        if not (self.end and self.start and self.system and all(self.system)):
            raise ValueError("markers must have at least one token each")


@dataclass(frozen=True, slots=True)
class Cuts:
    """Places where a prompt may be cut, ascending, and the one that a snapshot should be taken at."""

    at: tuple[int, ...]
    target: int | None


def detect_markers(tokenizer: Encoder) -> Markers | None:
    """The markers that the model's chat template uses, None when they are of no known family."""
    template = tokenizer.chat_template or ""
    for end, start in FAMILIES:
        if start not in template:
            continue
        end_ids, start_ids = _encode(tokenizer, end), _encode(tokenizer, start)
        if len(end_ids) == 1 and len(start_ids) == 1:  # else the vocabulary has them as ordinary text
            system = tuple(_encode(tokenizer, start + role) for role in SYSTEM_ROLES)
            return Markers(end_ids, start_ids, system)
    return None


def _encode(tokenizer: Encoder, text: str) -> Ids:
    return tuple(tokenizer.encode(text, add_bos=False))


def find_cuts(ids: Sequence[int], markers: Markers | None) -> Cuts:
    """Cuts of a prompt.

    With markers, and a system turn at the head: behind the opening of every further turn; the target is the
    second to last (the last one opens the answer itself, the one before stays when the last question is
    asked differently), or the only one. Without: the page edges below the end; the target is the last.
    """
    at = () if markers is None else _turns(ids, markers)
    if at:
        return Cuts(at, at[-2] if len(at) >= 2 else at[-1])
    pages = tuple(range(PAGE, len(ids), PAGE))
    return Cuts(pages, pages[-1] if pages else None)


def _turns(ids: Sequence[int], markers: Markers) -> tuple[int, ...]:
    if not _opens_with_system(ids, markers):
        return ()
    cuts = []
    for end in _positions(ids, markers.end):
        behind = end + len(markers.end)
        for gap in range(markers.separator + 1):
            if _is_at(ids, behind + gap, markers.start):
                cuts.append(behind + gap + len(markers.start))
                break
            if _is_at(ids, behind + gap, markers.end):
                break  # that end marker has its own opening
    return tuple(cuts)


def _opens_with_system(ids: Sequence[int], markers: Markers) -> bool:
    return any(_is_at(ids, at, opening) for at in range(markers.lead + 1) for opening in markers.system)


def _is_at(ids: Sequence[int], at: int, marker: Ids) -> bool:
    return tuple(ids[at : at + len(marker)]) == marker


def _positions(ids: Sequence[int], marker: Ids) -> list[int]:
    """Where `marker` stands. Looks for its first token with the sequence's own fast search."""
    found: list[int] = []
    at = 0
    while True:
        try:
            at = ids.index(marker[0], at)
        except ValueError:
            return found
        if _is_at(ids, at, marker):
            found.append(at)
        at += 1
