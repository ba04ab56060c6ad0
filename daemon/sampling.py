"""From logits to the next token.

The order is fixed and documented: logit_bias, repetition penalty, frequency and presence penalty, top_k,
softmax at temperature, top_p, min_p, draw. Temperature 0 takes the best logit after the penalties.
Candidates are ordered by (logit descending, id ascending). The draw for the n-th generated token is a
function of (seed, n), so it does not matter how many tokens a step of the model verified.

Only values are sorted, never ids: a draw picks a rank, and the id follows from the value at that rank and
its place among equal values. That is the documented order without a sort of the whole vocabulary by id.

A device can name the best of a row (`candidates`) where the row itself would be long under way. A choice
among them is the choice from the whole row: what lies behind them is known within bounds, and where the
token is not the same at both ends there is no answer, and the row has to be read.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from slotd.daemon.candidates import BANNED, BIASED, PENALISED, Adjustments, Candidates, View
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import Sampling, TokenLogprob

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
TokenIds = SequenceOf[int] | npt.NDArray[np.int32]

#: Lower temperatures (but for 0, which is greedy) count as this one.
MIN_TEMPERATURE = 1e-3

#: Most candidates that are asked for.
MOST_CANDIDATES = 1024

#: How far two sums of a row's weights, in different orders, may lie apart, relative to them: 2^20 additions
#: err by 2^-33 at most.
SUM_ERROR = 1e-9

_SMALLEST = float(np.finfo(np.float32).tiny)
_MASK64 = 2**64 - 1


class Sampler:
    """The sampling of one request.

    Args:
        sampling: the parameters; their ranges, and that bias ids are in the vocabulary, were checked before.
        seed: the seed in force, 0 .. 2^64 - 1 (`sampling.seed`, or the one that was drawn for it).

    Attributes:
        takes_best: the token is always that of the best raw logit, banned ids aside.
        window: so many of the last ids of a history matter.
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
        self.window = sampling.penalty_window if self._penalises else 0
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
        adjustments = self._adjustments(history, banned)
        if adjustments is not None:
            logits = adjustments.apply(logits)
            best = _best(logits, n)
        if self.sampling.temperature == 0.0:
            return best
        values = _largest_values(logits, self.sampling.top_k)
        rank = _draw(values, self.sampling, uniform(self.seed, n))
        assert rank is not None
        return _id_at_rank(logits, values, rank)

    def view(self, row: int, history: TokenIds, banned: Collection[int] = ()) -> View:
        """What `pick` has to know of a row of outputs; the other arguments are those of `sample`."""
        sampling, adjustments = self.sampling, self._adjustments(history, banned)
        if sampling.temperature == 0.0:
            return View(row, 1, adjustments=adjustments)
        if 0 < sampling.top_k <= MOST_CANDIDATES:
            return View(row, sampling.top_k, adjustments=adjustments)
        return View(row, MOST_CANDIDATES, max(sampling.temperature, MIN_TEMPERATURE), adjustments)

    def pick(self, candidates: Candidates, n: int) -> int | None:
        """The place among the candidates of what `sample` gives; None if the whole row has to be read."""
        sampling = self.sampling
        if sampling.temperature == 0.0:
            return 0
        values, number = candidates.values, uniform(self.seed, n)
        if candidates.complete or 0 < sampling.top_k <= len(values):
            return _draw(values[: sampling.top_k or None], sampling, number)
        return _draw(values, sampling, number, candidates.total)

    def _adjustments(self, history: TokenIds, banned: Collection[int]) -> Adjustments | None:
        """Repetition (CTRL, Keskar et al. 2019), frequency and presence: each id of the window once."""
        sampling = self.sampling
        if not (self._penalises or len(self._bias_ids) or banned):
            return None
        last = history[-sampling.penalty_window :] if self._penalises else ()
        window, counts = np.unique(np.asarray(last, dtype=np.int64), return_counts=True)
        ids = window
        if len(self._bias_ids) or banned:
            ids = np.unique(np.concatenate([self._bias_ids, window, np.array(list(banned), np.int64)]))
        if not len(ids):
            return None
        kinds = np.zeros(len(ids), dtype=np.int32)
        biases, frequencies = np.zeros((2, len(ids)), dtype=np.float32)
        at = np.searchsorted(ids, window)
        kinds[at] = PENALISED
        frequencies[at] = counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
        if len(self._bias_ids):
            at = np.searchsorted(ids, self._bias_ids)
            kinds[at] += BIASED
            biases[at] = self._bias
        if banned:
            kinds[np.searchsorted(ids, list(banned))] += BANNED
        repetition = np.float32(max(sampling.repetition_penalty, _SMALLEST))
        presence = np.float32(sampling.presence_penalty)
        return Adjustments(ids.astype(np.int32), kinds, biases, frequencies, repetition, presence)


