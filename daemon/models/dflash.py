"""DFlash: a small model that guesses a block of tokens at once, from what layers of its target have said.

Its context are the target's features, joined and seen as keys and values alone. Its block is the last token
and masks, which see the context and each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from slotd.daemon.models.decoder import block_weights
from slotd.daemon.models.llama import Layer
from slotd.daemon.models.model import Model
from slotd.daemon.ops.interface import Array, CallBatch, DraftOps, HeadNorms, Heads, Matrix, Tokens
from slotd.daemon.weights.draft_file import EMBEDDING, OUTPUT, OUTPUT_NORM, DraftFile, own_ids


class DFlash:
    """The draft of a file on its target: without an embedding or output of its own it uses the target's.

    Positions of a block go up to max_ctx and a block more.
    """

    def __init__(self, file: DraftFile, ops: DraftOps, target: Model, max_ctx: int) -> None:
        d = self.parameters = file.parameters
        self.ops = ops
        self.heads = Heads(d.n_head, d.n_head_kv, d.head_dim, d.value_dim)
        self.layers = [self.read_layer(file, i) for i in range(d.n_layer)]
        blocks = range(d.n_layer)
        # The same rows stand in attn_qkv: once more, so that a context needs one product for all layers.
        names = [name for i in blocks for name in block_weights(i, "attn_k", "attn_v")]
        self.context_kv = ops.matrix(file, *names)  # [n_layer * kv_row, n_embd]
        self.k_norms = ops.vector(file, *(name for i in blocks for name in block_weights(i, "attn_k_norm")))
        self.fc = ops.matrix(file, d.fc)  # [n_embd, n_features * n_embd]
        self.hidden_norm = ops.vector(file, d.hidden_norm)
        self.output_norm = ops.vector(file, OUTPUT_NORM)
        self.token_embd = ops.matrix(file, EMBEDDING) if d.own_embedding else None
        self.target = target
        self.output = target.output if d.n_own_ids is None else ops.matrix(file, OUTPUT)
        self.ids = own_ids(file)
        self.rope = ops.rope_table(d.rope_base, d.head_dim, None, max_ctx + d.block_size)

    def read_layer(self, file: DraftFile, i: int) -> Layer:
        ops, eps, ffn_norm = self.ops, self.parameters.rms_eps, self.parameters.ffn_norm
        q_norm, k_norm = (ops.vector(file, name) for name in block_weights(i, "attn_q_norm", "attn_k_norm"))
        return Layer(
            attn_norm=ops.vector(file, *block_weights(i, "attn_norm")),
            attn_qkv=ops.matrix(file, *block_weights(i, "attn_q", "attn_k", "attn_v")),
            head_norms=HeadNorms(q_norm, k_norm, eps),
            attn_output=ops.matrix(file, *block_weights(i, "attn_output")),
            ffn_norm=ops.vector(file, *block_weights(i, ffn_norm)),
            ffn_gate_up=ops.matrix(file, *block_weights(i, "ffn_gate", "ffn_up")),
            ffn_down=ops.matrix(file, *block_weights(i, "ffn_down")),
        )

    def context(self, features: Array, batch: CallBatch) -> None:
        """Keys and values of context rows from [n, n_features * n_embd]. A row's depend on it alone."""
        ops, eps = self.ops, self.parameters.rms_eps
        kv = ops.norm_linear(ops.linear(features, self.fc), self.hidden_norm, eps, self.context_kv)
        ops.store_context(kv, self.heads, self.rope, "half", batch, self.k_norms, eps)

    def embed(self, tokens: Tokens) -> Array:
        if self.token_embd is None:
            return self.target.embed(tokens)
        return self.ops.embed(tokens, self.token_embd)

    def forward(self, x: Array, batch: CallBatch, sliding: CallBatch) -> Array:
        """Residual stream of blocks behind the last layer, [n, n_embd]. Uses up x.

        sliding: the same rows as layers with a window see them; `batch` when there are none.
        """
        ops, d = self.ops, self.parameters
        for i, layer in enumerate(self.layers):
            seen = sliding if i in d.sliding else batch
            qkv = ops.norm_linear(x, layer.attn_norm, d.rms_eps, layer.attn_qkv)
            q = ops.rope_store(i, qkv, self.heads, self.rope, "half", seen, layer.head_norms)
            ops.add_linear(x, ops.attend(i, q, seen, d.head_dim**-0.5), layer.attn_output)
            gate_up = ops.norm_linear(x, layer.ffn_norm, d.rms_eps, layer.ffn_gate_up)
            ops.add_swiglu_linear(x, gate_up, layer.ffn_down)
        return x

    def logits(self, hidden: Array) -> Array:
        """[m, n_embd] -> [m, rows of the output matrix]."""
        return self.ops.logits(hidden, self.output_norm, self.parameters.rms_eps, self.output)

    def token_ids(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Tokens of the target that rows of the output matrix stand for."""
        return rows if self.ids is None else self.ids[rows]

    def block_tokens(self, anchors: Sequence[int], n: int) -> npt.NDArray[np.int32]:
        """int32 [len(anchors) * n]: blocks side by side, each an anchor and n - 1 masks."""
        tokens = np.full((len(anchors), n), self.parameters.mask_id, dtype=np.int32)
        tokens[:, 0] = anchors
        return tokens.reshape(-1)

    def linear_weights(self) -> Iterable[Matrix]:
        yield from (self.output, self.fc, self.context_kv)
        for layer in self.layers:
            yield from (layer.attn_qkv, layer.attn_output, layer.ffn_gate_up, layer.ffn_down)
