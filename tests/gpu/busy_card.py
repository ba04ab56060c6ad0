"""Matrix products that keep the card busy: on another stream of this process, or from a process of their own.

    python -m tests.gpu.busy_card

says `busy` when the first product is done, goes on until its stdin ends, and says how many there were.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Rows of a square matrix: a product has some waves of blocks on every multiprocessor, and is over so soon
#: that a kernel behind it need not wait for long.
SIZE = 1024

#: Products that wait behind the one that runs.
AHEAD = 4

#: Multiplies squares, a tile of 16 x 16 for each block of threads, through shared memory.
PRODUCT = r"""
extern "C" __global__ void multiply_squares(const float *a, const float *b, float *c, int n) {
    __shared__ float rows[16][17], columns[16][17];
    int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        rows[y][x] = a[row * n + k + x];
        columns[y][x] = b[(k + y) * n + column];
        __syncthreads();
        for (int i = 0; i < 16; ++i) sum += rows[y][i] * columns[i][x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
"""


def multiply_until(stop: threading.Event, started: Callable[[], object]) -> int:
    """Multiply on a stream of its own until `stop` is set; returns how many products were made."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        left = cupy.arange(SIZE * SIZE, dtype=cupy.float32) * 0.618034 % 1 - 0.5
        out = cupy.empty_like(left)
        multiply = cupy.RawKernel(PRODUCT, "multiply_squares")
        blocks = SIZE // 16
        done: list = []
        count = 0
        while not stop.is_set():
            multiply((blocks, blocks), (16, 16), (left, left, out, cupy.int32(SIZE)))
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(stream)
            done.append(event)
            if len(done) > AHEAD:
                done.pop(0).synchronize()
                count += 1
                if count == 1:
                    started()
        stream.synchronize()
    return count


@contextmanager
def busy_stream() -> Iterator[Callable[[], int]]:
    """Products on another stream inside; the function it gives ends them and says how many there were."""
    stop, started = threading.Event(), threading.Event()
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(multiply_until(stop, started.set)), daemon=True)
    thread.start()

    def end() -> int:
        stop.set()
        thread.join(60)
        return counts[0] if counts else 0

    try:
        assert started.wait(60), "no product within a minute"
        yield end
    finally:
        end()


@contextmanager
def busy_process() -> Iterator[Callable[[], int]]:
    """As busy_stream, from another process, with which the card is shared by turns."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.busy_card"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "busy\n":
            raise AssertionError(process.communicate()[1][-2000:])
        yield lambda: int(process.communicate("", 60)[0])
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """The process that keeps the card busy."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    print(multiply_until(stop, lambda: print("busy", flush=True)), flush=True)


if __name__ == "__main__":
    main()
