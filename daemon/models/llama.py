"""Llama (also SmolLM2, Mistral and others that ship as `llama`)."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.models.loading import load
from slotd.daemon.models.model import Interrupt, Interrupted
from slotd.daemon.ops.batch import Array, Batch
from slotd.daemon.ops.interface import Ops
from slotd.daemon.weights.reader import ModelFile


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Array  # [n_embd]
    attn_qkv: Array  # [(n_head + n_head_kv) * head_dim + n_head_kv * value_dim, n_embd]
    attn_output: Array  # [n_embd, n_head * value_dim]
    ffn_norm: Array  # [n_embd]
    ffn_gate_up: Array  # [2 * n_ff, n_embd]
    ffn_down: Array  # [n_embd, n_ff]


class Llama:
    def __init__(self, file: ModelFile, ops: Ops, memory: DeviceMemory) -> None:
        h = self.hyper = file.hyper
        self.ops = ops

        def layer(i: int) -> Layer:
            def weight(*names: str) -> Array:
                return load(memory, file, *(f"blk.{i}.{name}.weight" for name in names))

            return Layer(
                attn_norm=weight("attn_norm"),
                attn_qkv=weight("attn_q", "attn_k", "attn_v"),
                attn_output=weight("attn_output"),
                ffn_norm=weight("ffn_norm"),
                ffn_gate_up=weight("ffn_gate", "ffn_up"),
                ffn_down=weight("ffn_down"),
            )

        with ThreadPoolExecutor(2) as pool:
            token_embd = pool.submit(load, memory, file, "token_embd.weight")
            self.layers = list(pool.map(layer, range(h.n_layer)))
        self.token_embd = token_embd.result()  # [n_vocab, n_embd]
        self.output_norm = load(memory, file, "output_norm.weight")
        self.output = self.token_embd if h.tied else load(memory, file, "output.weight")
        divisors = load(memory, file, "rope_freqs.weight") if h.rope_freqs else None
        self.rope = ops.rope_table(h.rope_base, h.rope_dims, divisors)

    def embed(self, tokens: npt.NDArray[np.int32]) -> Array:
        return self.ops.embed(tokens, self.token_embd)

    def forward(self, x: Array, batch: Batch, interrupt: Interrupt | None) -> Array:
        ops, eps = self.ops, self.hyper.rms_eps
        rotations = ops.rotations(self.rope, batch.positions)
        for i, layer in enumerate(self.layers):
            if interrupt is not None and interrupt():
                raise Interrupted(f"before layer {i}")
            qkv = ops.linear(ops.rms_norm(x, layer.attn_norm, eps), layer.attn_qkv)
            ops.add(x, ops.linear(self.attention(i, qkv, rotations, batch), layer.attn_output))
            gate_up = ops.linear(ops.rms_norm(x, layer.ffn_norm, eps), layer.ffn_gate_up)
            ops.add(x, ops.linear(ops.swiglu(gate_up), layer.ffn_down))
        return x

    def attention(self, i: int, qkv: Array, rotations: Array, batch: Batch) -> Array:
        h, n = self.hyper, len(qkv)
        n_qk = (h.n_head + h.n_head_kv) * h.head_dim
        qk = qkv[:, :n_qk].reshape(n, h.n_head + h.n_head_kv, h.head_dim)
        v = qkv[:, n_qk:].reshape(n, h.n_head_kv, h.value_dim)
        self.ops.rope(qk, rotations, "interleaved")
        self.ops.kv_write(i, qk[:, h.n_head :], v, batch)
        return self.ops.attend(i, qk[:, : h.n_head], batch, h.head_dim**-0.5)

    def logits(self, hidden: Array) -> Array:
        return self.ops.linear(self.ops.rms_norm(hidden, self.output_norm, self.hyper.rms_eps), self.output)

    def linear_weights(self) -> Iterable[Array]:
        yield self.output
        for layer in self.layers:
            yield from (layer.attn_qkv, layer.attn_output, layer.ffn_gate_up, layer.ffn_down)
