"""The thinking budget: an answer whose thought may take so many tokens, as two requests.

The first request ends at the budget. Where the thought is still open then, the client closes it; the second
request has the prompt, what was generated and the closing tag, and generates the rest. It goes on where the
first one ended: the daemon keeps ended sequences, and this one ends exactly there, which a request that is
cancelled would have run past. So it works with recurrent state too, which cannot be taken back.

An answer that ends before its budget is one request. One whose thought was closed in time, but whose text is
not at its end at the budget, is two, and reads as one. Draws of the second request are those of the seed that
follows the first one's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from slotd.client.generation import Generation
from slotd.client.reasoning import CLOSING
from slotd.client.stream import Again
from slotd.client.tokenizer import Tokenizer
from slotd.protocol.messages import Prompt

_SEEDS = 2**64


class ThinkingBudget:
    """One answer under a budget. Implements `stream.Further`.

    Args:
        generation: what was asked for; has a budget.
        ids: the prompt.
        tokenizer: of the model.
        max_ctx: the daemon's context.
        dress: makes the request of a generation and a prompt.
    """

    def __init__(
        self,
        generation: Generation,
        ids: Sequence[int],
        tokenizer: Tokenizer,
        max_ctx: int,
        dress: Callable[[Generation, Sequence[int]], tuple[Prompt, Again]],
    ) -> None:
        self._generation = generation
        self._ids = ids
        self._tokenizer = tokenizer
        self._max_ctx = max_ctx
        self._dress = dress

    def first(self) -> Generation:
        """What the first request asks for."""
        asked = self._generation
        assert asked.thinking_budget is not None
        least = min(asked.min_tokens, asked.thinking_budget)
        return replace(asked, max_tokens=asked.thinking_budget, min_tokens=least)

    def request(
        self, produced: Sequence[int], *, close: bool, seed: int | None
    ) -> tuple[Prompt, Again] | None:
        """The second request; None when the context has no room for it.

        Args:
            produced: ids of the first one.
            close: whether the thought has to be closed.
            seed: that the first one used.
        """
        ids = array("i", [*self._ids, *produced])
        if close:
            ids.extend(self._tokenizer.encode(CLOSING, add_bos=False))
        if len(ids) >= self._max_ctx:
            return None
        asked = self._generation
        left = None if asked.max_tokens is None else asked.max_tokens - len(produced)
        following = None if seed is None else (seed + 1) % _SEEDS
        rest = replace(
            asked,
            max_tokens=left,
            min_tokens=max(0, asked.min_tokens - len(produced)),
            fit=True,
            slot=None,
            snap=None,
            sampling=replace(asked.sampling, seed=following),
        )
        return self._dress(rest, ids)


def is_needed(generation: Generation, n_prompt: int, max_ctx: int) -> bool:
    """Whether the budget can end a request of this generation.

    Not where the whole answer is no longer than it, and not where the daemon refuses the answer as too long.
    """
    budget, most = generation.thinking_budget, generation.max_tokens
    if budget is None or (most is not None and most <= budget):
        return False
    return generation.fit or most is None or n_prompt + most <= max_ctx