def _draw(values: Logits, sampling: Sampling, number: float, total: float | None = None) -> int | None:
    """The rank that a number in [0, 1) draws, by top_k, softmax at temperature, top_p and min_p.

    Args:
        values: the head of the order, float32 [k].
        total: the sum of the weights of all values, where more of them than `values` may be drawn.

    Returns:
        None where it depends on what lies behind `values`.
    """
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    scaled = (values.astype(np.float64) - float(values[0])) / temperature
    weights = np.exp(scaled)  # softmax up to its sum; weights[0] is 1
    cumulative = np.cumsum(weights)
    known, least = float(cumulative[-1]), float(weights[-1])
    if total is None:
        low = high = _kept(weights, cumulative, sampling, known, known, 0.0)
    else:
        low, high = total * (1 - SUM_ERROR), total * (1 + SUM_ERROR)
        if sampling.top_k:
            most = known + (sampling.top_k - len(values)) * least
            low, high = known, min(high, most * (1 + SUM_ERROR))
        low = _kept(weights, cumulative, sampling, low, known, 0.0)
        high = _kept(weights, cumulative, sampling, high, high, least)
    # A product with at most 1 - 2^-53 rounds to less than the sum, so the rank is one of those kept; a weight
    # of 0 (a logit of -inf) does not raise the sum and so is never the first one above the target.
    first = int(np.searchsorted(cumulative, number * low, side="right"))
    last = int(np.searchsorted(cumulative, number * high, side="right")) if high > low else first
    return first if first == last < len(values) else None


def _kept(
    weights: Weights, cumulative: Weights, sampling: Sampling, total: float, uncut: float, more: float
) -> float:
    """The sum of the weights that top_p and min_p leave; or a bound of it, where the cut lies behind these.

    Args:
        weights, cumulative: float64 [k], of the head of the order, descending, and their running sum.
        total: of all weights.
        uncut: what min_p leaves when it leaves all of the head.
        more: what top_p may leave beyond its share of the total when the cut lies behind the head.
    """
    kept = total
    if sampling.top_p < 1.0:  # the shortest head that holds top_p
        share = sampling.top_p * total
        last = int(np.searchsorted(cumulative, share))
        kept = float(cumulative[last]) if last < len(cumulative) else min(share + more, total)
    if sampling.min_p > 0.0:  # relative to the best, whose weight is 1
        count = int(np.count_nonzero(weights >= sampling.min_p))
        kept = min(kept, float(cumulative[count - 1]) if count < len(weights) else uncut)
    return kept


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
    total = float(np.sum(np.exp(logits.astype(np.float64) - highest)))
    best = _best_ids(logits, top_n)
    return _logprobs(highest, total, logits[chosen], best, logits[best])


def logprobs_view(row: int, top_n: int) -> View:
    """What `candidate_logprobs` has to know of a row of outputs."""
    return View(row, max(top_n, 1), 1.0)


def candidate_logprobs(candidates: Candidates, chosen: np.float32, top_n: int) -> TokenLogprob:
    """`logprobs`, by another order of the sum: values may differ in the last bit of a float64 logarithm.

    Args:
        candidates: of the view `logprobs_view`.
        chosen: raw logit of the chosen id.
    """
    assert candidates.total is not None
    highest, ids = float(candidates.values[0]), candidates.ids[:top_n].tolist()
    return _logprobs(highest, candidates.total, chosen, ids, candidates.values[:top_n])


def _logprobs(
    highest: float, total: float, chosen: np.float32, ids: list[int], values: Logits
) -> TokenLogprob:
    """total: the sum of exp(logit - highest) over the vocabulary."""
    log_total = np.log(total)

    def logprob(logit: np.float32) -> float:
        return float(np.float32(float(logit) - highest - log_total))

    return TokenLogprob(logprob(chosen), tuple((id, logprob(v)) for id, v in zip(ids, values, strict=True)))


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
