"""The blocking client: spawns a daemon (or is attached to one), asks it things, restarts it when it died."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from slotd.client import commands
from slotd.client.answer_requests import AnswerRequests
from slotd.client.bus import Callbacks
from slotd.client.completion import Completion
from slotd.client.failure import ClientClosedError
from slotd.client.generation import Generation, GenerationArgs
from slotd.client.params import PREFIX_SLOTS
from slotd.client.process import DaemonProcess, daemon_argv
from slotd.client.session import Session
from slotd.client.stream import Stream
from slotd.client.text import TextTools
from slotd.client.transport import Pipe
from slotd.protocol.errors import ConfigError
from slotd.protocol.messages import AllCleared, Event, Json

if TYPE_CHECKING:
    from slotd.client.chat_template import ChatTemplate
    from slotd.client.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class Client:
    """A slotd daemon, as a Python object. Safe to use from several threads at once.

        with Client("model.gguf") as client:
            for chunk in client.stream("The sky is", max_tokens=32):
                print(chunk.text, end="")

    The constructor returns when the daemon is ready. A daemon that died makes one call fail with
    `DaemonDiedError`; the next call starts a new one (its slots are empty, see `on_all_cleared`).

    Args:
        model: GGUF file. None: ``$SLOTD_MODEL``, else the default model (downloaded when it is not there).
        daemon_args: further flags of ``slotd daemon``, e.g. ``["--max-ctx", "4096", "--parallel", "4"]``.
        env: environment variables to set for the daemon, on top of this process's.
        start_timeout: seconds until the daemon must be ready.
        reply_timeout: seconds for the answer to a short command; and how long a running request may be
            silent before the daemon is asked for a sign of life.
        pre: name of the pre-tokenizer to use instead of the one that the model names.
        restart: whether a call after the daemon's death starts a new one.
        command: argv to run in place of ``python -m slotd.daemon daemon MODEL``, for a wrapper.
        log: called with every line of the daemon's stderr (from a thread of the client's).
        prefix_slots: slots of the daemon, from 0 on, that hold prefixes of prompts for later ones; 0: none.
            Answers stay the same, and `Completion.cached_tokens` says what it saved. A request with `slot`
            or `snap`, and a slot given to `snapshot`, are left alone.
        full_slots: slots behind these that hold whole prompts, for requests that repeat.
        cache_dir: folder in which the client remembers what the daemon has on disk (``--slot-dir``), so that
            another client finds it again. It holds the ids of prompts.

    Raises:
        ModelError: the model file is missing or cannot be used.
        ConfigError: an argument that is wrong.
        DaemonStartError: the daemon did not become ready; the message ends with its last words. One that
            ended by itself raises the subclass DaemonExitError, which has its `exit_code`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        daemon_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
        reply_timeout: float = 10.0,
        pre: str | None = None,
        restart: bool = True,
        command: Sequence[str] | None = None,
        log: Callable[[str], None] | None = None,
        prefix_slots: int = PREFIX_SLOTS,
        full_slots: int = 0,
        cache_dir: str | Path | None = None,
    ) -> None:
        if command is None:
            from slotd.client.fetch import resolve_model

            model = resolve_model(None if model is None else str(model), fetch=model is None)
        self._prepare(model, pre, start_timeout, reply_timeout, prefix_slots, full_slots, cache_dir)
        self._argv = [*command, *daemon_args] if command is not None else daemon_argv(str(model), daemon_args)
        self._env = env
        self._restart = restart
        self._log = log
        self._text.load()  # meanwhile the daemon loads the weights
        self._session = self._spawn()
        self._adopt_model()
        self._cache.start(self._session, self._text)

    @classmethod
    def attach(
        cls,
        stdin: Pipe,
        stdout: Pipe,
        *,
        model: str | Path | None = None,
        start_timeout: float = 300.0,
        reply_timeout: float = 10.0,
        pre: str | None = None,
        prefix_slots: int = 0,
        full_slots: int = 0,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """A client of a daemon that somebody else runs.

        Args:
            stdin: the daemon's standard input: a descriptor, or a file object without a buffer.
            stdout: its standard output, likewise. Nobody else may read it from now on.
            model: its GGUF file, for the tokenizer; None: the file that the daemon names, if it is there.
                Without one prompts and answers are ids only.
            prefix_slots, full_slots, cache_dir: as for `Client`, but off unless asked for: these slots are
                emptied, and must be nobody else's.

        `close` leaves the pipes open and the daemon running. There is no restart.

        Raises:
            DaemonStartError: no answer to HELLO within `start_timeout` seconds.
        """
        self = cls.__new__(cls)
        self._prepare(model, pre, start_timeout, reply_timeout, prefix_slots, full_slots, cache_dir)
        self._restart = False
        self._session = Session.attach(
            stdin,
            stdout,
            callbacks=self._callbacks,
            new_id=self._new_id,
            start_timeout=start_timeout,
            reply_timeout=reply_timeout,
        )
        self._adopt_model()
        self._cache.start(self._session, self._text)
        return self

    def _prepare(
        self,
        model: str | Path | None,
        pre: str | None,
        start_timeout: float,
        reply_timeout: float,
        prefix_slots: int,
        full_slots: int,
        cache_dir: str | Path | None,
    ) -> None:
        self._text = TextTools(None if model is None else Path(model), pre)
        self._pre = pre
        self._start_timeout = start_timeout
        self._reply_timeout = reply_timeout
        self._callbacks = Callbacks()
        self._callbacks.register_event_callback(Json, self._take_json)
        self._callbacks.register_event_callback(AllCleared, self._take_all_cleared)
        self._all_cleared: list[Callable[[AllCleared], None]] = []
        self._new_id = commands.IdSource()
        from slotd.client.cached_client import SlotCache  # not above: importing the package stays cheap

        self._cache = SlotCache(
            self._callbacks,
            self._new_id,
            prefix_slots=_slot_count("prefix_slots", prefix_slots),
            full_slots=_slot_count("full_slots", full_slots),
            cache_dir=None if cache_dir is None else Path(cache_dir),
        )
        self._epoch = 0
        self._last_id: str | None = None
        self._closed = False
        self._lock = threading.RLock()

    def _adopt_model(self) -> None:
        """Without a model file of our own: take the one that the daemon says it runs."""
        named = self.hello.get("model")
        path = named.get("path") if isinstance(named, Mapping) else None
        if self._text.model is None and isinstance(path, str) and Path(path).is_file():
            self._text = TextTools(Path(path), self._pre)

    # ----- the daemon's life

    def _spawn(self) -> Session:
        return Session.spawn(
            DaemonProcess(self._argv, env=self._env, log=self._log),
            callbacks=self._callbacks,
            new_id=self._new_id,
            start_timeout=self._start_timeout,
            reply_timeout=self._reply_timeout,
        )

    def live(self) -> Session:
        """The session to use for the next call; a new one after a death that somebody was told of.

        Raises:
            ClientClosedError: `close` was called.
            DaemonDiedError: the daemon died and nobody knew, or it cannot be restarted.
            DaemonStartError: the new one did not become ready.
        """
        with self._lock:
            if self._closed:
                raise ClientClosedError("the client was closed")
            session = self._session
            if session.alive:
                return session
            if not session.death_told or not self._restart:
                raise session.death()
            session.close()
            self._session = self._spawn()
            self._last_id = None
            # Nothing of the old daemon is left: for whoever keeps account of slots that is a clearing.
            self._callbacks.run_event(AllCleared(epoch=self._epoch))
            self._cache.start(self._session, self._text)
            return self._session

    def close(self) -> None:
        """End the daemon: quit, then SIGTERM, then SIGKILL. What still runs fails. Safe to call again.

        Calls that follow raise `ClientClosedError`.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._session.close()
                self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----- what is known without asking

    @property
    def hello(self) -> dict[str, Any]:
        """The object of the daemon's ``[hello]``: versions, slots, max_ctx, model, limits ..."""
        return self._session.hello

    @property
    def epoch(self) -> int:
        """The slot epoch: grows whenever the daemon has cleared its slots."""
        return self._epoch

    @property
    def model(self) -> Path | None:
        """The model file, None when attached without one."""
        return self._text.model

    @property
    def pid(self) -> int | None:
        """The daemon's process id, None when attached."""
        process = self._session.process
        return None if process is None else process.pid

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model file. Raises ModelError or ConfigError when there is none."""
        return self._text.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The chat template of the model file. Raises TemplateError when there is none."""
        return self._text.template

    # ----- generating

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **args: Unpack[GenerationArgs],
    ) -> Stream:
        """Begin an answer and return at once; see `generate` for the arguments and errors.

        Use it as a context manager to have the request cancelled when the block is left early.
        """
        return self.begin("stream", prompt, messages, args)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **args: Unpack[GenerationArgs],
    ) -> Completion:
        """Answer a prompt (text or token ids) or chat messages, and wait for the whole answer.

        Args:
            prompt: the text is tokenised as the model wants it; ids are sent as they are.
            messages: ``{"role": ..., "content": ...}`` objects, put through the model's chat template.
            args: see `GenerationArgs`.

        Raises:
            TypeError: an unknown argument, or not exactly one of prompt and messages.
            ConfigError: an argument of the wrong type.
            RequestError: the daemon refused the request, or it failed; `code` and `fields` say why.
            DaemonDiedError: the daemon is dead; the next call starts another.
            DaemonTimeoutError: it took longer than `timeout`, or the daemon is stuck.
        """
        with self.begin("generate", prompt, messages, args) as stream:
            return stream.result()

    def chat(self, messages: Sequence[Message], **args: Unpack[GenerationArgs]) -> Completion:
        """The assistant's answer to `messages`; see `generate`."""
        with self.begin("chat", None, messages, args) as stream:
            return stream.result()

    def begin(
        self,
        verb: str,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Message] | None,
        args: Mapping[str, Any],
    ) -> Stream:
        """`stream` on behalf of the method `verb`, which errors will name."""
        generation = Generation.from_args(verb, args)
        ids = self._text.prompt(verb, prompt, messages, generation)
        needs_text = bool(generation.stop) or messages is not None or isinstance(prompt, str)
        tokenizer = self._text.tokenizer_for(needs_text)
        requests = AnswerRequests(self.live(), self._cache, self._new_id(), self._remember)
        return requests.begin(generation, ids, tokenizer)

    def _remember(self, id: str) -> None:
        self._last_id = id

    def cancel(self, id: str) -> bool:
        """Cancel the request `id`; whether it was still open. Its stream ends with what it has."""
        return bool(self._ask(commands.Cancel(id)))

    # ----- slots and state

    def snapshot(self, slot: int, of: str | None = None) -> int:
        """Keep a finished sequence in `slot`; the number of tokens in it.

        Args:
            of: id of its request (`Completion.id`); None: the one of this client that ended last.

        Raises:
            RequestError: ``bad_slot``, ``nothing_to_snapshot``, ``oom`` ...; the slot is as it was.
        """
        of = of or self._last_id
        self._cache.claim(slot)
        return int(self._ask(commands.Snapshot(self._new_id(), slot, of)))

    def free_slot(self, slot: int) -> None:
        """Empty `slot`. Raises RequestError (``bad_slot``)."""
        self._cache.unclaim(slot)
        self._ask(commands.FreeSnapshot(self._new_id(), slot))

    def slots(self) -> tuple[int, ...]:
        """The occupied slots."""
        return tuple(self._ask(commands.ListSlots(self._new_id())))

    def status(self) -> dict[str, Any]:
        """The object of ``[status]``: what runs, what waits, memory."""
        return dict(self._ask(commands.Status(self._new_id())))

    def props(self) -> dict[str, Any]:
        """The object of ``[props]``: settings, and what is ``inactive`` and why."""
        return dict(self._ask(commands.Props(self._new_id())))

    def cache_stats(self) -> dict[str, Any]:
        """What the caches hold, and what they did since the client was made.

        ``active`` (False: the daemon has no slots for them, or they are off), ``epoch``, ``prefix`` and
        ``full`` (slots, entries, tokens, cold), ``entries`` (by slot: kind, tokens, hits), ``pending``,
        ``costs``, and counts, which survive eviction, clearings and restarts: ``prefix_hits``, ``misses``,
        ``confirmed``, ``aborted`` ...
        """
        return self._cache.stats()

    def _ask(self, command: commands.Command) -> Any:
        return self.live().ask(command)

    # ----- listening

    def on_all_cleared(self, callback: Callable[[AllCleared], None]) -> None:
        """Call `callback(event)` whenever the daemon's slots were cleared, and after a restart (then
        nothing is kept). As all callbacks it runs before any answer that it explains is given, in a thread
        of the client's, and must not call the client.
        """
        self._all_cleared.append(callback)

    def register_line_callback(self, prefix: str, callback: Callable[[], None]) -> None:
        """Call `callback()` on every line of the daemon's that starts with `prefix`; also after a restart."""
        self._callbacks.register_line_callback(prefix, callback)

    def register_event_callback(self, type: type[Event], callback: Callable[[Any], None]) -> None:
        """Call `callback(event)` on every event of `type`; also after a restart."""
        self._callbacks.register_event_callback(type, callback)

    def _take_json(self, event: Json) -> None:
        if event.kind == "hello":  # in the reader thread, so that no all-cleared is overtaken
            self._epoch = int(event.data.get("epoch", 0))

    def _take_all_cleared(self, event: AllCleared) -> None:
        self._epoch = event.epoch
        for callback in self._all_cleared:
            try:
                callback(event)
            except Exception:
                logger.exception("an on_all_cleared callback failed")


def _slot_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a number of slots, 0 or more, not {value!r}")
    return value
