"""What the config.json of a draft's checkpoint says, and the keys of a GGUF file that say the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from slotd.daemon.weights.safetensors_file import Checkpoint
from slotd.protocol.errors import ModelError

ARCH = "dflash-draft"

#: Largest number that a size may be: products of three stay below 2**63.
LIMIT = 2**21

Value = TypeVar("Value", int, float, bool, str)


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The numbers of a draft.

    Attributes:
        kind: ``DFlash``, ``DFlash2`` or ``DSpark``.
        hidden, layers, ff, heads, kv_heads, head_dim, vocab: as of a model.
        head_rows: rows of an output matrix of its own: fewer than `vocab` when there is a map (d2t).
        target_layers: whose outputs it reads, from 0 on.
        conv_kernel, conv_group, selector_rank: of DFlash2, else 0.
        markov_rank, confidence_dim: of DSpark, else 0; no confidence: 0.
        keys: of the GGUF file.
    """

    kind: str
    hidden: int
    layers: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    head_rows: int
    target_layers: tuple[int, ...]
    conv_kernel: int
    conv_group: int
    selector_rank: int
    markov_rank: int
    confidence_dim: int
    keys: Mapping[str, Any]


class _Values:
    """The values of a config: what drafts have of their own may stand below `dflash_config`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path / "config.json"
        own = checkpoint.config.get("dflash_config") or {}
        if not isinstance(own, dict):
            raise ModelError(f"{self.path}: dflash_config is not an object")
        rope = checkpoint.config.get("rope_parameters") or checkpoint.config.get("rope_scaling") or {}
        places = (rope if isinstance(rope, dict) else {}, checkpoint.config, own)
        self._values = {name: value for place in places for name, value in place.items() if value is not None}

    def get(self, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """Raises ModelError: absent without default, or of another type."""
        value = self._values.get(name, default)
        if value is None:
            raise ModelError(f"{self.path}: {name} is missing")
        if type(value) is not kind:
            raise ModelError(f"{self.path}: {name} is {value!r}, it must be of type {kind.__name__}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """From 1 to LIMIT. Raises ModelError."""
        value = self.get(name, int, default)
        if not 1 <= value <= LIMIT:
            raise ModelError(f"{self.path}: {name} is {value}, the limit is 1 to {LIMIT}")
        return value

    def positive(self, name: str) -> float:
        """A number above 0. Raises ModelError."""
        whole = type(self._values.get(name)) is int
        value = float(self.get(name, int)) if whole else self.get(name, float)
        if not 0 < value < math.inf:
            raise ModelError(f"{self.path}: {name} is {value}, it must be above 0")
        return value

    def has(self, name: str) -> bool:
        return name in self._values

    def items(self, name: str, kind: type[Value]) -> list[Value]:
        """A list. Raises ModelError: not there, or with something of another type in it."""
        value = self._values.get(name)
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise ModelError(f"{self.path}: {name} must be a list of type {kind.__name__}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Raises ModelError when it is there and none of these."""
        value = self._values.get(name)
        if value is not None and value not in allowed:
            raise ModelError(f"{self.path}: {name} is {value!r}, only {allowed[0]!r} is supported")


