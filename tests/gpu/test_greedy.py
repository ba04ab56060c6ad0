"""kernels/greedy.cu: the best logit, ties by the lowest id, rows that are not finite."""

from __future__ import annotations

import cupy
import numpy as np

from slotd.daemon.ops.cuda_greedy import greedy


def test_greedy(memory) -> None:
    rng = np.random.default_rng(0)
    for n_vocab in (1, 63, 49152, 151936):
        logits = rng.standard_normal((9, n_vocab)).astype(np.float32)
        logits[1] = 5.0  # all equal: the lowest id
        logits[2, n_vocab // 2 :] = 9.0
        logits[3, n_vocab - 1] = np.nan
        logits[4, 0] = np.inf
        logits[5] = -np.inf
        ids, finite = greedy(memory, cupy.asarray(logits)).get().T
        expected = [0, 1, 2, 6, 7, 8]
        assert ids[expected].tolist() == np.argmax(logits[expected], axis=1).tolist()
        assert finite.astype(bool).tolist() == [True, True, True, False, False, False, True, True, True]


def test_minus_infinity_is_a_ban_and_no_fault(memory) -> None:
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, 42] = -3
    assert greedy(memory, cupy.asarray(logits)).get().tolist() == [[42, 1]]
