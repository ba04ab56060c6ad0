"""Times of the gated DeltaNet kernels.

``python -m tests.bench.gpu_delta [step] [commit] [prompt] [only=TEXT]``: lines that contain TEXT.

Each time is the median of graph replays over layers that are together larger than the cache, with
programmatic launches as in a step. Printed: us of a layer, GB/s of states and inputs, share of the copy
bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from slotd.daemon.ops.cuda_attention import DeviceLimits
from slotd.daemon.ops.cuda_delta import ConvWeights, CudaDelta, Inputs, RowTables, Sequences
from slotd.daemon.ops.delta_plan import MOST_BLOCKS, Piece, pack_tables, plan_prompt
from slotd.daemon.ops.tree_order import walk_order
from tests.bench.gpu_linear import median_us
from tests.bench.gpu_report import Report, draft_tree, run_parts


@dataclass(frozen=True)
class Sizes:
    n_key_heads: int
    n_value_heads: int
    state_size: int
    conv_kernel: int = 4


SIZES = {"27b": Sizes(16, 48, 128), "0.8b": Sizes(16, 16, 128)}
N_LAYER = 48


def ptr(array: Any) -> int:
    return int(array.data.ptr)


class Call:
    """Rows of sequences of equal shape, their states, and everything that the kernels read and write."""

    def __init__(self, sizes: Sizes, parents: list[int], n_sequences: int, *, write: bool) -> None:
        limits = DeviceLimits.of(cupy.cuda.runtime.getDeviceProperties(0))
        self.delta = CudaDelta(sizes, N_LAYER, limits)
        self.sizes, self.n_sequences = sizes, n_sequences
        self.per_sequence, self.n = len(parents), len(parents) * n_sequences
        rng = np.random.default_rng(0)
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        ancestors = np.zeros((self.n, 64), np.uint8)
        if self.per_sequence <= 64:
            for row, parent in enumerate(parents):
                if parent >= 0:
                    ancestors[row] = ancestors[parent]
                ancestors[row, depths[row]] = row
            for s in range(1, n_sequences):
                ancestors[s * self.per_sequence : (s + 1) * self.per_sequence] = ancestors[
                    : self.per_sequence
                ]
        self.held: list[Any] = []
        count = self.delta.state_bytes // 4
        self.old = [cupy.zeros(count, np.float32) for _ in range(n_sequences)]
        self.new = [cupy.zeros(count if write else 1, np.float32) for _ in range(n_sequences)]
        starts = np.arange(n_sequences) * self.per_sequence
        self.sequences = Sequences(
            ptr(self.up([ptr(x) for x in self.old], np.uint64)),
            ptr(self.up([ptr(x) if write else 0 for x in self.new], np.uint64)),
            ptr(self.up(starts, np.int32)),
            ptr(self.up([self.per_sequence] * n_sequences, np.int32)),
            ptr(self.up([n_sequences], np.int32)),
        )
        self.rows = RowTables(
            ptr(self.up(np.repeat(np.arange(n_sequences), self.per_sequence), np.int32)),
            ptr(self.up(np.tile(np.array(depths) + 64, n_sequences), np.int32)),
            ptr(self.up([64] * n_sequences, np.int32)),
            ptr(self.up(ancestors, np.uint8)),
        )
        self.path = ptr(self.up(np.tile(np.arange(self.per_sequence), n_sequences), np.int32))
        order = walk_order(parents) if self.per_sequence <= 64 else []
        self.order = ptr(self.up(np.tile(order, n_sequences), np.int32))
        d = self.delta
        self.projected = self.up(rng.standard_normal((self.n, d.projected_width)), np.float32)
        self.weights = ConvWeights(
            ptr(self.up(rng.standard_normal((d.channels, sizes.conv_kernel)), np.float32)),
            ptr(self.up(-rng.uniform(0.1, 1, sizes.n_value_heads), np.float32)),
            ptr(self.up(rng.standard_normal(sizes.n_value_heads), np.float32)),
        )
        self.q = self.up(rng.standard_normal((self.n, d.key_width)) * 0.01, np.float32)
        self.out = self.up(np.zeros((self.n, d.value_width)), np.float32)
        self.widths = [d.channels, d.key_width, d.value_width, sizes.n_value_heads, sizes.n_value_heads]

    def up(self, data: Any, dtype: Any) -> Any:
        array = cupy.asarray(np.asarray(data, dtype))
        self.held.append(array)
        return array

    def inputs(self, layers: int) -> Inputs:
        """Small numbers, so that states stay finite however often they are replayed."""
        arrays = [cupy.full((layers, self.n, width), 0.01, np.float32) for width in self.widths]
        arrays[3] -= 0.05
        self.held += arrays
        return Inputs(*map(ptr, arrays))

    @property
    def matrix_bytes(self) -> int:
        """Of a layer of all sequences."""
        return 4 * self.n_sequences * self.delta.value_width * self.sizes.state_size


def steps(report: Report) -> None:
    """The convolution, the delta rule, and both in turn, as a layer has them."""
    shapes = {
        "1 row": ([-1], 1), "4 x 1 row": ([-1], 4), "16 x 1 row": ([-1], 16),
        "chain 8": (list(range(-1, 7)), 1), "tree 16": (draft_tree(16), 1), "tree 23": (draft_tree(23), 1),
        "tree 64": (draft_tree(64), 1), "2 x tree 23": (draft_tree(23), 2),
    }  # fmt: skip
    for name, sizes in SIZES.items():
        for shape, (parents, n_sequences) in shapes.items():
            if not report.wanted(f"step {name} {shape}"):
                continue
            plain = len(parents) == 1
            call = Call(sizes, parents, n_sequences, write=plain)
            inputs, d = call.inputs(1), call.delta
            if plain:
                inputs.u = 0  # nothing is replayed

            def conv(i: int, call: Call = call, inputs: Inputs = inputs) -> None:
                call.delta.conv(
                    i % N_LAYER, ptr(call.projected), call.weights, ptr(call.q), inputs, call.sequences,
                    call.rows, call.n, step=True,
                )  # fmt: skip

            def delta(i: int, call: Call = call, inputs: Inputs = inputs) -> None:
                call.delta.delta(
                    i % N_LAYER, ptr(call.q), inputs, ptr(call.out), call.sequences, call.order,
                    call.per_sequence, call.n_sequences,
                )  # fmt: skip

            def both(
                i: int, conv: Callable[[int], None] = conv, delta: Callable[[int], None] = delta
            ) -> None:
                conv(i)
                delta(i)

            traffic = call.matrix_bytes * (2 if plain else 1)
            rows = 4.0 * call.n * (2 * d.channels + d.value_width)
            report.line(f"step {name} {shape} conv", median_us(conv, N_LAYER), rows)
            report.line(f"step {name} {shape} delta", median_us(delta, N_LAYER), traffic + rows)
            report.line(f"step {name} {shape} both", median_us(both, N_LAYER), traffic + 2 * rows)


def commits(report: Report) -> None:
    """Paths of all layers at once; the time is of one layer."""
    for name, sizes in SIZES.items():
        for length in (1, 4, 8, 16):
            if not report.wanted(f"commit {name} path {length}"):
                continue
            call = Call(sizes, list(range(-1, length - 1)), 1, write=True)
            inputs = call.inputs(N_LAYER)

            def commit(_: int, call: Call = call, inputs: Inputs = inputs) -> None:
                call.delta.delta_commit(inputs, call.n, call.sequences, call.path, call.n_sequences)

            us = median_us(commit, 4) / N_LAYER
            n_bytes = 2.0 * call.matrix_bytes + 4 * length * sum(call.widths)
            report.line(f"commit {name} path {length}", us, n_bytes)


def prompts(report: Report) -> None:
    """Pieces of a prompt, by width of a block of threads and blocks of rows in a launch; * as chosen."""
    for name, sizes in SIZES.items():
        for n in (256, 512, 2048):
            if not report.wanted(f"prompt {name} rows {n}"):
                continue
            call = Call(sizes, list(range(-1, n - 1)), 1, write=True)
            inputs, d = call.inputs(1), call.delta
            inputs.u = 0

            def conv(i: int, call: Call = call, inputs: Inputs = inputs) -> None:
                call.delta.conv(
                    i % N_LAYER, ptr(call.projected), call.weights, ptr(call.q), inputs, call.sequences,
                    call.rows, call.n, step=False,
                )  # fmt: skip

            rows = 4.0 * n * (2 * d.channels + d.value_width)
            report.line(f"prompt {name} rows {n} conv", median_us(conv, 8), rows)
            piece = Piece(0, n, 0, ptr(call.old[0]), ptr(call.new[0]))
            chosen = d.columns
            for columns in sorted({chosen, 32, 64}):
                for most_blocks in (8, MOST_BLOCKS, 32):
                    d.columns = columns
                    launches = plan_prompt([piece], most_blocks=most_blocks)
                    packed, places = pack_tables(launches)
                    tables, work = cupy.asarray(packed), cupy.empty(most_blocks * d.work_bytes, np.uint8)

                    def blocks(
                        i: int, call: Call = call, inputs: Inputs = inputs, launches: list[Any] = launches,
                        places: list[Any] = places, tables: Any = tables, work: Any = work,
                    ) -> None:  # fmt: skip
                        call.delta.delta_prompt(
                            i % N_LAYER, ptr(call.q), inputs, ptr(call.out), ptr(work), ptr(tables), launches,
                            places,
                        )  # fmt: skip

                    us = median_us(blocks, 8)
                    mark = "*" if columns == chosen and most_blocks == MOST_BLOCKS else ""
                    label = f"prompt {name} rows {n} columns {columns} group {most_blocks}{mark}"
                    report.line(label, us, 4.0 * n * (2 * d.key_width + 2 * d.value_width))
                    size = sizes.state_size
                    each = 64 * 64 * (5 * size) + 3 * 64 * size * size  # products of a block of a head
                    print(f"{'':44} {2e-6 * each * n / 64 * sizes.n_value_heads / us:10.1f} TFLOP/s")


if __name__ == "__main__":
    run_parts({"step": steps, "commit": commits, "prompt": prompts}, sys.argv[1:])
