"""Tokenizer and chat template of a model file, loaded while the daemon loads the weights."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotd.client.generation import Generation, token_ids
from slotd.client.reasoning import opens_thought
from slotd.protocol.errors import ConfigError, SlotdError

if TYPE_CHECKING:
    from slotd.client.chat_template import ChatTemplate
    from slotd.client.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as it is sent. `thought`: of a model that may reason, whether the prompt opens the thought."""

    ids: array[int]
    thought: bool | None


class TextTools:
    """What turns text into ids and back, for one model file.

    Args:
        model: the GGUF file; None: only prompts of ids, only answers of ids.
        pre: pre-tokenizer to use instead of the one that the file names.
    """

    def __init__(self, model: Path | None, pre: str | None = None) -> None:
        self.model = model
        self._pre = pre
        self._tokenizer: Future[Tokenizer] | None = None
        self._template: ChatTemplate | None = None
        self._lock = threading.Lock()
        self._warned = False

    def load(self) -> None:
        """Begin to load the tokenizer, if there is a model and nobody has begun; returns at once."""
        with self._lock:
            if self._tokenizer is not None or self.model is None:
                return
            self._tokenizer = Future()
            # Not a daemon thread: the interpreter must not end in the middle of its native code.
            threading.Thread(target=self._load, args=(self._tokenizer,), name="slotd-tokenizer").start()

    def _load(self, future: Future[Tokenizer]) -> None:
        try:
            from slotd.client.tokenizer import Tokenizer

            assert self.model is not None
            future.set_result(Tokenizer.from_file(self.model, pre_override=self._pre))
        except BaseException as error:  # whatever it is, the one who waits must hear of it
            future.set_exception(error)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError or ConfigError when the file has none that can be used."""
        self.load()
        if self._tokenizer is None:
            raise ConfigError("text needs the model file for its tokenizer: give model=, or send token ids")
        return self._tokenizer.result()

    def tokenizer_for(self, needed: bool) -> Tokenizer | None:
        """The tokenizer; None when there is none that can be used and ids alone will do."""
        if needed:
            return self.tokenizer
        if self.model is None:
            return None
        try:
            return self.tokenizer
        except SlotdError as error:
            if not self._warned:
                self._warned = True
                logger.warning("answers have ids and no text: %s", error)
            return None

    @property
    def template(self) -> ChatTemplate:
        """Raises TemplateError when the file has none that can be used."""
        if self._template is None:
            from slotd.client.chat_template import ChatTemplate

            tokenizer = self.tokenizer
            self._template = ChatTemplate(
                tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
            )
        return self._template

    def prompt(
        self,
        verb: str,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Mapping[str, Any]] | None,
        generation: Generation,
    ) -> PromptIds:
        """The prompt of `verb` as int32 ids, from a text, from ids, or from chat messages.

        Raises:
            TypeError: not exactly one of prompt and messages.
            ConfigError: neither text nor ids, text without a model file, an argument that needs messages, or
                one that the chat template does not read.
            TemplateError: the chat template refuses the messages.
        """
        if (prompt is None) == (messages is None):
            raise TypeError(f"{verb}() needs either a prompt or messages=")
        if messages is not None:
            return self._chat_prompt(list(messages), generation)
        if generation.for_chats:
            raise ConfigError(f"{generation.for_chats[0]} goes with messages=, not with a plain prompt")
        if isinstance(prompt, str):
            return PromptIds(array("i", self.tokenizer.encode(prompt)), None)
        return PromptIds(token_ids("prompt", prompt), None)

    def _chat_prompt(self, messages: list[Mapping[str, Any]], generation: Generation) -> PromptIds:
        template = self.template
        if generation.thinking_budget is not None and not template.has_thoughts:
            raise ConfigError("thinking_budget: the chat template of this model has no thoughts")
        extra = generation.template_variables
        template.check_extra(extra)
        text = template.render(messages, add_generation_prompt=True, **extra)
        ids = array("i", self.tokenizer.encode(text))
        return PromptIds(ids, opens_thought(text) if template.has_thoughts else None)
