"""The content hash of a slot, computed once: what a client compares with what it takes the slot for."""

from __future__ import annotations

import sys

from slotd.daemon.kv.slots import Slot
from slotd.protocol.slot_identity import hash_of_id_bytes


class SlotHash:
    """Names slots as stored snapshots are named.

    Hashing 10,000 ids takes about 0.1 ms, so it is done where it is first asked for; the text of a slot
    never changes, so the result is kept with it.

    Args:
        model: identity of the model.
        k_type, v_type: how K and V are stored.
        window: attention window in tokens, 0 = full.
    """

    def __init__(self, model: str, k_type: str, v_type: str, window: int = 0) -> None:
        self._facts = (model, k_type, v_type, window)

    def of(self, slot: Slot) -> str | None:
        """Its hash; None for a thin slot: its bytes are those of a span, not of all its ids."""
        if slot.kind == "thin":
            return None
        if slot.content_hash is None:
            ids = slot.tokens
            if sys.byteorder == "big":
                ids = ids[:]
                ids.byteswap()
            slot.content_hash = hash_of_id_bytes(*self._facts, ids.tobytes())
        return slot.content_hash
