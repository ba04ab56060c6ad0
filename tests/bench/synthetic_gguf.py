"""Seeded random models of any published shape and weight type, as fast as the disk takes them.

    python -m tests.bench.synthetic_gguf --preset qwen35-27b --seed 0 OUT.gguf
    python -m tests.bench.synthetic_gguf --preset qwen35-27b-draft --seed 0 DRAFT.gguf
    python -m tests.bench.synthetic_gguf --preset qwen35-27b --layers 4 --width 256 --vocab 512 SMALL.gguf

Speed does not depend on what the weights say, so benchmarks run on these, and tests of exactness need no more
than numbers. Norms are near 1, matrices scaled by their width, a DeltaNet's heads forget within some tokens
to some hundreds: activations stay finite through all layers, and logits have a spread of a few units. The
tokenizer is real, with filler tokens behind 32,768.
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.bench.draft_shapes import ARCH as DRAFT_ARCH
from tests.bench.draft_shapes import DRAFTS, DraftShape, draft_keys, draft_tensors
from tests.bench.model_shapes import MIXES, PRESETS, Shape, TensorSpec, cut_down, keys, tensors
from tests.bench.random_blocks import TYPES, random_rows
from tests.fakes.qwen_templates import QWEN3, QWEN35
from tests.fakes.tiny_gguf import CHATML, add_key, tokenizer_keys

#: Tokens with a text of their own; the others are fillers.
N_REAL_TOKENS = 32_768

#: Tensors begin at multiples of so many bytes.
_ALIGNMENT = 32

_USER_DEFINED_TOKEN, _UNUSED_TOKEN = 4, 5
_THOUGHT_TAGS = ["<think>", "</think>"]

_PRE = {"llama": "smollm", "qwen3": "qwen2", "qwen35": "qwen35"}
_TEMPLATES = {"llama": CHATML, "qwen3": QWEN3, "qwen35": QWEN35}

#: What a channel's norm weights are multiplied by when it is to be an outlier.
OUTLIER = 1000.0


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
    return _write(path, shape.arch, _keys(shape, seed), list(tensors(shape)), seed, outlier)


def write_synthetic_draft(path: Path, shape: DraftShape, seed: int = 0) -> Path:
    """Write a draft; the same shape and seed give the same file. It has no idea of its target's text.

    Returns:
        `path`.
    """
    name = f"Synthetic draft {shape.weight_type} {shape.n_layer}x{shape.n_embd} seed {seed}"
    found = {"general.name": name, "general.quantization_version": 2, **draft_keys(shape)}
    return _write(path, DRAFT_ARCH, found, list(draft_tensors(shape)), seed, None)


def write_hollow(path: Path, shape: Shape) -> Path:
    """A model file of full size whose matrices are holes, which take no room on the disk. Returns `path`."""
    specs = list(tensors(shape))
    _write_header(path, shape.arch, _keys(shape, 0), specs).close()
    start = path.stat().st_size
    with path.open("r+b") as file:
        for spec in specs:
            start = -(-start // _ALIGNMENT) * _ALIGNMENT
            if spec.std is None:
                file.seek(start)
                file.write(_values(spec, 0, None).tobytes())
            start += math.prod(spec.shape[:-1]) * _row_bytes(spec)
        file.truncate(start)
    return path


def _row_bytes(tensor: TensorSpec) -> int:
    elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.kind]]
    return tensor.shape[-1] // elements * n_bytes


def _write(
    path: Path, arch: str, found: Mapping[str, Any], specs: list[TensorSpec], seed: int, outlier: int | None
) -> Path:
    writer = _write_header(path, arch, found, specs)
    for values in _in_order([lambda t=tensor: _values(t, seed, outlier) for tensor in specs]):
        writer.write_tensor_data(values)
    writer.close()
    return path


def _write_header(
    path: Path, arch: str, found: Mapping[str, Any], specs: list[TensorSpec]
) -> gguf.GGUFWriter:
    """Everything in front of the data of the tensors, which come in the order of the list."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in found.items():
        add_key(writer, key, value)
    for tensor in specs:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        row = _row_bytes(tensor)
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
    return writer


