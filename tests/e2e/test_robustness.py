"""Prompts at the limits, prompts that are none, fairness, and a long mixed run against one daemon."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from slotd.protocol.messages import Cancelled, Done, Tokens
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def test_prompts_at_the_edge_of_the_context(tiny_llama: Path) -> None:
    """One too long, exactly full, and full but for one: named numbers, never a cut prompt, never a crash."""
    with DaemonProcess(tiny_llama, "--max-ctx=64") as daemon:
        for length, n_gen, status in (
            *((65, 0, "err"), (64, 0, "ok"), (64, 1, "err"), (63, 1, "length")),
            *((60, 4, "length"), (60, 5, "err"), (1, 63, "length")),
        ):
            produced, done = daemon.generate([7] * length, n_gen, "ignore_eos=1", f"r{length}-{n_gen}")
            assert done.status == status, (length, n_gen, done)
            if status == "err":
                assert done.fields["code"] == "overflow"
                assert (done.fields["prompt"], done.fields["n_gen"], done.fields["max_ctx"]) == (
                    length,
                    n_gen,
                    64,
                )
            else:
                assert len(produced) == n_gen


@pytest.mark.parametrize("context", [2, 3, 64, 65])
def test_tiny_contexts_work(tiny_llama: Path, context: int) -> None:
    with DaemonProcess(tiny_llama, f"--max-ctx={context}") as daemon:
        produced, done = daemon.generate([5], 1000, "fit=1 ignore_eos=1")
        assert (len(produced), done.fields["limit"]) == (context - 1, "max_ctx")


def test_a_long_prompt_beside_an_answer_does_not_freeze_it(tiny_llama: Path) -> None:
    """The longest gap between two tokens of A while B prefills stays near what one short piece takes."""
    with DaemonProcess(tiny_llama, "--max-ctx=20000", "--chunk=8192", "--max-stall=30") as daemon:
        daemon.send("- 4000 ids=5,6,7 id=a ignore_eos=1")
        daemon.wait_line("[tok] id=a")
        daemon.send(f"- 1 ids={joined([9] * 12000)} id=b")
        stamps = []
        while True:
            event = parse_event(daemon.next_line())
            if isinstance(event, Tokens) and event.id == "a":
                stamps.append(time.monotonic())
            if isinstance(event, Done) and event.id == "b":
                break
        daemon.send("CANCEL id=a")
        daemon.wait_done("a")
        assert len(stamps) > 50  # A went on while B was computed
        gaps = [b - a for a, b in pairwise(stamps)]
        assert max(gaps) < 2.0  # 12,000 rows in one piece take longer than that


def test_a_nan_in_one_answer_leaves_the_others_alone(tmp_path: Path) -> None:
    """A model whose embedding row 9 is NaN: prompts that contain 9 fail by name, the others are exact."""
    embedding = np.random.default_rng(3).standard_normal((320, 64)).astype(np.float32)
    embedding[9] = np.nan
    poisoned = write_tiny_llama(tmp_path / "nan.gguf", tensors={"token_embd.weight": embedding})
    with DaemonProcess(poisoned) as daemon:
        clean, _ = daemon.generate([5, 6, 7], 12, "ignore_eos=1", "before")
        daemon.send("- 12 ids=5,6,7 id=clean ignore_eos=1", "- 12 ids=5,9,7 id=bad ignore_eos=1")
        produced: list[int] = []
        seen: dict[str, Done] = {}
        while len(seen) < 2:
            event = parse_event(daemon.next_line())
            if isinstance(event, Tokens) and event.id == "clean":
                produced.extend(event.ids)
            if isinstance(event, Done):
                seen[str(event.id)] = event
        assert seen["bad"].fields["code"] == "nonfinite"
        assert (seen["clean"].status, produced) == ("length", clean)
        for attempt in range(4):  # pages that held NaN are used again
            again, _ = daemon.generate(
                [5, 6, 7, *range(20, 20 + 20 * attempt)], 12, "ignore_eos=1", f"again{attempt}"
            )
            assert len(again) == 12


def test_soak(tiny_llama: Path) -> None:
    """2,000 mixed commands against one daemon: each answered once, memory flat, still exact at the end."""
    rng = random.Random(7)
    golden_prompt = list(range(40, 90))
    with DaemonProcess(tiny_llama, "--max-ctx=512", "--parallel=4") as daemon:
        golden, _ = daemon.generate(golden_prompt, 24, "ignore_eos=1", "golden-before")
        process = psutil.Process(daemon.process.pid)
        answered: Counter[str] = Counter()
        cancels = Counter[str]()
        sent: set[str] = set()
        open_ids: set[str] = set()
        memory: list[int] = []

        def take(line: str) -> None:
            event = parse_event(line)
            if isinstance(event, Done):
                answered[str(event.id)] += 1
                open_ids.discard(str(event.id))
            elif isinstance(event, Cancelled):
                cancels["answered"] += 1

        for number in range(2000):
            request_id = f"s{number}"
            line = soak_command(rng, sorted(open_ids))
            if line.startswith("CANCEL"):
                cancels["sent"] += 1
                daemon.send(line)
            else:
                daemon.send(f"{line} id={request_id}")
                sent.add(request_id)
                open_ids.add(request_id)
            while len(open_ids) > 12:
                take(daemon.next_line())
            if number % 200 == 199:
                memory.append(process.memory_info().rss)
        while open_ids:
            take(daemon.next_line())
        daemon.send("STATUS id=last")
        for line in daemon.quiet(0.5):
            take(line)
        answered.pop("last", None)
        assert set(answered) == sent
        assert set(answered.values()) == {1}
        assert cancels["sent"] == cancels["answered"]
        assert max(memory[5:]) < 1.15 * max(memory[:5]) + (8 << 20), memory
        again, _ = daemon.generate(golden_prompt, 24, "ignore_eos=1", "golden-after")
        assert again == golden


def soak_command(rng: random.Random, open_ids: list[str]) -> str:
    """One random command without its id: about a third of them wrong."""
    ids = joined([rng.randrange(320) for _ in range(rng.choice((1, 3, 20, 70, 200)))])
    slot = rng.randrange(10)  # 8 and 9 are out of range
    n_gen = rng.choice((0, 1, 4, 12))
    sampled = rng.choice(
        ("", "temperature=0.8 top_k=20", "temperature=1.2 top_p=0.9 min_p=0.02", "repetition_penalty=1.2")
    )
    choices = [
        f"- {n_gen} ids={ids} {sampled}",
        f"- {n_gen} ids={ids} snap={rng.randrange(1, 60)}:{slot} {sampled}",
        f"RESTORE {slot} - {n_gen} ids={ids}",
        f"SNAPSHOT {slot}",
        f"FREE_SNAPSHOT {slot}",
        "LIST_SLOTS",
        "STATUS",
        "PROPS",
        "nonsense words here",
        "- 5 ids=5,99999",
        "/no/such/file 4",
        f"- 600 ids={ids}",
        "- 2 ids=5 top_p=7",
        "compress x 5 y",
        "park draft",
    ]
    if open_ids and rng.random() < 0.15:
        return f"CANCEL id={rng.choice(open_ids)}"
    return rng.choice(choices).strip()
