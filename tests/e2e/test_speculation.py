"""Guessing ahead in the real daemon: what it says of itself, what users reported, memory that is short."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slotd.client import Client
from slotd.protocol.messages import Done
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_draft import write_tiny_draft
from tests.fakes.tiny_gguf import write_tiny_llama

TEXT = [(7 * i) % 250 + 3 for i in range(70)]
OTHER = [(13 * i) % 230 + 9 for i in range(50)]
N_GEN = 48
PLAIN = ("--exact", "--device=cpu", "--spec=off")
NGRAM = ("--exact", "--device=cpu", "--spec=ngram")

#: Random weights repeat nothing by themselves: with few ids to choose from they do.
FEW_IDS = "ignore_eos=1 logit_bias=40:90,41:90,42:90"

#: Fields of [done] that say what was guessed.
Counts = dict[str, Any]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_draft(tmp_path_factory.mktemp("draft") / "draft.gguf")


@cache
def plain_answers(model: Path) -> tuple[list[int], list[int]]:
    with DaemonProcess(model, *PLAIN) as daemon:
        return answer(daemon, TEXT, "a")[0], answer(daemon, OTHER, "b")[0]


def answer(
    daemon: DaemonProcess, ids: list[int], key: str, slot: int | None = None
) -> tuple[list[int], Counts]:
    found, done = daemon.generate(ids, N_GEN, FEW_IDS, key, slot=slot)
    assert isinstance(done, Done)
    assert done.status == "length", done
    return found, dict(done.fields)


def speculation(daemon: DaemonProcess) -> dict[str, Any]:
    daemon.send("PROPS")
    found: dict[str, Any] = daemon.wait_json("props")["speculation"]
    return found


@pytest.fixture(scope="module")
def ngram(tiny_llama: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tiny_llama, *NGRAM) as daemon:
        yield daemon


def test_field_reports_16_23_40_49_every_request_guesses_and_says_the_same(
    tiny_llama: Path, ngram: DaemonProcess
) -> None:
    """From nothing, from what an ended request has left, from a slot: the counts are those of the first."""
    expected = plain_answers(tiny_llama)[0]
    found, first = answer(ngram, TEXT, "first")
    assert found == expected
    assert first["accepted"] > 0
    assert first["acceptance"] > 1
    assert first["mode"] == "ngram"
    for key in ("second", "third"):
        found, counts = answer(ngram, TEXT, key)
        assert (found, counts["reused"]) == (expected, len(TEXT) - 1)
        assert (counts["drafted"], counts["accepted"]) == (first["drafted"], first["accepted"])
    ngram.send(f"- 0 ids={','.join(map(str, TEXT))} snap={len(TEXT) - 6}:1 id=keep")
    ngram.wait_done("keep")
    for number in range(4):
        answer(ngram, [*OTHER, number + 3], f"between{number}")
    found, counts = answer(ngram, TEXT, "restored", slot=1)
    assert (found, counts["accepted"]) == (expected, first["accepted"])


def test_status_counts_what_was_guessed(ngram: DaemonProcess) -> None:
    ngram.send("STATUS")
    before = ngram.wait_json("status")["totals"]
    _, counts = answer(ngram, TEXT, "counted")
    ngram.send("STATUS")
    after = ngram.wait_json("status")["totals"]
    assert after["drafted_tokens"] - before["drafted_tokens"] == counts["drafted"]
    assert after["accepted_tokens"] - before["accepted_tokens"] == counts["accepted"]


def test_field_report_45_constraints_are_refused_not_ignored(ngram: DaemonProcess) -> None:
    """There are none, so no guess can break one."""
    ngram.send('- 8 ids=5,6 grammar="a" id=g')
    done = ngram.wait_done("g")
    assert (done.status, done.fields["code"]) == ("err", "bad_args")


def test_field_report_44_a_stop_text_inside_accepted_tokens(tiny_llama: Path) -> None:
    """Over the edge of two tokens, at every place of the answer: the text before it, and no more."""
    with Client(tiny_llama, daemon_args=list(PLAIN)) as client:
        text = client.generate("hello hello hello", max_tokens=N_GEN, temperature=0.0).text
    with Client(tiny_llama, daemon_args=list(NGRAM)) as client:
        whole = client.generate("hello hello hello", max_tokens=N_GEN, temperature=0.0)
        assert whole.text == text
        for at in range(0, len(text) - 3, 5):
            stop = text[at : at + 3]
            stopped = client.generate("hello hello hello", max_tokens=N_GEN, temperature=0.0, stop=[stop])
            assert stopped.text == text[: text.index(stop)], (at, stop)


def test_field_report_74_the_mode_that_is_used_is_said_and_why_not_more(
    tiny_llama: Path, draft: Path
) -> None:
    with DaemonProcess(
        tiny_llama, "--exact", "--device=cpu", "--spec=tree", f"--draft={draft}", "--budget=6"
    ) as daemon:
        found = speculation(daemon)
        assert (found["spec"], found["modes"], found["adapts"], found["reason"]) == (
            "tree",
            ["tree"],
            False,
            None,
        )
        assert found["draft"] == {"path": str(draft), "block": 8, "window": 2048}
        said, counts = answer(daemon, TEXT, "a")
        assert said == plain_answers(tiny_llama)[0]
        assert counts["mode"] == "tree"
        assert counts["drafted"] > 0
        assert counts["draft_s"] > 0
        assert counts["verify_s"] > 0
    for flags, modes, reason in (
        (("--spec=off",), [], "--spec off"),
        (("--spec=chain",), [], "there is no draft model"),
        (
            (),
            [],
            "there is no draft model; n-grams would change roundings, --spec ngram or --exact allows them",
        ),
        (("--exact",), ["ngram"], "there is no draft model"),
    ):
        with DaemonProcess(tiny_llama, "--device=cpu", *flags) as daemon:
            found = speculation(daemon)
            assert (found["modes"], found["reason"]) == (modes, reason)
            assert ("slotd: speculation: off" in daemon.stderr) == (flags == ("--spec=chain",))


@pytest.mark.parametrize("number", [61, 63])
def test_field_reports_61_63_a_draft_that_does_not_fit_is_done_without(
    tiny_llama: Path, draft: Path, tmp_path: Path, number: int
) -> None:
    """Another model's draft is refused with the reason, one without room too; the daemon serves."""
    env, reason = {"SLOTD_FAULT": "draft_load:1"}, "draft_load"
    if number == 61:
        env, reason = {}, "hidden size is 96"
        draft = write_tiny_draft(tmp_path / "other.gguf", n_embd=96)
    with DaemonProcess(tiny_llama, "--exact", "--device=cpu", f"--draft={draft}", env=env) as daemon:
        found = speculation(daemon)
        assert found["draft"] is None
        assert reason in found["reason"]
        assert daemon.stderr.count("slotd: speculation:") == 1
        assert reason in daemon.stderr
        assert answer(daemon, TEXT, "a")[0] == plain_answers(tiny_llama)[0]