def _in_order(jobs: list[Callable[[], npt.NDArray[Any]]]) -> Iterator[npt.NDArray[Any]]:
    """The results one after the other; some are computed ahead (drawing lets go of the GIL)."""
    n = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(n) as pool:
        ahead: deque[Future[npt.NDArray[Any]]] = deque()
        for job in jobs:
            ahead.append(pool.submit(job))
            if len(ahead) > n:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _values(tensor: TensorSpec, seed: int, outlier: int | None) -> npt.NDArray[Any]:
    own = zlib.crc32(tensor.name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF)
    if tensor.std is not None:
        return random_rows(tensor.kind, *tensor.shape, tensor.std, own)
    rng = np.random.default_rng(own)
    part = tensor.name.rpartition("blk.")[2].partition(".")[2]
    if part in _OF_THEIR_OWN:
        return _OF_THEIR_OWN[part](tensor.shape, rng).astype(np.float32)
    norm = 1 + 0.1 * rng.standard_normal(tensor.shape, dtype=np.float32)
    if outlier is not None and part in ("attn_norm.weight", "ffn_norm.weight", "post_attention_norm.weight"):
        norm[outlier] *= np.float32(OUTLIER)
    return norm


def _decays(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """What log decays are multiples of; below 0."""
    return -np.exp(rng.uniform(np.log(0.05), np.log(1.0), shape))


def _steps(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    return rng.uniform(-4.0, 0.0, shape)


def _taps(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """The spread of what the convolution gives is that of its input."""
    return rng.standard_normal(shape) / math.sqrt(shape[-1])


#: Tensors of a DeltaNet that are neither matrices nor norms: name in the block -> its numbers.
_OF_THEIR_OWN: Mapping[str, Callable[[tuple[int, ...], np.random.Generator], npt.NDArray[np.float64]]] = {
    "ssm_a": _decays,
    "ssm_dt.bias": _steps,
    "ssm_conv1d.weight": _taps,
}


def _keys(shape: Shape, seed: int) -> dict[str, Any]:
    n_real = min(shape.n_vocab, N_REAL_TOKENS)
    found = tokenizer_keys(n_real, _PRE[shape.arch])
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    if shape.arch != "llama" and shape.n_vocab >= n_real + len(_THOUGHT_TAGS):
        tokens += _THOUGHT_TAGS
        types += [_USER_DEFINED_TOKEN] * len(_THOUGHT_TAGS)
    n_fillers = shape.n_vocab - len(tokens)
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(n_fillers)]
    types += [_UNUSED_TOKEN] * n_fillers
    return {
        "general.name": f"Synthetic {shape.weight_type} {shape.n_layer}x{shape.n_embd} seed {seed}",
        "general.quantization_version": 2,
        **keys(shape),
        **found,
        "tokenizer.chat_template": _TEMPLATES[shape.arch],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.synthetic_gguf", description=__doc__)
    parser.add_argument("--preset", choices=[*PRESETS, *DRAFTS], default="tiny")
    parser.add_argument("--type", choices=[*TYPES, *MIXES], help="another type for the matrices")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--width", type=int, help="a smaller hidden width, with fewer heads")
    parser.add_argument("--vocab", type=int, help="another number of tokens")
    parser.add_argument(
        "--mtp", type=int, default=0, metavar="N", help="N blocks that predict further tokens"
    )
    parser.add_argument(
        "--outlier", type=int, metavar="CHANNEL", help=f"a channel {OUTLIER:.0f} times larger"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    chosen = parser.parse_args()
    began = time.perf_counter()
    if chosen.preset in DRAFTS:
        draft = DRAFTS[chosen.preset]
        write_synthetic_draft(
            chosen.out, dataclasses.replace(draft, weight_type=chosen.type or draft.weight_type), chosen.seed
        )
        return _told(chosen.out, began)
    shape = PRESETS[chosen.preset]
    if chosen.type:
        shape = dataclasses.replace(shape, weight_type=chosen.type, embedding_type=None)
    shape = cut_down(shape, layers=chosen.layers, width=chosen.width, vocab=chosen.vocab)
    shape = dataclasses.replace(shape, n_mtp=chosen.mtp)
    try:
        write_synthetic(chosen.out, shape, chosen.seed, chosen.outlier)
    except ValueError as error:
        parser.error(str(error))
    return _told(chosen.out, began)


def _told(path: Path, began: float) -> int:
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
