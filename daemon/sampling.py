"""From logits to the next token.

The order is fixed and documented: logit_bias, repetition penalty, frequency and presence penalty, top_k,
softmax at temperature, top_p, min_p, draw. Temperature 0 takes the best logit after the penalties.
Candidates are ordered by (logit descending, id ascending). The draw for the n-th generated token is a
function of (seed, n), so it does not matter how many tokens a step of the model verified.

Only values are sorted, never ids: a draw picks a rank, and the id follows from the value at that rank and
its place among equal values. That is the documented order without a sort of the whole vocabulary by id.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from slotd.protocol.errors import RequestError
from slotd.protocol.messages import Sampling, TokenLogprob

Logits = npt.NDArray[np.float32]
TokenIds = SequenceOf[int] | npt.NDArray[np.int32]

#: Lower temperatures (but for 0, which is greedy) count as this one.
MIN_TEMPERATURE = 1e-3

_LARGEST = np.finfo(np.float32).max
_SMALLEST = float(np.finfo(np.float32).tiny)
_MASK64 = 2**64 - 1


class Sampler:
    """The sampling of one request.

    Args:
        sampling: the parameters; their ranges, and that bias ids are in the vocabulary, were checked before.
        seed: the seed in force, 0 .. 2^64 - 1 (`sampling.seed`, or the one that was drawn for it).

    Attributes:
        takes_best: the token is always that of the best raw logit, banned ids aside.
    """

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self.seed = seed
        self._bias_ids = np.array([id for id, _ in sampling.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self._penalises = sampling.penalty_window > 0 and (
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
        )
        self.takes_best = sampling.temperature == 0.0 and not len(self._bias) and not self._penalises

    def sample(self, logits: Logits, history: TokenIds, n: int, banned: Collection[int] = ()) -> int:
        """The id of the n-th generated token.

        Args:
            logits: float32 [V], not changed. -inf means never.
            history: prompt and answer so far, oldest first; the last `penalty_window` are enough.
            n: index of this token in the answer, from 0.
            banned: ids not allowed now (end-of-text before min_tokens).

        Raises:
            RequestError: ``nonfinite``, there is a NaN or +inf, or nothing but -inf.
        """
        best = _best(logits, n)
        if len(self._bias) or self._penalises or banned:
            logits = self._adjusted(logits, history, banned)
            best = _best(logits, n)
        if self.sampling.temperature == 0.0:
            return best
        return self._draw(logits, n)

    def _adjusted(self, logits: Logits, history: TokenIds, banned: Collection[int]) -> Logits:
        logits = logits.copy()
        logits[self._bias_ids] += self._bias
        if self._penalises and len(history):
            self._penalise(logits, history)
        if banned:
            logits[list(banned)] = -np.inf
        return logits

    def _penalise(self, logits: Logits, history: TokenIds) -> None:
        """Repetition (CTRL, Keskar et al. 2019), then frequency and presence, each id of the window once."""
        sampling = self.sampling
        window = np.asarray(history[-sampling.penalty_window :], dtype=np.int64)
        ids, counts = np.unique(window, return_counts=True)
        values = logits[ids]
        factor = np.float32(max(sampling.repetition_penalty, _SMALLEST))
        with np.errstate(over="ignore"):
            values = np.where(values > 0, values / factor, values * factor)
        values -= counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
        values -= np.float32(sampling.presence_penalty)
        # A tiny repetition_penalty overflows; that is a huge logit, not a fault of the model.
        logits[ids] = np.minimum(values, _LARGEST)

    def _draw(self, logits: Logits, n: int) -> int:
        sampling = self.sampling
        values = _largest_values(logits, sampling.top_k)
        temperature = max(sampling.temperature, MIN_TEMPERATURE)
        scaled = (values.astype(np.float64) - float(values[0])) / temperature
        weights = np.exp(scaled)  # softmax up to its sum; weights[0] is 1
        cumulative = np.cumsum(weights)
        kept = len(weights)
        if sampling.top_p < 1.0:  # the shortest head that holds top_p
            kept = min(kept, int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1)
        if sampling.min_p > 0.0:  # relative to the best, whose weight is 1
            kept = min(kept, int(np.count_nonzero(weights >= sampling.min_p)))
        # A product with at most 1 - 2^-53 rounds to less than the sum, so the rank is below `kept`; a weight
        # of 0 (a logit of -inf) does not raise the sum and so is never the first one above the target.
        target = uniform(self.seed, n) * cumulative[kept - 1]
        rank = int(np.searchsorted(cumulative, target, side="right"))
        return _id_at_rank(logits, values, rank)


def uniform(seed: int, n: int) -> float:
    """The n-th number (from 0) of SplitMix64 started at `seed`, as a float64 in [0, 1).

    Its top 53 bits over 2^53. SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
    """
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return float((z >> 11) / 2**53)


def logprobs(logits: Logits, chosen: int, top_n: int) -> TokenLogprob:
    """Log-softmax of the raw logits: of the chosen id, and of the `top_n` best ids.

    Computed in float64, given as float32 values. Equal logits are ordered by id; ids with -inf are left
    out, so fewer than `top_n` are possible.

    Args:
        logits: float32 [V], before any sampling rule.

    Raises:
        RequestError: ``nonfinite``, as `Sampler.sample`.
    """
    highest = float(logits[_best(logits)])
    total = np.log(np.sum(np.exp(logits.astype(np.float64) - highest)))

    def logprob(id: int) -> float:
        return float(np.float32(float(logits[id]) - highest - total))

    return TokenLogprob(logprob(chosen), tuple((id, logprob(id)) for id in _best_ids(logits, top_n)))


def _best(logits: Logits, n: int | None = None) -> int:
    """The id of the highest logit, the lowest such id. It is also the check: argmax stops at NaN or +inf."""
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        fields = {"value": str(logits[best])} | ({} if n is None else {"at": n})
        raise RequestError("nonfinite", fields)
    return best


def _largest_values(logits: Logits, k: int) -> Logits:
    """The k largest logits in descending order (k = 0: all)."""
    if 0 < k < len(logits):
        logits = np.partition(logits, len(logits) - k)[-k:]
    return np.sort(logits)[::-1]


def _id_at_rank(logits: Logits, values: Logits, rank: int) -> int:
    """The id at `rank` of the order (logit descending, id ascending), given the values in that order."""
    value = values[rank]
    first_equal = int(np.argmax(values == value))
    return int(np.flatnonzero(logits == value)[rank - first_equal])


def _best_ids(logits: Logits, n: int) -> list[int]:
    if n == 0:
        return []
    values = _largest_values(logits, n)
    values = values[values > -np.inf]
    ids = np.flatnonzero(logits >= values[-1])  # ascending, so a stable sort leaves equals ordered by id
    order = np.argsort(-logits[ids], kind="stable")
    return [int(id) for id in ids[order[: len(values)]]]
