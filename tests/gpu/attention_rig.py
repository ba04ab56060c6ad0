"""Sequences with random K and V on the device and, byte for byte the same, in the NumPy page store.

Places that no token was written to hold 0xFF bytes on the device: NaN in every type that can say it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slotd.daemon.kv.batches import build_batch
from slotd.daemon.kv.element_types import kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES, pages_for
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceBatch, DeviceLimits, StepSpace
from slotd.daemon.ops.cuda_attention_shape import AttentionShape
from slotd.daemon.ops.cuda_batch import BatchLayout, pack_prompt, pack_step
from slotd.daemon.ops.kv_blocks import stored_bytes, write_stored
from slotd.daemon.ops.numpy_ops import NumpyOps
from slotd.daemon.ops.rotation import rotate_unmetered
from slotd.daemon.rows import Rows
from slotd.daemon.sequence import Sequence

N_LAYER = 2
LAYER = 1  # the layer that is looked at: the other one's bytes differ
BAND = 256


class CupyDevice:
    """Blocks of device memory between guard bands, and the kernels."""

    def __init__(self) -> None:
        import cupy

        from slotd.daemon.ops.kernels import kernel

        self.find = kernel
        self.limits = DeviceLimits.of(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id))

    def upload(self, data: np.ndarray) -> Any:
        import cupy

        flat = np.frombuffer(data.tobytes(), np.uint8)
        band = np.full(BAND, 0xA5, np.uint8)
        return cupy.asarray(np.concatenate([band, flat, band]))

    def address(self, block: Any) -> int:
        return int(block.data.ptr) + BAND

    def download(self, block: Any, dtype: Any = np.uint8) -> np.ndarray:
        """The content; raises AssertionError when a guard band has changed."""
        host = block.get()
        assert (host[:BAND] == 0xA5).all(), "written in front of a block"
        assert (host[-BAND:] == 0xA5).all(), "written behind a block"
        return host[BAND:-BAND].view(dtype)


@dataclass
class Timeline:
    """K and V of layer LAYER by token: float32 [tokens, n_head_kv, dim] each."""

    k: np.ndarray
    v: np.ndarray

    @classmethod
    def random(cls, shape: AttentionShape, n: int, rng: np.random.Generator, spread: float = 1.0) -> Timeline:
        return cls(
            (rng.standard_normal((n, shape.n_head_kv, shape.head_dim)) * spread).astype(np.float32),
            rng.standard_normal((n, shape.n_head_kv, shape.value_dim)).astype(np.float32),
        )

    def take(self, tokens: SequenceOf[int] | slice) -> Timeline:
        return Timeline(self.k[tokens], self.v[tokens])

    def __add__(self, other: Timeline) -> Timeline:
        return Timeline(np.concatenate([self.k, other.k]), np.concatenate([self.v, other.v]))

    def __len__(self) -> int:
        return len(self.k)


@dataclass
class Call:
    """Rows of one sequence: what is committed, the rows' own K and V, queries, parents (None: a chain)."""

    committed: Timeline
    rows: Timeline
    q: np.ndarray
    parents: list[int] | None = None


