"""The formats in which K and V can be stored: those of GGUF tensors, under their names in lower case."""

from __future__ import annotations

from collections.abc import Mapping

import gguf

from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.block_types import BlockType, block_type
from slotd.protocol.errors import ConfigError

#: Names as `-ctk` and `-ctv` take them.
KV_NAMES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")

#: Names of the design that this version does not have, and when they come.
LATER = {"tq3_0": "it arrives with the qwen models"}


def _known(name: str) -> BlockType:
    kind = block_type(gguf.GGMLQuantizationType[name.upper()])
    assert kind is not None
    return kind


KV_FORMATS: Mapping[str, BlockType] = {name: _known(name) for name in KV_NAMES}


def kv_format(name: str) -> BlockType:
    """The format of this name.

    Raises:
        ConfigError: not a K/V type, or one that this version does not have.
    """
    if name in KV_FORMATS:
        return KV_FORMATS[name]
    available = f"(supported: {', '.join(KV_NAMES)})"
    if name in LATER:
        raise ConfigError(f"K/V type {name} is not in this version: {LATER[name]} {available}")
    raise ConfigError(f"{name!r} is not a K/V type {available}")


def check_kv_formats(hyper: HyperParameters, k_type: str, v_type: str) -> None:
    """Whether heads of this model are whole blocks in these types.

    Raises:
        ConfigError: naming the type, the key of the model and what it would have to be; or an unknown type.
    """
    planes = (("K", k_type, "key_length", hyper.head_dim), ("V", v_type, "value_length", hyper.value_dim))
    for plane, name, key, dim in planes:
        elements = kv_format(name).block_elements
        if dim % elements:
            raise ConfigError(
                f"{plane} type {name} needs heads of a multiple of {elements} numbers: "
                f"{hyper.arch}.attention.{key} is {dim}"
            )


def kv_bytes_per_token(hyper: HyperParameters, k_type: str, v_type: str) -> int:
    """Bytes of one token's K and V, all layers together, in types that `check_kv_formats` lets pass."""
    per_head = kv_format(k_type).row_bytes(hyper.head_dim) + kv_format(v_type).row_bytes(hyper.value_dim)
    return len(hyper.attention_layers) * hyper.n_head_kv * per_head
