"""Contexts as long as a model takes, under a memory limit: decoding behind full K/V, and long prompts."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
import psutil

from slotd.daemon.config import Config
from slotd.daemon.engine import Engine
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.memory import cuda_device
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.serve import build_engine
from tests.bench.figures import Figures
from tests.bench.gpu_trim import N_GEN, device_memory_in_use, memory_in_use, observe

#: Tokens that are decoded behind the full context.
DECODED = 256

#: Tokens that are really computed; their pages are copied to all others.
COMPUTED = 2048

#: After so many tokens of a long prompt the pool is trimmed.
TRIM = 8192


def full_context(name: str, config: Config, n: int, limit: int, figures: Figures) -> None:
    """Decode the last tokens of n positions under a memory limit.

    With K/V of tq3_0; of q8_0 in the tiny model, whose heads are too narrow for it.
    """
    on_cpu = cuda_device.choose(config.device) is None
    by_others = 0 if on_cpu else device_memory_in_use()
    k_type = "tq3_0" if name != "tiny" else "q8_0"
    config = replace(
        config, k_type=k_type, v_type=k_type, max_ctx=n, memory_limit=limit, host_cache=0, slots=1
    )
    engine = build_engine(config)
    try:
        sequence = filled(engine, n - DECODED, min(config.chunk or engine.backend.chunk, n // 2))
        token, times = 5, []
        for _ in range(DECODED):
            began = time.perf_counter()
            outputs = engine.forward(Rows.next_tokens([sequence], [token]), Kind.STEP)
            ids, finite = outputs.greedy()
            engine.commit(sequence, [0])
            times.append(time.perf_counter() - began)
            if not finite[0]:
                raise RuntimeError(f"{name}: logits are not finite at {len(sequence)} tokens")
            token = int(ids[0])
        used = memory_in_use(engine)() - by_others
        figures.add(
            "full", name, len(sequence), kv=k_type, tokens_per_s=1 / statistics.median(times),
            tokens_per_s_all=DECODED / sum(times), limit=limit, driver_used=used, above_limit=used - limit,
            kv_bytes=engine.memory.by_tag["kv"],
        )  # fmt: skip
        engine.close(sequence)
        engine.trim()
    finally:
        engine.park()


def filled(engine: Engine, n: int, chunk: int) -> Sequence:
    """A sequence of n tokens: the first ones computed, the K/V of all others copies of theirs."""
    sequence, computed = engine.open(), min(COMPUTED, n // 2) // PAGE * PAGE
    ids = np.random.default_rng(n).integers(0, engine.hyper.n_vocab, n)
    engine.reserve(sequence, n + DECODED)
    for start in range(0, computed, chunk):
        piece = ids[start : min(start + chunk, computed)].tolist()
        engine.forward(Rows.chain(sequence, piece, logits="none"), Kind.PROMPT)
        engine.commit(sequence, range(len(piece)))
    sources = computed // PAGE
    for index in range(sources, -(-n // PAGE)):
        engine.store.copy(sequence.pages[index % sources], sequence.pages[index], PAGE)
    sequence.tokens.extend(ids[computed:].tolist())
    return sequence


def long_prompts(name: str, config: Config, lengths: tuple[int, ...], limit: int, figures: Figures) -> None:
    """Prompts of growing length through the scheduler, trimmed; the first one also without trims."""
    k_type = "q8_0"
    base = replace(
        config, k_type=k_type, v_type=k_type, pool="legacy", memory_limit=limit, host_cache=0, slots=1,
        max_ctx=max(lengths) + N_GEN + PAGE,
    )  # fmt: skip
    engine = build_engine(base)
    process, host, swap = psutil.Process(), [], []
    try:
        first = None
        for n, trim_tokens in [(lengths[0], 0), *((n, TRIM) for n in lengths)]:
            found = observe(engine, config.chunk or engine.backend.chunk, n, trim_tokens)
            first = first or found
            host.append(process.memory_info().rss)
            swap.append(psutil.swap_memory().used)
            same = found.answer == first.answer if n == lengths[0] else None
            figures.add(
                "long", name, n, trim_tokens=trim_tokens, s=found.seconds, tokens_per_s=n / found.seconds,
                driver_peak=found.driver_peak, ledger_peak=found.ledger_peak, limit=limit, same=same,
                trims=len(found.released), rss=host[-1], swap=swap[-1],
                **{f"peak_{tag}": n_bytes for tag, n_bytes in found.tag_peaks.items() if n_bytes},
            )  # fmt: skip
    finally:
        engine.park()
