"""kernels/attention_plain.cu: float32 throughout, for steps and prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slotd.daemon.ops.cuda_attention_shape import AttentionShape
from tests.gpu.attention_rig import CupyDevice, Rig
from tests.gpu.test_attention import TYPES, alone, assert_close, assert_same_bits, make_call, make_rig


@pytest.mark.parametrize("other", ["f32", *TYPES])
@pytest.mark.parametrize("k_is_f32", [True, False])
def test_against_numpy(other: str, k_is_f32: bool) -> None:
    types = ("f32", other) if k_is_f32 else (other, "f32")
    rig = make_rig("smollm", *types)
    for committed, n, tree in ((0, 1, False), (570, 23, True), (100, 64, False)):
        call = make_call(rig, committed, n, 1, tree)
        assert_close(rig.run([call]), rig.expected([call]), 2e-5, (committed, n))


def test_prompts_and_other_widths() -> None:
    rig = Rig(AttentionShape(4, 2, 96, 160, "f32", "f32"), CupyDevice())
    call = make_call(rig, 100, 80, 2)
    prompt = rig.run([call], step=False)
    assert_close(prompt, rig.expected([call]), 2e-5)
    call = make_call(rig, 100, 60, 2)
    assert_same_bits(rig.run([call], step=False), rig.run([call]))


def test_queries_behind_which_their_gates_stand() -> None:
    rig = make_rig("smollm", "f32", "f32")
    call = make_call(rig, 100, 3, 4)
    gated = Rig(replace(rig.shape, gated=True), rig.device)
    assert_same_bits(gated.run([call]), rig.run([call]))


def test_tree_row_equals_its_path() -> None:
    rig = make_rig("smollm", "f32", "f32")
    call = make_call(rig, 500, 23, 3, True)
    together = rig.run([call])
    for row in (0, 11, 22):
        assert_same_bits(rig.run([alone(call, row)])[0], np.ascontiguousarray(together[row]), row)
