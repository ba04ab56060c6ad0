"""kernels/topk.cu: the largest logits of a row, ties by the lowest id, log-probabilities against float64."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops.cuda_topk import CHOICE, MOST_VOCAB, WIDTHS, topk


def expected(logits: np.ndarray, width: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    ids = np.argsort(-x, axis=1, kind="stable")[:, :width]
    peak = x.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        logprobs = (x - peak) / temperature
        logprobs -= np.log(np.nansum(np.exp(logprobs), axis=1, keepdims=True))
    return ids, np.take_along_axis(logprobs, ids, axis=1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n_vocab", [16, 255, 2048, 2049, 49152, 151936, 248320, MOST_VOCAB])
def test_the_largest_and_how_likely_they_are(memory, width: int, n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    logits = (rng.standard_normal((9, n_vocab)) * 4).astype(np.float32)
    logits[1] = np.round(logits[1])  # many are equal
    logits[2] = -0.0
    logits[2, 5:] = 0.0  # equal to those before
    logits[3, : n_vocab // 2] = -np.inf
    logits[4, -1] = 90.0
    logits[5, ::3] = np.nan
    logits[6] *= 100
    logits[7] = -np.sort(-logits[7])
    logits[8] = np.sort(logits[8])
    for temperature in (1.0, 0.5):
        found = topk(memory, cupy.asarray(logits), width, temperature).get().view(CHOICE)
        ids, logprobs = expected(logits, width, temperature)
        for row in range(len(logits)):
            where = f"row {row}, {n_vocab} logits, {width} of them, temperature {temperature}"
            assert found["id"][row].tolist() == ids[row].tolist(), where
            np.testing.assert_allclose(
                found["logprob"][row], logprobs[row], rtol=2e-6, atol=3e-6, err_msg=where
            )


def test_rows_without_a_number_give_ids_all_the_same(memory) -> None:
    logits = np.full((3, 300), np.nan, np.float32)
    logits[1], logits[2, 7] = -np.inf, np.inf
    found = topk(memory, cupy.asarray(logits), 8).get().view(CHOICE)
    assert found["id"].tolist() == [[*range(8)], [*range(8)], [7, *range(7)]]
    assert (found["logprob"] == -np.inf).all()


def test_a_row_alone_has_the_same_bits(memory) -> None:
    logits = cupy.asarray(np.random.default_rng(1).standard_normal((24, 49152)).astype(np.float32))
    together = topk(memory, logits, 16).get()
    alone = [topk(memory, logits[row : row + 1], 16).get()[0] for row in (0, 11, 23)]
    assert (together[[0, 11, 23]] == np.stack(alone)).all()
