"""Rotation, K/V writes and attention on CUDA: the kernels rope_store, attention*, for one model's heads.

Every method enqueues on a stream and returns; what changes from call to call is read on the device from the
packed batch (`cuda_batch`), so that launches can be captured once and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.ops import cuda_attention_args as arguments
from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.cuda_attention_shape import KV_TYPE_NUMBERS, AttentionShape
from slotd.daemon.ops.cuda_batch import (
    NARROW_QUERIES,
    PROMPT_BLOCK_ROWS,
    WIDE_QUERIES,
    BatchLayout,
    HostBatch,
    is_wide,
)
from slotd.daemon.ops.interface import RopeStyle
from slotd.daemon.ops.kernels import Kernel, kernel
from slotd.daemon.ops.rotation import GROUP
from slotd.protocol.errors import ConfigError

#: Pages of a segment: the stride from one layer of a page to the next counts them.
SEGMENT_PAGES = 16

THREADS = 128

_PAIRS = {"interleaved": 0, "half": 1}

#: Tiles are worked on one by one, not split by split, while that takes so many rounds of all blocks or fewer.
SINGLE_ROUNDS = 2

#: Blocks of a multiprocessor that the registers allow, by kernel, and with eight warps instead of four.
_NARROW_BLOCKS, _WIDE_BLOCKS = 3, 2
_NARROW_BLOCKS_256, _WIDE_BLOCKS_256 = 2, 1

#: K/V types that have a narrow kernel of 256 numbers to themselves.
_TYPES_256 = frozenset({"q8_0", "tq3_0"})

#: Static shared memory and what the driver keeps for itself, bytes for each block.
_SHARED_OVERHEAD = 2048

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Of one device: multiprocessors, and shared memory of one and of a block, bytes."""

    multiprocessors: int
    shared_per_multiprocessor: int
    shared_per_block: int

    @classmethod
    def of(cls, properties: Mapping[str, Any]) -> DeviceLimits:
        """From what cudaGetDeviceProperties says."""
        return cls(
            multiprocessors=int(properties["multiProcessorCount"]),
            shared_per_multiprocessor=int(properties["sharedMemPerMultiprocessor"]),
            shared_per_block=int(properties["sharedMemPerBlockOptin"]),
        )


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A packed call on the device.

    Attributes:
        layout: of the buffer.
        address: of the buffer.
        n_rows: rows that are launched: the bucket of a step, the rows of a prompt piece.
        n_entries: blocks of a prompt piece; a step reads its number of entries on the device.
    """

    layout: BatchLayout
    address: int
    n_rows: int
    n_entries: int = 0

    def at(self, name: str) -> int:
        """Address of an array."""
        return self.layout.address(self.address, name)

    @property
    def visible(self) -> int:
        """Address of the last place that each row sees: its own position, but for rows of blocks."""
        return self.at("visible" if self.layout.blocks else "positions")


@dataclass(frozen=True, slots=True)
class StepSpace:
    """What step attention needs beside its inputs: one block of device memory, used anew by every layer."""

    part_weights: int
    part_sums: int

    @staticmethod
    def nbytes(layout: BatchLayout, shape: AttentionShape) -> int:
        """Bytes for steps of a layout."""
        return _offsets(layout, shape)[-1]

    @classmethod
    def at(cls, address: int, layout: BatchLayout, shape: AttentionShape) -> StepSpace:
        """The parts of a block of memory at `address`."""
        weights, sums, _ = _offsets(layout, shape)
        return cls(address + weights, address + sums)


def _offsets(layout: BatchLayout, shape: AttentionShape) -> tuple[int, int, int]:
    weights = -(-layout.most_parts * shape.n_head * 8 // 256) * 256
    sums = layout.most_parts * shape.n_head * shape.value_dim * 4
    return 0, weights, weights + sums


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query and key head before the rotation: addresses of float32 [head_dim] weights."""

    q: int
    k: int
    eps: float