def read_draft_config(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> DraftConfig:
    """The config of a checkpoint whose tensors have these shapes.

    Raises:
        ModelError: a key is missing, of the wrong type, or asks for what drafts in GGUF files cannot be.
    """
    values = _Values(checkpoint)
    values.only("attention_bias", False)
    values.only("hidden_act", "silu")
    for name in ("rope_type", "type"):
        values.only(name, "default", "none")
    values.only("partial_rotary_factor", 1, 1.0)
    values.only("markov_head_type", "vanilla")
    if values.has("quantization_config"):
        raise ModelError(f"{values.path}: quantization_config: convert the checkpoint that is not quantised")
    kind = _kind(shapes)
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    confidence = shapes.get("confidence_head.proj.weight", (0, 0))
    vocab = values.size("vocab_size")
    config = DraftConfig(
        kind=kind,
        hidden=hidden,
        layers=values.size("num_hidden_layers"),
        ff=values.size("intermediate_size"),
        heads=heads,
        kv_heads=values.size("num_key_value_heads", heads),
        head_dim=values.size("head_dim", max(1, hidden // heads)),
        vocab=vocab,
        head_rows=shapes["d2t"][0] if shapes.get("d2t") else vocab,
        target_layers=_target_layers(values, shapes, hidden),
        conv_kernel=values.size("conv_kernel_size") if kind == "DFlash2" else 0,
        conv_group=values.size("conv_group_size") if kind == "DFlash2" else 0,
        selector_rank=values.size("selector_rank") if kind == "DFlash2" else 0,
        markov_rank=values.size("markov_rank") if kind == "DSpark" else 0,
        confidence_dim=confidence[-1] if kind == "DSpark" else 0,
        keys={},
    )
    if config.conv_group and hidden % config.conv_group:
        raise ModelError(f"{values.path}: conv_group_size {config.conv_group} does not divide {hidden}")
    return replace(config, keys=_keys(values, config))


def _kind(shapes: Mapping[str, tuple[int, ...]]) -> str:
    if any(name.startswith("candidate_selector.") for name in shapes):
        return "DFlash2"
    return "DSpark" if any(name.startswith("markov_head.") for name in shapes) else "DFlash"


def _target_layers(values: _Values, shapes: Mapping[str, tuple[int, ...]], hidden: int) -> tuple[int, ...]:
    """Those that the config names; else evenly spaced from the second to the third last, one: the middle."""
    columns = shapes.get("fc.weight", (0, 0))[-1]
    n = columns // hidden
    if n == 0 or columns % hidden:
        raise ModelError(f"{values.path}: tensor fc.weight is missing, or not {hidden} wide for each layer")
    if values.has("target_layer_ids"):
        layers = tuple(values.items("target_layer_ids", int))
        if len(layers) != n or len(set(layers)) != n or min(layers) < 0:
            found = list(layers)
            raise ModelError(f"{values.path}: target_layer_ids is {found}, it must be {n} layers, from 0 on")
        return layers
    n_target = values.size("num_target_layers")
    if n == 1:
        return (n_target // 2,)
    return tuple(round(1 + i * (n_target - 4) / (n - 1)) for i in range(n))


def _keys(values: _Values, config: DraftConfig) -> dict[str, Any]:
    block = values.size("block_size")
    mask = values.get("mask_token_id", int)
    if block < 2:
        raise ModelError(f"{values.path}: block_size is {block}, it must be 2 or more")
    if not 0 <= mask < config.vocab:
        raise ModelError(f"{values.path}: mask_token_id is {mask}, the vocabulary has {config.vocab} tokens")
    keys: dict[str, Any] = {
        "context_length": values.size("max_position_embeddings"),
        "embedding_length": config.hidden,
        "block_count": config.layers,
        "feed_forward_length": config.ff,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": values.positive("rms_norm_eps"),
        "rope.freq_base": values.positive("rope_theta"),
        "vocab_size": config.vocab,
        "dflash.n_target_layers": len(config.target_layers),
        "dflash.block_size": block,
        "dflash.mask_token_id": mask,
        "dflash.target_layer_ids": list(config.target_layers),
    }
    keys |= _window(values, config.layers)
    for name, key in (("is_causal", "attention.causal"), ("sample_from_anchor", "dflash.sample_from_anchor"),
                      ("context_kv_layer_norm", "dflash.context_kv_layer_norm")):  # fmt: skip
        if values.has(name):
            keys[key] = values.get(name, bool)
    for name, key in (("final_logit_softcapping", "final_logit_softcapping"),
                      ("output_multiplier", "logit_scale"),
                      ("input_embedding_scale", "embedding_scale")):  # fmt: skip
        if values.has(name):
            keys[key] = values.positive(name)
    if config.kind == "DFlash2":
        keys |= {
            "dflash.conv_kernel_size": config.conv_kernel,
            "dflash.conv_group_size": config.conv_group,
            "dflash.selector_rank": config.selector_rank,
            "dflash.selector_top_k": values.size("selector_top_k"),
        }
    if config.kind == "DSpark":
        keys |= {
            "dflash.dspark.enabled": 1,
            "dflash.dspark.markov_rank": config.markov_rank,
            "dflash.dspark.vocab_size": config.head_rows,
            "dflash.dspark.confidence.enabled": int(config.confidence_dim > 0),
            "dflash.dspark.confidence_dim": config.confidence_dim,
        }
    return {f"{ARCH}.{key}": value for key, value in keys.items()}


def _window(values: _Values, layers: int) -> dict[str, Any]:
    if not values.has("layer_types"):
        return {}
    types = values.items("layer_types", str)
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != layers:
        raise ModelError(f"{values.path}: layer_types is {types}, it must name {layers} known layers")
    if "sliding_attention" not in types:
        return {}
    return {
        "attention.sliding_window": values.size("sliding_window"),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
    }
