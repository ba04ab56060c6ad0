"""Times of one engine: prefill, decode, rows in a step, snapshots. Through Engine alone, on any backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.engine import Engine
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from tests.bench.device_rates import Rates
from tests.bench.figures import Figures

#: Steps of a decode run, and those at its start that do not count (the first captures a graph).
STEPS, WARM = 128, 8

#: Steps of each number of rows, and moves of a snapshot, that count.
STEPS_OF_ROWS, MOVES = 30, 15

#: Another run of a point is made while it has had less than this, and fewer than MOST_RUNS.
SECONDS_PER_POINT, MOST_RUNS = 15.0, 5


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model beside its engine.

    Attributes:
        name: as in the figures.
        read_bytes: weight bytes that a step reads.
        multiplied: numbers in the matrices that every row is multiplied with, the output matrix left out.
        chunk: most rows of a prompt call.
    """

    name: str
    read_bytes: int
    multiplied: int
    chunk: int


class Timing:
    """Measures one engine and adds to the figures."""

    def __init__(self, engine: Engine, model: Model, rates: Rates, figures: Figures) -> None:
        self._engine, self._model, self._rates, self._figures = engine, model, rates, figures
        self._random = np.random.default_rng(1)
        self._kept: dict[int, Sequence] = {}

    # ----- prefill

    def prefill(self, n: int) -> None:
        """A prompt of n tokens, in pieces; the last sequence is kept for `decode` at that depth."""
        self._fill(min(n, self._model.chunk))  # the first call of a size pays for what is made on first use
        times: list[float] = []
        while not times or (sum(times) < SECONDS_PER_POINT and len(times) < MOST_RUNS):
            if n in self._kept:
                self._engine.close(self._kept.pop(n))
            began = time.perf_counter()
            self._kept[n] = self._fill(n, keep=True)
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times)
        operations = 2 * self._model.multiplied * n / seconds
        self._figures.add(
            "prefill", self._model.name, n, tokens_per_s=n / seconds, runs=len(times), s=seconds,
            worst_s=max(times), linear_tflops=operations / 1e12,
            share_of_multiply=_share(operations, self._rates.multiply),
        )  # fmt: skip

    def _fill(self, n: int, keep: bool = False) -> Sequence:
        """A new sequence of n random tokens; closed at once unless it is to be kept."""
        sequence = self._engine.open()
        self._extend(sequence, n)
        if not keep:
            self._engine.close(sequence)
        return sequence

    def _extend(self, sequence: Sequence, n: int) -> None:
        tokens = self._tokens(n)
        for start in range(0, n, self._model.chunk):
            piece = tokens[start : start + self._model.chunk]
            last = start + len(piece) == n
            rows = Rows.chain(sequence, piece, logits="last" if last else "none")
            outputs = self._engine.forward(rows, Kind.PROMPT)
            if last:
                outputs.greedy()  # waits for the device
            self._engine.commit(sequence, range(len(piece)))

    def _tokens(self, n: int) -> npt.NDArray[np.int64]:
        return self._random.integers(0, self._engine.hyper.n_vocab, n)

    # ----- decode

    def decode(self, depth: int) -> None:
        """Tokens one by one behind `depth` tokens (one, for depth 0), each the greedy choice of the last."""
        sequence = self._at(depth)
        with step_graphs() as graphs:
            times = self._decode_run(sequence)
            step = statistics.median(times)
            device = graphs.device_seconds()
        n_bytes = self._model.read_bytes + self._kv_bytes(depth + STEPS // 2)
        self._figures.add(
            "decode", self._model.name, depth, tokens_per_s=1 / step, ms=1000 * step,
            p95_ms=1000 * float(np.quantile(times, 0.95)), gb_per_s=n_bytes / step / 1e9,
            share_of_copy=_share(n_bytes / step, self._rates.copy),
            share_of_read=_share(n_bytes / step, self._rates.read),
        )  # fmt: skip
        if device is not None:
            self._figures.add(
                "overhead", self._model.name, depth, us=1e6 * (step - device), device_ms=1000 * device,
                device_share_of_copy=_share(n_bytes / device, self._rates.copy),
            )  # fmt: skip

    def _decode_run(self, source: Sequence) -> list[float]:
        sequence, token = self._engine.fork(source), 5  # recurrent layers cannot go back
        self._engine.reserve(sequence, len(sequence) + STEPS + WARM)
        times = []
        for number in range(STEPS + WARM):
            began = time.perf_counter()
            outputs = self._engine.forward(Rows.next_tokens([sequence], [token]), Kind.STEP)
            ids, finite = outputs.greedy()
            self._engine.commit(sequence, [0])
            if number >= WARM:
                times.append(time.perf_counter() - began)
            if not finite[0]:
                raise RuntimeError(f"{self._model.name}: logits are not finite after {len(sequence)} tokens")
            token = int(ids[0])
        self._engine.close(sequence)
        return times

    def _at(self, depth: int) -> Sequence:
        """The kept sequence of that length, made when it is not there."""
        if depth not in self._kept:
            self._kept[depth] = self._fill(max(depth, 1), keep=True)
        return self._kept[depth]

    def _kv_bytes(self, n: int) -> int:
        report = self._engine.memory_report()
        return int(n * report["page_bytes"] // report["page_tokens"])

    # ----- several rows in one step

    def rows(self, n: int, depth: int = 0) -> None:
        """One step of n rows behind each other, with the greedy choice of every row.

        Without a commit, and with one of all rows: that is the most it can cost.
        """
        step, device = self._rows_run(n, depth, commit=False)
        committed, _ = self._rows_run(n, depth, commit=True)
        self._figures.add(
            "rows", self._model.name, n, depth=depth, ms=1000 * step, us_per_row=1e6 * step / n,
            device_ms=None if device is None else 1000 * device, with_commit_ms=1000 * committed,
        )  # fmt: skip

    def _rows_run(self, n: int, depth: int, *, commit: bool) -> tuple[float, float | None]:
        """Median seconds of a step, and of a replay of its graph."""
        sequence = self._engine.fork(self._at(depth))
        self._engine.reserve(sequence, len(sequence) + n * (STEPS_OF_ROWS + WARM if commit else 1))
        times = []
        with step_graphs() as graphs:
            for number in range(STEPS_OF_ROWS + WARM):
                tokens = self._tokens(n)
                began = time.perf_counter()
                self._engine.forward(Rows.chain(sequence, tokens, logits="all"), Kind.STEP).greedy()
                if commit:
                    self._engine.commit(sequence, range(n))
                if number >= WARM:
                    times.append(time.perf_counter() - began)
            device = graphs.device_seconds()
        self._engine.close(sequence)
        return statistics.median(times), device

    # ----- snapshots

    def snapshots(self, n: int) -> None:
        """Snapshot and restore of n tokens with logits, in device memory and to and from the host tier."""
        engine, sequence = self._engine, self._at(n)
        n_bytes, logits = self._kv_bytes(n), np.zeros(engine.hyper.n_vocab, np.float32)
        saves, restores = [], []
        for _ in range(MOVES):
            saves.append(self._timed(lambda: engine.snapshot(0, sequence, logits)))
            restores.append(self._timed(lambda: engine.close(engine.restore(0))))
        self._add_move("snapshot", n, saves)
        self._add_move("restore", n, restores)
        out, back = [], []
        for number in range(4):  # the first one pins its memory, a quarter of a second for each GiB
            out.append(self._timed(lambda: engine.snapshot(0, sequence, logits, tier="host")))
            back.append(self._timed(lambda: engine.close(engine.restore(0))))
            if number == 0:
                self._figures.add("host_save_first", self._model.name, n, ms=1000 * out.pop())
                back.clear()
        engine.free_slot(0)
        for name, times, rate in (
            ("host_save", out, self._rates.to_host),
            ("host_load", back, self._rates.to_device),
        ):
            speed = n_bytes / statistics.median(times)
            self._add_move(name, n, times, gb_per_s=speed / 1e9, share_of_pinned=_share(speed, rate))

    def _add_move(self, name: str, n: int, times: list[float], **more: Any) -> None:
        self._figures.add(
            name, self._model.name, n, ms=1000 * statistics.median(times), worst_ms=1000 * max(times), **more
        )

    def _timed(self, work: Callable[[], Any]) -> float:
        """Seconds, what the device still does included."""
        began = time.perf_counter()
        work()
        if self._engine.backend.name == "cuda":
            import cupy

            cupy.cuda.runtime.deviceSynchronize()
        return time.perf_counter() - began

    def close(self) -> None:
        """End the kept sequences."""
        for sequence in self._kept.values():
            self._engine.close(sequence)
        self._kept.clear()


class StepGraphs:
    """The graph that the engine launched last, to be launched again with nothing around it."""

    def __init__(self) -> None:
        self.last: tuple[Any, Any] | None = None

    def device_seconds(self, n: int = 50) -> float | None:
        """Seconds of one replay among n in a row; None: no graph was launched.

        A replay does the same step again: it reads the same batch and writes the same places.
        """
        if self.last is None:
            return None
        stream, graph = self.last
        stream.wait()
        began = time.perf_counter()
        for _ in range(n):
            stream.launch(graph)
        stream.wait()
        return (time.perf_counter() - began) / n


@contextmanager
def step_graphs() -> Iterator[StepGraphs]:
    """Watch which graphs are launched; on a machine without CUDA none is."""
    seen = StepGraphs()
    try:
        from slotd.daemon.ops.cuda_graphs import Stream
    except ImportError:
        yield seen
        return
    launch = Stream.launch

    def watched(stream: Any, graph: Any) -> None:
        seen.last = (stream, graph)
        launch(stream, graph)

    Stream.launch = watched
    try:
        yield seen
    finally:
        Stream.launch = launch


def _share(measured: float, limit: float | None) -> float | None:
    return None if limit is None else measured / limit
