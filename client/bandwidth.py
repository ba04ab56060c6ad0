"""How fast this machine reads memory: ``python -m slotd.client.bandwidth`` prints one JSON object.

Every thread reads a block of its own, larger than a cache, with a dot product of the block with itself
(each number is read once); the best of several passes counts. It runs in a process of its own, so that its
thread count is its own and the memory is given back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slotd.protocol.errors import SlotdError

TOTAL_BYTES = 512 << 20
PASSES = 7


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second read by `threads` threads together."""

    bytes_per_s: float
    threads: int


def measure() -> Bandwidth:
    """Measure in a new process (about one second). Raises SlotdError when that fails."""
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    found = subprocess.run(
        [sys.executable, "-P", "-m", "slotd.client.bandwidth"],
        capture_output=True, text=True, env={**os.environ, **one_thread}, timeout=120, check=False,
    )  # fmt: skip
    if found.returncode:
        raise SlotdError(f"the memory bandwidth cannot be measured: {found.stderr.strip()[-500:]}")
    return Bandwidth(**json.loads(found.stdout))


def read_here(total_bytes: int = TOTAL_BYTES, passes: int = PASSES) -> Bandwidth:
    """Measure in this process."""
    import numpy as np

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    blocks = [np.ones(total_bytes // threads // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(passes):
            start = time.perf_counter()
            list(pool.map(lambda block: float(block @ block), blocks))
            best = max(best, sum(block.nbytes for block in blocks) / (time.perf_counter() - start))
    return Bandwidth(best, threads)


if __name__ == "__main__":
    result = read_here()
    print(json.dumps({"bytes_per_s": result.bytes_per_s, "threads": result.threads}))
