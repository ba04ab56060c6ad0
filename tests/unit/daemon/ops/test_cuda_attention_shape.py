"""Which types and heads the CUDA attention kernels take, said before anything is loaded."""

from __future__ import annotations

from slotd.daemon.ops.cuda_attention_shape import KV_TYPE_NUMBERS, AttentionShape


def test_the_types_that_have_kernels_are_taken() -> None:
    for name in KV_TYPE_NUMBERS:
        shape = AttentionShape(8, 2, 128, 128, name, name)
        shape.check()
        assert shape.k_row_bytes == shape.v_row_bytes > 0
