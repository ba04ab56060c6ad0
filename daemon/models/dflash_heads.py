"""What DFlash2 and DSpark add to DFlash: convolutions along the block, and choices that know their neighbour.

A choice is made position by position: what is likely depends on the token that was found best before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.models.dflash import DFlash
from slotd.daemon.models.model import Model
from slotd.daemon.ops.interface import Array, BlockOps, CallBatch, Matrix
from slotd.daemon.ops.top_logprobs import top_logprobs
from slotd.daemon.weights.draft_file import DraftFile
from slotd.daemon.weights.draft_heads import BlockConv

#: A draft that thinks less of a position stops in front of it.
LEAST_CONFIDENCE = 0.2

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Convs:
    """Of one layer; base [2, kernel, n_embd], proj [2 * kernel * groups, n_embd]."""

    attn_base: Array
    attn_proj: Matrix
    ffn_base: Array
    ffn_proj: Matrix


class DFlash2(DFlash):
    """DFlash with convolutions in front of and behind both parts of each layer."""

    ops: BlockOps

    def __init__(self, file: DraftFile, ops: BlockOps, target: Model, max_ctx: int) -> None:
        super().__init__(file, ops, target, max_ctx)
        conv = file.parameters.heads.conv
        assert conv is not None
        self.convs = [self.read_convs(file, conv, i) for i in range(file.parameters.n_layer)]

    def read_convs(self, file: DraftFile, conv: BlockConv, i: int) -> Convs:
        base, proj = self.ops.vector, self.ops.matrix
        return Convs(
            base(file, f"blk.{i}.{conv.attn_base}"), proj(file, f"blk.{i}.{conv.attn_proj}"),
            base(file, f"blk.{i}.{conv.ffn_base}"), proj(file, f"blk.{i}.{conv.ffn_proj}"),
        )  # fmt: skip

    def forward(self, x: Array, batch: CallBatch, sliding: CallBatch) -> Array:
        ops, d = self.ops, self.parameters
        for i, (layer, conv) in enumerate(zip(self.layers, self.convs, strict=True)):
            seen = sliding if i in d.sliding else batch
            h = ops.rms_norm(x, layer.attn_norm, d.rms_eps)
            moving = ops.linear(h, conv.attn_proj)
            qkv = ops.linear(ops.block_conv(h, moving, conv.attn_base, 0, batch), layer.attn_qkv)
            q = ops.rope_store(i, qkv, self.heads, self.rope, "half", seen, layer.head_norms)
            y = ops.linear(ops.attend(i, q, seen, d.head_dim**-0.5), layer.attn_output)
            ops.add(x, ops.block_conv(y, moving, conv.attn_base, 1, batch))
            h = ops.rms_norm(x, layer.ffn_norm, d.rms_eps)
            moving = ops.linear(h, conv.ffn_proj)
            gate_up = ops.linear(ops.block_conv(h, moving, conv.ffn_base, 0, batch), layer.ffn_gate_up)
            y = ops.linear(ops.swiglu(gate_up), layer.ffn_down)
            ops.add(x, ops.block_conv(y, moving, conv.ffn_base, 1, batch))
        return x


class SelectorHead:
    """The path selector of DFlash2: candidates of a position are weighed against the one before.

    In host memory.
    """

    def __init__(self, file: DraftFile, ops: BlockOps) -> None:
        s = file.parameters.heads.selector
        assert s is not None
        self.ops, self.top_k = ops, s.top_k
        self.before, self.behind = ops.matrix(file, s.before), ops.matrix(file, s.behind)  # [n_vocab, rank]
        self.hidden = ops.matrix(file, s.hidden)  # [rank, n_embd]

    def choose(
        self, draft: DFlash, hidden: Array, logits: Array, anchors: Ids, width: int, temperature: float
    ) -> tuple[Ids, Floats]:
        """See `MarkovHead.choose`."""
        m, depth, _ = hidden.shape
        n = max(width, self.top_k)
        rows, alone = top_logprobs(logits.reshape(m * depth, -1), n)
        tokens, alone = draft.token_ids(rows).reshape(m, depth, n), alone.reshape(m, depth, n)
        turned = self.ops.linear(hidden.reshape(m * depth, -1), self.hidden).reshape(m, depth, 1, -1)
        ids, logprobs = np.empty((m, depth, n), np.int32), np.empty((m, depth, n), np.float32)
        last = anchors
        for i in range(depth):
            pairs = (self.before[last][:, None] * turned[:, i]) @ self.behind[tokens[:, i]].swapaxes(1, 2)
            order, logprobs[:, i] = top_logprobs(alone[:, i] + pairs[:, 0], n, temperature)
            ids[:, i] = np.take_along_axis(tokens[:, i], order, axis=1)
            last = ids[:, i, 0]
        return ids[..., :width], logprobs[..., :width]


class MarkovHead:
    """The heads of DSpark: logits of a position depend on the token before it, and a confidence ends a draft.

    In host memory.
    """

    def __init__(self, file: DraftFile, ops: BlockOps) -> None:
        markov = file.parameters.heads.markov
        assert markov is not None
        self.ops = ops
        self.before, self.behind = ops.matrix(file, markov.before), ops.matrix(file, markov.behind)
        self.confidence = None
        if markov.confidence is not None:
            self.confidence = ops.vector(file, markov.confidence).reshape(-1)  # [n_embd + rank]
            self.bias = 0.0 if markov.bias is None else float(ops.vector(file, markov.bias)[0])

    def choose(
        self, draft: DFlash, hidden: Array, logits: Array, anchors: Ids, width: int, temperature: float
    ) -> tuple[Ids, Floats]:
        """The best of each position behind the best of the one before, and log-probabilities.

        Args:
            draft: knows what tokens rows of its output matrix are.
            hidden: [m, L, n_embd], what the output matrix was multiplied with.
            logits: [m, L, rows], used up.
            anchors: int32 [m].
            width: how many of each position.
            temperature: what logits are divided by.

        Returns:
            int32 [m, L', width], float32 [m, L', width]; L' < L where no block has confidence in more.
        """
        m, depth, _ = hidden.shape
        ids, logprobs = np.empty((m, depth, width), np.int32), np.empty((m, depth, width), np.float32)
        last, going = anchors, np.ones(m, dtype=bool)
        for i in range(depth):
            before = self.before[last]
            going &= self._confident(hidden[:, i], before)
            if i and not going.any():
                return ids[:, :i], logprobs[:, :i]
            rows, logprobs[:, i] = top_logprobs(
                logits[:, i] + self.ops.linear(before, self.behind), width, temperature
            )
            ids[:, i] = draft.token_ids(rows)
            last = ids[:, i, 0]
        return ids, logprobs

    def _confident(self, hidden: Array, before: Array) -> Any:
        if self.confidence is None:
            return True
        says = np.concatenate([hidden, before], axis=1) @ self.confidence + self.bias
        return 1 / (1 + np.exp(-says)) >= LEAST_CONFIDENCE
