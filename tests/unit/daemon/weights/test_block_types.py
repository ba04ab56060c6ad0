"""Block types: names and sizes from gguf, and which can be dequantised."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from slotd.daemon.weights.block_types import BlockType, block_type, can_dequantise, dequantise_blocks

RUN_TIME_ONLY = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}


def test_known_types() -> None:
    assert block_type(0) == BlockType(0, "F32", 1, 4)
    assert block_type(3) == BlockType(3, "Q4_1", 32, 20)
    assert block_type(14) == BlockType(14, "Q6_K", 256, 210)


@pytest.mark.parametrize("type_id", [4, 5, 255, 2**32 - 1])
def test_unknown_types(type_id: int) -> None:
    assert block_type(type_id) is None


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: str(kind.name))
def test_every_type_of_gguf_is_known_and_judged(kind: gguf.GGMLQuantizationType) -> None:
    found = block_type(int(kind))
    assert found is not None
    assert found.name == kind.name
    try:
        values = gguf.dequantize(np.zeros((2, found.block_bytes), np.uint8), kind)
    except NotImplementedError:
        assert not can_dequantise(found)
    else:
        assert can_dequantise(found)
        assert values.shape == (2, found.block_elements)
    assert can_dequantise(found) or kind.name in RUN_TIME_ONLY | {"Q1_0"}


def test_result_is_never_a_view() -> None:
    data = np.arange(4, dtype=np.float32)
    kind = block_type(0)
    assert kind is not None
    values = dequantise_blocks(data.view(np.uint8), kind)
    assert not np.may_share_memory(values, data)
    assert values.flags.owndata
    np.testing.assert_array_equal(values, data)


def test_wild_scales_raise_no_warning() -> None:
    kind = block_type(8)
    assert kind is not None
    infinite = np.full((1, 34), 0xFF, np.uint8)
    infinite[0, :2] = 0x00, 0x7C  # float16 infinity
    assert not np.isfinite(dequantise_blocks(infinite, kind)).any()
