"""Counts since the start of a daemon, for STATUS. They only grow, whatever is freed or moved meanwhile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Requests and tokens.

    Attributes:
        requests: prompts that were taken.
        from_slot, from_ended, from_nothing: how those that were admitted began: with a slot, with what an
            ended request had left, or with nothing.
        prompt_tokens: tokens of the prompts that were admitted; of these
        reused_tokens: so many were there already, and
        computed_tokens: so many were computed until now (fewer in all, when a request was cut short).
        generated_tokens: tokens of answers.
        drafted_tokens: tokens that were guessed and verified; of these
        accepted_tokens: so many became part of an answer.
    """

    requests: int = 0
    from_slot: int = 0
    from_ended: int = 0
    from_nothing: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def admit(self, prompt: int, reused: int, *, slot: bool) -> None:
        """A prompt of so many tokens starts; `slot`: from one or more slots."""
        self.prompt_tokens += prompt
        self.reused_tokens += reused
        if slot:
            self.from_slot += 1
        elif reused:
            self.from_ended += 1
        else:
            self.from_nothing += 1
