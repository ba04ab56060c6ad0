"""Times of products with rows of whole numbers: ``python -m tests.bench.gpu_linear_q8``."""

from __future__ import annotations

import cupy

from slotd.daemon.ops import cuda_prepare
from slotd.daemon.ops.cuda_rows import RowKind, multiply
from tests.bench.gpu_linear import CACHE_BYTES, SHAPES, Memory, copy_bandwidth, median_us, random_matrix


def time_both(type_name: str, shape: str, n: int, copy: float) -> None:
    """One line: whole numbers beside halves."""
    n_out, n_in = SHAPES.get(shape) or tuple(int(x) for x in shape.split("x"))
    first = random_matrix(type_name, n_out, n_in)
    copies = max(1, CACHE_BYTES // first.nbytes + 1)
    matrices = [first, *(random_matrix(type_name, n_out, n_in) for _ in range(copies - 1))]
    x = cupy.random.standard_normal((n, n_in), dtype=cupy.float32)
    y = cupy.empty((n, n_out), cupy.float32)
    times = []
    for kind in (RowKind.INTEGERS, RowKind.HALVES):
        rows = cuda_prepare.prepare(Memory(), x, kind)
        us = median_us(
            lambda i, rows=rows: multiply(rows, matrices[i % copies], y, add=False), max(copies, 3)
        )
        times.append(us)
    share = first.nbytes / times[0] / copy * 1e8
    figures = f"{times[0]:8.2f} us {share:5.1f} % of copy  exact {times[1]:8.2f} us"
    print(f"{type_name:6} {shape:14} n={n:<3} {figures}", flush=True)


def main() -> None:
    """All lines."""
    copy = copy_bandwidth()
    print(f"copy {copy / 1e9:.0f} GB/s")
    for shape in SHAPES:
        for n in (1, 2, 8, 16, 23, 64):
            time_both("Q4_K", shape, n, copy)
    for type_name in ("Q6_K", "Q4_0", "Q8_0", "Q5_K", "Q2_K"):
        for n in (1, 16):
            time_both(type_name, "down", n, copy)
    time_both("Q6_K", "151936x5120", 1, copy)


if __name__ == "__main__":
    main()
