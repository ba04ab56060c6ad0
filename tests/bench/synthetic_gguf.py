"""Seeded random llama models of any size and weight type, as fast as the disk takes them.

    python -m tests.bench.synthetic_gguf --preset 23b --seed 0 OUT.gguf

Speed does not depend on what the weights say, so benchmarks run on these, and tests of exactness need no more
than numbers. Norms are near 1 and matrices scaled by their width: activations stay finite through all layers,
and logits have a spread of a few units. The tokenizer is real, with filler tokens behind 32,768.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.bench.random_blocks import FALLBACK, TYPES, random_rows
from tests.fakes.tiny_gguf import CHATML, add_key, tokenizer_keys

Q4_K_M = "Q4_K_M"

#: Tokens with a text of their own; the others are fillers.
N_REAL_TOKENS = 32_768

_UNUSED_TOKEN = 5

#: What a channel's norm weights are multiplied by when it is to be an outlier.
OUTLIER = 1000.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama model: sizes, and the type of its matrices (one of TYPES, or Q4_K_M for that mix)."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    weight_type: str
    tied: bool = False
    embedding_type: str | None = None


PRESETS = {
    "23b": Shape(64, 5120, 17408, 40, 8, 128, 151936, 262144, 1e6, Q4_K_M),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, Q4_K_M, tied=True),
    "135m": Shape(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, "Q4_1", tied=True, embedding_type="Q8_0"),
    "tiny": Shape(2, 256, 512, 4, 2, 64, 512, 16384, 1e4, Q4_K_M),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What a tensor will be: numpy shape (n_out, n_in), or (n,) for a norm."""

    name: str
    shape: tuple[int, ...]
    kind: str
    std: float = 0.0


