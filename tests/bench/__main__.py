"""What slotd adds around the model: ``python -m tests.bench``, on a tiny model so that compute is small.

Prints one line per figure: medians over repeats, and what each is to stay under.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slotd.daemon.engine import Engine
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model
from tests.bench import disk
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama

LONG = 200_000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder) / "tiny.gguf")
        overhead = overhead_per_token(model)
        report("daemon overhead per token", "0.3 ms", 1000 * overhead, "ms")
        unwatched = overhead_per_token(model, "--state-dir=-")
        report("of it for the state file (slotd top)", "0.01 ms", 1000 * (overhead - unwatched), "ms")
        for name, seconds in long_prompts(model, Path(folder)).items():
            report(f"{LONG} ids {name}: line in, queued", "0.5 s", seconds, "s")
        worst, middle = status_latency(model)
        report("STATUS while a prefill runs, worst of 20", "100 ms", 1000 * worst, "ms")
        report("STATUS while a prefill runs, median", "100 ms", 1000 * middle, "ms")
    disk.main()
    report("import slotd.client", "0.15 s", child_seconds("-c", "import slotd.client"), "s")
    report("slotd --help", "0.3 s", child_seconds("-m", "slotd.client", "--help"), "s")


def report(name: str, limit: str, value: float, unit: str) -> None:
    print(f"{name:<50} {value:9.3f} {unit:<3} (to stay under {limit})", flush=True)


def overhead_per_token(model: Path, *flags: str, n: int = 400, repeats: int = 5) -> float:
    """Seconds per token between line in and token out, less what the bare engine takes for the same step."""
    bare = statistics.median(bare_seconds(model, n) for _ in range(repeats))
    with DaemonProcess(model, *flags) as daemon:
        daemon.generate([5, 6, 7], n, "ignore_eos=1", "warm")
        whole = []
        for number in range(repeats):
            began = time.perf_counter()
            daemon.generate([8 + number, 6, 7], n, "ignore_eos=1", f"r{number}")
            whole.append((time.perf_counter() - began) / n)
    return statistics.median(whole) - bare


def bare_seconds(model: Path, n: int) -> float:
    """Seconds per token of forward, argmax and commit, with nothing around them."""
    with open_model(model) as file:
        engine = Engine(file, NumpyBackend())
    sequence = engine.open()
    token = 5
    began = time.perf_counter()
    for _ in range(n):
        logits = engine.forward(Rows.chain(sequence, [token]), Kind.STEP).logits[0]
        engine.commit(sequence, [0])
        token = int(np.argmax(logits))
    return (time.perf_counter() - began) / n


def long_prompts(model: Path, folder: Path) -> dict[str, float]:
    """Seconds until a prompt of 200,000 ids is read, checked and queued: STATUS behind it shows it."""
    ids = np.random.default_rng(0).integers(0, 320, LONG).astype("<i4")
    path = folder / "long.bin"
    path.write_bytes(ids.tobytes())
    lines = {"by path": f"{path} 1", "inline": f"- 1 ids={','.join(map(str, ids.tolist()))}"}
    seconds = {}
    with DaemonProcess(model, "--max-ctx=262144") as daemon:
        for name, line in lines.items():
            tries = []
            for number in range(5):
                request_id = f"{name.split()[-1]}{number}"
                began = time.perf_counter()
                daemon.send(f"{line} id={request_id}", "STATUS")
                status = daemon.wait_json("status")
                tries.append(time.perf_counter() - began)
                assert status["open"] >= 1
                daemon.send(f"CANCEL id={request_id}")
                daemon.wait_done(request_id)
            seconds[name] = statistics.median(tries)
    return seconds


def status_latency(model: Path) -> tuple[float, float]:
    """(worst, median) seconds from STATUS to its reply while a long prefill runs."""
    with DaemonProcess(model, "--max-ctx=262144", "--chunk=2048") as daemon:
        daemon.send(f"- 1 ids={','.join(['7'] * LONG)} id=long")
        daemon.wait_line("[prefill]")
        waits = []
        for _ in range(20):
            began = time.perf_counter()
            daemon.send("STATUS")
            daemon.wait_json("status")
            waits.append(time.perf_counter() - began)
            time.sleep(0.05)
        daemon.send("CANCEL id=long")
        daemon.wait_done("long")
    return max(waits), statistics.median(waits)


def child_seconds(*argv: str, repeats: int = 5) -> float:
    """Median seconds of a whole Python process with these arguments, less one that does nothing."""

    def run(arguments: tuple[str, ...]) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began

    median: Callable[[tuple[str, ...]], float] = lambda arguments: statistics.median(  # noqa: E731
        run(arguments) for _ in range(repeats)
    )
    return median(argv) - (median(("-c", "pass")) if argv[0] == "-c" else 0.0)


if __name__ == "__main__":
    main()
