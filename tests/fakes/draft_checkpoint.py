"""A small checkpoint of a draft with random weights: config.json and a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HIDDEN, LAYERS, FF, HEADS, KV_HEADS, HEAD_DIM, VOCAB, FEATURES = 64, 2, 96, 4, 2, 32, 320, 3

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "block_size": 8, "head_dim": HEAD_DIM,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]}, "hidden_act": "silu",
    "hidden_size": HIDDEN, "intermediate_size": FF, "max_position_embeddings": 4096, "model_type": "qwen3",
    "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS,
    "num_target_layers": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None,
    "sliding_window": None, "vocab_size": VOCAB,
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def shapes_of(kind: str) -> Shapes:
    """Tensors of a DFlash, DFlash2 (groups of 16, 2 taps, rank 8) or DSpark (rank 8) checkpoint."""
    shapes: Shapes = {"fc.weight": (HIDDEN, FEATURES * HIDDEN), "hidden_norm.weight": (HIDDEN,)}
    shapes["norm.weight"] = (HIDDEN,)
    for i in range(LAYERS):
        layer: Shapes = {
            "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN), "self_attn.q_norm.weight": (HEAD_DIM,),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.k_norm.weight": (HEAD_DIM,),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj.weight": (FF, HIDDEN), "mlp.up_proj.weight": (FF, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, FF),
        }  # fmt: skip
        for part in ("attention_conv", "mlp_conv") if kind == "DFlash2" else ():
            layer |= {f"{part}.base_kernel": (2, 2, HIDDEN), f"{part}.kernel_projection.weight": (16, HIDDEN)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if kind == "DFlash2":
        shapes["candidate_selector.hidden_projection.weight"] = (8, HIDDEN)
        for part in ("predecessor", "successor"):
            shapes[f"candidate_selector.{part}_codebook"] = (VOCAB, 8)
    if kind == "DSpark":
        shapes |= {f"markov_head.markov_w{n}.weight": (VOCAB, 8) for n in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 8), "confidence_head.proj.bias": (1,)}
    return shapes


def config_of(kind: str) -> dict[str, Any]:
    own = dict(CONFIG["dflash_config"])
    if kind == "DFlash2":
        own |= {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 8, "selector_top_k": 16}
    return CONFIG | {"dflash_config": own} | ({"markov_rank": 8} if kind == "DSpark" else {})


def write_checkpoint(
    folder: Path,
    kind: str = "DFlash",
    *,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any] | None] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Write it and return its values, rounded to what was stored.

    config: changes keys; None takes one out. tensors: adds or replaces tensors; None takes one out.
    """
    rng = np.random.default_rng(0)
    values: dict[str, npt.NDArray[Any]] = {
        name: rng.standard_normal(shape, np.float32) for name, shape in shapes_of(kind).items()
    }
    values |= {name: tensor for name, tensor in (tensors or {}).items() if tensor is not None}
    for name in [name for name, tensor in (tensors or {}).items() if tensor is None]:
        del values[name]
    folder.mkdir(parents=True, exist_ok=True)
    keys = {k: v for k, v in (config_of(kind) | dict(config or {})).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    stored = {name: _stored(tensor, dtype) for name, tensor in values.items()}
    write_safetensors(folder / "model.safetensors", stored)
    return {name: _value(tensor, kind_) for name, (kind_, tensor) in stored.items()}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, npt.NDArray[Any]]]) -> None:
    """Name -> (type, values as they lie in the file)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, tensor) in tensors.items():
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(tensor.tobytes() for _, tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _stored(tensor: npt.NDArray[Any], dtype: str) -> tuple[str, npt.NDArray[Any]]:
    if tensor.dtype == np.int64:
        return "I64", tensor
    if dtype == "BF16":
        return dtype, (tensor.astype("<f4").view("<u4") >> 16).astype("<u2")
    return dtype, tensor.astype({"F32": "<f4", "F16": "<f2"}[dtype])


def _value(tensor: npt.NDArray[Any], kind: str) -> npt.NDArray[Any]:
    if kind == "BF16":
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor if kind == "I64" else tensor.astype(np.float32)
