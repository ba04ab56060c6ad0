"""A stand-in for `slotd.client.Client` that answers from a script, for the commands built on top of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

from slotd.client.completion import Chunk, Completion


class FakeStream:
    """An answer of a chunk for its thought and one per word; `step` runs before each word and may raise."""

    def __init__(self, answer: Completion, step: Callable[[int], None]) -> None:
        self._answer = answer
        self._step = step
        self._cancelled = threading.Event()
        self._shown = 0

    def __iter__(self) -> Iterator[Chunk]:
        if self._answer.reasoning:
            yield Chunk("", reasoning=self._answer.reasoning)
        for index, token in enumerate(self._answer.ids):
            self._step(index)
            if self._cancelled.is_set():
                return
            self._shown += 1
            yield Chunk(f"t{token} ", (token,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def cancel(self) -> bool:
        self._cancelled.set()
        return True

    def result(self) -> Completion:
        if not self._cancelled.is_set():
            return self._answer
        ids = self._answer.ids[: self._shown]
        return Completion(text=text_of(ids), ids=ids, finish_reason="cancelled")


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(f"t{token} " for token in ids)


def completion(ids: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Completion:
    """A finished answer; the text follows from the ids."""
    known: dict[str, Any] = {
        "text": text_of(ids),
        "finish_reason": "length",
        "limit": "n_gen",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "seed": 7,
        "timings": {"wall_s": 1.0, "prefill_s": 0.5, "decode_s": 0.25},
        "id": "r1",
    }
    return Completion(ids=ids, **(known | fields))


class FakeClient:
    """Answers every request by `answer(request)`, a Completion or an exception to raise.

    `requests` are the arguments of each call; `step(index)` runs before every chunk.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Completion] | None = None) -> None:
        self.answer = answer or (lambda request: completion())
        self.requests: list[dict[str, Any]] = []
        self.step: Callable[[int], None] = lambda index: None
        self.hello: dict[str, Any] = {
            "slots": 8,
            "max_ctx": 4096,
            "model": {"identity": "abc", "arch": "llama"},
        }
        self.tokenizer = SimpleNamespace(chat_template="x", vocab_size=300)
        self.caching = True
        self.closed = False
        self._lock = threading.Lock()

    def stream(self, prompt: Any = None, *, messages: Any = None, **args: Any) -> FakeStream:
        request = {"prompt": prompt, "messages": messages, **args}
        with self._lock:
            self.requests.append(request)
        return FakeStream(self.answer(request), self.step)

    def generate(self, prompt: Any = None, *, messages: Any = None, **args: Any) -> Completion:
        return self.stream(prompt, messages=messages, **args).result()

    def slots(self) -> tuple[int, ...]:
        return (0, 3)

    def cache_stats(self) -> dict[str, Any]:
        names = ("prefix_hits", "prefix_hit_tokens", "passed", "misses", "confirmed", "aborted", "cleared")
        counts = {name: index for index, name in enumerate(names)}
        prefix = {"slots": 4, "entries": 2, "tokens": 96, "cold": 0}
        entries = {3: {"kind": "prefix", "tokens": 96, "hits": 2}}
        return {"active": self.caching, "prefix": prefix, "entries": entries, **counts}

    def status(self) -> dict[str, Any]:
        held = {"tokens": 96, "kind": "thick", "tier": "host", "bytes": 2048, "own_bytes": 0, "idle_s": 90.0}
        slots = {"0": held | {"hash": None, "kind": "thin"}, "3": held | {"hash": "ab" * 16}}
        return {"memory": {"live": {"weights": 1000}}, "slots": slots}

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
