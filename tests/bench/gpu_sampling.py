"""What sampling costs on a GPU: the kernels, and decode loops beside greedy ones.

    python -m tests.bench.gpu_sampling [-m FILE] [--temperature T] [--part kernels decode]

Kernels: medians of replays in a graph, three launches each, no copies. Decode: a loop of steps of 1 and 16
sequences through Engine and NextTokens, milliseconds a step, beside the same loop with every row read and
sampled on the host. Without FILE the model is a random one of SmolLM2-135M's shape: at 0.4 its nucleus is as
large as that of a real model at 0.8; give 0.8 with a real one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from slotd.daemon.backend import HostOutputs, Outputs
from slotd.daemon.candidates import BANNED, BIASED, PENALISED, Adjustments, View
from slotd.daemon.config import Config
from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.link import Flags, Submit
from slotd.daemon.next_token import NextTokens
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.serve import build_engine
from slotd.protocol.messages import Prompt, Sampling
from tests.bench.synthetic_gguf import PRESETS, write_synthetic

STEPS, WARM, PROMPT = 100, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu_sampling", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-m", dest="path", type=Path)
    parser.add_argument("--temperature", type=float, default=0.4)
    parser.add_argument("--part", nargs="+", choices=("kernels", "decode"), default=("kernels", "decode"))
    chosen = parser.parse_args()
    if "kernels" in chosen.part:
        kernels()
    if "decode" in chosen.part:
        with tempfile.TemporaryDirectory() as folder:
            path = chosen.path or write_synthetic(Path(folder) / "135m.gguf", PRESETS["135m"])
            decode(build_engine(Config(model=path, chunk=2048, max_ctx=1024)), chosen.temperature)


def kernels() -> None:
    """Time of the three kernels, and of greedy, by rows and vocabulary."""
    import cupy

    from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice
    from slotd.daemon.ops.cuda_greedy import greedy
    from slotd.daemon.ops.cuda_sample import SampleLayout, pack, sample
    from tests.bench.gpu_linear import median_us

    memory, rng = CudaMemory(CupyDevice()), np.random.default_rng(0)
    for n_vocab in (49152, 151936):
        for n in (1, 8, 23, 64):
            logits = cupy.asarray(rng.normal(0, 2.5, (n, n_vocab)).astype(np.float32))
            us = median_us(lambda i, logits=logits: greedy(memory, logits), 20)
            line = f"vocab {n_vocab:6} rows {n:2}, us: greedy {us:5.1f}"
            for name, views in _views(rng, n, n_vocab).items():
                layout = SampleLayout.of(views)
                work = cupy.zeros(layout.offsets[-1], cupy.uint8)
                host = np.zeros(layout.n_bytes_in, np.uint8)
                pack(layout, views, host)
                work[: len(host)] = cupy.asarray(host)
                args = (logits, layout, work.data.ptr)
                us = median_us(lambda i, args=args: sample(*args), 20)
                line += f", {name} {us:5.1f}"
            print(line, flush=True)


def _views(rng: np.random.Generator, n: int, n_vocab: int) -> dict[str, list[View]]:
    def adjusted() -> Adjustments:
        ids = np.sort(rng.choice(n_vocab, 256, replace=False)).astype(np.int32)
        kinds = rng.choice([BIASED, PENALISED, BANNED], 256).astype(np.int32)
        biases, frequencies = rng.normal(0, 1, (2, 256)).astype(np.float32)
        return Adjustments(ids, kinds, biases, frequencies, np.float32(1.1), np.float32(0.1))

    return {
        "best 1": [View(row, 1) for row in range(n)],
        "top 40": [View(row, 40) for row in range(n)],
        "top_p": [View(row, 1024, 0.8) for row in range(n)],
        "top_p, 256 adjusted": [View(row, 1024, 0.8, adjusted()) for row in range(n)],
    }


def decode(engine: Engine, temperature: float) -> None:
    """Milliseconds a step of several ways to choose."""
    print(f"backend {engine.backend.name}, temperature {temperature}")
    warm = Sampling(temperature=temperature, top_p=0.95, seed=1)
    penal = Sampling(temperature=temperature, top_p=0.95, repetition_penalty=1.1, seed=1)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "top_p": {"sampling": warm},
        "top_p, penalties": {"sampling": penal},
        "top_p, logprobs": {"sampling": warm, "logprobs": 5},
        "greedy, logprobs": {"logprobs": 5},
        "greedy, penalties": {"sampling": Sampling(repetition_penalty=1.1)},
    }
    for n in (1, 16):
        for name, fields in ways.items():
            step, choice, read = loop(engine, n, fields, False)
            line = f"sequences {n:2}, {name:18}: {step:7.3f} ms a step, {choice:6.3f} of it to choose"
            line += f", {100 * read:4.1f} % of rows read"
            if name != "greedy":
                line += f"; on the host {loop(engine, n, fields, True)[0]:7.3f}"
            print(line, flush=True)


class CountedRows:
    """Outputs, and how many rows of them were read."""

    def __init__(self, outputs: Outputs, read: list[int]) -> None:
        self._outputs, self._read = outputs, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outputs, name)

    def row(self, index: int) -> Any:
        self._read[0] += 1
        return self._outputs.row(index)


def loop(engine: Engine, n: int, fields: dict[str, Any], on_host: bool) -> tuple[float, float, float]:
    """Median milliseconds of a step, those of its choices, the share of rows that were read."""
    jobs = [_job(engine, number, fields) for number in range(n)]
    times, choices, read = [], [], [0]
    for number in range(WARM + STEPS):
        began = time.perf_counter()
        last = [job.history[-1] for job in jobs]
        outputs = engine.forward(Rows.next_tokens([job.running_sequence for job in jobs], last), Kind.STEP)
        for row, job in enumerate(jobs):
            engine.commit(job.running_sequence, [row])
        chose = time.perf_counter()
        if on_host:
            outputs = HostOutputs(outputs.logits, outputs.rows)
        tokens = NextTokens(jobs, CountedRows(outputs, read))
        for row, job in enumerate(jobs):
            job.take(tokens.of(row)[0])
        if number >= WARM:
            times.append(time.perf_counter() - began)
            choices.append(time.perf_counter() - chose)
    for job in jobs:
        engine.close(job.running_sequence)
    return 1000 * statistics.median(times), 1000 * statistics.median(choices), read[0] / n / (WARM + STEPS)


def _job(engine: Engine, number: int, fields: dict[str, Any]) -> Job:
    """A job whose prompt is computed but for its last token."""
    ids = np.random.default_rng(number).integers(300, engine.hyper.n_vocab, PROMPT).astype(np.int32)
    command = Prompt(ids=ids.tolist(), n_gen=900, **({"sampling": Sampling()} | fields))
    job = Job(Submit(f"r{number}", command, Flags(), 0.0, ids), 1024, frozenset(), time.monotonic)
    job.sequence = engine.open()
    engine.forward(Rows.chain(job.sequence, ids[:-1].tolist(), logits="none"), Kind.PROMPT)
    engine.commit(job.sequence, range(PROMPT - 1))
    engine.reserve(job.sequence, PROMPT + WARM + STEPS)
    return job


if __name__ == "__main__":
    main()
