"""Checkpoints of DFlash, DFlash2 and DSpark drafts as GGUF files.

Keys are those of architecture `dflash-draft`, which counts target layers from 0 as checkpoints do. Every
tensor of the checkpoint has its place in the file or is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from slotd.daemon.weights.draft_config import ARCH, DraftConfig, read_draft_config
from slotd.daemon.weights.safetensors_file import Checkpoint, StoredTensor
from slotd.protocol.errors import ConfigError, ModelError

#: What matrices can be stored as.
MATRIX_TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "f16": gguf.GGMLQuantizationType.F16}

F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16

#: Numbers that are converted at a time.
_AT_A_TIME = 2**24

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_LAYER_2 = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_WHOLE = {
    "fc.weight": "dflash.fc.weight",
    "hidden_norm.weight": "dflash.hidden_norm.weight",
    "norm.weight": "output_norm.weight",
}
_WHOLE_2 = {
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
_MARKOV = {
    "markov_head.markov_w1.weight": "dflash.dspark.markov.w1",
    "markov_head.markov_w2.weight": "dflash.dspark.markov.w2",
}
_CONFIDENCE = {
    "confidence_head.proj.weight": "dflash.dspark.confidence.weight",
    "confidence_head.proj.bias": "dflash.dspark.confidence.bias",
}
_OWN = {"embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight", "d2t": "d2t"}

#: Says the same as d2t, the other way round.
_NOT_NEEDED = frozenset({"t2d"})

#: Tables that are looked up rather than multiplied with whole rows: not quantised.
_TABLES = frozenset({*_WHOLE_2.values(), *_MARKOV.values()}) - {"selector_hidden.weight"}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """What was converted.

    Attributes:
        kind: ``DFlash``, ``DFlash2`` or ``DSpark``.
        tensors: how many.
        parameters: numbers in them.
        bytes: length of the file.
    """

    kind: str
    tensors: int
    parameters: int
    bytes: int


def convert_draft(source: Path, out: Path, matrices: str = "q8_0") -> Written:
    """Write a checkpoint as a GGUF file. An existing file is replaced when the new one is whole.

    Args:
        source: a folder with config.json and .safetensors files, or one such file with config.json beside it.
        matrices: one of MATRIX_TYPES.

    Raises:
        ConfigError: no such type, or `out` cannot be written.
        ModelError: it is no draft of these kinds; the message names the key or tensor.
    """
    if matrices not in MATRIX_TYPES:
        raise ConfigError(f"--type {matrices}: it must be {' or '.join(MATRIX_TYPES)}")
    checkpoint = Checkpoint(source)
    tensors = {_plain(name): tensor for name, tensor in checkpoint.tensors.items()}
    config = read_draft_config(checkpoint, {name: tensor.shape for name, tensor in tensors.items()})
    places = _places(checkpoint, tensors, config)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        _write(temporary, places, config, MATRIX_TYPES[matrices])
        os.replace(temporary, out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    numbers = sum(int(np.prod(tensor.shape)) for tensor in places.values())
    return Written(config.kind, len(places), numbers, out.stat().st_size)


def _plain(name: str) -> str:
    """Some trainers save the draft as a part of something."""
    return name.removeprefix("model.")


def expected_tensors(config: DraftConfig) -> dict[str, tuple[str, Shape]]:
    """Tensor of the checkpoint -> its name in the file and its shape, for all that must be there."""
    c, n = config, config.hidden
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (n,), "post_attention_layernorm.weight": (n,),
        "self_attn.q_proj.weight": (q, n), "self_attn.k_proj.weight": (kv, n),
        "self_attn.v_proj.weight": (kv, n), "self_attn.o_proj.weight": (n, q),
        "self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,),
        "mlp.gate_proj.weight": (c.ff, n), "mlp.up_proj.weight": (c.ff, n), "mlp.down_proj.weight": (n, c.ff),
    }  # fmt: skip
    whole: dict[str, Shape] = {
        "fc.weight": (n, len(c.target_layers) * n), "hidden_norm.weight": (n,), "norm.weight": (n,)
    }  # fmt: skip
    layer_names, whole_names = dict(_LAYER), dict(_WHOLE)
    if c.kind == "DFlash2":
        coefficients = 2 * c.conv_kernel * (n // c.conv_group)
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"{part}.base_kernel"] = (2, c.conv_kernel, n)
            shapes[f"{part}.kernel_projection.weight"] = (coefficients, n)
        whole["candidate_selector.hidden_projection.weight"] = (c.selector_rank, n)
        for part in ("predecessor", "successor"):
            whole[f"candidate_selector.{part}_codebook"] = (c.vocab, c.selector_rank)
        layer_names |= _LAYER_2
        whole_names |= _WHOLE_2
    if c.kind == "DSpark":
        whole["markov_head.markov_w1.weight"] = (c.vocab, c.markov_rank)
        whole["markov_head.markov_w2.weight"] = (c.head_rows, c.markov_rank)
        whole_names |= _MARKOV
        if c.confidence_dim:
            whole |= {"confidence_head.proj.weight": (1, c.confidence_dim), "confidence_head.proj.bias": (1,)}
            whole_names |= _CONFIDENCE
    expected = {name: (place, whole[name]) for name, place in whole_names.items()}
    for i in range(c.layers):
        for name, place in layer_names.items():
            expected[f"layers.{i}.{name}"] = f"blk.{i}.{place}", shapes[name]
    return expected


def _places(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], config: DraftConfig
) -> dict[str, StoredTensor]:
    """Name in the file -> tensor, in the order of the file."""
    expected = expected_tensors(config)
    own: dict[str, tuple[str, Shape]] = {
        "embed_tokens.weight": (_OWN["embed_tokens.weight"], (config.vocab, config.hidden)),
        "lm_head.weight": (_OWN["lm_head.weight"], (config.head_rows, config.hidden)),
        "d2t": (_OWN["d2t"], (config.head_rows,)),
    }
    for name in expected:
        if name not in tensors and name != "confidence_head.proj.bias":
            raise ModelError(f"{checkpoint.path}: tensor {name} is missing")
    known = expected | own
    for name, tensor in tensors.items():
        if name in _NOT_NEEDED:
            continue
        if name not in known:
            raise ModelError(f"{tensor.path}: tensor {tensor.name} is not part of a {config.kind} draft")
        shape = known[name][1]
        if tensor.shape != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise ModelError(f"{tensor.path}: tensor {tensor.name} has shape {found}, it must be {wanted}")
        if (tensor.dtype in ("I32", "I64")) != (name == "d2t") or tensor.dtype == "BOOL":
            raise ModelError(f"{tensor.path}: tensor {tensor.name} cannot be of type {tensor.dtype}")
    return {place: tensors[name] for name, (place, _) in known.items() if name in tensors}


def _write(
    path: Path, places: Mapping[str, StoredTensor], config: DraftConfig,
    matrices: gguf.GGMLQuantizationType,
) -> None:  # fmt: skip
    writer = gguf.GGUFWriter(path, ARCH)
    writer.add_name(f"{config.kind} draft")
    add: Mapping[type, Callable[[str, Any], None]] = {
        str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
        bool: writer.add_bool, list: writer.add_array,
    }  # fmt: skip
    for key, value in config.keys.items():
        add[type(value)](key, value)
    kinds = {place: _kind(place, tensor, matrices) for place, tensor in places.items()}
    try:
        for place, tensor in places.items():
            _announce(writer, place, tensor.shape, kinds[place])
        no_bias = config.confidence_dim and "dflash.dspark.confidence.bias" not in places
        if no_bias:  # readers expect one
            _announce(writer, "dflash.dspark.confidence.bias", (1,), F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for place, tensor in places.items():
            writer.write_tensor_data(_converted(tensor, kinds[place]))
        if no_bias:
            writer.write_tensor_data(np.zeros(1, np.float32))
    finally:
        writer.close()


def _kind(place: str, tensor: StoredTensor, matrices: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if tensor.dtype in ("I32", "I64"):
        return gguf.GGMLQuantizationType[tensor.dtype]
    if len(tensor.shape) != 2 or tensor.shape[0] == 1:
        return F32
    if place in _TABLES or tensor.shape[1] % gguf.GGML_QUANT_SIZES[matrices][0]:
        return F16
    return matrices


def _announce(writer: gguf.GGUFWriter, place: str, shape: Shape, kind: gguf.GGMLQuantizationType) -> None:
    elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    row = (shape[-1] // elements * n_bytes,) if kind is MATRIX_TYPES["q8_0"] else (shape[-1],)
    dtype = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64}.get(kind.name, np.uint8)
    stored = (*shape[:-1], *row)
    size = int(np.prod(shape)) // elements * n_bytes
    writer.add_tensor_info(place, stored, np.dtype(dtype), size, raw_dtype=kind)


def _converted(tensor: StoredTensor, kind: gguf.GGMLQuantizationType) -> npt.NDArray[Any]:
    """The tensor as it is stored, made a few rows at a time."""
    if tensor.dtype in ("I32", "I64"):
        return tensor.read()
    rows = max(1, _AT_A_TIME // max(1, int(np.prod(tensor.shape[1:]))))
    parts = []
    for first in range(0, tensor.shape[0], rows):
        values = tensor.read(first, first + rows)
        with np.errstate(over="ignore"):
            stored = values.astype(np.float16) if kind is F16 else values
        if not np.isfinite(stored).all():
            what = "a value that F16 does not hold" if np.isfinite(values).all() else "NaN or infinity"
            raise ModelError(f"{tensor.path}: tensor {tensor.name} has {what}")
        parts.append(quants.quantize(values, kind) if kind is MATRIX_TYPES["q8_0"] else stored)
    return np.concatenate(parts)