def write_synthetic(path: Path, shape: Shape, seed: int = 0, outlier: int | None = None) -> Path:
    """Write a model; the same shape, seed and outlier give the same file.

    outlier: a channel whose norm weights are 1000 times larger, in every layer.

    Returns:
        `path`.

    Raises:
        ValueError: an unknown weight type, or an outlier outside the width.
    """
    if outlier is not None and not 0 <= outlier < shape.n_embd:
        raise ValueError(f"outlier channel {outlier}: the model has {shape.n_embd} channels")
    tensors = list(_tensors(shape))
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in _keys(shape, seed).items():
        add_key(writer, key, value)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        row = tensor.shape[-1] // elements * n_bytes
        size = math.prod(tensor.shape[:-1]) * row
        if tensor.kind in ("F32", "F16"):
            dtype = np.dtype(np.float32 if tensor.kind == "F32" else np.float16)
            writer.add_tensor_info(tensor.name, tensor.shape, dtype, size)
        else:
            as_bytes = (*tensor.shape[:-1], row)
            writer.add_tensor_info(tensor.name, as_bytes, np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in _in_order([lambda t=tensor: _values(t, seed, outlier) for tensor in tensors]):
        writer.write_tensor_data(values)
    writer.close()
    return path


def _in_order(jobs: list[Callable[[], npt.NDArray[Any]]]) -> Iterator[npt.NDArray[Any]]:
    """The results one after the other; some are computed ahead (drawing lets go of the GIL)."""
    n = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(n) as pool:
        ahead: deque[Future[npt.NDArray[Any]]] = deque()
        for job in jobs:
            ahead.append(pool.submit(job))
            if len(ahead) > n:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _values(tensor: _Tensor, seed: int, outlier: int | None) -> npt.NDArray[Any]:
    own = zlib.crc32(tensor.name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF)
    if len(tensor.shape) > 1:
        return random_rows(tensor.kind, *tensor.shape, tensor.std, own)
    rng = np.random.default_rng(own)
    norm = 1 + 0.1 * rng.standard_normal(tensor.shape, dtype=np.float32)
    if outlier is not None and tensor.name.startswith("blk."):
        norm[outlier] *= np.float32(OUTLIER)
    return norm


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    mixed = shape.weight_type == Q4_K_M
    base = "Q4_K" if mixed else shape.weight_type

    def matrix(name: str, n_out: int, n_in: int, kind: str = base, scale: float = 1.0) -> _Tensor:
        kind = FALLBACK.get(kind, kind) if n_in % 256 else kind
        return _Tensor(name + ".weight", (n_out, n_in), kind, scale / math.sqrt(n_in))

    output = "Q6_K" if mixed else base
    embedding = shape.embedding_type or (output if shape.tied else base)
    # A tied embedding is the output matrix too, so it is scaled as that one; its rows are normed anyway.
    yield matrix("token_embd", shape.n_vocab, shape.n_embd, embedding, 2.0)
    for layer in range(shape.n_layer):
        block = f"blk.{layer}."
        better = "Q6_K" if mixed and _gets_more(layer, shape.n_layer) else base
        yield _Tensor(block + "attn_norm.weight", (shape.n_embd,), "F32")
        yield matrix(block + "attn_q", n_q, shape.n_embd)
        yield matrix(block + "attn_k", n_kv, shape.n_embd)
        yield matrix(block + "attn_v", n_kv, shape.n_embd, better)
        yield matrix(block + "attn_output", shape.n_embd, n_q)
        yield _Tensor(block + "ffn_norm.weight", (shape.n_embd,), "F32")
        yield matrix(block + "ffn_gate", shape.n_ff, shape.n_embd)
        yield matrix(block + "ffn_up", shape.n_ff, shape.n_embd)
        yield matrix(block + "ffn_down", shape.n_embd, shape.n_ff, better)
    yield _Tensor("output_norm.weight", (shape.n_embd,), "F32")
    if not shape.tied:
        yield matrix("output", shape.n_vocab, shape.n_embd, output, 2.0)


def _gets_more(layer: int, n_layer: int) -> bool:
    """Whether llama.cpp's Q4_K_M gives this layer's attn_v and ffn_down the larger type."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def _keys(shape: Shape, seed: int) -> dict[str, Any]:
    n_real = min(shape.n_vocab, N_REAL_TOKENS)
    keys = tokenizer_keys(n_real)
    n_fillers = shape.n_vocab - n_real
    keys["tokenizer.ggml.tokens"] += [f"[PAD{n_real + i}]" for i in range(n_fillers)]
    keys["tokenizer.ggml.token_type"] += [_UNUSED_TOKEN] * n_fillers
    return {
        "general.name": f"Synthetic {shape.weight_type} {shape.n_layer}x{shape.n_embd} seed {seed}",
        "general.quantization_version": 2,
        "llama.block_count": shape.n_layer,
        "llama.context_length": shape.n_ctx,
        "llama.embedding_length": shape.n_embd,
        "llama.feed_forward_length": shape.n_ff,
        "llama.attention.head_count": shape.n_head,
        "llama.attention.head_count_kv": shape.n_head_kv,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": shape.rope_base,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.vocab_size": shape.n_vocab,
        **keys,
        "tokenizer.chat_template": CHATML,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.synthetic_gguf", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--type", choices=[*TYPES, Q4_K_M], help="another type for the matrices")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument(
        "--outlier", type=int, metavar="CHANNEL", help=f"a channel {OUTLIER:.0f} times larger"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    chosen = parser.parse_args()
    shape = PRESETS[chosen.preset]
    if chosen.type:
        shape = dataclasses.replace(shape, weight_type=chosen.type, embedding_type=None)
    if chosen.layers:
        shape = dataclasses.replace(shape, n_layer=chosen.layers)
    began = time.perf_counter()
    try:
        write_synthetic(chosen.out, shape, chosen.seed, chosen.outlier)
    except ValueError as error:
        parser.error(str(error))
    size = chosen.out.stat().st_size
    print(f"{chosen.out}: {size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
