"""Qwen3.5 and later, dense: most layers gated DeltaNet, every few gated attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slotd.daemon.models.decoder import Decoder, block_weights
from slotd.daemon.models.model import Interrupt, Interrupted, Taps
from slotd.daemon.ops.interface import (
    Array,
    CallBatch,
    DeltaWeights,
    HeadNorms,
    HybridOps,
    Matrix,
)
from slotd.daemon.weights.reader import ModelFile


@dataclass(frozen=True, slots=True)
class Attention:
    attn_qkv: Matrix  # [(2 * n_head + 2 * n_head_kv) * head_dim, n_embd], each query with its gate
    head_norms: HeadNorms  # of head_dim
    attn_output: Matrix  # [n_embd, n_head * head_dim]


@dataclass(frozen=True, slots=True)
class Delta:
    delta_in: Matrix  # [channels + value_width + 2 * n_value_heads, n_embd]: q, k, v; z; beta; alpha
    weights: DeltaWeights
    ssm_out: Matrix  # [n_embd, value_width]


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Array  # [n_embd]
    mixer: Attention | Delta
    post_attention_norm: Array  # [n_embd]
    ffn_gate_up: Matrix  # [2 * n_ff, n_embd]
    ffn_down: Matrix  # [n_embd, n_ff]


class Qwen35(Decoder[HybridOps, Layer]):
    gated = True

    def read_layer(self, file: ModelFile, i: int) -> Layer:
        ops = self.ops
        return Layer(
            attn_norm=ops.vector(file, *block_weights(i, "attn_norm")),
            mixer=self.read_mixer(file, i),
            post_attention_norm=ops.vector(file, *block_weights(i, "post_attention_norm")),
            ffn_gate_up=ops.matrix(file, *block_weights(i, "ffn_gate", "ffn_up")),
            ffn_down=ops.matrix(file, *block_weights(i, "ffn_down")),
        )

    def read_mixer(self, file: ModelFile, i: int) -> Attention | Delta:
        ops, h, net = self.ops, self.hyper, self.hyper.delta_net
        assert net is not None

        def vector(name: str) -> Array:
            return ops.vector(file, f"blk.{i}.{name}")

        if i in net.layers:
            joined = block_weights(i, "attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
            return Delta(
                delta_in=ops.matrix(file, *joined),
                weights=DeltaWeights(
                    net, vector("ssm_conv1d.weight"), vector("ssm_a"), vector("ssm_dt.bias"),
                    vector("ssm_norm.weight"), h.rms_eps,
                ),
                ssm_out=ops.matrix(file, *block_weights(i, "ssm_out")),
            )  # fmt: skip
        q_norm, k_norm = vector("attn_q_norm.weight"), vector("attn_k_norm.weight")
        return Attention(
            attn_qkv=ops.matrix(file, *h.qkv_names(i)),
            head_norms=HeadNorms(q_norm, k_norm, h.rms_eps),
            attn_output=ops.matrix(file, *block_weights(i, "attn_output")),
        )

    def forward(
        self, x: Array, batch: CallBatch, interrupt: Interrupt | None, taps: Taps | None = None
    ) -> Array:
        ops, eps = self.ops, self.hyper.rms_eps
        n_attention = n_delta = 0
        for i, layer in enumerate(self.layers):
            if interrupt is not None and interrupt():
                raise Interrupted(f"before layer {i}")
            if isinstance(layer.mixer, Attention):
                self.attend(x, layer, layer.mixer, n_attention, batch)
                n_attention += 1
            else:
                projected = ops.norm_linear(x, layer.attn_norm, eps, layer.mixer.delta_in)
                mixed = ops.delta_net(n_delta, projected, layer.mixer.weights, batch)
                ops.add_delta_linear(x, mixed, projected, layer.mixer.weights, layer.mixer.ssm_out)
                n_delta += 1
            gate_up = ops.norm_linear(x, layer.post_attention_norm, eps, layer.ffn_gate_up)
            ops.add_swiglu_linear(x, gate_up, layer.ffn_down)
            if taps is not None:
                taps.after(i, x)
        return x

    def attend(self, x: Array, layer: Layer, mixer: Attention, number: int, batch: CallBatch) -> None:
        ops, heads = self.ops, self.heads
        qkv = ops.norm_linear(x, layer.attn_norm, self.hyper.rms_eps, mixer.attn_qkv)
        q = ops.rope_store(number, qkv, heads, self.rope, "half", batch, mixer.head_norms)
        attended = ops.attend(number, q, batch, heads.head_dim**-0.5)
        ops.add_gated_linear(x, attended, qkv, heads, mixer.attn_output)

    def linear_weights(self) -> Iterable[Matrix]:
        yield self.output
        for layer in self.layers:
            yield from (layer.ffn_gate_up, layer.ffn_down)
            if isinstance(layer.mixer, Attention):
                yield from (layer.mixer.attn_qkv, layer.mixer.attn_output)
            else:
                yield from (layer.mixer.delta_in, layer.mixer.ssm_out)
