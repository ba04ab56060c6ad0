"""Times of products with rows of whole numbers: ``python -m tests.bench.gpu_linear_q8 [--quick]``.

Taken as gpu_linear takes them. Printed: us, share of the copy bandwidth of this run, TFLOP/s, and what the
exact product takes in this run.
"""

from __future__ import annotations

import sys

import cupy

from slotd.daemon.ops import cuda_linear_q8, cuda_prepare
from slotd.daemon.ops.cuda_linear_q8 import RowKind, multiply_rows, row_kind
from tests.bench.gpu_linear import CACHE_BYTES, SHAPES, Memory, copy_bandwidth, median_us, random_matrix


def time_both(type_name: str, shape: str, n: int, warps: int | None, copy: float) -> None:
    """One line. warps: of a block of the kernel for few rows; None: as it chooses."""
    n_out, n_in = SHAPES.get(shape) or tuple(int(x) for x in shape.split("x"))
    first = random_matrix(type_name, n_out, n_in)
    copies = max(1, CACHE_BYTES // first.nbytes + 1) if n <= 64 else 1
    matrices = [first, *(random_matrix(type_name, n_out, n_in) for _ in range(copies - 1))]
    x = cupy.random.standard_normal((n, n_in), dtype=cupy.float32)
    y = cupy.empty((n, n_out), cupy.float32)
    used: list[int] = []
    choose = cuda_linear_q8.warps_for

    def note(*args: int) -> int:
        used.append(warps or choose(*args))
        return used[-1]

    def us_with(kind: RowKind) -> float:
        rows = cuda_prepare.prepare(Memory(), x, kind)
        return median_us(lambda i: multiply_rows(rows, matrices[i % copies], y, add=False), max(copies, 3))

    cuda_linear_q8.warps_for = note  # type: ignore[assignment]
    us = us_with(row_kind(first, "q8"))
    cuda_linear_q8.warps_for = choose
    exact = us_with(RowKind.HALVES) if warps is None else 0.0
    share, rate = first.nbytes / us / copy * 1e8, 2 * n * n_out * n_in / us / 1e6
    print(
        f"{type_name:6} {shape:14} n={n:<5} warps={used[-1] if used else '-':<3} {us:9.2f} us"
        f"  {share:5.1f} % of copy  {rate:7.1f} TFLOP/s  exact {exact:9.2f} us",
        flush=True,
    )


def time_preparation(width: int, n: int) -> None:
    """One line: rows as halves, as whole numbers, and these with the sums of 16."""
    x = cupy.random.standard_normal((n, width), dtype=cupy.float32)
    times = []
    for kind in RowKind:
        room = cuda_prepare.room(Memory(), kind, n, width)
        times.append(median_us(lambda _, room=room: cuda_prepare.prepare_into(room, x), 10))
    print(f"prepare {width} n={n:<5}", " ".join(f"{us:7.2f} us" for us in times), flush=True)


def main() -> None:
    """All lines; --quick leaves out the numbers of warps."""
    copy = copy_bandwidth()
    print(f"copy {copy / 1e9:.0f} GB/s")
    quick = "--quick" in sys.argv
    for width in (5120, 17408):
        for n in (1, 16, 512, 2048):
            time_preparation(width, n)
    for shape in SHAPES:
        for n in (1, 8, 16, 23, 24, 64):
            for warps in [None] if quick or n > 24 else [None, 4, 5, 6, 7, 8]:
                time_both("Q4_K", shape, n, warps, copy)
        for n in (512, 2048):
            time_both("Q4_K", shape, n, None, copy)
    for type_name in ("Q6_K", "Q4_0", "Q8_0", "Q5_K", "Q2_K"):
        for n in (1, 16, 23, 512):
            time_both(type_name, "down", n, None, copy)
    for n in (1, 16, 23):
        time_both("Q6_K", "151936x5120", n, None, copy)
    for shape in ("960x576", "576x576", "3072x576", "576x1536", "49152x576"):
        for n in (1, 2048):
            time_both("Q4_1", shape, n, None, copy)


if __name__ == "__main__":
    main()
