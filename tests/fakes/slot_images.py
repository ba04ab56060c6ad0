"""Snapshots of a made-up model with small pages, for tests of the store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.kv.save_plan import Image
from slotd.daemon.kv.slot_files import Blob, Identity
from slotd.daemon.kv.slot_store import SlotStore
from slotd.protocol.errors import RequestError

PAGE = 4
TOKEN_BYTES = 8

IDENTITY = Identity(
    model="ab" * 16, content="cd" * 16, k="f32", v="f16", window=0, math="float32", page=PAGE,
    page_bytes=PAGE * TOKEN_BYTES,
)  # fmt: skip


def id_bytes(ids: range | list[int]) -> bytes:
    """int32 little-endian."""
    return np.asarray(list(ids), "<i4").tobytes()


def token_bytes(ids: bytes, at: int, salt: str = "") -> bytes:
    """The K/V of token `at`: they depend on all ids up to it, and on nothing else."""
    text = ids[: 4 * (at + 1)] + salt.encode()
    return hashlib.blake2b(text, digest_size=TOKEN_BYTES).digest()


def kv_bytes(ids: bytes, salt: str = "") -> bytes:
    """The K/V of all tokens."""
    return b"".join(token_bytes(ids, at, salt) for at in range(len(ids) // 4))


def image(
    ids: range | list[int], logits: bytes = b"", identity: Identity = IDENTITY, salt: str = "",
    state: bytes | None = None,
) -> Image:  # fmt: skip
    """A snapshot of these ids; `salt` stands for another rounding of the same K/V."""
    data = id_bytes(ids)

    def read_page(index: int, start: int, n: int, buffer: memoryview) -> None:
        assert len(buffer) == n * TOKEN_BYTES
        for number in range(n):
            place = number * TOKEN_BYTES
            at = index * PAGE + start + number
            buffer[place : place + TOKEN_BYTES] = token_bytes(data, at, salt)

    return Image(identity, data, logits, read_page, None if state is None else Blob.of(state))


class Sink:
    """Takes the K/V of a loaded snapshot."""

    def __init__(self) -> None:
        self.tokens: dict[int, bytes] = {}

    def __call__(self, index: int, start: int, n: int, data: memoryview) -> None:
        assert len(data) == n * TOKEN_BYTES
        assert start + n <= PAGE
        for number in range(n):
            at = index * PAGE + start + number
            assert at not in self.tokens
            self.tokens[at] = bytes(data[number * TOKEN_BYTES : (number + 1) * TOKEN_BYTES])

    @property
    def data(self) -> bytes:
        """All that came."""
        assert sorted(self.tokens) == list(range(len(self.tokens)))
        return b"".join(self.tokens[at] for at in sorted(self.tokens))


# ----- a store of them

IDS = range(100, 110)  # two whole pages and two tokens
LOGITS = bytes(range(8))


def store_of(path: Path, budget: int | None = None, **other: Any) -> SlotStore:
    return SlotStore(path, budget, **other)


def load(store: SlotStore, name: str, identity: Identity = IDENTITY) -> tuple[bytes, bytes]:
    """(K/V, logits) of a stored snapshot."""
    store.find(name, identity)
    sink = Sink()
    logits, _ = store.read(name, sink)
    return sink.data, logits


def refused(work: Callable[[], Any]) -> tuple[str, dict[str, Any]]:
    with pytest.raises(RequestError) as caught:
        work()
    return caught.value.code, caught.value.fields


def hashes(store: SlotStore) -> list[str]:
    return [file["hash"] for file in store.report()["files"]]


def files(path: Path, suffix: str) -> list[Path]:
    return sorted(path.glob(f"*{suffix}"))
