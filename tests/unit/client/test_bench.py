"""The bench: plan, arithmetic, output."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slotd.client import bandwidth, bench
from slotd.client.bandwidth import Bandwidth
from slotd.client.completion import Completion
from slotd.protocol.errors import ConfigError, SlotdError
from tests.fakes.fake_client import FakeClient, completion

PLAN = bench.Plan(prefill=(8, 16), depths=(4,), decode=5, repeats=2)


@pytest.fixture
def client() -> FakeClient:
    def answer(request: dict[str, Any]) -> Completion:
        steps = request["max_tokens"] - 1
        return completion(
            tuple(range(request["max_tokens"])),
            prompt_tokens=len(request["prompt"]),
            cached_tokens=0,
            timings={
                "prefill_s": 0.01 * len(request["prompt"]),
                "decode_s": 0.004 * steps,
                "sample_s": 0.001 * steps,
            },
        )

    fake = FakeClient(answer)
    fake.step = lambda index: time.sleep(0.01)
    return fake


def test_report(client: FakeClient) -> None:
    report = bench.bench(client, PLAN, Bandwidth(1e6, 2))
    assert [(r["tokens"], round(r["tokens_per_s"])) for r in report["prefill"]] == [(8, 100), (16, 100)]
    assert all(result["ttft_s"] >= 0.01 for result in report["prefill"])
    decode = report["decode"][0]
    assert decode["depth"] == 4
    assert 0.01 <= decode["token_s"] < 0.1
    assert decode["overhead_s"] == pytest.approx(decode["token_s"] - 0.005, abs=1e-6)
    assert decode["tokens_per_s"] == pytest.approx(1 / decode["token_s"])
    for result in (*report["prefill"], decode):
        assert result["tokens_per_s_min"] <= result["tokens_per_s"] <= result["tokens_per_s_max"]


def test_min_and_max_are_of_the_runs(client: FakeClient) -> None:
    # The first request is a warm-up, the last three are decodes.
    seconds = iter([9.0, 0.1, 0.2, 0.4, 9.0, 9.0, 9.0])

    def answer(request: dict[str, Any]) -> Completion:
        timings = {"prefill_s": next(seconds)}
        return completion((1, 2), prompt_tokens=8, cached_tokens=0, timings=timings)

    client.answer = answer
    client.step = lambda index: None
    plan = bench.Plan(prefill=(8,), depths=(4,), decode=2, repeats=3)
    [prefill] = bench.bench(client, plan, Bandwidth(1e6, 2))["prefill"]
    names = ("tokens_per_s_min", "tokens_per_s", "tokens_per_s_max")
    assert [prefill[name] for name in names] == pytest.approx([20.0, 40.0, 80.0])


def test_no_title_is_wider_than_its_table(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda: Bandwidth(1e6, 2))
    bench.run(Path("a-model-with-quite-a-long-name-Q4_1.gguf"), lambda: client, PLAN, as_json=False)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {"Prefill", "Decode, 5 tokens"} <= set(lines)
    assert any("min" in line and "max" in line for line in lines)


def test_the_floor(client: FakeClient) -> None:
    report = bench.bench(client, PLAN, Bandwidth(1e6, 2))
    decode = report["decode"][0]
    floor = report["floor"]
    assert floor["token_s"] == pytest.approx(0.001)
    assert floor["reached"] == pytest.approx(0.001 / decode["token_s"])
    assert report["prefill_over_decode"] == pytest.approx(100 / decode["tokens_per_s"])


def test_every_prompt_is_another_one_and_nothing_stops_it(client: FakeClient) -> None:
    bench.bench(client, PLAN, Bandwidth(1e6, 2))
    prompts = [tuple(request["prompt"]) for request in client.requests]
    assert len(set(prompts)) == len(prompts) == 1 + 2 * 2 + 2
    assert all(request["ignore_eos"] and request["temperature"] == 0.0 for request in client.requests)
    assert all(0 <= token < 300 for prompt in prompts for token in prompt)


def test_a_plan_over_the_context_is_refused(client: FakeClient) -> None:
    client.hello["max_ctx"] = 16
    with pytest.raises(ConfigError, match="a context of 17 tokens; the daemon has 16"):
        bench.bench(client, PLAN, Bandwidth(1e6, 2))


def test_no_floor_when_the_daemon_does_not_say(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "status", dict)
    assert bench.bench(client, PLAN, Bandwidth(1e6, 2))["floor"] is None


@pytest.mark.parametrize("as_json", [True, False])
def test_run_prints(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(bench, "measure", lambda: Bandwidth(1e6, 2))
    assert bench.run(Path("x/m.gguf"), lambda: client, PLAN, as_json=as_json) == 0
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed)["model"]["file"] == "m.gguf"
    else:
        assert "m.gguf" in printed
        assert "of the floor's rate" in printed
    assert client.closed


@pytest.mark.parametrize("text", ["", "a", "1,", "0", "-4", "1;2"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        bench.parse_sizes("--prefill", text)


def test_sizes() -> None:
    assert bench.parse_sizes("--depth", "1, 2") == (1, 2)


def test_bandwidth_is_measured() -> None:
    found = bandwidth.read_here(total_bytes=8 << 20, passes=2)
    assert found.bytes_per_s > 1e7
    assert found.threads >= 1


def test_bandwidth_in_a_process_of_its_own_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth.sys, "executable", "/bin/false")
    with pytest.raises(SlotdError, match="cannot be measured"):
        bandwidth.measure()
