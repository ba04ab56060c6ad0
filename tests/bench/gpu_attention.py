"""Times of step and prompt attention, and of rope_store.

``python -m tests.bench.gpu_attention [step] [prompt] [store] [only=TEXT]``: lines that contain TEXT.

Each time is the median of graph replays. A graph runs over layers that are together larger than the cache,
with programmatic launches as in a step. Printed: us, GB/s of K and V read once, its share of the copy
bandwidth, TFLOP/s of the products.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from slotd.daemon.kv.element_types import KV_TYPES
from slotd.daemon.kv.pages import SEGMENT_PAGES, pages_for
from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceBatch, DeviceLimits, StepSpace
from slotd.daemon.ops.cuda_attention_shape import AttentionShape
from slotd.daemon.ops.cuda_batch import BatchLayout, pack_prompt, pack_step
from slotd.daemon.ops.kv_blocks import stored_bytes, write_stored
from slotd.daemon.rows import Rows
from slotd.daemon.sequence import Sequence
from tests.bench.gpu_linear import median_us
from tests.bench.gpu_report import Report, draft_tree, run_parts

HEADS = {"23b": (40, 8, 128), "smollm": (9, 3, 64), "27b": (24, 4, 256)}

STEP_DEPTHS = (40, 100, 4096, 32768, 131072)
PROMPTS = ((512, 512), (2048, 2048), (2048, 8192), (2048, 32768))

#: Of 27b other depths, and other contexts: as its issue asks for them.
STEP_DEPTHS_27B = (100, 2048, 32768, 131072)
PROMPTS_27B = ((2048, 2048), (2048, 10240), (2048, 34816))
CACHE_BYTES = 200 << 20
MOST_LAYERS = 256


@dataclass
class Pages:
    """K and V of enough layers for one sequence, random numbers."""

    shape: AttentionShape
    n_layer: int
    segments: list[Any]

    @classmethod
    def make(cls, shape: AttentionShape, n_tokens: int) -> Pages:
        row_bytes = shape.n_head_kv * (shape.k_row_bytes + shape.v_row_bytes)
        n_layer = max(1, min(MOST_LAYERS, -(-CACHE_BYTES // (n_tokens * row_bytes))))
        k, v = (random_rows(name, shape.head_dim) for name in (shape.k_type, shape.v_type))
        segments = []
        for _ in range(-(-pages_for(n_tokens) // SEGMENT_PAGES)):
            n_rows = n_layer * SEGMENT_PAGES * shape.n_head_kv * TILE
            segment = cupy.empty(n_rows * (shape.k_row_bytes + shape.v_row_bytes), cupy.uint8)
            fill(segment[: n_rows * shape.k_row_bytes], k)
            fill(segment[n_rows * shape.k_row_bytes :], v)
            segments.append(segment)
        return cls(shape, n_layer, segments)

    def addresses(self, n_pages: int) -> np.ndarray:
        k_page, v_page = (
            self.shape.n_head_kv * TILE * n for n in (self.shape.k_row_bytes, self.shape.v_row_bytes)
        )
        base = np.array([s.data.ptr for s in self.segments], np.uint64).repeat(SEGMENT_PAGES)[:n_pages]
        index = (np.arange(n_pages) % SEGMENT_PAGES).astype(np.uint64)
        k = base + index * np.uint64(k_page)
        v = base + np.uint64(self.n_layer * SEGMENT_PAGES * k_page) + index * np.uint64(v_page)
        return np.stack([k, v])


def random_rows(name: str, dim: int) -> Any:
    """About 4 MiB of stored rows."""
    x = np.random.default_rng(0).standard_normal((16384, dim), dtype=np.float32)
    kind = KV_TYPES[name]
    stored = np.empty((len(x), kind.items(dim)), kind.dtype)
    write_stored(x, stored)
    return cupy.asarray(stored_bytes(stored).reshape(-1))


def fill(target: Any, source: Any) -> None:
    for start in range(0, len(target), len(source)):
        part = target[start : start + len(source)]
        part[...] = source[: len(part)]


class Call:
    """One packed call on the device, and its launches."""

    def __init__(self, pages: Pages, rows: Rows, step: bool) -> None:
        shape = self.shape = pages.shape
        self.pages = pages
        limits = DeviceLimits.of(cupy.cuda.runtime.getDeviceProperties(0))
        self.attention = CudaAttention(shape, limits)
        sequence = rows.sequences[0]
        n_pages = pages_for(len(sequence) + len(rows))
        context = n_pages * TILE
        if step:
            layout = self.attention.step_layout(len(rows), n_pages, context)
        else:
            layout = BatchLayout.for_prompt(len(rows), n_pages, context)
        buffer = np.zeros(layout.nbytes, np.uint8)
        host = self.attention.host_batch(layout, buffer)
        packed = (pack_step if step else pack_prompt)(host, rows, [pages.addresses(n_pages)])
        self.buffer = cupy.asarray(buffer)
        self.batch = DeviceBatch(layout, self.buffer.data.ptr, len(rows), packed.n_entries)
        rng = np.random.default_rng(1)
        self.qkv = cupy.asarray(rng.standard_normal((len(rows), shape.qkv_width), dtype=np.float32))
        self.out = cupy.empty((len(rows), shape.n_head * shape.value_dim), np.float32)
        self.dims = 64 if shape.head_dim == 256 else shape.head_dim  # that turn
        self.angles = cupy.zeros((context, self.dims // 2, 2), np.float32)
        if step:
            self.held = cupy.zeros(StepSpace.nbytes(layout, shape), cupy.uint8)
            self.space = StepSpace.at(self.held.data.ptr, layout, shape)
        else:
            self.space = None

    def attend(self, i: int) -> None:
        layer, scale = i % self.pages.n_layer, self.shape.head_dim**-0.5
        self.attention.attend(layer, self.qkv.data.ptr, self.out.data.ptr, self.batch, scale, self.space)

    def store(self, i: int) -> None:
        self.attention.rope_store(
            i % self.pages.n_layer,
            self.qkv.data.ptr,
            self.batch,
            self.angles.data.ptr,
            self.dims,
            "half",
        )


def steps(report: Report) -> None:
    for heads, kv_type in (
        ("27b", "q8_0"), ("27b", "f16"), ("27b", "q4_0"), ("27b", "tq3_0"),
        ("23b", "f16"), ("23b", "q8_0"), ("smollm", "f16"), ("23b", "q4_0"),
    ):  # fmt: skip
        shape = AttentionShape(*HEADS[heads], HEADS[heads][2], kv_type, kv_type)
        for depth in STEP_DEPTHS_27B if heads == "27b" else STEP_DEPTHS:
            name = f"step {heads} {kv_type} depth {depth}"
            if not report.wanted(name):
                continue
            pages = Pages.make(shape, depth + 64)
            for n in (1, 16, 23):
                sequence = Sequence()
                sequence.tokens = array("i", bytes(4 * depth))
                rows = Rows.tree(sequence, [0] * n, draft_tree(n))
                call = Call(pages, rows, step=True)
                us = median_us(call.attend, max(4, min(64, pages.n_layer)))
                n_bytes = depth * shape.n_head_kv * (shape.k_row_bytes + shape.v_row_bytes)
                flop = 4.0 * n * shape.n_head * shape.head_dim * depth
                report.line(f"{name} rows {n}", us, n_bytes, flop)
            del pages, call
            cupy.get_default_memory_pool().free_all_blocks()


def prompts(report: Report) -> None:
    for heads, kv_type in (
        ("27b", "q8_0"),
        ("27b", "f16"),
        ("23b", "f16"),
        ("23b", "q8_0"),
        ("smollm", "f16"),
    ):
        shape = AttentionShape(*HEADS[heads], HEADS[heads][2], kv_type, kv_type)
        for n, end in PROMPTS_27B if heads == "27b" else PROMPTS:
            name = f"prompt {heads} {kv_type} rows {n} context {end}"
            if not report.wanted(name):
                continue
            pages = Pages.make(shape, end)
            sequence = Sequence()
            sequence.tokens = array("i", bytes(4 * (end - n)))
            call = Call(pages, Rows.chain(sequence, [0] * n), step=False)
            us = median_us(call.attend, 4)
            flop = 4.0 * shape.n_head * shape.head_dim * sum(range(end - n + 1, end + 1))
            n_bytes = end * shape.n_head_kv * (shape.k_row_bytes + shape.v_row_bytes)
            report.line(name, us, n_bytes, flop)
            del pages, call
            cupy.get_default_memory_pool().free_all_blocks()


def stores(report: Report) -> None:
    for heads, kv_type in (("27b", "q8_0"), ("23b", "f16"), ("23b", "q8_0"), ("smollm", "f16")):
        shape = AttentionShape(*HEADS[heads], HEADS[heads][2], kv_type, kv_type, gated=heads == "27b")
        pages = Pages.make(shape, 4096)
        for n in (1, 23, 2048):
            name = f"store {heads} {kv_type} rows {n}"
            if not report.wanted(name):
                continue
            sequence = Sequence()
            sequence.tokens = array("i", bytes(4 * 1024))
            call = Call(pages, Rows.chain(sequence, [0] * n), step=n <= 64)
            n_bytes = n * (8 * shape.qkv_width + shape.n_head_kv * (shape.k_row_bytes + shape.v_row_bytes))
            report.line(name, median_us(call.store, min(32, pages.n_layer)), n_bytes, 0)


if __name__ == "__main__":
    run_parts({"step": steps, "prompt": prompts, "store": stores}, sys.argv[1:])
