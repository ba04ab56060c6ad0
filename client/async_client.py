"""The asyncio client: the same verbs on the same bus. Only what may block runs in threads of its own."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from slotd.client.client import Client, Message
from slotd.client.completion import Chunk, Completion
from slotd.client.failure import ClientClosedError
from slotd.client.generation import GenerationArgs
from slotd.client.stream import Stream
from slotd.client.transport import Pipe
from slotd.protocol.errors import DaemonDiedError, DaemonError, SlotdError
from slotd.protocol.messages import AllCleared, Event

if TYPE_CHECKING:
    from slotd.client.chat_template import ChatTemplate
    from slotd.client.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncClient:
    """`Client` for asyncio; the arguments, verbs and errors are the same.

        async with AsyncClient("model.gguf") as client:
            async for chunk in client.stream("The sky is", max_tokens=32):
                print(chunk.text, end="")

    The daemon is spawned by ``async with`` or `start`. One event loop uses it.
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        self._make: Callable[[], Client] = partial(Client, model, **settings)
        self._started: Client | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="slotd-async")

    @classmethod
    async def attach(
        cls, stdin: Pipe, stdout: Pipe, *, model: str | Path | None = None, **settings: Any
    ) -> Self:
        """See `Client.attach`."""
        self = cls(model)
        self._make = partial(Client.attach, stdin, stdout, model=model, **settings)
        return await self.start()

    async def start(self) -> Self:
        """Spawn the daemon and wait until it is ready. Raises what `Client` raises."""
        async with self._starting:
            await self._start()
        return self

    async def _start(self) -> None:
        if self._started is None:
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._make)
            try:
                self._started = await asyncio.shield(future)
            except asyncio.CancelledError:
                future.add_done_callback(_close_late)
                raise

    async def close(self) -> None:
        """See `Client.close`."""
        if self._started is not None and not self._closed:
            await self.run(self._started.close)
        self._closed = True
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call something that may block in a thread of the client's."""
        if self._closed:
            raise ClientClosedError("the client was closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    @property
    def _client(self) -> Client:
        if self._started is None:
            raise DaemonDiedError("the client is not started: use `async with`, or await start()")
        return self._started

    # ----- what is known without asking

    @property
    def hello(self) -> dict[str, Any]:
        """See `Client.hello`."""
        return self._client.hello

    @property
    def epoch(self) -> int:
        """See `Client.epoch`."""
        return self._client.epoch

    @property
    def model(self) -> Path | None:
        """See `Client.model`."""
        return self._client.model

    @property
    def pid(self) -> int | None:
        """See `Client.pid`."""
        return self._client.pid

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Client.tokenizer`; waits until it is loaded."""
        return self._client.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """See `Client.template`; waits until it is loaded."""
        return self._client.template

    # ----- generating

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **args: Unpack[GenerationArgs],
    ) -> AsyncStream:
        """An answer for ``async for``. It begins with the first chunk asked for, or with ``async with``."""
        return AsyncStream(self, "stream", prompt, messages, args)

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **args: Unpack[GenerationArgs],
    ) -> Completion:
        """See `Client.generate`. When the task is cancelled, so is the request."""
        async with AsyncStream(self, "generate", prompt, messages, args) as stream:
            return await stream.result()

    async def chat(self, messages: Sequence[Message], **args: Unpack[GenerationArgs]) -> Completion:
        """See `Client.chat`."""
        async with AsyncStream(self, "chat", None, messages, args) as stream:
            return await stream.result()

    async def cancel(self, id: str) -> bool:
        """See `Client.cancel`."""
        return await self.run(self._client.cancel, id)

    # ----- slots and state

    async def snapshot(self, slot: int, of: str | None = None) -> int:
        """See `Client.snapshot`."""
        return await self.run(self._client.snapshot, slot, of)

    async def free_slot(self, slot: int) -> None:
        """See `Client.free_slot`."""
        await self.run(self._client.free_slot, slot)

    async def slots(self) -> tuple[int, ...]:
        """See `Client.slots`."""
        return await self.run(self._client.slots)

    async def status(self) -> dict[str, Any]:
        """See `Client.status`."""
        return await self.run(self._client.status)

    async def props(self) -> dict[str, Any]:
        """See `Client.props`."""
        return await self.run(self._client.props)

    def cache_stats(self) -> dict[str, Any]:
        """See `Client.cache_stats`."""
        return self._client.cache_stats()

    # ----- listening: callbacks run in the reader thread, not in the event loop

    def on_all_cleared(self, callback: Callable[[AllCleared], None]) -> None:
        """See `Client.on_all_cleared`."""
        self._client.on_all_cleared(callback)

    def register_line_callback(self, prefix: str, callback: Callable[[], None]) -> None:
        """See `Client.register_line_callback`."""
        self._client.register_line_callback(prefix, callback)

    def register_event_callback(self, type: type[Event], callback: Callable[[Any], None]) -> None:
        """See `Client.register_event_callback`."""
        self._client.register_event_callback(type, callback)


def _close_late(future: asyncio.Future[Client]) -> None:
    """Close a client that was made for a task that no longer waits."""
    if not future.cancelled() and future.exception() is None:
        client = future.result()
        asyncio.get_running_loop().run_in_executor(None, client.close)


class AsyncStream:
    """`Stream` for asyncio: ``async for`` chunks, then ``await result()``."""

    def __init__(
        self,
        client: AsyncClient,
        verb: str,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Message] | None,
        args: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._arguments = (verb, prompt, messages, args)
        self._stream: Stream | None = None
        self._grown = asyncio.Event()

    async def start(self) -> Self:
        """Send the request. Raises what `Client.stream` raises."""
        if self._stream is None:
            self._stream = await self._client.run(self._client._client.begin, *self._arguments)
            self._listen(self._stream)
        return self

    def _listen(self, stream: Stream) -> None:
        wake = asyncio.get_running_loop().call_soon_threadsafe
        stream.command.listen(partial(wake, self._grown.set))

    @property
    def id(self) -> str:
        """The request id, once it was sent."""
        return self._open.id

    @property
    def _open(self) -> Stream:
        if self._stream is None:
            raise DaemonDiedError("the stream is not started: use `async for`, `async with` or await start()")
        return self._stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """See `Stream.__next__`; StopAsyncIteration at the end."""
        await self.start()
        stream = self._open
        while not stream.ended:
            chunk = stream.process(await self._wait(stream))
            if stream.wants_cancel:
                await self._client.run(stream.begin_cancel)
            if stream.wants_resend:
                await self._client.run(stream.resend)
                self._listen(stream)
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def _wait(self, stream: Stream) -> Event | DaemonError:
        while True:
            if stream.overdue:
                await self._client.run(stream.attend)
            self._grown.clear()  # before looking, so that nothing that comes now is missed
            try:
                return stream.command.events.get_nowait()
            except queue.Empty:
                pass
            try:
                await asyncio.wait_for(self._grown.wait(), stream.patience)
            except TimeoutError:
                await self._client.run(stream.attend)

    async def result(self) -> Completion:
        """See `Stream.result`."""
        async for _ in self:
            pass
        return self._open.result()

    async def cancel(self) -> bool:
        """See `Stream.cancel`."""
        return await self._client.run(self._open.cancel)

    async def close(self) -> None:
        """See `Stream.close`."""
        if self._stream is None or self._stream.ended:
            return
        try:
            await self._client.run(self._stream.begin_cancel)
            await self.result()
        except SlotdError:
            pass  # it has ended, which is all that was asked for

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
