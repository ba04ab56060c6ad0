"""`--prefill-pool-trim-tokens` on a long prompt whose attention scores change their shape (S139-S162)."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slotd.daemon.memory import DeviceMemory, Policy
from tests.fakes.pressure_rig import PressureRig
from tests.fakes.tiny_gguf import write_tiny_llama

MIB = 1 << 20
CHUNK = 128

#: 23 pieces. Every tile of context gives the scores another shape, so that freed blocks fit nothing later.
PROMPT = [(17 * i) % 300 + 3 for i in range(23 * CHUNK)]

#: Beside the weights: too little for all shapes of the prompt, enough for those of 512 tokens.
ROOM = 12 * MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("long") / "long.gguf", n_ctx=4096)


@cache
def run(model: Path, trim_tokens: int, room: int | None = None, policy: Policy = Policy.SEED) -> PressureRig:
    rig = PressureRig(model, room, chunk=CHUNK, policy=policy, trim_tokens=trim_tokens)
    rig.prompt("p", PROMPT)
    rig.run()
    return rig


def trims(rig: PressureRig, why: str = "interval") -> Any:
    return rig.state["recovery"]["trims"].get(why, {"count": 0, "bytes": 0})


@pytest.mark.parametrize("interval", [CHUNK, 512, 1024, 2944])
def test_p47_p48_the_result_is_the_same_and_the_trims_are_counted(model: Path, interval: int) -> None:
    plain, trimmed = run(model, 0), run(model, interval)
    assert trimmed.ids("p") == plain.ids("p") != []
    assert trims(plain) == {"count": 0, "bytes": 0}
    assert trims(trimmed)["count"] == len(PROMPT) // interval
    assert trims(trimmed)["bytes"] > 0


def test_p49_after_a_trim_the_pool_is_what_lives(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    trim = DeviceMemory.trim

    def watched(memory: DeviceMemory) -> int:
        released = trim(memory)
        seen.append((released, memory.cached))
        return released

    monkeypatch.setattr(DeviceMemory, "trim", watched)
    rig = PressureRig(model, chunk=CHUNK, trim_tokens=512)
    rig.prompt("p", PROMPT, n_gen=0)
    rig.run()
    assert len(seen) == len(PROMPT) // 512 + 1
    assert all(released > 0 and cached == 0 for released, cached in seen[:-1])


def test_seed_runs_out_without_and_passes_with_trim(model: Path) -> None:
    """Field report 62, under one limit."""
    without, trimmed = run(model, 0, ROOM), run(model, 512, ROOM)
    ended = without.ended("p")
    assert (ended.status, ended.code, ended.reason["site"]) == ("err", "oom", "prefill_compute")
    assert len(without.cleared) == 1
    assert trimmed.ended("p").status == "length"
    assert trimmed.cleared == []
    assert trimmed.ids("p") == run(model, 0).ids("p")


def test_the_ladders_first_rung_steps_in_less_often_with_trim(model: Path) -> None:
    without, trimmed = (run(model, tokens, ROOM, Policy.LADDER) for tokens in (0, 512))
    assert without.ids("p") == trimmed.ids("p") == run(model, 0).ids("p")
    assert without.state["recovery"]["rungs"]["trim"] >= 3
    assert trimmed.state["recovery"]["rungs"] == {}
    assert without.cleared == trimmed.cleared == []


def test_a_trim_comes_only_behind_a_committed_piece(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = PressureRig(model, chunk=CHUNK, trim_tokens=512)
    committed: list[int] = []
    trim = rig.engine.trim

    def watched() -> int:
        committed.extend(len(job.sequence or ()) for job in rig.scheduler._running)
        return trim()

    monkeypatch.setattr(rig.engine, "trim", watched)
    rig.prompt("p", PROMPT)
    rig.run()
    assert committed == list(range(512, len(PROMPT) + 1, 512))


def test_a_pool_of_virtual_memory_is_left_alone(model: Path) -> None:
    rig = PressureRig(model, chunk=CHUNK, trim_tokens=512)
    rig.engine.memory.pool_kind = "vmm"
    rig.prompt("p", PROMPT)
    rig.run()
    assert rig.state["recovery"]["trims"] == {}
    assert rig.engine.memory.cached > 0
    assert rig.ids("p") == run(model, 0).ids("p")


def test_the_trim_at_the_end_of_a_request_stays(model: Path) -> None:
    for tokens in (0, 512):
        rig = run(model, tokens)
        assert trims(rig, "end")["count"] == 1
        assert rig.engine.memory.cached <= 320 * 4  # the last logits, which were still being read


def test_each_trim_is_logged_with_its_bytes(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slotd.daemon.recovery"):
        rig = PressureRig(model, chunk=CHUNK, trim_tokens=1024)
        rig.prompt("p", PROMPT, n_gen=0)
        rig.run()
    logged = re.findall(r"pool trim \((\w+)\): (\d+) bytes \([\d.]+ MiB\) released", caplog.text)
    assert [why for why, _ in logged] == ["interval", "interval", "end"]
    assert sum(int(n) for why, n in logged if why == "interval") == trims(rig)["bytes"]
