"""What a scripted daemon says about generated text: [tok] lines of the tiny model's byte tokens."""

from __future__ import annotations

import re

from tests.fakes.tiny_gguf import FIRST_BYTE_TOKEN

PROMPT = re.compile(r"- \d+ id=\S+ ids=.*")


def bytes_ids(text: str | bytes) -> list[int]:
    """One token of the tiny model per byte."""
    data = text.encode() if isinstance(text, str) else text
    return [FIRST_BYTE_TOKEN + byte for byte in data]


def tok(at: int, ids: list[int]) -> str:
    return f"[tok] id=$id at={at} ids={','.join(map(str, ids))}"


def toks(*pieces: str | bytes) -> list[str]:
    """One [tok] line per piece, as if each were a token of several bytes."""
    at, lines = 0, []
    for piece in pieces:
        ids = bytes_ids(piece)
        lines.append(tok(at, ids))
        at += len(ids)
    return lines
