"""DFlash written down once more, in float64, each context worked out anew: what tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.fakes.tiny_draft import EPS, HEAD_DIM, MASK, N_HEAD, N_HEAD_KV, N_LAYER, ROPE_BASE

Numbers = npt.NDArray[Any]


def rms(x: Numbers, weight: Numbers) -> Numbers:
    """RMS norm over the last axis."""
    normed: Numbers = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return normed


def silu(x: Numbers) -> Numbers:
    """x * sigmoid(x)."""
    y: Numbers = x / (1 + np.exp(-x))
    return y


def turned(x: Numbers, positions: Numbers) -> Numbers:
    """Rotated over halves of a head. x [n, heads, HEAD_DIM]."""
    half = HEAD_DIM // 2
    angles = positions[:, None, None] * ROPE_BASE ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


@dataclass(frozen=True)
class Formula:
    """A tiny draft.

    Attributes:
        weights: its tensors under the names of the lucebox dialect.
        embedding: of the target, [V, n_embd].
        head: the output matrix.
        window, sliding: as of `DraftParameters`.
        causal: as there.
        around: (layer, "attn" or "ffn", side 0 in front or 1 behind, normed input, x) -> x, of a head.
    """

    weights: Mapping[str, Numbers]
    embedding: Numbers
    head: Numbers
    window: int = 0
    sliding: frozenset[int] = frozenset()
    causal: bool = False
    around: Callable[[int, str, int, Numbers, Numbers], Numbers] = lambda layer, part, side, normed, x: x

    def hidden(self, features: Numbers, start: int, token: int, n: int) -> Numbers:
        """The last norm's output of a block of n rows. features: of positions start .. ."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        context = rms(features @ w["dflash.fc.weight"].T, w["dflash.hidden_norm.weight"])
        x = self.embedding[[token] + [MASK] * (n - 1)].astype(np.float64)
        for i in range(N_LAYER):
            part = {name.split(".")[2]: value for name, value in w.items() if name.startswith(f"blk.{i}.")}
            normed = rms(x, part["attn_norm"])
            h = self.around(i, "attn", 0, normed, normed)
            x = x + self.around(i, "attn", 1, normed, self.attend(i, h, context, start, part))
            normed = rms(x, part["ffn_norm"])
            h = self.around(i, "ffn", 0, normed, normed)
            fed = (silu(h @ part["ffn_gate"].T) * (h @ part["ffn_up"].T)) @ part["ffn_down"].T
            x = x + self.around(i, "ffn", 1, normed, fed)
        return rms(x, w["output_norm.weight"])

    def attend(
        self, i: int, h: Numbers, context: Numbers, start: int, part: Mapping[str, Numbers]
    ) -> Numbers:
        """What attention adds to the rows of the block."""
        n_context, n = len(context), len(h)
        positions = start + np.arange(n_context + n)
        both = np.concatenate([context, h])
        q = turned(
            rms((h @ part["attn_q"].T).reshape(n, N_HEAD, HEAD_DIM), part["attn_q_norm"]),
            positions[n_context:],
        )
        k = (both @ part["attn_k"].T).reshape(-1, N_HEAD_KV, HEAD_DIM)
        k = turned(rms(k, part["attn_k_norm"]), positions)
        v = (both @ part["attn_v"].T).reshape(-1, N_HEAD_KV, HEAD_DIM)
        out = np.zeros((n, N_HEAD, HEAD_DIM))
        for row in range(n):
            last = n_context + (row if self.causal or i in self.sliding else n - 1)
            first = max(0, n_context + row - self.window + 1) if i in self.sliding else 0
            for head in range(N_HEAD):
                group = head // (N_HEAD // N_HEAD_KV)
                scores = k[first : last + 1, group] @ q[row, head] / np.sqrt(HEAD_DIM)
                p = np.exp(scores - scores.max())
                out[row, head] = p @ v[first : last + 1, group] / p.sum()
        attended: Numbers = out.reshape(n, -1) @ part["attn_output"].T
        return attended

    def logprobs(self, features: Numbers, start: int, token: int, n: int) -> Numbers:
        """[n - 1, V]: logarithms of probabilities for the positions behind the token."""
        logits = self.hidden(features, start, token, n)[1:] @ self.head.T.astype(np.float64)
        return log_softmax(logits)


def log_softmax(logits: Numbers) -> Numbers:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: Numbers = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found
