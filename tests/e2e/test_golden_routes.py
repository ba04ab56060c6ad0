"""Greedy ids of the default model equal the golden file's, whichever way the prompt takes.

The golden ids were made by an independent float32 implementation. A case may leave them at a position
whose top two logits are closer than float32 rounding can tell apart (`min_margin` under 0.01); all of
these cases have wider margins, so they must agree to the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.client import Client
from slotd.daemon.engine import Engine
from slotd.daemon.link import Emit, Finished, Flags, Stop, Submit, ToFront
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.weights.reader import open_model
from slotd.protocol.messages import Done, Prompt, Tokens
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess

pytestmark = pytest.mark.model

DATA = Path(__file__).parents[1] / "golden" / "data" / "smollm2_greedy.json"
CASES: list[dict[str, Any]] = json.loads(DATA.read_text())["cases"]

#: The shorter cases, for routes that are slow or tried many times.
CAPITAL, MEETING = CASES[0], CASES[3]


@pytest.fixture(scope="module")
def daemon(default_model: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(default_model, "--max-ctx=1024") as process:
        yield process


def ended_by_eos(case: dict[str, Any]) -> bool:
    return bool(case["greedy"][-1] == 2)


def test_margins_leave_no_excuse() -> None:
    assert min(case["min_margin"] for case in CASES) >= 0.01


@pytest.mark.parametrize("case", CASES, ids=[case["prompt"][:20] for case in CASES])
def test_a_request_with_an_id(daemon: DaemonProcess, case: dict[str, Any]) -> None:
    produced, done = daemon.generate(case["ids"], 64)
    assert produced == case["greedy"]
    assert done.status == ("stop" if ended_by_eos(case) else "length")


def test_a_bare_line_and_the_token_stream(daemon: DaemonProcess, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.bin"
    prompt.write_bytes(np.asarray(CAPITAL["ids"], "<i4").tobytes())
    daemon.send(f"{prompt} 64")
    assert daemon.read_stream() == CAPITAL["greedy"]


def test_three_sequences_at_once(daemon: DaemonProcess) -> None:
    cases = CASES[:3]
    for number, case in enumerate(cases):
        daemon.send(f"- 64 ids={','.join(map(str, case['ids']))} id=c{number}")
    produced = daemon.answers(["c0", "c1", "c2"])
    assert list(produced.values()) == [case["greedy"] for case in cases]


def test_restored_from_a_slot(daemon: DaemonProcess) -> None:
    ids = ",".join(map(str, MEETING["ids"]))
    daemon.generate(MEETING["ids"], 0, "snap=30:4", "take")
    for number in range(5):  # displace the ended sequence, which holds more than the slot
        daemon.generate([300 + number, 400], 0, request_id=f"other{number}")
    daemon.send(f"RESTORE 4 - 64 ids={ids} id=back")
    produced: list[int] = []

    def collect(event: object) -> bool:
        if isinstance(event, Tokens):
            produced.extend(event.ids)
        return isinstance(event, Done) and event.id == "back"

    done = daemon.wait_event(collect)
    assert isinstance(done, Done)
    assert done.fields["reused"] == 30
    assert produced == MEETING["greedy"]


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Engine:
    with open_model(default_model) as file:
        return Engine(file, NumpyBackend(), max_ctx=512)


@pytest.mark.parametrize("chunk", [1, 2, 7, 36, 37, 64, 512])
def test_any_chunk_size(engine: Engine, chunk: int) -> None:
    """One engine, and a scheduler for each size: what a daemon would load anew is not the matter here."""
    produced: list[int] = []

    def deliver(message: ToFront) -> None:
        if isinstance(message, Emit):
            produced.extend(message.ids)
        elif isinstance(message, Finished):
            scheduler.put(Stop())

    eos = frozenset(engine.hyper.stop_ids)
    scheduler = Scheduler(engine, deliver, chunk=chunk, parallel=1, max_stall=60.0, eos_ids=eos)
    ids = np.asarray(CAPITAL["ids"], np.int32)
    scheduler.put(Submit(1, Prompt(path="-", n_gen=64), Flags(), time.monotonic(), ids))
    scheduler.run()
    assert produced == CAPITAL["greedy"]


def test_exact_mode_is_bit_equal_alone_and_in_a_crowd(default_model: Path) -> None:
    with DaemonProcess(default_model, "--max-ctx=512", "--exact", "--chunk=16") as daemon:
        ids = ",".join(map(str, CAPITAL["ids"]))
        daemon.send(f"- 6 ids={ids} id=alone logprobs=5")
        alone = collect_tokens(daemon, {"alone"})["alone"]
        daemon.send(f"- 6 ids={ids} id=a logprobs=5", *(f"- 6 ids=5,6,7,{n} id=b{n}" for n in range(3)))
        crowd = collect_tokens(daemon, {"a", "b0", "b1", "b2"})["a"]
        for events in (alone, crowd):  # however many ids a line has
            assert all(len(event.ids) == len(event.logprobs) for event in events)
        assert [id for event in alone for id in event.ids] == [id for event in crowd for id in event.ids]
        assert [p for event in alone for p in event.logprobs] == [
            p for event in crowd for p in event.logprobs
        ]


def collect_tokens(daemon: DaemonProcess, open_ids: set[str]) -> dict[str, list[Tokens]]:
    events: dict[str, list[Tokens]] = {request_id: [] for request_id in open_ids}
    while open_ids:
        event = parse_event(daemon.next_line(120))
        if isinstance(event, Tokens):
            events[str(event.id)].append(event)
        elif isinstance(event, Done):
            open_ids = open_ids - {str(event.id)}
    return events


def test_one_shot(default_model: Path, tmp_path: Path) -> None:
    prompt, out = tmp_path / "p.bin", tmp_path / "o.bin"
    prompt.write_bytes(np.asarray(CAPITAL["ids"], "<i4").tobytes())
    argv = [
        sys.executable,
        "-m",
        "slotd.daemon",
        "daemon",
        str(default_model),
        "-",
        str(prompt),
        "64",
        str(out),
    ]
    subprocess.run(argv, check=True, timeout=120)
    assert np.fromfile(out, "<i4").tolist() == CAPITAL["greedy"]


def test_the_python_client_by_ids_and_by_chat(default_model: Path) -> None:
    with Client(default_model, daemon_args=["--max-ctx=1024"]) as client:
        by_ids = client.generate(CAPITAL["ids"], max_tokens=64)
        assert list(by_ids.ids) == CAPITAL["greedy"]
        by_chat = client.generate(messages=[{"role": "user", "content": CAPITAL["prompt"]}], max_tokens=64)
        assert list(by_chat.ids) == CAPITAL["greedy"]
        assert by_chat.text == "The capital of France is Paris."
        assert by_chat.prompt_tokens == len(CAPITAL["ids"])
        assert by_chat.cached_tokens == len(CAPITAL["ids"]) - 1


def test_a_batch(default_model: Path, tmp_path: Path) -> None:
    jobs, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    greedy = {"max_tokens": 64, "temperature": 0}
    capital, meeting = ([{"role": "user", "content": case["prompt"]}] for case in (CAPITAL, MEETING))
    lines = [
        {"id": "ids", "ids": CAPITAL["ids"], "params": greedy},
        {"id": "chat", "messages": meeting, "params": greedy},
        {"custom_id": "openai", "body": {"messages": capital, **greedy}},
    ]
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = [
        sys.executable,
        "-m",
        "slotd.client",
        "batch",
        str(jobs),
        "-o",
        str(out),
        "-m",
        str(default_model),
    ]
    done = subprocess.run(argv, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[0]["ids"] == CAPITAL["greedy"]
    assert records[1]["ids"] == MEETING["greedy"]
    assert "The capital of France is Paris." in json.dumps(records[2])
