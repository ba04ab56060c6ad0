"""Times of the linear kernels by shape, type, rows and warps: ``python -m tests.bench.gpu_linear``.

Each time is the median of graph replays over several copies of the weight, together larger than the cache,
with programmatic launches as in a step. Printed: us, share of the copy bandwidth of this run, TFLOP/s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from slotd.daemon.ops import cuda_linear, cuda_prepare
from slotd.daemon.ops.cuda_weights import FORMAT_OF, Matrix, MatrixPart

CACHE_BYTES = 400 << 20
REPLAYS = 15

SHAPES = {"qkv": (7168, 5120), "out": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)}


class Memory:
    """Device arrays without a ledger."""

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32, tag: str = "scratch") -> Any:
        return cupy.empty(shape, dtype)


def median_us(launches: Callable[[int], None], n: int) -> float:
    """Time of one of n launches in a graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for i in range(n):
            launches(i)
        stream.synchronize()
        stream.begin_capture()
        for i in range(n):
            launches(i)
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(REPLAYS):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1000 / n)
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copies of 1 GiB. (In a graph a copy is slower.)"""
    source = cupy.zeros(1 << 30, cupy.uint8)
    target = cupy.empty_like(source)
    stream = cupy.cuda.Stream(non_blocking=True)
    times = []
    for _ in range(REPLAYS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for _ in range(4):
            cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, 3, stream.ptr)
        stop.record(stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop))
    return 8 * source.nbytes / float(np.median(times)) * 1e3


def random_matrix(type_name: str, n_out: int, n_in: int) -> Matrix:
    """A matrix of random tiles: the time depends on the bytes only by power, not by values."""
    form = FORMAT_OF[type_name]
    tiles = cupy.random.randint(0, 255, -(-n_out // 16) * -(-n_in // 256) * form.tile_bytes, dtype=cupy.uint8)
    part = MatrixPart(form, tiles, cupy.ones(n_out + 16, cupy.float32), 0, n_out)
    return Matrix((part,), n_out, n_in)


def time_linear(type_name: str, shape: str, n: int, warps: int | None, copy: float) -> None:
    n_out, n_in = SHAPES.get(shape) or tuple(int(x) for x in shape.split("x"))
    first = random_matrix(type_name, n_out, n_in)
    copies = max(1, CACHE_BYTES // first.nbytes + 1) if n <= 64 else 1
    matrices = [first, *(random_matrix(type_name, n_out, n_in) for _ in range(copies - 1))]
    x = cuda_prepare.prepare(Memory(), cupy.random.standard_normal((n, n_in), dtype=cupy.float32))
    y = cupy.empty((n, n_out), cupy.float32)
    choose = cuda_linear.warps_for
    used = []

    def note(*args: int) -> int:
        used.append(warps or choose(*args))
        return used[-1]

    cuda_linear.warps_for = note  # type: ignore[assignment]
    us = median_us(lambda i: cuda_linear.multiply(x, matrices[i % copies], y, add=False), max(copies, 3))
    cuda_linear.warps_for = choose
    share, rate = first.nbytes / us / copy * 1e8, 2 * n * n_out * n_in / us / 1e6
    print(
        f"{type_name:6} {shape:14} n={n:<5} warps={used[-1] if used else '-':<3} {us:9.2f} us"
        f"  {share:5.1f} % of copy  {rate:7.1f} TFLOP/s",
        flush=True,
    )


def main() -> None:
    copy = copy_bandwidth()
    print(f"copy {copy / 1e9:.0f} GB/s")
    quick = "--quick" in sys.argv
    for shape in SHAPES:
        for n in (1, 8, 16, 23, 32, 64):
            for warps in [None] if quick else [4, 5, 6, 7, 8, *([10] if n <= 8 else [])]:
                time_linear("Q4_K", shape, n, warps, copy)
        for n in (128, 512, 2048):
            time_linear("Q4_K", shape, n, None, copy)
    for type_name in ("Q6_K", "Q4_0", "Q8_0", "Q5_K", "F16"):
        for n in (1, 16, 512):
            time_linear(type_name, "down", n, None, copy)
    for n in (1, 16, 23):
        time_linear("Q6_K", "151936x5120", n, None, copy)
    for shape in ("960x576", "576x576", "3072x576", "576x1536", "49152x576"):
        for n in (1, 512, 2048):
            time_linear("Q4_1", shape, n, None, copy)


if __name__ == "__main__":
    main()
