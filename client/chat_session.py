"""``slotd chat`` put together: conversation, screen and loop, for a terminal or a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slotd.client import repl
from slotd.client.chat import Chat
from slotd.client.conversation import Conversation
from slotd.client.params import ParamDict
from slotd.client.render import Screen
from slotd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from slotd.client.client import Client


def run(
    client: Client, model: str, params: ParamDict, system: str | None, *, show_reasoning: bool = False
) -> int:
    """Chat until the end of input. Returns the exit code."""
    if client.tokenizer.chat_template is None:
        raise ConfigError(f"{model} has no chat template; `slotd generate` continues plain text")
    conversation = Conversation(params, model=model)
    if system:
        conversation.set_system(system)
    interactive = sys.stdin.isatty()
    chat = Chat(client, conversation, Screen(interactive=interactive, show_reasoning=show_reasoning))
    if interactive:
        return repl.run_terminal(chat)
    return repl.run_pipe(chat, sys.stdin.buffer)
