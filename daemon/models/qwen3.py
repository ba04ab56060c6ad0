"""Qwen3, dense: Llama with an RMS norm on each query and key head."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slotd.daemon.models.model import Interrupt, Interrupted
from slotd.daemon.ops.interface import Array, CallBatch, HeadNorms, Heads, Matrix, Ops, Tokens
from slotd.daemon.weights.reader import ModelFile


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Array  # [n_embd]
    attn_qkv: Matrix  # [(n_head + n_head_kv) * head_dim + n_head_kv * value_dim, n_embd]
    head_norms: HeadNorms  # of head_dim
    attn_output: Matrix  # [n_embd, n_head * value_dim]
    ffn_norm: Array  # [n_embd]
    ffn_gate_up: Matrix  # [2 * n_ff, n_embd]
    ffn_down: Matrix  # [n_embd, n_ff]


class Qwen3:
    def __init__(self, file: ModelFile, ops: Ops, max_ctx: int) -> None:
        h = self.hyper = file.hyper
        self.ops = ops
        self.heads = Heads(h.n_head, h.n_head_kv, h.head_dim, h.value_dim)

        def layer(i: int) -> Layer:
            def names(*parts: str) -> list[str]:
                return [f"blk.{i}.{part}.weight" for part in parts]

            return Layer(
                attn_norm=ops.vector(file, *names("attn_norm")),
                attn_qkv=ops.matrix(file, *h.qkv_names(i)),
                head_norms=HeadNorms(
                    ops.vector(file, *names("attn_q_norm")),
                    ops.vector(file, *names("attn_k_norm")),
                    h.rms_eps,
                ),
                attn_output=ops.matrix(file, *names("attn_output")),
                ffn_norm=ops.vector(file, *names("ffn_norm")),
                ffn_gate_up=ops.matrix(file, *names("ffn_gate", "ffn_up")),
                ffn_down=ops.matrix(file, *names("ffn_down")),
            )

        with ThreadPoolExecutor(ops.loaders) as pool:
            token_embd = pool.submit(ops.matrix, file, "token_embd.weight")
            self.layers = list(pool.map(layer, range(h.n_layer)))
        self.token_embd = token_embd.result()  # [n_vocab, n_embd]
        self.output_norm = ops.vector(file, "output_norm.weight")
        self.output = self.token_embd if h.tied else ops.matrix(file, "output.weight")
        self.rope = ops.rope_table(h.rope_base, h.rope_dims, None, max_ctx)

    def embed(self, tokens: Tokens) -> Array:
        return self.ops.embed(tokens, self.token_embd)

    def forward(self, x: Array, batch: CallBatch, interrupt: Interrupt | None) -> Array:
        ops, eps, scale = self.ops, self.hyper.rms_eps, self.hyper.head_dim**-0.5
        for i, layer in enumerate(self.layers):
            if interrupt is not None and interrupt():
                raise Interrupted(f"before layer {i}")
            qkv = ops.norm_linear(x, layer.attn_norm, eps, layer.attn_qkv)
            q = ops.rope_store(i, qkv, self.heads, self.rope, "half", batch, layer.head_norms)
            ops.add_linear(x, ops.attend(i, q, batch, scale), layer.attn_output)
            gate_up = ops.norm_linear(x, layer.ffn_norm, eps, layer.ffn_gate_up)
            ops.add_swiglu_linear(x, gate_up, layer.ffn_down)
        return x

    def logits(self, hidden: Array) -> Array:
        return self.ops.logits(hidden, self.output_norm, self.hyper.rms_eps, self.output)

    def linear_weights(self) -> Iterable[Matrix]:
        yield self.output
        for layer in self.layers:
            yield from (layer.attn_qkv, layer.attn_output, layer.ffn_gate_up, layer.ffn_down)