@dataclass
class Rig:
    """Page store, device and kernels for one shape; most_single: as in BatchLayout."""

    shape: AttentionShape
    device: Any
    seed: int = 0
    most_single: int = 200
    attention: CudaAttention = field(init=False)

    def __post_init__(self) -> None:
        self.attention = CudaAttention(self.shape, self.device.limits, self.device.find)

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def run(
        self, calls: list[Call], step: bool = True, bucket: int | None = None, context: int | None = None,
        placed: Placed | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Attention of all rows of the calls in one launch: float32 [rows, n_head * value_dim]."""
        placed = Placed(self, calls) if placed is None else placed
        layout, batch, host = placed.pack(step, bucket, context)
        q = np.full((layout.rows if step else len(placed.rows), self.shape.qkv_width), np.nan, np.float32)
        n_q = self.shape.n_head * self.shape.query_stride
        by_head = q[:, :n_q].reshape(len(q), self.shape.n_head, -1)[..., : self.shape.head_dim]
        rows_q = np.concatenate([call.q for call in calls])
        by_head[: len(placed.rows)] = rotate_unmetered(rows_q) if self.shape.k_type == "tq3_0" else rows_q
        by_head[len(placed.rows) :] = 0
        out = np.full((len(q), self.shape.n_head * self.shape.value_dim), np.nan, np.float32)
        blocks = [self.device.upload(x) for x in (q, out)]
        space, _held = self.space(layout) if step else (None, None)
        self.attention.attend(
            LAYER,
            self.device.address(blocks[0]),
            self.device.address(blocks[1]),
            batch,
            self.scale,
            space,
        )
        result = self.device.download(blocks[1], np.float32).reshape(out.shape)
        assert (
            self.device.download(blocks[0], np.float32).view(np.uint32) == q.reshape(-1).view(np.uint32)
        ).all()
        assert (self.device.download(host) == placed.buffer[: layout.nbytes]).all(), (
            "the batch was written to"
        )
        placed.check_pages()
        assert np.isnan(result[len(placed.rows) :]).all(), "padding rows were written"
        return result[: len(placed.rows)].copy()

    def space(self, layout: BatchLayout) -> tuple[StepSpace, Any]:
        space = np.full(StepSpace.nbytes(layout, self.shape), 0xFF, np.uint8)
        block = self.device.upload(space)
        return StepSpace.at(self.device.address(block), layout, self.shape), block

    def expected(self, calls: list[Call]) -> np.ndarray:
        """The NumPy backend's answer."""
        placed = Placed(self, calls)
        ops = NumpyOps(placed.memory)
        q = np.concatenate([call.q for call in calls]).copy()
        return ops.attend(LAYER, q, build_batch(placed.rows, placed.store), self.scale)


class Placed:
    """Calls with their tokens in pages, on the host and on the device."""

    def __init__(self, rig: Rig, calls: list[Call]) -> None:
        shape, rng = rig.shape, np.random.default_rng(rig.seed)
        self.rig = rig
        self.memory = DeviceMemory()
        types = kv_type(shape.k_type), kv_type(shape.v_type)
        kv_shape = KvShape(N_LAYER, shape.n_head_kv, shape.head_dim, shape.value_dim, *types)
        self.store = PageStore(self.memory, kv_shape)
        counts = [pages_for(len(call.committed) + len(call.rows)) for call in calls]
        pages = rng.permutation(self.store.allocate(sum(counts) + 3))  # three pages are nobody's
        self.segments = [self.store._segments[n] for n in sorted(self.store._segments)]
        for segment in self.segments:
            stored_bytes(segment.k)[...] = 0
            stored_bytes(segment.v)[...] = 0
        used = [np.zeros((SEGMENT_PAGES, PAGE), np.bool_) for _ in self.segments]
        parts = []
        for call, count in zip(calls, counts, strict=True):
            sequence = Sequence()
            sequence.pages, pages = pages[:count].tolist(), pages[count:]
            sequence.tokens = array("i", range(len(call.committed)))
            timeline = call.committed + call.rows
            for place in range(len(timeline)):
                number, index = divmod(sequence.pages[place // PAGE], SEGMENT_PAGES)
                used[number][index, place % PAGE] = True
            for first in range(0, len(timeline), PAGE):
                number, index = divmod(sequence.pages[first // PAGE], SEGMENT_PAGES)
                segment, part = self.segments[number], timeline.take(slice(first, first + PAGE))
                for plane, x in ((segment.k, part.k), (segment.v, part.v)):
                    write_stored(x.swapaxes(0, 1), plane[LAYER, index, :, : len(part)])
                    write_stored(np.full_like(x.swapaxes(0, 1), 7), plane[1 - LAYER, index, :, : len(part)])
            tokens = list(range(len(call.rows)))
            if call.parents is None:
                parts.append(Rows.chain(sequence, tokens, logits="all"))
            else:
                parts.append(Rows.tree(sequence, tokens, call.parents))
        self.rows = Rows.join(parts)
        self.images = [
            self._image(segment, places) for segment, places in zip(self.segments, used, strict=True)
        ]
        self.blocks = [rig.device.upload(image) for image in self.images]

    @staticmethod
    def _image(segment: Any, used: np.ndarray) -> np.ndarray:
        """The bytes of a segment, K plane then V plane, unwritten places poisoned."""
        planes = []
        for plane in (segment.k, segment.v):
            content = stored_bytes(plane).copy()
            poisoned = np.full_like(content, 0xFF)
            poisoned.swapaxes(2, 3)[:, used] = content.swapaxes(2, 3)[:, used]
            planes.append(poisoned.reshape(-1))
        return np.concatenate(planes)

    def check_pages(self) -> None:
        """The pages hold what was put there."""
        for block, image in zip(self.blocks, self.images, strict=True):
            assert (self.rig.device.download(block) == image).all(), "attention wrote into a page"

    def addresses(self, sequence: Sequence) -> np.ndarray:
        shape = self.rig.shape
        k_page, v_page = (shape.n_head_kv * PAGE * n for n in (shape.k_row_bytes, shape.v_row_bytes))
        k, v = [], []
        for page in sequence.pages:
            number, index = divmod(page, SEGMENT_PAGES)
            base = self.rig.device.address(self.blocks[number])
            k.append(base + index * k_page)
            v.append(base + N_LAYER * SEGMENT_PAGES * k_page + index * v_page)
        return np.array([k, v], np.uint64)

    def pack(
        self, step: bool, bucket: int | None = None, context: int | None = None
    ) -> tuple[BatchLayout, DeviceBatch, Any]:
        """The call in a buffer on the device."""
        shape, rows = self.rig.shape, self.rows
        addresses = [self.addresses(sequence) for sequence in rows.sequences]
        n_pages = sum(table.shape[1] for table in addresses)
        context = context or max(len(sequence.pages) for sequence in rows.sequences) * PAGE
        if step:
            layout = BatchLayout.for_steps(
                bucket or len(rows), n_pages, context, shape.per_group, self.rig.most_single
            )
        else:
            layout = BatchLayout.for_prompt(len(rows), n_pages, context)
        self.buffer = np.full(layout.nbytes, 0xEE, np.uint8)
        host = self.rig.attention.host_batch(layout, self.buffer)
        packed = (pack_step if step else pack_prompt)(host, rows, addresses)
        block = self.rig.device.upload(self.buffer)
        n_rows = layout.rows if step else len(rows)
        return layout, DeviceBatch(layout, self.rig.device.address(block), n_rows, packed.n_entries), block


def queries(shape: AttentionShape, n: int, rng: np.random.Generator, spread: float = 1.0) -> np.ndarray:
    """float32 [n, n_head, head_dim]."""
    return (rng.standard_normal((n, shape.n_head, shape.head_dim)) * spread).astype(np.float32)


def random_parents(n: int, rng: np.random.Generator) -> list[int]:
    """A tree of n rows: every row's parent is an earlier one or, now and then, the committed end."""
    return [
        -1 if row == 0 or rng.random() < 0.1 else int(rng.integers(max(0, row - 5), row)) for row in range(n)
    ]


def path_to(row: int, parents: list[int]) -> list[int]:
    """The rows from the committed end to `row`, itself included."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]
