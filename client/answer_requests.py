"""The requests of one answer: the first is sent here, another follows when a thinking budget ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slotd.client import commands
from slotd.client.completion import Assembler
from slotd.client.generation import Generation
from slotd.client.stream import Again, Stream
from slotd.protocol.errors import SlotdError
from slotd.protocol.messages import Prompt

if TYPE_CHECKING:
    from slotd.client.cached_client import SlotCache
    from slotd.client.session import Session
    from slotd.client.text import PromptIds
    from slotd.client.tokenizer import Tokenizer


class AnswerRequests:
    """Makes and sends the requests of one answer, all under one id.

    Args:
        session: the daemon.
        cache: adds to requests what the caches know, where the caller has named no slot.
        id: of the requests; the second is sent when the first has ended.
        ended: called with the id whenever one of them has ended.
    """

    def __init__(self, session: Session, cache: SlotCache, id: str, ended: Callable[[str], None]) -> None:
        self._session = session
        self._cache = cache
        self._id = id
        self._ended = ended
        self._max_ctx = int(session.hello.get("max_ctx", 0))

    def begin(self, generation: Generation, prompt: PromptIds, tokenizer: Tokenizer | None) -> Stream:
        """Send the first request. Raises what sending raises."""
        budget = None
        asked = generation
        if generation.thinking_budget is not None:
            from slotd.client.thinking_budget import ThinkingBudget, is_needed

            if is_needed(generation, len(prompt.ids), self._max_ctx):
                assert tokenizer is not None  # there are messages
                budget = ThinkingBudget(generation, prompt.ids, tokenizer, self._max_ctx, self._dress)
                asked = budget.first()
        request, again = self._dress(asked, prompt.ids)
        command = commands.Generation(request, self._ended)
        assembler = Assembler(
            self._id,
            tokenizer,
            stops=generation.stop,
            stop_ids=generation.stop_ids,
            on_progress=generation.on_progress,
            thought=prompt.thought,
            budgeted=budget is not None,
        )
        try:
            self._session.send(command)
        except SlotdError as error:
            again.unsent(self._id, error)
            raise
        return Stream(self._session, command, assembler, generation.timeout, again, budget)

    def _dress(self, generation: Generation, ids: Sequence[int]) -> tuple[Prompt, Again]:
        request = generation.command(self._id, ids, max_ctx=self._max_ctx)
        if generation.snap is not None:
            self._cache.claim(generation.snap.slot)
        elif generation.slot is None:
            request = self._cache.dress(self._session, request)
        return request, self._cache.second_try(request)
