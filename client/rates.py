"""Speeds of one answer, from its time account. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotd.client.completion import Completion


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens, and tokens per second (0 where nothing was computed)."""

    generated: int
    prompt: int
    cached: int
    prefill: float
    decode: float
    seconds: float


def rates(answer: Completion) -> Rates:
    """Rates of the daemon's own stages: waiting in the queue is not in them."""
    timings = answer.timings
    computed = answer.prompt_tokens - answer.cached_tokens
    decode_s = sum(timings.get(stage, 0.0) for stage in ("decode_s", "draft_s", "verify_s", "sample_s"))
    # The first token comes out of the prefill; the decode stages make the others.
    steps = len(answer.ids) - 1
    return Rates(
        generated=len(answer.ids),
        prompt=answer.prompt_tokens,
        cached=answer.cached_tokens,
        prefill=_per_second(computed, timings.get("prefill_s", 0.0)),
        decode=_per_second(steps, decode_s),
        seconds=timings.get("wall_s", 0.0),
    )


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0


def rate_line(answer: Completion) -> str:
    """One line for a person."""
    found = rates(answer)
    cached = f", {found.cached} cached" if found.cached else ""
    return (
        f"{found.generated} tokens, {found.decode:.1f} tok/s; "
        f"prompt {found.prompt} tokens{cached}, {found.prefill:.0f} tok/s; {found.seconds:.2f} s"
    )
