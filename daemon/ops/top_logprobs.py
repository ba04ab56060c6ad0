"""The most likely of a row of logits, with logarithms of their probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def top_logprobs(
    logits: npt.NDArray[np.float32], k: int, temperature: float = 1.0
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids and log-probabilities of the k highest, best first; of equals the lower id.

    Args:
        logits: float32 [n, V], used up; V is at least k.
        temperature: what they are divided by.

    Returns:
        int32 [n, k], float32 [n, k].
    """
    n, n_vocab = logits.shape
    if temperature != 1.0:
        logits /= np.float32(temperature)
    logits -= logits.max(axis=1, keepdims=True)
    least = np.partition(logits, n_vocab - k, axis=1)[:, n_vocab - k]
    ids, best = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
    for row in range(n):
        found = np.flatnonzero(logits[row] >= least[row])
        ids[row] = found[np.argsort(-logits[row, found], kind="stable")[:k]]
        best[row] = logits[row, ids[row]]
    best -= np.log(np.exp(logits, out=logits).sum(axis=1, keepdims=True))
    return ids, best
