"""The content hash of a snapshot: what a stored one is called, on disk and on the wire.

Daemon and client compute it alone, from the same five facts, so a client can ask for a stored snapshot
that it never saw being made.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

#: Bytes of the hash; it is written as twice as many hexadecimal digits.
HASH_BYTES = 16


def slot_hash(identity: str, k_type: str, v_type: str, window: int, ids: Iterable[int]) -> str:
    """BLAKE2b of model identity, K/V types, attention window and ids, each with its length in front.

    Args:
        identity: the model, as HELLO names it.
        k_type, v_type: how K and V are stored.
        window: attention window in tokens; 0 is full attention.
        ids: the int32 token ids that the snapshot covers.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"slotd-slot")
    for part in _parts(identity, k_type, v_type, window, ids):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(identity: str, k_type: str, v_type: str, window: int, ids: Iterable[int]) -> Iterator[bytes]:
    yield identity.encode()
    yield k_type.encode()
    yield v_type.encode()
    yield str(window).encode()
    yield id_bytes(ids)


def id_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as int32, little-endian. Raises struct.error for one that is none."""
    values = tuple(ids)
    return struct.pack(f"<{len(values)}i", *values)
