"""The default model on the GPU: logits beside NumPy's, and the golden answers through the daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.cuda_backend import CudaBackend
from slotd.daemon.engine import Engine
from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.reader import open_model
from tests.fakes.daemon_process import DaemonProcess

pytestmark = pytest.mark.model

DATA = Path(__file__).parents[1] / "golden" / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "smollm2_greedy.json").read_text("utf-8"))["cases"]

#: A token may differ from the golden one where the two best logits are closer than this.
MARGIN = 0.05


@pytest.fixture(scope="module")
def host(default_model: Path) -> Engine:
    with open_model(default_model) as file:
        return Engine(file, NumpyBackend(), max_ctx=2048)


@pytest.fixture(scope="module")
def device(default_model: Path) -> Engine:
    with open_model(default_model) as file:
        return Engine(file, CudaBackend(CudaMemory(CupyDevice())), max_ctx=2048)


@pytest.fixture(scope="module")
def daemon(default_model: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(default_model, "--max-ctx=2048", "--device=0") as process:
        yield process


def logits(engine: Engine, ids: list[int], wanted: str = "last") -> np.ndarray:
    sequence = engine.open()
    found = engine.forward(Rows.chain(sequence, ids, logits=wanted), Kind.PROMPT).logits
    engine.close(sequence)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_last_logits_beside_numpy(host: Engine, device: Engine, case: dict[str, Any]) -> None:
    difference = np.abs(logits(device, case["ids"]) - logits(host, case["ids"]))
    print(f"max {difference.max():.4f} mean {difference.mean():.5f}")
    assert difference.max() < 0.1


def test_what_exact_math_costs_on_text(host: Engine, device: Engine) -> None:
    """2,000 tokens: the prompts and answers of the golden cases, one behind the other."""
    ids = [token for case in CASES for token in (*case["ids"], *case["greedy"])]
    ids = (ids * (2000 // len(ids) + 1))[:2000]
    expected, got = logits(host, ids, "all"), logits(device, ids, "all")
    difference = np.abs(got - expected)
    agree = (got.argmax(axis=1) == expected.argmax(axis=1)).mean()
    print(f"max {difference.max():.4f} mean {difference.mean():.5f} argmax {agree:.4f}")
    assert agree >= 0.99


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_golden_answers(daemon: DaemonProcess, case: dict[str, Any]) -> None:
    produced, _ = daemon.generate(case["ids"], 64)
    if case["min_margin"] >= MARGIN:
        assert produced == case["greedy"]
    else:
        same = next((i for i, (a, b) in enumerate(zip(produced, case["greedy"], strict=False)) if a != b), 64)
        print(f"margin {case['min_margin']}: the first {same} agree")
        assert same >= 8


def test_golden_answers_side_by_side(daemon: DaemonProcess) -> None:
    alone = {f"c{number}": daemon.generate(case["ids"], 64)[0] for number, case in enumerate(CASES[:3])}
    for number, case in enumerate(CASES[:3]):
        daemon.send(f"- 64 ids={','.join(map(str, case['ids']))} id=c{number}")
    assert daemon.answers(set(alone)) == alone


def test_a_restored_slot_goes_on_as_before(daemon: DaemonProcess) -> None:
    ids = CASES[0]["ids"]
    expected, _ = daemon.generate(ids, 32)
    daemon.generate(ids, 0, "snap=20:4", "take")
    daemon.send(f"RESTORE 4 - 32 ids={','.join(map(str, ids))} id=back")
    assert daemon.answers({"back"}) == {"back": expected}
