"""``python -m tests.bench.snapshots [MODEL]``: taking a snapshot of 4,096 tokens, and starting from it.

On a small llama model whose prompts cost something, or on MODEL. The prefix is computed, kept and restored in
the same run; restore and compute both end with the first token. Medians over repeats.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from slotd.protocol.messages import Done
from tests.bench.__main__ import report
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama

PREFIX, REPEATS = 4096, 5


def main(model: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(model) if model else write_small_llama(Path(folder) / "small.gguf")
        snapshot, wall, restored, computed = measure(path)
    report(f"snapshot of {PREFIX} tokens, in the daemon", "2 ms", 1000 * snapshot, "ms")
    for name, value in (
        ("the same, command to reply", wall),
        ("restore + first token", restored),
        (f"computing {PREFIX} tokens + first token", computed),
    ):
        print(f"{name:<50} {1000 * value:9.3f} ms")
    print(f"{'starting from the slot is faster by':<50} {computed / restored:9.1f} x   (to be at least 50)")


def write_small_llama(path: Path) -> Path:
    """Eight layers of 256: enough work that a prefix of 4,096 tokens is worth keeping."""
    return write_tiny_llama(path, n_ctx=8192, n_layer=8, n_embd=256, n_head=8, n_head_kv=4, n_ff=512)


def measure(model: Path) -> tuple[float, float, float, float]:
    """Median seconds: snapshot in the daemon, seen from outside, restore + token, compute + token."""
    chance = np.random.default_rng(5)
    inside, outside, restored, computed = [], [], [], []
    with DaemonProcess(model, "--max-ctx=8192") as daemon:
        for number in range(REPEATS):
            ids = chance.integers(3, 259, PREFIX).tolist()
            began = time.perf_counter()
            daemon.generate(ids, 1, "ignore_eos=1", f"c{number}")
            computed.append(time.perf_counter() - began)
            daemon.generate(ids, 0, "", f"p{number}")  # what is kept is the prompt and nothing else
            began = time.perf_counter()
            daemon.send(f"SNAPSHOT 0 of=p{number} id=s{number}")
            inside.append(seconds(daemon.wait_done(f"s{number}"), "wall_s"))
            outside.append(time.perf_counter() - began)
            for other in range(8):  # nothing of it is left but the slot
                daemon.generate(
                    [other + 3, number + 20, *range(3, 23)], 1, "ignore_eos=1", f"o{number}.{other}"
                )
            line = ",".join(map(str, [*ids, 7]))
            began = time.perf_counter()
            daemon.send(f"RESTORE 0 - 1 ids={line} id=r{number} ignore_eos=1")
            done = daemon.wait_done(f"r{number}")
            restored.append(time.perf_counter() - began)
            assert done.fields["reused"] == PREFIX
    inside_s, outside_s, restored_s, computed_s = map(
        statistics.median, (inside, outside, restored, computed)
    )
    return inside_s, outside_s, restored_s, computed_s


def seconds(done: Done, name: str) -> float:
    """A time of the daemon's own account."""
    value = done.fields[name]
    assert isinstance(value, int | float)
    return float(value)


if __name__ == "__main__":
    main(*sys.argv[1:2])
