"""A long prefill with and without `--prefill-pool-trim-tokens`: memory, time, and whether the answer is one.

Through the scheduler, which trims between the pieces of a prompt.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from slotd.daemon.config import Config
from slotd.daemon.engine import Engine
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.link import Emit, Finished, Flags, Stop, Submit, ToFront
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.serve import build_engine
from slotd.protocol.messages import Prompt, Snap
from tests.bench.figures import Figures

#: Seconds between two looks at how much memory is in use.
LOOK = 0.005

#: Tokens that are generated behind the prompt.
N_GEN = 8


@dataclass(slots=True)
class Observed:
    """One prefill.

    Attributes:
        seconds: from the command to its end, N_GEN tokens included.
        driver_peak: most bytes of the device in use, by whomever, as the driver says; without a GPU, of this
            process.
        ledger_peak: most bytes in live and cached blocks, as the ledger says.
        tag_peaks: most live bytes by purpose, and "cached": most in cached blocks.
        released: bytes that each trim inside the prompt gave back.
        trim_seconds: how long each took.
        tokens: the answer.
        digest: of the logits behind the prompt and of all K/V in the slot.
    """

    seconds: float = 0.0
    driver_peak: int = 0
    ledger_peak: int = 0
    tag_peaks: dict[str, int] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    trim_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    digest: str = ""

    @property
    def answer(self) -> tuple[str, list[int]]:
        """What must not depend on trims."""
        return self.digest, self.tokens


def compare(name: str, config: Config, n: int, every: int, figures: Figures) -> list[Observed]:
    """A prompt of n tokens without trims, with one each `every` tokens and, on a GPU, in the other pool.

    Adds a figure for each run; the first one is what the others are held against.
    """
    config = replace(config, max_ctx=n + N_GEN + PAGE, host_cache=0, slots=1)
    runs: list[Observed] = []
    for pool in ("legacy", "vmm"):
        engine = build_engine(replace(config, pool=pool))
        try:
            for trim_tokens in (0, every) if pool == "legacy" else (0,):
                found = observe(engine, min(config.chunk or engine.backend.chunk, every), n, trim_tokens)
                runs.append(found)
                add_figure(figures, name, n, pool, trim_tokens, found, found.answer == runs[0].answer)
        finally:
            engine.park()
        if engine.backend.name != "cuda":
            break
    return runs


def add_figure(
    figures: Figures, name: str, n: int, pool: str, trim_tokens: int, found: Observed, same: bool
) -> None:
    trims = {}
    if found.released:
        trims = {
            "released_each": int(statistics.median(found.released)), "released_most": max(found.released),
            "trim_ms": 1000 * statistics.median(found.trim_seconds),
        }  # fmt: skip
    figures.add(
        "trim", name, n, pool=pool, trim_tokens=trim_tokens, s=found.seconds,
        tokens_per_s=n / found.seconds, driver_peak=found.driver_peak, ledger_peak=found.ledger_peak,
        trims=len(found.released), **trims, same=same,
    )  # fmt: skip


def observe(engine: Engine, chunk: int, n: int, trim_tokens: int) -> Observed:
    """One prompt of n tokens on an engine that has computed nothing else since its last trim."""
    ids = np.random.default_rng(n).integers(0, engine.hyper.n_vocab, n).astype(np.int32)
    warm_up(engine, ids[:chunk])
    found, ended = Observed(), []

    def deliver(message: ToFront) -> None:
        if isinstance(message, Emit):
            found.tokens += message.ids
        elif isinstance(message, Finished):
            ended.append(message)
            scheduler.put(Stop())

    scheduler = Scheduler(
        engine, deliver, chunk=chunk, parallel=1, max_stall=60.0, eos_ids=frozenset(), trim_tokens=trim_tokens
    )
    command = Prompt(path="-", n_gen=N_GEN, snap=Snap(at=n, slot=0), ignore_eos=True)
    with watched(engine, found):
        began = time.perf_counter()
        scheduler.put(Submit(1, command, Flags(), time.monotonic(), ids))
        scheduler.run()
        found.seconds = time.perf_counter() - began
    if ended[0].code is not None:
        raise RuntimeError(f"the prompt failed: {ended[0].code} {ended[0].reason}")
    found.released, found.trim_seconds = found.released[:-1], found.trim_seconds[:-1]  # not that of the end
    found.digest = digest(engine, 0)
    engine.free_slot(0)
    engine.trim()
    return found


def warm_up(engine: Engine, ids: np.ndarray) -> None:
    """What is loaded and made at first use is there, and the pool is empty."""
    sequence = engine.open()
    engine.forward(Rows.chain(sequence, ids.tolist()), Kind.PROMPT)
    engine.commit(sequence, range(len(ids)))
    engine.forward(Rows.next_tokens([sequence], [1]), Kind.STEP)
    engine.close(sequence)
    engine.trim()


@contextmanager
def watched(engine: Engine, found: Observed) -> Iterator[None]:
    """Note what each trim gives back, and the largest use of memory: before trims, and again and again."""
    stop, used, trim = threading.Event(), memory_in_use(engine), engine.trim

    def look() -> None:
        found.driver_peak = max(found.driver_peak, used())
        found.ledger_peak = max(found.ledger_peak, engine.memory.live() + engine.memory.cached)
        for tag, n_bytes in {**engine.memory.by_tag, "cached": engine.memory.cached}.items():
            found.tag_peaks[tag] = max(found.tag_peaks.get(tag, 0), n_bytes)

    def look_on() -> None:
        while not stop.wait(LOOK):
            look()

    def noted_trim() -> int:
        look()
        began = time.perf_counter()
        released = trim()
        found.trim_seconds.append(time.perf_counter() - began)
        found.released.append(released)
        return released

    thread = threading.Thread(target=look_on)
    engine.trim = noted_trim  # type: ignore[method-assign]
    thread.start()
    try:
        yield
    finally:
        del engine.trim
        stop.set()
        thread.join()


def memory_in_use(engine: Engine) -> Callable[[], int]:
    """Asks for the bytes of the device that are in use; on the CPU, of this process."""
    if engine.backend.name == "cuda":
        return device_memory_in_use
    import psutil

    process = psutil.Process()
    return lambda: int(process.memory_info().rss)


def device_memory_in_use() -> int:
    """Bytes of the CUDA device that are in use, by whomever, as the driver says."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def digest(engine: Engine, number: int) -> str:
    """Of all that a slot in device memory holds."""
    slot, store = engine.slots[number], engine.store
    assert slot.logits is not None
    store.settle()

    def of_page(index: int) -> bytes:
        n = min(PAGE, len(slot) - index * PAGE)
        image = bytearray(n * store.bytes_per_token)
        store.read_page(slot.pages[index], n, memoryview(image))
        return hashlib.blake2b(image).digest()

    whole = hashlib.blake2b(np.asarray(slot.logits).tobytes(), digest_size=16)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for part in pool.map(of_page, range(len(slot.pages))):
            whole.update(part)
    return whole.hexdigest()