def test_s135_the_command_for_little_memory_starts_and_serves(tmp_path: Path) -> None:
    """As it was recommended for the older daemon, its variables included; with a draft of this model."""
    model = write_tiny_llama(tmp_path / "wide.gguf", n_embd=256, n_head=2, n_head_kv=1)
    draft = write_tiny_draft(tmp_path / "draft.gguf", n_embd=256)
    flags = f"{draft} --max-ctx 65536 --fa-window 1024 --prefix-cache-slots 1 --budget 8 --daemon".split()
    env = {"DFLASH27B_KV_TQ3": "1", "DFLASH27B_PREFILL_UBATCH": "128"}
    with DaemonProcess(model, *flags, "--device=cpu", env=env) as daemon:
        assert len(answer(daemon, TEXT * 3, "a")[0]) == N_GEN
        daemon.send("PROPS")
        props = daemon.wait_json("props")
        assert (props["kv"]["k"], props["kv"]["v"], props["chunk"]) == ("tq3_0", "tq3_0", 128)
        assert (props["max_ctx"], props["slots"]) == (65536, 1)
        assert props["speculation"]["budget"] == 8
        assert props["speculation"]["draft"]["path"] == str(draft)


@pytest.mark.parametrize("policy", ["ladder", "seed"])
@pytest.mark.parametrize("fault", ["verify:2", "verify:1:1000", "draft:2:5"])
def test_s137_memory_that_is_short_for_a_guess_costs_the_guess(
    tiny_llama: Path, draft: Path, fault: str, policy: str
) -> None:
    """No slot, no request, no token twice."""
    flags = ("--exact", "--device=cpu", "--spec=tree", f"--draft={draft}", f"--oom-policy={policy}")
    with DaemonProcess(tiny_llama, *flags, env={"SLOTD_FAULT": fault}) as daemon:
        daemon.send(f"- 0 ids={','.join(map(str, OTHER))} snap=50:2 id=keep")
        daemon.wait_done("keep")
        for key in ("a", "b"):
            assert answer(daemon, TEXT, key)[0] == plain_answers(tiny_llama)[0]
        daemon.send("STATUS")
        status = daemon.wait_json("status")
        assert status["recovery"]["all_cleared"] == 0
        assert "2" in status["slots"]
        assert answer(daemon, OTHER, "c", slot=2)[0] == plain_answers(tiny_llama)[1]
