"""Which types and heads the CUDA attention kernels take, said before anything is loaded."""

from __future__ import annotations

import itertools

import pytest

from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceLimits
from slotd.daemon.ops.cuda_attention_shape import HEAD_DIMS, KV_TYPE_NUMBERS, AttentionShape
from slotd.protocol.errors import ConfigError


def test_the_types_that_have_kernels_are_taken() -> None:
    for name in KV_TYPE_NUMBERS:
        shape = AttentionShape(8, 2, 128, 128, name, name)
        shape.check()
        assert shape.k_row_bytes == shape.v_row_bytes > 0


#: Multiprocessors, shared memory of one and of a block: of an H200, an A100, an RTX 4090.
H200, A100, ADA = (
    DeviceLimits(132, 233_472, 232_448),
    DeviceLimits(108, 167_936, 166_912),
    DeviceLimits(128, 102_400, 101_376),
)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_pair_of_types_fits_a_hopper_multiprocessor(head_dim: int) -> None:
    types = [name for name in KV_TYPE_NUMBERS if name != "f32"]
    for k_type, v_type in itertools.product(types, types):
        attention = CudaAttention(AttentionShape(24, 4, head_dim, head_dim, k_type, v_type), H200)
        for wide in (False, True):
            n_stages, shared, blocks = attention.step_resources(wide)
            assert n_stages >= 2
            assert shared * blocks < H200.shared_per_multiprocessor
    for kv_type in ("q8_0", "q4_0", "tq3_0"):
        narrow = CudaAttention(AttentionShape(24, 4, head_dim, head_dim, kv_type, kv_type), H200)
        assert narrow.step_resources(wide=False)[2] >= 2, "blocks that hide each other's waits"


@pytest.mark.parametrize("limits", [A100, ADA])
def test_heads_that_a_device_is_too_small_for_are_refused_before_a_model_is_loaded(
    limits: DeviceLimits,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"attention, heads of 256: \d+ bytes of shared memory a block, the device has",
    ):
        CudaAttention(AttentionShape(24, 4, 256, 256, "f16", "f16"), limits)
    CudaAttention(AttentionShape(32, 8, 128, 128, "q8_0", "q8_0"), limits)
