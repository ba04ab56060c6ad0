"""Drafts that come with slotd, each for one model file: it was trained on what this very file says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["best_block", "draft_for"]

#: Identity of the target's file (see `weights.identity`) -> the draft's file, beside this module.
_DRAFTS: Mapping[str, str] = {
    # SmolLM2-135M-Instruct.Q4_1.gguf
    "c9d8975c5fc0af8d5de72c0294cf536d": "dflash-smollm2-135m-4l-q8_0.gguf",
}


#: Rows of a block that such a draft is best given with trees of the usual size, by its file. This one was
#: trained for blocks of 8 and of 16; the shorter one costs less.
_BLOCKS: Mapping[str, int] = {"dflash-smollm2-135m-4l-q8_0.gguf": 8}


def best_block(path: Path) -> int | None:
    """Rows that the draft of this file is best given; None: what it was made for."""
    return _BLOCKS.get(path.name) if path.parent == Path(__file__).parent else None


def draft_for(identity: str) -> Path | None:
    """The draft that belongs to a model file of this identity; None: there is none."""
    name = _DRAFTS.get(identity)
    return None if name is None else Path(__file__).with_name(name)
