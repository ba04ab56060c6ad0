"""The content hash of a snapshot: a fixed value, and that each fact it is made of counts."""

from __future__ import annotations

import hashlib
import struct
from array import array

import numpy as np
import pytest

from slotd.protocol.slot_identity import id_bytes, slot_hash

FACTS = ("0f" * 16, "f16", "q8_0", 0, (1, 2, 3))


def test_the_hash_is_what_the_documentation_says() -> None:
    digest = hashlib.blake2b(digest_size=16, person=b"slotd-slot")
    for part in (b"0f" * 16, b"f16", b"q8_0", b"0", bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])):
        digest.update(len(part).to_bytes(8, "little") + part)
    assert slot_hash(*FACTS) == digest.hexdigest()


@pytest.mark.parametrize(
    "facts",
    [
        ("0f" * 16 + "f", "16", "q8_0", 0, (1, 2, 3)),  # the same text in a row, cut elsewhere
        ("0f" * 16, "q8_0", "f16", 0, (1, 2, 3)),
        ("0f" * 16, "f16", "q8_0", 1, (1, 2, 3)),
        ("0f" * 16, "f16", "q8_0", 0, (1, 2)),
        ("0f" * 16, "f16", "q8_0", 0, (1, 2, 3, 0)),
        ("0f" * 16, "f16", "q8_0", 0, (3, 2, 1)),
        ("0f" * 16, "f16", "q8_0", 0, ()),
    ],
)
def test_every_fact_counts(facts: tuple[str, str, str, int, tuple[int, ...]]) -> None:
    assert slot_hash(*facts) != slot_hash(*FACTS)


def test_the_ids_may_come_in_any_container() -> None:
    ids = [0, 2**31 - 1, -1, 7]
    wanted = slot_hash("m", "f32", "f32", 0, ids)
    for same in (tuple(ids), array("i", ids), array("q", ids), np.asarray(ids, np.int32), iter(ids)):
        assert slot_hash("m", "f32", "f32", 0, same) == wanted
    assert id_bytes(array("i", ids)) == np.asarray(ids, "<i4").tobytes()


def test_an_id_that_is_no_int32_is_refused() -> None:
    with pytest.raises(struct.error):
        slot_hash("m", "f32", "f32", 0, [2**31])
