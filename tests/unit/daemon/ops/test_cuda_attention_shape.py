"""Which types and heads the CUDA attention kernels take, said before anything is loaded."""

from __future__ import annotations

import pytest

from slotd.daemon.ops.cuda_attention_shape import KV_TYPE_NUMBERS, AttentionShape
from slotd.protocol.errors import ConfigError


@pytest.mark.parametrize("pair", [("tq3_0", "f16"), ("q8_0", "tq3_0"), ("tq3_0", "tq3_0")])
def test_p53_tq3_0_is_refused_by_name(pair: tuple[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"^K/V type tq3_0 is not on CUDA in this version \(supported: f32, "
    ):
        AttentionShape(8, 2, 128, 128, *pair).check()


def test_the_types_that_have_kernels_are_taken() -> None:
    for name in KV_TYPE_NUMBERS:
        shape = AttentionShape(8, 2, 128, 128, name, name)
        shape.check()
        assert shape.k_row_bytes == shape.v_row_bytes > 0
