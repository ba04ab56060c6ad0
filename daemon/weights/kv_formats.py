"""The formats in which K and V can be stored: those of GGUF tensors, in lower case, and tq3_0."""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
    _check_pair(k_type, v_type, KV_NAMES, KV_NAMES)


def check_kv_formats(hyper: HyperParameters, k_type: str, v_type: str) -> None:
    """Whether the types go together, and heads of this model are whole blocks in them.

    Raises:
        ConfigError: naming what is wrong, and the types that this model can have instead; a pair or a type
            that there is not.
    """
    kv_format(k_type)
    kv_format(v_type)
    # Heads before pairs: the partners of a type that does not fit are of no use.
    planes = (("K", k_type, "key_length", hyper.head_dim), ("V", v_type, "value_length", hyper.value_dim))
    for plane, name, key, dim in planes:
        if name not in (fitting := _types_for_heads(dim)):
            raise ConfigError(
                f"{plane} type {name} needs heads of a multiple of {_numbers_of(name)} numbers: "
                f"{hyper.arch}.attention.{key} is {dim}, which {', '.join(fitting)} can have"
            )
    _check_pair(k_type, v_type, _types_for_heads(hyper.head_dim), _types_for_heads(hyper.value_dim))


def _numbers_of(name: str) -> int:
    """Heads are a multiple of so many numbers in this type."""
    return TQ3_GROUP if name == "tq3_0" else kv_format(name).block_elements


def _types_for_heads(dim: int) -> tuple[str, ...]:
    return tuple(name for name in KV_NAMES if dim % _numbers_of(name) == 0)


def _check_pair(k_type: str, v_type: str, k_types: Collection[str], v_types: Collection[str]) -> None:
    """k_types, v_types: those that may be named instead, for either plane."""
    kv_format(k_type)
    kv_format(v_type)
    planes = (("K", k_type, "V", v_type, "-ctv", v_types), ("V", v_type, "K", k_type, "-ctk", k_types))
    for plane, name, partner, other, flag, possible in planes:
        if name == "tq3_0" and other not in TQ3_PARTNERS[plane]:
            good = ", ".join(kind for kind in TQ3_PARTNERS[plane] if kind in possible)
            raise ConfigError(
                f"{plane} type tq3_0 does not go with {partner} type {other}; "
                f"it does with {flag} of one of: {good}"
            )


def kv_bytes_per_token(hyper: HyperParameters, k_type: str, v_type: str) -> int:
    """Bytes of one token's K and V, all layers together, in types that `check_kv_formats` lets pass."""
    per_head = kv_format(k_type).row_bytes(hyper.head_dim) + kv_format(v_type).row_bytes(hyper.value_dim)
    return len(hyper.attention_layers) * hyper.n_head_kv * per_head
