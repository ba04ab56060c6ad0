"""The content hash of a snapshot: what a stored one is called, on disk and on the wire.

Daemon and client compute it alone, from the same five facts, so a client can ask for a stored snapshot
that it never saw being made.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

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
    return hash_of_id_bytes(identity, k_type, v_type, window, id_bytes(ids))


def hash_of_id_bytes(identity: str, k_type: str, v_type: str, window: int, ids: bytes) -> str:
    """As `slot_hash`, of ids that are int32 little-endian bytes already."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"slotd-slot")
    for part in (identity.encode(), k_type.encode(), v_type.encode(), str(window).encode(), ids):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def id_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as int32, little-endian. Raises struct.error for one that is none."""
    values = tuple(ids)
    return struct.pack(f"<{len(values)}i", *values)
