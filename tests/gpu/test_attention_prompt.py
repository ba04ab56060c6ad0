"""kernels/attention_prompt.cu: right against NumPy, and the same bits however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.attention_rig import Call, Rig, Timeline, queries
from tests.gpu.test_attention import TYPES, assert_close, assert_same_bits, make_call, make_rig


@pytest.mark.parametrize("shape", ["smollm", "23b", "one"])
@pytest.mark.parametrize("committed", [0, 1, 63, 64, 700])
def test_against_numpy(shape: str, committed: int) -> None:
    rig = make_rig(shape)
    for n in (1, 31, 64, 129, 300):
        call = make_call(rig, committed, n, 1)
        assert_close(rig.run([call], step=False), rig.expected([call]), 2e-3, n)


@pytest.mark.parametrize("kv_type", TYPES)
def test_types(kv_type: str) -> None:
    for shape in ("smollm", "23b"):
        rig = make_rig(shape, kv_type, "f16" if kv_type == "q5_0" else kv_type)
        call = make_call(rig, 90, 200, 2)
        assert_close(rig.run([call], step=False), rig.expected([call]), 4e-3, shape)


def pieces(rig: Rig, timeline: Timeline, q: np.ndarray, size: int) -> np.ndarray:
    results = []
    for first in range(0, len(timeline), size):
        call = Call(
            timeline.take(slice(first)), timeline.take(slice(first, first + size)), q[first : first + size]
        )
        results.append(rig.run([call], step=False))
    return np.concatenate(results)


@pytest.mark.parametrize(("shape", "kv_type"), [("smollm", "f16"), ("23b", "f16"), ("23b", "q8_0")])
def test_piece_size_changes_no_bit(shape: str, kv_type: str) -> None:
    rig = make_rig(shape, kv_type, kv_type)
    rng = np.random.default_rng(3)
    timeline, q = Timeline.random(rig.shape, 1000, rng), queries(rig.shape, 1000, rng)
    # Values that a row must not see are large: a masked product has to be nothing at all.
    timeline.v *= 10.0 ** rng.integers(-3, 3, (1000, 1, 1))
    whole = pieces(rig, timeline, q, 2048)
    for size in (64, 192, 77, 333):
        assert_same_bits(pieces(rig, timeline, q, size), whole, size)


def test_sequences_side_by_side() -> None:
    rig = make_rig("smollm")
    calls = [make_call(rig, committed, n, 4) for committed, n in ((0, 200), (513, 70), (64, 1))]
    together = rig.run(calls, step=False)
    assert_same_bits(together, np.concatenate([rig.run([call], step=False) for call in calls]))


def test_prompt_and_step_agree() -> None:
    rig = make_rig("23b")
    call = make_call(rig, 600, 40, 5)
    assert_close(rig.run([call], step=False), rig.run([call]), 2e-3)
