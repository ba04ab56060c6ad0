"""The figures of the GPU backend, in one command: ``make bench-gpu``, or ``python -m tests.bench.gpu``.

    python -m tests.bench.gpu --model 23b --part rates prefill decode --file figures.jsonl

Prints a JSON line for each figure as it comes (and appends it to --file), and a table at the end. Models are
random ones of the named shape, written once into --folder; -m measures a file instead, under the name of the
model whose shape it has. Without a GPU it measures the NumPy backend; the model tiny is made for that.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slotd.daemon.arena_directory import make_arena
from slotd.daemon.config import Config
from slotd.daemon.engine import Engine
from slotd.daemon.kv.host_arena import open_arena
from slotd.daemon.memory import cuda_device
from slotd.daemon.ops.kernels import load_all
from slotd.daemon.serve import build_engine
from slotd.daemon.weights.reader import open_model
from tests.bench.device_rates import Rates, measure
from tests.bench.engine_timing import STEPS, STEPS_OF_ROWS, WARM, Model, Timing
from tests.bench.figures import Figures
from tests.bench.gpu_long import full_context, long_prompts
from tests.bench.gpu_trim import compare
from tests.bench.synthetic_gguf import PRESETS, write_synthetic
from tests.fakes.daemon_process import DaemonProcess

PARTS = ("rates", "prefill", "decode", "rows", "snapshot", "trim", "cold", "full", "long")

#: Parts that measure on an engine that is loaded for all of them.
OF_ONE_ENGINE = frozenset(PARTS) - {"rates", "trim", "cold", "full", "long"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes that a model is measured at.

    trim: tokens of a prompt, and after how many the pool is trimmed; None: not measured.
    full: positions that are all filled, and the memory limit for that; None: not measured.
    long: tokens of each long prompt, and the memory limit for them; None: not measured.
    weight_type: of the matrices; None: that of the published file.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    rows: tuple[int, ...]
    snapshot: int
    trim: tuple[int, int] | None = None
    full: tuple[int, int] | None = None
    long: tuple[tuple[int, ...], int] | None = None
    weight_type: str | None = None


PLANS = {
    "135m": Plan((512, 4096), (0, 4096), (1, 2, 4, 8, 16, 23, 32, 64), 4096),
    "1b": Plan((512, 4096), (0, 4096), (1, 16, 23), 4096),
    "23b": Plan(
        (512, 2048, 8192, 32768), (0, 8192, 32768), (1, 2, 4, 8, 16, 23, 32, 64), 4096, (32768, 4096)
    ),
    "qwen35-27b": Plan(
        (2048, 8192, 65536),
        (0, 32768, 131072),
        (1, 16, 23),
        4096,
        full=(262144, 24 << 30),
        long=((32781, 60363, 131013, 258013), int(31.86 * 2**30)),
    ),
    "qwen35-0.8b": Plan((4096,), (0, 4096), (1, 16, 23), 4096, weight_type="BF16"),
    "tiny": Plan(
        (64, 256), (0, 64), (1, 16, 23), 128, (512, 128), full=(1024, 1 << 30), long=((300, 500), 1 << 30)
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=PLANS, default=["135m", "23b"])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("-m", dest="path", type=Path, help="a GGUF file in place of the first model's")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "slotd-bench-models")
    parser.add_argument(
        "--set", nargs="+", type=setting, default=[], metavar="NAME=VALUE",
        help="settings of the daemon, named as in its Config: k_type=q8_0 chunk=512",
    )  # fmt: skip
    parser.add_argument("--file", type=Path, help="append the JSON lines here")
    chosen = parser.parse_args()
    figures = Figures(sys.stdout, chosen.file)
    rates: Rates | None = None
    try:
        for number, name in enumerate(chosen.model):
            path = chosen.path if chosen.path and number == 0 else model_file(chosen.folder, name, figures)
            config = replace(Config(model=path, chunk=2048, host_cache=4 << 30), **dict(chosen.set))
            if number == 0:
                figures.add("device", **device(config.device))
            if OF_ONE_ENGINE & set(chosen.part) or ("rates" in chosen.part and rates is None):
                rates = measure_model(name, config, chosen.part, rates, figures)
            plan = PLANS[name]
            if "trim" in chosen.part and plan.trim is not None:
                compare(name, config, *plan.trim, figures)
            if "full" in chosen.part and plan.full is not None:
                full_context(name, config, *plan.full, figures)
            if "long" in chosen.part and plan.long is not None:
                long_prompts(name, config, *plan.long, figures)
            if "cold" in chosen.part and name != "23b":
                cold_starts(name, path, figures)
    finally:
        print("\n" + figures.table())
    return 0


def device(choice: str) -> dict[str, Any]:
    """What is measured: the CUDA device that `--device` means with its driver, or the CPU."""
    if cuda_device.choose(choice) is None:
        return {"device": f"CPU, {platform.machine()}, {os.cpu_count()} cores", "numpy": np.__version__}
    found = dict(cuda_device.describe())
    with suppress(OSError):  # another operating system
        text = Path("/proc/driver/nvidia/version").read_text("utf-8")
        found["driver_version"] = " ".join(re.findall(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)[:1])
    return found


def model_file(folder: Path, name: str, figures: Figures) -> Path:
    """The random model of that shape, written when it is not there."""
    path = folder / f"{name}-0.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        unfinished = path.with_suffix(".new")
        shape = PRESETS[name]
        write_synthetic(unfinished, replace(shape, weight_type=PLANS[name].weight_type or shape.weight_type))
        os.replace(unfinished, path)
        figures.add("write_file", name, s=time.perf_counter() - began, bytes=path.stat().st_size)
    return path


def setting(text: str) -> tuple[str, int | str]:
    """NAME=VALUE as a field of Config."""
    name, equals, value = text.partition("=")
    if not equals or name not in Config.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=VALUE, NAME a field of the daemon's Config")
    number = value.isdecimal() and "int" in str(Config.__dataclass_fields__[name].type)
    return name, int(value) if number else value


def measure_model(
    name: str, config: Config, parts: Collection[str], rates: Rates | None, figures: Figures
) -> Rates:
    """Load the model, measure the parts that need an engine, and the rates when nobody has yet."""
    plan = PLANS[name]
    behind = max(STEPS + WARM, max(plan.rows) * (STEPS_OF_ROWS + WARM))
    largest = max(*plan.prefill, *plan.decode, plan.snapshot) + behind + 64
    arena = open_arena(make_arena(config.host_cache or 0), config.host_cache or 0, recorded=False)
    began = time.perf_counter()
    engine = build_engine(replace(config, max_ctx=largest), arena)
    try:
        report = engine.backend.report()
        figures.add("load", name, s=time.perf_counter() - began, backend=report["name"], math=report["math"])
        if rates is None:
            rates = measure(engine.backend.name)
            figures.add("rates", **asdict(rates))
        timing = Timing(engine, describe(name, config.model, config.chunk), rates, figures)
        if "prefill" in parts:
            for n in plan.prefill:
                timing.prefill(n)
        if "decode" in parts:
            for depth in plan.decode:
                timing.decode(depth)
        if "rows" in parts:
            for n in plan.rows:
                timing.rows(n)
        if "snapshot" in parts:
            timing.snapshots(plan.snapshot)
        timing.close()
        figures.add("memory", name, **memory(engine))
        engine.trim()
    finally:
        engine.park()
    return rates


def describe(name: str, path: Path, chunk: int) -> Model:
    """What a step reads and multiplies. An embedding that is not the output matrix too is not read."""
    with open_model(path) as file:
        tensors = file.header.tensors
        tied = "output.weight" not in tensors
        matrices = [tensor for tensor, info in tensors.items() if len(info.shape) > 1]
        inside = [tensor for tensor in matrices if tensor.startswith("blk.")]
        read = [tensor for tensor in tensors if tied or tensor != "token_embd.weight"]
        return Model(
            name=name,
            read_bytes=sum(file.n_bytes(tensor) for tensor in read),
            multiplied=sum(tensors[tensor].n_elements for tensor in inside),
            chunk=chunk,
        )


def memory(engine: Engine) -> dict[str, int]:
    """Bytes of device memory: in use by weights and K/V, kept by the pool, free."""
    report = engine.memory_report()
    live = report["live"]
    return {
        "weights": live.get("weights", 0),
        "kv": live.get("kv", 0),
        "cached": report["cached"],
        "free": report["free"],
    }


def cold_starts(name: str, path: Path, figures: Figures, repeats: int = 3) -> None:
    """Seconds from the start of a daemon's process until it is ready; the first start is not counted.

    The kernels are compiled before: that is done once for a machine, and takes longer than a daemon is given.
    """
    if cuda_device.choose("auto") is not None:
        load_all()
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        with DaemonProcess(path):
            times.append(time.perf_counter() - began)
    figures.add("cold_start", name, s=statistics.median(times[1:]), first_s=times[0])


if __name__ == "__main__":
    sys.exit(main())
