"""Dequantised blocks against ggml's own C code (data/quants.npz: bytes packed and unpacked by it)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from slotd.daemon.weights.block_types import block_type, dequantise_blocks

DATA = Path(__file__).parent / "data" / "quants.npz"
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
         "F16", "BF16"]  # fmt: skip


def test_every_type_of_the_data_is_tested() -> None:
    with np.load(DATA) as data:
        assert {name.removesuffix("_bytes") for name in data if name.endswith("_bytes")} == set(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_equals_ggml(name: str) -> None:
    kind = block_type(int(gguf.GGMLQuantizationType[name]))
    assert kind is not None
    with np.load(DATA) as data:
        packed, expected = data[f"{name}_bytes"], data[f"{name}_deq"]
    found = dequantise_blocks(packed, kind)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
