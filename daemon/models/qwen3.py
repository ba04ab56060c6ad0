"""Qwen3, dense: Llama with an RMS norm on each query and key head, and rope over halves of a head."""

from __future__ import annotations

from slotd.daemon.models.decoder import block_weights
from slotd.daemon.models.llama import Llama
from slotd.daemon.ops.interface import HeadNorms
from slotd.daemon.weights.reader import ModelFile


class Qwen3(Llama):
    rope_style = "half"

    def read_head_norms(self, file: ModelFile, i: int) -> HeadNorms:
        names = block_weights(i, "attn_q_norm", "attn_k_norm")
        q_norm, k_norm = (self.ops.vector(file, name) for name in names)
        return HeadNorms(q_norm, k_norm, self.hyper.rms_eps)
