"""What every model here has: embeddings, blocks that are read side by side, and the output head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, Generic, TypeVar

from slotd.daemon.ops.interface import Array, Heads, Ops, Tokens
from slotd.daemon.weights.reader import ModelFile

OpsT = TypeVar("OpsT", bound=Ops)
LayerT = TypeVar("LayerT")


def block_weights(i: int, *parts: str) -> list[str]:
    """Names in the file of weights of block i."""
    return [f"blk.{i}.{part}.weight" for part in parts]


class Decoder(ABC, Generic[OpsT, LayerT]):
    """A model without its blocks: an architecture says what is in a block, and computes them."""

    #: Whether each query has a gate, see `Heads`.
    gated: ClassVar[bool] = False

    def __init__(self, file: ModelFile, ops: OpsT, max_ctx: int) -> None:
        h = self.hyper = file.hyper
        self.ops = ops
        self.heads = Heads(h.n_head, h.n_head_kv, h.head_dim, h.value_dim, self.gated)
        with ThreadPoolExecutor(ops.loaders) as pool:
            token_embd = pool.submit(ops.matrix, file, "token_embd.weight")
            self.layers = list(pool.map(partial(self.read_layer, file), range(h.n_layer)))
        self.token_embd = token_embd.result()  # [n_vocab, n_embd]
        self.output_norm = ops.vector(file, "output_norm.weight")
        self.output = self.token_embd if h.tied else ops.matrix(file, "output.weight")
        divisors = file.dequantise("rope_freqs.weight") if h.rope_freqs else None
        self.rope = ops.rope_table(h.rope_base, h.rope_dims, divisors, max_ctx)

    @abstractmethod
    def read_layer(self, file: ModelFile, i: int) -> LayerT:
        """Block i. Called from several threads."""

    def embed(self, tokens: Tokens) -> Array:
        return self.ops.embed(tokens, self.token_embd)

    def logits(self, hidden: Array) -> Array:
        return self.ops.logits(hidden, self.output_norm, self.hyper.rms_eps, self.output)
