"""Llama (also SmolLM2, Mistral and others that ship as `llama`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from slotd.daemon.models.decoder import Decoder, block_weights
from slotd.daemon.models.model import Interrupt, Interrupted, Taps
from slotd.daemon.ops.interface import Array, CallBatch, HeadNorms, Matrix, Ops, RopeStyle
from slotd.daemon.weights.reader import ModelFile


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Array  # [n_embd]
    attn_qkv: Matrix  # [(n_head + n_head_kv) * head_dim + n_head_kv * value_dim, n_embd]
    head_norms: HeadNorms | None  # of head_dim
    attn_output: Matrix  # [n_embd, n_head * value_dim]
    ffn_norm: Array  # [n_embd]
    ffn_gate_up: Matrix  # [2 * n_ff, n_embd]
    ffn_down: Matrix  # [n_embd, n_ff]


class Llama(Decoder[Ops, Layer]):
    rope_style: ClassVar[RopeStyle] = "interleaved"

    def read_layer(self, file: ModelFile, i: int) -> Layer:
        ops = self.ops
        return Layer(
            attn_norm=ops.vector(file, *block_weights(i, "attn_norm")),
            attn_qkv=ops.matrix(file, *self.hyper.qkv_names(i)),
            head_norms=self.read_head_norms(file, i),
            attn_output=ops.matrix(file, *block_weights(i, "attn_output")),
            ffn_norm=ops.vector(file, *block_weights(i, "ffn_norm")),
            ffn_gate_up=ops.matrix(file, *block_weights(i, "ffn_gate", "ffn_up")),
            ffn_down=ops.matrix(file, *block_weights(i, "ffn_down")),
        )

    def read_head_norms(self, file: ModelFile, i: int) -> HeadNorms | None:
        """Llama has none."""
        return None

    def forward(
        self, x: Array, batch: CallBatch, interrupt: Interrupt | None, taps: Taps | None = None
    ) -> Array:
        ops, eps, scale = self.ops, self.hyper.rms_eps, self.hyper.head_dim**-0.5
        for i, layer in enumerate(self.layers):
            if interrupt is not None and interrupt():
                raise Interrupted(f"before layer {i}")
            qkv = ops.norm_linear(x, layer.attn_norm, eps, layer.attn_qkv)
            q = ops.rope_store(i, qkv, self.heads, self.rope, self.rope_style, batch, layer.head_norms)
            ops.add_linear(x, ops.attend(i, q, batch, scale), layer.attn_output)
            gate_up = ops.norm_linear(x, layer.ffn_norm, eps, layer.ffn_gate_up)
            ops.add_swiglu_linear(x, gate_up, layer.ffn_down)
            if taps is not None:
                taps.after(i, x)
        return x

    def linear_weights(self) -> Iterable[Matrix]:
        yield self.output
        for layer in self.layers:
            yield from (layer.attn_qkv, layer.attn_output, layer.ffn_gate_up, layer.ffn_down)
