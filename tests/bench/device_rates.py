"""The ceilings of a run: how fast this device copies, reads and multiplies, how fast pinned memory moves."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

GIB = 1 << 30
REPEATS = 10

#: Reads 16 bytes a thread and step; the sum is used, so that no load is dropped.
READ_KERNEL = r"""
extern "C" __global__ void read_all(const uint4 *data, long long n, unsigned *out) {
    unsigned sum = 0;
    long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = data[i], b = data[i + step], c = data[i + 2 * step], d = data[i + 3 * step];
        sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w);
        sum += (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
    }
    for (; i < n; i += step) sum += data[i].x;
    if (sum == 0x12345678u) out[0] = sum;
}
"""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes or operations per second; None: this machine has no such thing.

    Attributes:
        copy: bytes read plus bytes written by a copy in device memory.
        read: bytes read, nothing written.
        to_host, to_device: copies between pinned and device memory.
        multiply: floating-point operations of a large float16 product.
    """

    copy: float
    read: float
    to_host: float | None = None
    to_device: float | None = None
    multiply: float | None = None


def measure(backend: str) -> Rates:
    """backend: numpy or cuda."""
    if backend != "cuda":
        return _host()
    import cupy

    rates = _cuda()
    cupy.get_default_memory_pool().free_all_blocks()
    return rates


def _host() -> Rates:
    source = np.ones(GIB // 16, np.float32)
    target = np.empty_like(source)
    copy = _best(lambda: np.copyto(target, source))
    read = _best(lambda: np.dot(source, source))
    return Rates(2 * source.nbytes / copy, source.nbytes / read)


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _cuda() -> Rates:
    import cupy

    source = cupy.arange(GIB // 4, dtype=cupy.int32)  # not zeros: they may move faster
    target = cupy.empty_like(source)
    found = cupy.empty(1, cupy.uint32)
    read_all = cupy.RawKernel(READ_KERNEL, "read_all")
    n, blocks = np.int64(source.nbytes // 16), 132 * 8
    pinned = cupy.cuda.alloc_pinned_memory(GIB)
    stream = cupy.cuda.get_current_stream()

    def move(to: int, of: int, kind: int) -> None:
        cupy.cuda.runtime.memcpyAsync(to, of, GIB, kind, stream.ptr)

    copy = _median(lambda: move(target.data.ptr, source.data.ptr, 3))
    read = _median(lambda: read_all((blocks,), (512,), (source, n, found)))
    to_host = _median(lambda: move(pinned.ptr, source.data.ptr, 2))
    to_device = _median(lambda: move(target.data.ptr, pinned.ptr, 1))
    return Rates(2 * GIB / copy, GIB / read, GIB / to_host, GIB / to_device, _multiply())


def _multiply(n: int = 8192) -> float | None:
    """Operations per second of cuBLAS, None where it is not installed."""
    import cupy

    try:
        left = (
            (cupy.arange(n * n, dtype=cupy.float32) * 0.618034 % 1 - 0.5).astype(cupy.float16).reshape(n, n)
        )
        out = cupy.empty_like(left)
        return 2 * n**3 / _median(lambda: cupy.matmul(left, left, out=out))
    except (ImportError, RuntimeError, OSError) as error:
        print(f"no matrix rate: {error}", file=sys.stderr)
        return None


def _median(work: Callable[[], Any]) -> float:
    """Seconds by device events, after one run that is not counted."""
    import cupy

    work()
    times = []
    for _ in range(REPEATS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) / 1000)
    return statistics.median(times)
