"""The heads of a model as the CUDA attention kernels see them, and which of them they take."""

from __future__ import annotations

from dataclasses import dataclass

from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.cuda_batch import NARROW_QUERIES
from slotd.protocol.errors import ConfigError

#: Storage types of K and V as the kernels number them.
KV_TYPE_NUMBERS = {
    "f32": 0, "f16": 1, "bf16": 2, "q8_0": 3, "q4_0": 4, "q4_1": 5, "q5_0": 6, "q5_1": 7,
    "tq3_0": 8,
}  # fmt: skip

_ITEM_BYTES = {
    "f32": 4, "f16": 2, "bf16": 2, "q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24,
    "tq3_0": 14,
}  # fmt: skip
_BLOCK_TYPES = frozenset({"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq3_0"})

#: Head widths of the tensor-core kernels; the plain one (f32) takes any up to MOST_PLAIN_DIMS.
HEAD_DIMS = (64, 128, 256)
MOST_PLAIN_DIMS = 256

#: Query heads of a kv head: a row's group has to fit one product.
MOST_PER_GROUP = NARROW_QUERIES


def row_bytes(kv_type: str, dim: int) -> int:
    """Stored bytes of `dim` numbers."""
    return _ITEM_BYTES[kv_type] * (dim // 32 if kv_type in _BLOCK_TYPES else dim)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model and how its K and V are stored.

    gated: behind each query of a row stand head_dim numbers of its gate.
    """

    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    k_type: str
    v_type: str
    gated: bool = False

    @property
    def plain(self) -> bool:
        """Whether the float32 kernel has to do it."""
        return "f32" in (self.k_type, self.v_type)

    @property
    def per_group(self) -> int:
        """Query heads of a kv head."""
        return self.n_head // self.n_head_kv

    @property
    def k_row_bytes(self) -> int:
        """Stored bytes of one head's key."""
        return row_bytes(self.k_type, self.head_dim)

    @property
    def v_row_bytes(self) -> int:
        """Stored bytes of one head's value."""
        return row_bytes(self.v_type, self.value_dim)

    @property
    def query_stride(self) -> int:
        """Numbers from one query of a row to the next."""
        return self.head_dim * (2 if self.gated else 1)

    @property
    def qkv_width(self) -> int:
        """Numbers in a row of q, k and v."""
        return self.n_head * self.query_stride + self.n_head_kv * (self.head_dim + self.value_dim)

    @property
    def threads(self) -> int:
        """Of a block of the tensor-core kernels."""
        return 256 if self.head_dim == 256 else 128

    def unpacked_bytes(self, *, keys: bool = True) -> int:
        """Shared memory for tiles of halves made of quantised values and, where asked for, keys."""
        types = (self.k_type, self.v_type) if keys else (self.v_type,)
        return sum(TILE * 2 * self.head_dim for kv_type in types if kv_type in _BLOCK_TYPES)

    def check(self) -> None:
        """Raises ConfigError for heads that no kernel here takes, with the limit."""
        if self.n_head % self.n_head_kv:
            raise ConfigError(
                f"{self.n_head} query heads do not divide into {self.n_head_kv} key/value heads"
            )
        if self.plain:
            for name, dim in (("key", self.head_dim), ("value", self.value_dim)):
                if dim > MOST_PLAIN_DIMS or dim % 32:
                    raise ConfigError(
                        f"{name} heads of {dim} numbers: CUDA attention with f32 takes multiples of 32 "
                        f"up to {MOST_PLAIN_DIMS}"
                    )
            return
        if self.head_dim != self.value_dim or self.head_dim not in HEAD_DIMS:
            widths = ", ".join(map(str, HEAD_DIMS))
            raise ConfigError(
                f"key heads of {self.head_dim} and value heads of {self.value_dim} numbers: "
                f"CUDA attention takes equal ones, {widths} (or -ctk f32)"
            )
        if self.per_group > MOST_PER_GROUP:
            raise ConfigError(
                f"{self.per_group} query heads for a key/value head: CUDA takes up to {MOST_PER_GROUP}"
            )