class CudaAttention:
    """Launches for one model.

    Args:
        shape: its heads and K/V types.
        limits: of the device.
        find: kernel by name.

    Raises:
        ConfigError: heads that no kernel takes, or that the device has too little shared memory for.
    """

    def __init__(
        self, shape: AttentionShape, limits: DeviceLimits, find: Callable[[str], Kernel] = kernel
    ) -> None:
        shape.check()
        self.shape = shape
        self._limits = limits
        self._find = find
        self._kind = "f16" if shape.k_type == shape.v_type == "f16" else "any"
        self._k_layer_bytes = SEGMENT_PAGES * shape.n_head_kv * TILE * shape.k_row_bytes
        self._v_layer_bytes = SEGMENT_PAGES * shape.n_head_kv * TILE * shape.v_row_bytes
        if not shape.plain:  # what every request needs
            self.step_resources(wide=False)
            self.prompt_bytes()

    def rope_store(
        self,
        layer: int,
        qkv: int,
        batch: DeviceBatch,
        angles: int,
        dims: int,
        style: RopeStyle,
        norms: HeadNorms | None = None,
        stream: Any = None,
    ) -> None:
        """Rotate q (in place) and k of every row, and store k and v at the rows' places.

        With keys in tq3_0, q is left rotated as they are (`rotation`) after its positions.

        Args:
            qkv: address of float32 [rows, qkv_width]: query heads (and gates), key heads, value heads.
            angles: address of float32 [positions, dims / 2, 2], cos and sin.
            dims: numbers of a head that turn.
        """
        shape = self.shape
        args = self._rotated(batch, angles, dims, style, norms)
        args.qkv, args.stride, args.width = qkv, shape.qkv_width, shape.qkv_width
        args.n_head, args.q_head = shape.n_head, shape.query_stride
        args.k_layer, args.v_layer = layer * self._k_layer_bytes, layer * self._v_layer_bytes
        blocks = math.ceil((shape.n_head + 2 * shape.n_head_kv) / (THREADS // 32))
        self._find("rope_store").launch((blocks, batch.n_rows), THREADS, (args,), stream=stream, pdl=True)

    def store_context(
        self,
        kv: int,
        n_layer: int,
        batch: DeviceBatch,
        angles: int,
        dims: int,
        style: RopeStyle,
        norms: HeadNorms,
        stream: Any = None,
    ) -> None:
        """As rope_store, of keys and values alone and of all layers at once.

        Args:
            kv: address of float32 [rows, n_layer, key heads and value heads].
            norms: of the keys, for each layer one behind the other.
        """
        shape = self.shape
        args = self._rotated(batch, angles, dims, style, norms)
        width = shape.n_head_kv * (shape.head_dim + shape.value_dim)
        args.qkv, args.stride, args.width = kv, n_layer * width, width
        args.k_step, args.v_step = self._k_layer_bytes, self._v_layer_bytes
        grid = (math.ceil(2 * shape.n_head_kv / (THREADS // 32)), batch.n_rows, n_layer)
        self._find("rope_store").launch(grid, THREADS, (args,), stream=stream, pdl=True)

    def _rotated(
        self, batch: DeviceBatch, angles: int, dims: int, style: RopeStyle, norms: HeadNorms | None
    ) -> arguments.RopeStore:
        """What both say of rows and heads."""
        shape = self.shape
        return arguments.RopeStore(
            positions=batch.at("positions"),
            write_k=batch.at("write_k"),
            write_v=batch.at("write_v"),
            angles=angles,
            q_norm=norms.q if norms else 0,
            k_norm=norms.k if norms else 0,
            n_head_kv=shape.n_head_kv,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            dims=dims,
            pairs=_PAIRS[style],
            k_type=KV_TYPE_NUMBERS[shape.k_type],
            v_type=KV_TYPE_NUMBERS[shape.v_type],
            eps=norms.eps if norms else 0.0,
        )

    def attend(
        self,
        layer: int,
        q: int,
        out: int,
        batch: DeviceBatch,
        scale: float,
        space: StepSpace | None = None,
        stream: Any = None,
    ) -> None:
        """softmax(scale q K^T) V of every row over what it may see.

        Args:
            q: address of the rows of q, k and v, rotated.
            out: address of float32 [rows, n_head * value_dim].
            space: for a step, made for the batch's layout.
        """
        if self.shape.plain:
            self.attention_plain(layer, q, out, batch, scale, stream)
        elif batch.layout.step:
            if space is None:
                raise ValueError("step attention without a StepSpace")
            self.attention(layer, q, out, batch, scale, space, stream)
        else:
            self.attention_prompt(layer, q, out, batch, scale, stream)
        if self.shape.v_type == "tq3_0":
            self.rotation(out, batch, stream)

    def rotation(self, out: int, batch: DeviceBatch, stream: Any = None) -> None:
        """Rotate back what attention gave of rotated values (`rotation`). out: as of attend, in place."""
        n_groups = self.shape.n_head * self.shape.value_dim // GROUP
        args = arguments.Rotation(out, batch.at("positions"), n_groups)
        blocks = math.ceil(n_groups / (THREADS // 32))
        self._find("rotation_back").launch((blocks, batch.n_rows), THREADS, (args,), stream=stream, pdl=True)

    def attention(
        self,
        layer: int,
        q: int,
        out: int,
        batch: DeviceBatch,
        scale: float,
        space: StepSpace,
        stream: Any = None,
    ) -> None:
        """Of step rows, on tensor cores. Arguments as for attend."""
        shape, layout = self.shape, batch.layout
        wide = is_wide(layout.rows, shape.per_group)
        n_stages, shared, per_multiprocessor = self.step_resources(wide)
        args = arguments.Step(
            heads=self._heads(layer, q, out, batch, scale),
            entries=batch.at("entries"),
            n_entries=batch.at("counts") + 4,
            ancestors=batch.at("ancestors"),
            positions=batch.visible,
            first_part=batch.at("first_part"),
            split_parts=batch.at("split_parts"),
            first_single=batch.at("first_single"),
            part_sums=space.part_sums,
            part_weights=space.part_weights,
            n_stages=n_stages,
        )
        grid = min(layout.entries * shape.n_head_kv, self._limits.multiprocessors * per_multiprocessor)
        step = self._kernel("attention_wide" if wide else "attention_narrow", self._kind)
        step.launch(grid, shape.threads, (args,), smem=shared, stream=stream, pdl=True)
        combine = self._kernel("attention_combine")
        grid_of_results = (shape.value_dim // 32, shape.n_head, layout.rows)
        combine.launch(grid_of_results, THREADS, (args,), stream=stream, pdl=True)

    def step_layout(self, rows: int, pages: int, context: int) -> BatchLayout:
        """The batch of steps of up to `rows` rows; the longest sequence has up to `context` tokens."""
        blocks = self.step_resources(is_wide(rows, self.shape.per_group))[2] * self._limits.multiprocessors
        most_single = SINGLE_ROUNDS * blocks // self.shape.n_head_kv
        return BatchLayout.for_steps(rows, pages, context, self.shape.per_group, most_single)

    def host_batch(self, layout: BatchLayout, buffer: npt.NDArray[np.uint8]) -> HostBatch:
        """A host buffer to fill with calls of this model; made once for a buffer."""
        shape = self.shape
        return HostBatch(layout, layout.views(buffer), shape.k_row_bytes, shape.v_row_bytes, shape.per_group)

    def step_resources(self, wide: bool) -> tuple[int, int, int]:
        """Of a step kernel: stages of its pipeline, bytes of dynamic shared memory, blocks an SM."""
        shape = self.shape
        narrow_most, most = _NARROW_BLOCKS, _WIDE_BLOCKS
        if shape.head_dim == 256:
            narrow_most, most = _NARROW_BLOCKS_256, _WIDE_BLOCKS_256
        queries = WIDE_QUERIES
        if not wide:
            queries, most = NARROW_QUERIES, narrow_most
        fixed = queries * (2 * shape.head_dim + 4) + NARROW_QUERIES * (2 * TILE + 4 * shape.threads // 32)
        fixed += shape.unpacked_bytes(keys=wide or shape.head_dim != 256)
        stage = TILE * (shape.k_row_bytes + shape.v_row_bytes)
        for blocks in range(most, 0, -1):
            budget = self._limits.shared_per_multiprocessor // blocks - _SHARED_OVERHEAD
            budget = min(budget, self._limits.shared_per_block)
            n_stages = min(4, (budget - fixed) // stage)
            if n_stages >= 2:
                return n_stages, fixed + n_stages * stage, blocks
        raise ConfigError(
            f"step attention, heads of {shape.head_dim}: {fixed + 2 * stage} bytes of shared memory a block, "
            f"the device has {self._limits.shared_per_block}"
        )

    def attention_prompt(
        self, layer: int, q: int, out: int, batch: DeviceBatch, scale: float, stream: Any = None
    ) -> None:
        """Of prompt rows, on tensor cores. Arguments as for attend."""
        shape = self.shape
        args = arguments.Prompt(
            heads=self._heads(layer, q, out, batch, scale),
            blocks=batch.at("entries"),
        )
        grid = (shape.n_head, batch.n_entries)
        prompt = self._kernel("attention_prompt", self._kind)
        prompt.launch(grid, shape.threads, (args,), smem=self.prompt_bytes(), stream=stream, pdl=True)

    def prompt_bytes(self) -> int:
        """Dynamic shared memory of a block of prompt attention. Raises ConfigError: the device has less."""
        shape = self.shape
        shared = PROMPT_BLOCK_ROWS * 2 * shape.head_dim + 2 * TILE * (shape.k_row_bytes + shape.v_row_bytes)
        shared += shape.unpacked_bytes()
        if shared > self._limits.shared_per_block:
            raise ConfigError(
                f"prompt attention, heads of {shape.head_dim}: {shared} bytes of shared memory a block, "
                f"the device has {self._limits.shared_per_block}"
            )
        return shared

    def attention_plain(
        self, layer: int, q: int, out: int, batch: DeviceBatch, scale: float, stream: Any = None
    ) -> None:
        """Of any rows, in float32. Arguments as for attend."""
        shape = self.shape
        args = arguments.Plain(
            heads=self._heads(layer, q, out, batch, scale),
            positions=batch.visible,
            sequence=batch.at("sequence"),
            first_page=batch.at("first_page"),
            committed=batch.at("committed"),
            ancestors=batch.at("ancestors") if batch.layout.step else 0,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
        )
        grid = (shape.n_head, batch.n_rows)
        self._find("attention_plain").launch(grid, TILE, (args,), stream=stream, pdl=True)

    def _kernel(self, what: str, kind: str = "") -> Kernel:
        if self.shape.head_dim == 256:
            return self.attention_256(what.removeprefix("attention_"))
        return self._find("_".join(filter(None, (what, kind, str(self.shape.head_dim)))))

    def attention_256(self, what: str) -> Kernel:
        """narrow, wide, combine or prompt for heads of 256 numbers."""
        if what == "narrow":
            alike = self.shape.k_type == self.shape.v_type and self.shape.k_type in _TYPES_256
            what = f"narrow_{self.shape.k_type if alike else 'any'}"
        return self._find(f"attention_256_{what}")

    def _heads(self, layer: int, q: int, out: int, batch: DeviceBatch, scale: float) -> arguments.Heads:
        shape = self.shape
        return arguments.Heads(
            q=q,
            out=out,
            page_k=batch.at("page_k"),
            page_v=batch.at("page_v"),
            k_layer=layer * self._k_layer_bytes,
            v_layer=layer * self._v_layer_bytes,
            q_stride=shape.qkv_width,
            q_head=shape.query_stride,
            n_head=shape.n_head,
            n_head_kv=shape.n_head_kv,
            k_type=KV_TYPE_NUMBERS[shape.k_type],
            v_type=KV_TYPE_NUMBERS[shape.v_type],
            factor=scale * LOG2_E,
        )
