"""What the client's caches keep: identity, entries, reservations. Values only.

Ids are kept as bytes (int32, little-endian, four for each token): a prefix test on them is exact and fast.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from slotd.protocol.slot_identity import id_bytes, slot_hash

#: Bytes of one token id.
WIDTH = 4

Kind = Literal["prefix", "full"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything besides the ids that decides whether stored K/V fits a prompt.

    Attributes:
        model: identity of the model, as HELLO names it.
        k_type, v_type: how K and V are stored.
        window: attention window in tokens, 0 for full attention.
        max_ctx: context of the daemon.
        salt: stands for tokenizer and chat template.
    """

    model: str
    k_type: str
    v_type: str
    window: int = 0
    max_ctx: int = 0
    salt: str = ""

    def content(self, ids: bytes) -> str:
        """The hash by which the daemon names a snapshot of these ids."""
        return slot_hash(self.model, self.k_type, self.v_type, self.window, array_of(ids))

    def key(self, ids: bytes) -> str:
        """The key of an entry for these ids: 32 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16, person=b"slotd-cache")
        for part in (self.content(ids), str(self.max_ctx), self.salt):
            digest.update(len(part.encode()).to_bytes(8, "little"))
            digest.update(part.encode())
        return digest.hexdigest()


def as_bytes(ids: Iterable[int]) -> bytes:
    """Ids as an entry keeps them."""
    return id_bytes(ids)


def array_of(ids: bytes) -> array[int]:
    """The ids again."""
    values = array("i", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values


@dataclass(slots=True)
class PrefixEntry:
    """A prompt prefix that a slot holds.

    Attributes:
        key: see `Identity.key`.
        ids: the tokens.
        slot: where the daemon holds them; None: cold, only a file of the daemon's does.
        used: larger is later.
        hits: how often it was found.
        content: hash of the daemon's file with it, "" when there is none.
        proven: its conversation has come back before: it goes on from an earlier entry, or was kept before.
    """

    key: str
    ids: bytes
    slot: int | None
    used: int = 0
    hits: int = 0
    content: str = ""
    proven: bool = False
    kind: ClassVar[Kind] = "prefix"

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.ids) // WIDTH


@dataclass(slots=True)
class FullEntry:
    """A whole raw prompt, and the ids that were sent to the daemon in its place.

    Attributes:
        key: of the raw ids.
        ids: what is sent; the slot holds exactly these.
        raw_length: of the raw prompt, in tokens.
        slot: None: cold, the next hit computes `ids` again.
        artifact_bytes: size of its file, 0 without one.
    """

    key: str
    ids: bytes
    raw_length: int
    slot: int | None
    used: int = 0
    hits: int = 0
    artifact_bytes: int = 0
    content: str = ""
    kind: ClassVar[Kind] = "full"

    @property
    def length(self) -> int:
        """Of `ids`, in tokens."""
        return len(self.ids) // WIDTH


@dataclass(eq=False, slots=True)
class Reservation:
    """A slot that a request on its way shall fill. It becomes an entry by `Caches.confirm`, or nothing.

    Attributes:
        victim: the entry whose slot it takes; out of sight until the outcome is known.
        length: tokens that the slot must hold.
        acked: the daemon has said that exactly this was done.
        untouched: the daemon has said that the slot is as it was.
        void: it can no longer become an entry. It still keeps others from the slot, which the request may
            fill at any moment until it has ended.
        content: hash of the file that the daemon wrote with it, "" when none.
    """

    kind: Kind
    key: str
    ids: bytes
    raw_length: int
    slot: int
    victim: PrefixEntry | FullEntry | None
    epoch: int
    boot: str
    acked: bool = False
    untouched: bool = False
    void: bool = False
    content: str = ""

    @property
    def length(self) -> int:
        """Of `ids`, in tokens."""
        return len(self.ids) // WIDTH


def is_prefix(short: bytes, long: bytes) -> bool:
    """Whether `short` is a strict prefix of `long`."""
    return len(short) < len(long) and long.startswith(short)


def shared_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens are the same: a binary search, so that the comparing is memcmp's."""
    low, high = 0, min(len(a), len(b)) // WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * WIDTH] == b[: middle * WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
