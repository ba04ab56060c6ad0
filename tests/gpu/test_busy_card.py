"""Whole models beside other work on the card: the bits are those of an idle one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.rows import Kind, Rows
from tests.bench.synthetic_gguf import write_synthetic
from tests.gpu.busy_card import busy_process, busy_stream
from tests.gpu.same_bits import SHAPES, cuda_engine, decode, ids, prefill, rows_unlike_alone

CONTEXTS = (1, 64, 513, 5000)
COUNTS = (7, 23, 64)

Busy = Callable[[], AbstractContextManager[Callable[[], int]]]


@pytest.fixture(scope="module", params=sorted(SHAPES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    return cuda_engine(write_synthetic(path, SHAPES[request.param], seed=7, outlier=3), "f16")


def observed(engine: Engine) -> dict[str, bytes]:
    """Bits of logits: behind prompts of large and small pieces, of rows in a step, of tokens one by one."""
    found = {}
    for context in CONTEXTS:
        for chunk in (2048, 192):
            sequence, logits = prefill(engine, ids(context), chunk)
            found[f"prompt of {context} in pieces of {chunk}"] = logits.tobytes()
        for n in COUNTS:
            rows = Rows.chain(sequence, ids(n, seed=n), logits="all")
            logits = engine.forward(rows, Kind.STEP).logits
            found[f"{n} rows behind {context}"] = logits.tobytes()
        engine.drop(sequence)
        found[f"decoding behind {context}"] = b"".join(decode(engine, sequence, ids(10, seed=1)))
    return found


@pytest.mark.parametrize("busy", [busy_stream, busy_process])
def test_bits_are_those_of_an_idle_card(engine: Engine, busy: Busy) -> None:
    began = time.perf_counter()
    expected = observed(engine)
    idle_s = time.perf_counter() - began
    with busy() as end:
        began = time.perf_counter()
        found = observed(engine)
        busy_s = time.perf_counter() - began
        unlike = rows_unlike_alone(engine, CONTEXTS, COUNTS)
        n_products = end()
    print(f"{idle_s:.2f} s idle, {busy_s:.2f} s beside {n_products} products in all")
    assert n_products >= 10, "the card was not busy"
    assert [name for name in expected if found[name] != expected[name]] == []
    assert unlike == []
