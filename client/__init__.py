"""slotd.client: what a program needs to use a slotd daemon. Imports `slotd.protocol`, never `slotd.daemon`.

    from slotd.client import Client

    with Client("model.gguf") as client:
        print(client.generate("The sky is", max_tokens=16).text)

`Client` spawns the daemon (or is attached to given pipes), `AsyncClient` is the same for asyncio. Both are
safe to use from several threads or tasks at once: every request has its own id, and the daemon runs them
concurrently. Importing this package is cheap; the tokenizer and asyncio come in when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slotd.client.client import Client
from slotd.client.completion import Chunk, Completion
from slotd.client.failure import ClientClosedError, DaemonExitError
from slotd.client.stream import Stream
from slotd.protocol.errors import (
    ConfigError,
    DaemonDiedError,
    DaemonError,
    DaemonStartError,
    DaemonTimeoutError,
    ModelError,
    ProtocolError,
    RequestError,
    SlotdError,
)

if TYPE_CHECKING:
    from slotd.client.async_client import AsyncClient, AsyncStream
    from slotd.client.chat_template import TemplateError

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "ClientClosedError",
    "Completion",
    "ConfigError",
    "DaemonDiedError",
    "DaemonError",
    "DaemonExitError",
    "DaemonStartError",
    "DaemonTimeoutError",
    "ModelError",
    "ProtocolError",
    "RequestError",
    "SlotdError",
    "Stream",
    "TemplateError",
]


#: Name -> the module it is loaded from when it is first used.
_LAZY = {
    "AsyncClient": "slotd.client.async_client",
    "AsyncStream": "slotd.client.async_client",
    "TemplateError": "slotd.client.chat_template",
}


def __getattr__(name: str) -> Any:
    """Load on first use what few programs need: asyncio alone would take a third of the import budget."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
