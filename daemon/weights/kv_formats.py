"""The formats in which K and V can be stored: those of GGUF tensors, in lower case, and tq3_0."""

from __future__ import annotations

from collections.abc import Mapping

import gguf

from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.block_types import BlockType, block_type
from slotd.protocol.errors import ConfigError

#: Names as `-ctk` and `-ctv` take them.
KV_NAMES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq3_0")

#: What goes with tq3_0 in the other plane. All pairs without it go.
TQ3_PARTNERS = {
    "K": ("f16", "bf16", "q4_0", "q8_0", "tq3_0"),  # types of V beside keys in tq3_0
    "V": ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq3_0"),  # types of K beside such values
}

#: Numbers that tq3_0 rotates together: heads are a multiple of it. The other types: of their blocks.
TQ3_GROUP = 128


def _known(name: str) -> BlockType:
    if name == "tq3_0":
        return BlockType(type_id=-1, name="TQ3_0", block_elements=32, block_bytes=14)  # never in a file
    kind = block_type(gguf.GGMLQuantizationType[name.upper()])
    assert kind is not None
    return kind


KV_FORMATS: Mapping[str, BlockType] = {name: _known(name) for name in KV_NAMES}


def kv_format(name: str) -> BlockType:
    """The format of this name. Raises ConfigError: not a K/V type."""
    if name not in KV_FORMATS:
        raise ConfigError(f"{name!r} is not a K/V type (supported: {', '.join(KV_NAMES)})")
    return KV_FORMATS[name]


def check_kv_pair(k_type: str, v_type: str) -> None:
    """Whether K and V of these types go together.

    Raises:
        ConfigError: they do not, with the types that do; or an unknown type.
    """
    kv_format(k_type)
    kv_format(v_type)
    for plane, name, other in (("K", k_type, v_type), ("V", v_type, k_type)):
        if name == "tq3_0" and other not in TQ3_PARTNERS[plane]:
            partner = "V" if plane == "K" else "K"
            raise ConfigError(
                f"{plane} type tq3_0 does not go with {partner} type {other}, only with "
                f"{', '.join(TQ3_PARTNERS[plane])}"
            )


def check_kv_formats(hyper: HyperParameters, k_type: str, v_type: str) -> None:
    """Whether the types go together, and heads of this model are whole blocks in them.

    Raises:
        ConfigError: naming the type, the key of the model and what it would have to be; a pair or a type that
            there is not.
    """
    check_kv_pair(k_type, v_type)
    planes = (("K", k_type, "key_length", hyper.head_dim), ("V", v_type, "value_length", hyper.value_dim))
    for plane, name, key, dim in planes:
        elements = TQ3_GROUP if name == "tq3_0" else kv_format(name).block_elements
        if dim % elements:
            raise ConfigError(
                f"{plane} type {name} needs heads of a multiple of {elements} numbers: "
                f"{hyper.arch}.attention.{key} is {dim}"
            )


def kv_bytes_per_token(hyper: HyperParameters, k_type: str, v_type: str) -> int:
    """Bytes of one token's K and V, all layers together, in types that `check_kv_formats` lets pass."""
    per_head = kv_format(k_type).row_bytes(hyper.head_dim) + kv_format(v_type).row_bytes(hyper.value_dim)
    return len(hyper.attention_layers) * hyper.n_head_kv * per_head
