"""The turns of a chat: ask, stream, keep or drop. Knows nothing of terminals beyond the `Ui` it is given."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from slotd.client.conversation import Conversation
from slotd.client.failure import explain
from slotd.client.rates import rate_line
from slotd.client.reasoning import ONLY_A_THOUGHT
from slotd.protocol.errors import DaemonStartError, SlotdError

if TYPE_CHECKING:
    from slotd.client.client import Client
    from slotd.client.completion import Completion

#: A second Ctrl-C within this many seconds leaves.
LEAVE_WITHIN = 1.0


class Ui(Protocol):
    """Where a chat shows itself."""

    interactive: bool

    def progress(self, at: int, of: int) -> None: ...
    def reasoning(self, text: str) -> None: ...
    def answer(self, text: str) -> None: ...
    def end_answer(self) -> None: ...
    def notice(self, text: str) -> None: ...
    def error(self, text: str) -> None: ...
    def table(self, rows: list[tuple[str, str]]) -> None: ...


class Leave(KeyboardInterrupt):
    """The second Ctrl-C: end the program."""


class Interrupts:
    """Ctrl-C in a chat: while an answer runs it cancels the answer, twice within a second it leaves."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._cancel: Callable[[], object] | None = None
        self._running = False
        self._wanted = False

    def second_press(self) -> bool:
        """Count one Ctrl-C; whether the one before was less than a second ago."""
        before, self._last = self._last, time.monotonic()
        return self._last - before < LEAVE_WITHIN

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT here; for the main thread."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """An answer runs: a press cancels it, as soon as `cancels` has said how."""
        self._running, self._wanted = True, False
        try:
            yield
        finally:
            self._running, self._cancel = False, None

    def cancels(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        if self._wanted:
            self._start_cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._running:
            raise KeyboardInterrupt
        if self.second_press():
            raise Leave
        self._wanted = True
        self._start_cancel()

    def _start_cancel(self) -> None:
        # A signal handler runs in the middle of whatever holds the client's locks: cancel from elsewhere.
        if self._cancel is not None:
            threading.Thread(target=_quietly, args=(self._cancel,), daemon=True).start()


def _quietly(cancel: Callable[[], object]) -> None:
    try:
        cancel()
    except SlotdError:
        pass  # the request, or the daemon, is gone: whoever reads the answer hears of it


class Chat:
    """A conversation with a client and a screen."""

    def __init__(
        self, client: Client, conversation: Conversation, ui: Ui, interrupts: Interrupts | None = None
    ) -> None:
        self.client = client
        self.conversation = conversation
        self.ui = ui
        self.interrupts = interrupts or Interrupts()
        self.last: Completion | None = None
        self.turns = 0
        self.tokens = 0

    def ask(self, text: str) -> bool:
        """Answer one turn. A turn that fails is shown and forgotten, so that the next one can be asked.

        Returns whether the turn was kept. A cancelled answer is kept as far as it came. The thought before
        an answer is not kept: models do not see their thoughts of earlier turns again.
        """
        try:
            answer = self._answer(text)
        except DaemonStartError as error:
            if not self.ui.interactive:
                raise
            self.ui.error(str(error))
            return False
        except SlotdError as error:
            self.ui.error(explain(error, "/reset starts afresh, --max-ctx makes room"))
            return False
        self.last = answer
        self.tokens += len(answer.ids)
        self._comment(answer)
        if answer.is_only_thought:
            self.ui.error(ONLY_A_THOUGHT)
            return False
        if answer.finish_reason == "cancelled" and not answer.text:
            return False
        self.turns += 1
        self.conversation.add_turn(text, answer.text)
        return True

    def _answer(self, text: str) -> Completion:
        messages = self.conversation.asking(text)
        try:
            with self.interrupts.answering():
                stream = self.client.stream(
                    messages=messages, on_progress=self.ui.progress, **self.conversation.params
                )
                with stream:
                    self.interrupts.cancels(stream.cancel)
                    for chunk in stream:
                        self.ui.reasoning(chunk.reasoning)
                        self.ui.answer(chunk.text)
                    return stream.result()
        finally:
            self.ui.end_answer()

    def _comment(self, answer: Completion) -> None:
        """What is worth saying about an answer, on a terminal."""
        if not self.ui.interactive:
            return
        if answer.finish_reason == "cancelled":
            self.ui.notice("cancelled")
        elif answer.finish_reason == "length":
            limit = "the context is full: /reset" if answer.limit == "max_ctx" else "/params max_tokens=N"
            self.ui.notice(f"cut off at {len(answer.ids)} tokens ({limit})")
        self.ui.notice(rate_line(answer))
