"""K/V types by name."""

from __future__ import annotations

import pytest

from slotd.daemon.kv.element_types import KV_TYPES, kv_type
from slotd.daemon.ops.kv_blocks import item_numbers
from slotd.protocol.errors import ConfigError

SUPPORTED = r"\(supported: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, tq3_0\)$"

#: Bytes of 64 numbers.
SIZES = {
    "f32": 256,
    "f16": 128,
    "bf16": 128,
    "q8_0": 68,
    "q4_0": 36,
    "q4_1": 40,
    "q5_0": 44,
    "q5_1": 48,
    "tq3_0": 28,
}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_bytes_per_token(name: str, size: int) -> None:
    assert kv_type(name).bytes_per_token(n_layer=30, n_head_kv=3, dim=64) == 30 * 3 * size


def test_pages_hold_the_bytes_of_the_format() -> None:
    assert KV_TYPES.keys() == SIZES.keys()
    for name, kind in KV_TYPES.items():
        assert (kind.name, kind.format.name.lower()) == (name, name)
        assert kind.dtype.itemsize == kind.format.block_bytes
        assert item_numbers(kind.dtype) == kind.format.block_elements


@pytest.mark.parametrize("name", ["F32", "Q8_0", "q4_k", "i8", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^'{name}' is not a K/V type {SUPPORTED}"):
        kv_type(name)
