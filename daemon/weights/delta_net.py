"""Hyper-parameters and tensors of gated DeltaNet layers, and which layers of a model they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slotd.daemon.weights.keys import Keys
from slotd.protocol.errors import ModelError

#: Every so many layers one has attention, when a file does not say it.
DEFAULT_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The numbers of all DeltaNet layers of a model.

    Attributes:
        layers: which layers they are, ascending.
        conv_kernel: K, taps of the short convolution.
        state_size: S, width of a key, query and value head.
        n_key_heads: query and key heads; divides n_value_heads.
        n_value_heads: value heads; head j reads query/key head j % n_key_heads.
    """

    layers: tuple[int, ...]
    conv_kernel: int
    state_size: int
    n_key_heads: int
    n_value_heads: int

    @property
    def key_width(self) -> int:
        """Numbers of all query heads, and of all key heads."""
        return self.n_key_heads * self.state_size

    @property
    def value_width(self) -> int:
        """Numbers of all value heads."""
        return self.n_value_heads * self.state_size

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all layers together, in float32: inputs of the convolution, and matrices."""
        matrices = self.n_value_heads * self.state_size * self.state_size
        return 4 * len(self.layers) * ((self.conv_kernel - 1) * self.channels + matrices)


def read_delta_net(keys: Keys, n_layer: int, n_nextn: int) -> DeltaNet:
    """The DeltaNet layers of a file whose first n_layer blocks are computed.

    Raises:
        ModelError: a key is missing, out of range, or does not fit the others.
    """
    state_size, n_value_heads = keys.positive("ssm.state_size"), keys.positive("ssm.time_step_rank")
    n_key_heads, inner = keys.positive("ssm.group_count"), keys.positive("ssm.inner_size")
    if n_value_heads % n_key_heads:
        why = f"which does not divide ssm.time_step_rank {n_value_heads}"
        raise keys.refuse("ssm.group_count", n_key_heads, why)
    if inner != n_value_heads * state_size:
        why = f"it must be {n_value_heads * state_size} (ssm.time_step_rank * ssm.state_size)"
        raise keys.refuse("ssm.inner_size", inner, why)
    return DeltaNet(
        layers=_recurrent_layers(keys, n_layer, n_nextn),
        conv_kernel=keys.positive("ssm.conv_kernel"),
        state_size=state_size,
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
    )


def _recurrent_layers(keys: Keys, n_layer: int, n_nextn: int) -> tuple[int, ...]:
    suffix = "attention.recurrent_layers"
    named = keys.header.metadata.get(f"{keys.arch}.{suffix}")
    if named is None:
        interval = keys.positive("full_attention_interval", DEFAULT_INTERVAL)
        return _some(keys, n_layer, [layer for layer in range(n_layer) if (layer + 1) % interval])
    if not isinstance(named, list) or not all(isinstance(each, bool) for each in named):
        raise ModelError(f"{keys.header.name}: key {keys.arch}.{suffix} must be an array of bools")
    if len(named) != n_layer + n_nextn:
        raise keys.refuse(suffix, f"of {len(named)} values", f"it must have {n_layer + n_nextn}")
    return _some(keys, n_layer, [layer for layer in range(n_layer) if named[layer]])


def _some(keys: Keys, n_layer: int, layers: list[int]) -> tuple[int, ...]:
    """Positions are counted by the K/V of attention layers, so at least one layer must have some."""
    if not 0 < len(layers) < n_layer:
        raise ModelError(
            f"{keys.header.name}: {len(layers)} of {n_layer} layers are recurrent, "
            f"{keys.arch} needs some of both kinds"
        )
    return tuple(layers)


def check_rope_sections(keys: Keys, rope_dims: int) -> None:
    """Three position streams that are equal for text: every pair must follow one of them.

    Raises:
        ModelError: a pair would follow the fourth stream, which does not move.
    """
    suffix = "rope.dimension_sections"
    sections = keys.header.integers(f"{keys.arch}.{suffix}", [])
    for pair in range(rope_dims // 2 if sections else 0):
        if pair % 3 >= len(sections) or pair >= 3 * sections[pair % 3]:
            why = f"which leaves pair {pair} of {rope_dims // 2} without a position"
            raise keys.refuse(suffix, list(sections), why)


def delta_net_tensors(n_embd: int, net: DeltaNet) -> Mapping[str, tuple[int, ...]]:
    """The mixer of one layer: tensor name without ``blk.N.`` -> shape."""
    return {
        "attn_qkv.weight": (n_embd, net.channels),
        "attn_gate.weight": (n_embd, net.value_width),
        "ssm_conv1d.weight": (net.conv_kernel, net.channels),
        "ssm_a": (net.n_value_heads,),
        "ssm_dt.bias": (net.n_value_heads,),
        "ssm_alpha.weight": (n_embd, net.n_value_heads),
        "ssm_beta.weight": (n_embd, net.n_value_heads),
        "ssm_norm.weight": (net.state_size,),
        "ssm_out.weight": (net.value_width, n_embd),
    }
