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

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "DaemonDiedError",
    "DaemonError",
    "DaemonStartError",
    "DaemonTimeoutError",
    "ModelError",
    "ProtocolError",
    "RequestError",
    "SlotdError",
    "Stream",
]


def __getattr__(name: str) -> Any:
    """Load the asyncio half on first use: asyncio alone would take a third of the import budget."""
    if name in ("AsyncClient", "AsyncStream"):
        from slotd.client import async_client

        return getattr(async_client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
