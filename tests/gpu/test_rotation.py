"""kernels/rotation.cu: bit for bit as ops/rotation.py, padding rows left alone."""

from __future__ import annotations

import numpy as np
import pytest

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.cuda_attention import DeviceBatch
from slotd.daemon.ops.rotation import rotate_back
from tests.gpu.attention_rig import Placed
from tests.gpu.test_attention import assert_same_bits, make_call, make_rig


@pytest.mark.parametrize("shape_name", ["one", "23b", "27b"])
def test_back(shape_name: str) -> None:
    rig = make_rig(shape_name, "f16", "tq3_0")
    width, n = rig.shape.n_head * rig.shape.value_dim, 5
    layout, batch, _held = Placed(rig, [make_call(rig, 61, n, 1)]).pack(step=True, bucket=8)
    x = np.random.default_rng(1).standard_normal((layout.rows, width)).astype(np.float32)
    x[1, 3] = np.inf
    block = rig.device.upload(x)
    rig.attention.rotation(rig.device.address(block), DeviceBatch(layout, batch.address, layout.rows))
    got = rig.device.download(block, np.float32).reshape(x.shape)
    expected = x.copy()
    with np.errstate(invalid="ignore"):
        rotate_back(DeviceMemory(), x[:n].reshape(n, -1, 128), expected[:n].reshape(n, -1, 128))
    finite = np.isfinite(expected)
    assert (finite == np.isfinite(got)).all()
    assert_same_bits(np.where(finite, got, 0), np.where(finite, expected, 0))
