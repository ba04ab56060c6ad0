"""Ids, HELLO, concurrency, CANCEL, STATUS: the additions of version 2, on the real daemon."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from slotd.protocol.messages import Done, Prefill, Tokens
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess

PARTS = ("queue", "load", "compress", "restore", "prefill", "decode", "draft", "verify", "sample", "snapshot",
         "recover", "emit", "other")  # fmt: skip


@pytest.fixture
def daemon(tiny_llama: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tiny_llama, "--max-ctx=512") as process:
        yield process


def lines_of(daemon: DaemonProcess, request_id: str) -> list[object]:
    """Every event of a request up to and including its [done]."""
    events: list[object] = []

    def collect(event: object) -> bool:
        if getattr(event, "id", None) == request_id:
            events.append(event)
        return isinstance(event, Done) and event.id == request_id

    daemon.wait_event(collect)
    return events


def test_an_answer_with_an_id(daemon: DaemonProcess) -> None:
    daemon.send("- 6 ids=5,6,7 id=r1 ignore_eos=1")
    events = lines_of(daemon, "r1")
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [event.at for event in tokens] == list(range(6))
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.status, done.fields["limit"], done.fields["gen"], done.fields["prompt"]) == (
        "length",
        "n_gen",
        6,
        3,
    )
    assert sum(float(done.fields[f"{part}_s"]) for part in PARTS) == pytest.approx(
        float(done.fields["wall_s"]), abs=1e-4
    )
    assert isinstance(done.fields["seed"], int)


def test_an_id_never_touches_the_token_stream(daemon: DaemonProcess, tmp_path: Path) -> None:
    prompt = tmp_path / "p.bin"
    prompt.write_bytes(b"\x05\0\0\0\x06\0\0\0")
    daemon.send("- 3 ids=5,6 id=a", "park id=b", "nonsense id=c", "unpark id=d")
    for request_id in "abcd":
        daemon.wait_done(request_id)
    daemon.send(f"{prompt} 0")
    assert daemon.read_stream_value() == -1


def test_hello_turns_to_version_2_for_the_lines_behind_it(daemon: DaemonProcess, tmp_path: Path) -> None:
    daemon.send("LIST_SLOTS")
    assert daemon.next_line() == "[snap] slots="
    daemon.send("HELLO")
    hello = daemon.wait_json("hello")
    assert hello["protocol"] == [1, 2]
    assert hello["max_ctx"] == 512
    assert hello["slots"] == 8
    assert hello["epoch"] == 0
    assert len(hello["boot"]) == 16
    assert "SNAPSHOT" in hello["verbs"]
    daemon.send("LIST_SLOTS", "nonsense", "- 2 ids=5,6 ignore_eos=1")
    assert daemon.next_line() == "[snap] slots="
    assert daemon.next_line().startswith("[done] status=ok")
    assert daemon.next_line().startswith("[done] status=err code=unknown_command verb=nonsense")
    assert daemon.read_stream() == []
    assert len(daemon.read_stream()) == 2
    assert daemon.next_line().startswith("[done] status=length")


def test_done_leaves_before_the_minus_one(daemon: DaemonProcess) -> None:
    daemon.send("HELLO")
    daemon.wait_json("hello")
    for _ in range(20):
        daemon.send("- 1 ids=5,6 ignore_eos=1")
        daemon.read_stream()
        assert daemon.quiet(0.05)[-1].startswith("[done]")


def test_requests_run_side_by_side_and_each_equals_its_lone_run(daemon: DaemonProcess) -> None:
    prompts = [[5, 6, 7], list(range(20, 90)), [9] * 40, [100, 3, 77]]
    alone = [daemon.generate(ids, 20, "ignore_eos=1", f"alone{i}")[0] for i, ids in enumerate(prompts)]
    for i, ids in enumerate(prompts):
        daemon.send(f"- 20 ids={','.join(map(str, ids))} id=r{i} ignore_eos=1")
    together: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
    open_ids, order = set(together), []
    while open_ids:
        event = parse_event(daemon.next_line())
        if isinstance(event, Tokens) and event.id is not None:
            together[event.id].extend(event.ids)
            order.append(event.id)
        if isinstance(event, Done):
            open_ids.discard(str(event.id))
    assert list(together.values()) == alone
    switches = sum(a != b for a, b in pairwise(order))
    assert switches > 10  # they took turns


def test_a_duplicate_id_is_refused_and_the_first_lives_on(daemon: DaemonProcess) -> None:
    daemon.send("- 400 ids=5,6,7 id=x ignore_eos=1", "- 5 ids=5 id=x", "STATUS id=x", "nonsense id=x")
    errors = [daemon.wait_line("err ") for _ in range(3)]
    assert errors[0] == errors[1] == "err duplicate_id id=x"
    assert errors[2] == "err unknown_command verb=nonsense id=x"
    daemon.send("CANCEL id=x")
    assert daemon.wait_done("x").status == "cancelled"
    daemon.send("- 2 ids=5,6 id=x ignore_eos=1")
    assert daemon.wait_done("x").status == "length"


def test_cancel_while_decoding_prefilling_and_queued(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--max-ctx=100000", "--parallel=1", "--chunk=64") as daemon:
        long_prompt = ",".join(["7"] * 60_000)
        daemon.send(f"- 9 ids={long_prompt} id=long", "- 9 ids=5,6 id=queued", "- 9 ids=5,6,9 id=next")
        daemon.wait_line("[prefill] id=long")
        daemon.send("CANCEL id=queued")
        assert daemon.wait_line("[cancel]") == "[cancel] id=queued found=1"
        assert daemon.wait_done("queued").status == "cancelled"
        began = time.monotonic()
        daemon.send("CANCEL id=long")
        done = daemon.wait_done("long")
        assert done.status == "cancelled"
        assert daemon.wait_done("next").status in ("stop", "length")
        assert time.monotonic() - began < 10
        # What was prefilled is not lost: the same prompt again starts from there.
        daemon.send(f"- 0 ids={long_prompt[:4001]} id=again")
        assert int(daemon.wait_done("again").fields["reused"]) >= 64
        daemon.send("CANCEL id=nobody")
        assert daemon.wait_line("[cancel]") == "[cancel] id=nobody found=0"


def test_cancel_without_id_ends_the_token_stream_request(daemon: DaemonProcess) -> None:
    daemon.send("CANCEL")
    assert daemon.next_line() == "[cancel] found=0"
    daemon.send("- 480 ids=5,6,7 ignore_eos=1")
    first = daemon.read_stream_value()
    assert first >= 0
    daemon.send("CANCEL")
    assert daemon.next_line() == "[cancel] found=1"
    assert len(daemon.read_stream()) < 479


def test_status_answers_while_a_prefill_runs(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--max-ctx=100000", "--chunk=2048") as daemon:
        daemon.send(f"- 1 ids={','.join(['7'] * 60_000)} id=long")
        daemon.wait_line("[prefill] id=long")
        waits = []
        for _ in range(5):
            began = time.monotonic()
            daemon.send("STATUS")
            status = daemon.wait_json("status")
            waits.append(time.monotonic() - began)
            assert status["running"][0]["id"] == "long"
            assert status["running"][0]["phase"] == "prefill"
        assert min(waits) < 5  # a bound against hanging; the figure is in the benchmarks
        daemon.send("CANCEL id=long")
        daemon.wait_done("long")


def test_progress_is_monotonic_and_ends_at_the_total(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--max-ctx=4096", "--chunk=100") as daemon:
        daemon.send(f"- 1 ids={','.join(['7'] * 1500)} id=p")
        progress = [event for event in lines_of(daemon, "p") if isinstance(event, Prefill)]
        at = [event.at for event in progress]
        assert at == sorted(at)
        assert at[-1] == 1500
        assert len(at) >= 10
        assert all(event.of == 1500 for event in progress)


def test_a_reused_prefix_is_counted(daemon: DaemonProcess) -> None:
    ids = list(range(30, 130))
    _, first = daemon.generate(ids, 2, request_id="a")
    answer, second = daemon.generate(ids, 2, request_id="b")
    assert first.fields["reused"] == 0
    assert second.fields["reused"] == 99
    with_more, third = daemon.generate([*ids, *answer[:1], 50], 2, request_id="c")
    assert third.fields["reused"] == 101
    assert with_more


def test_snapshot_of_a_named_request(daemon: DaemonProcess) -> None:
    daemon.generate([5, 6, 7], 3, "ignore_eos=1", "a")
    daemon.generate([9, 9], 3, "ignore_eos=1", "b")
    daemon.send("SNAPSHOT 2 of=a id=s")
    assert daemon.wait_line("[snap]") == "[snap] slot=2 cur_pos=6 id=s"
    assert daemon.wait_done("s").status == "ok"
    daemon.send("SNAPSHOT 2 of=nobody id=t", "SNAPSHOT 2")
    assert daemon.wait_done("t").fields["code"] == "nothing_to_snapshot"
    assert daemon.wait_line("err") == "err nothing_to_snapshot"  # the serial lane has run no prompt


def test_a_snapshot_that_can_not_fire_is_said(daemon: DaemonProcess) -> None:
    daemon.send("- 1 ids=5,6,7 id=a snap=9:1")
    assert daemon.wait_line("[snap]") == "[snap] inline-failed slot=1 reason=past_prompt id=a"
    assert daemon.wait_done("a").status in ("stop", "length")


def test_lines_for_a_stream(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--stream-fd", "-", stream=False) as daemon:
        daemon.send("- 3 ids=5,6 ignore_eos=1")
        for at in range(3):
            assert daemon.next_line().startswith(f"[tok] at={at} ids=")
        assert daemon.next_line().startswith("[done] status=length limit=n_gen")
        daemon.send("nonsense")
        assert daemon.next_line().startswith("[done] status=err code=unknown_command")


def test_fit_runs_with_what_is_left(daemon: DaemonProcess) -> None:
    ids = [7] * 500
    daemon.send(f"- 100 ids={','.join(map(str, ids))} id=no ignore_eos=1")
    done = daemon.wait_done("no")
    assert (done.status, done.fields["code"]) == ("err", "overflow")
    assert [done.fields[name] for name in ("prompt", "n_gen", "max_ctx")] == [500, 100, 512]
    produced, done = daemon.generate(ids, 100, "ignore_eos=1 fit=1", "yes")
    assert (done.status, done.fields["limit"], len(produced)) == ("length", "max_ctx", 12)
    produced, done = daemon.generate([7] * 511, 100, "fit=1", "edge")
    assert len(produced) == 1
    daemon.send(f"- 1 ids={','.join(['7'] * 512)} id=full fit=1")
    assert daemon.wait_done("full").fields["code"] == "overflow"
    daemon.send(f"- 0 ids={','.join(['7'] * 512)} id=prefill")
    assert daemon.wait_done("prefill").status == "ok"


def test_stop_ids_min_tokens_and_logprobs(daemon: DaemonProcess) -> None:
    produced, _ = daemon.generate([5, 6, 7], 10, "ignore_eos=1", "a")
    stop = produced[3]
    first = produced.index(stop)
    stopped, done = daemon.generate([5, 6, 7], 10, f"ignore_eos=1 stop={stop}", "b")
    assert stopped == produced[: first + 1]
    assert (done.status, done.fields["stop"]) == ("stop", stop)
    longer, done = daemon.generate([5, 6, 7], 10, f"ignore_eos=1 stop={stop} min_tokens=10", "c")
    assert len(longer) == 10  # min_tokens counts generated tokens only
    assert stop not in longer[:9]
    daemon.send("- 2 ids=5,6,7 id=d logprobs=3 ignore_eos=1")
    event = daemon.wait_event(lambda event: isinstance(event, Tokens))
    assert isinstance(event, Tokens)
    assert event.ids[0] == event.logprobs[0].top[0][0] == produced[0]
    assert event.logprobs[0].logprob == event.logprobs[0].top[0][1] < 0
    assert len(event.logprobs[0].top) == 3
    daemon.wait_done("d")


def test_fields_that_can_not_be_honoured_are_refused(daemon: DaemonProcess) -> None:
    for fields, code in (
        ("grammar=x", "bad_args"), ("top_p=2", "bad_args"), ("stop=99999", "bad_args"),
        ("logit_bias=400:1", "bad_args"), ("snap=1:64", "bad_slot"), ("logprobs=99", "bad_args"),
    ):  # fmt: skip
        daemon.send(f"- 2 ids=5,6 id=f {fields}")
        done = daemon.wait_done("f")
        assert (done.status, done.fields["code"]) == ("err", code), fields
    daemon.send("- 2 ids=5,320 id=g", "- 2 ids= id=h", "- 2 ids=5 logprobs=2")
    assert daemon.wait_done("g").fields == {"code": "bad_token", "at": 1, "token": 320, "vocab": 320}
    assert daemon.wait_done("h").fields["code"] == "empty_prompt"
    assert daemon.wait_line("err").startswith("err bad_args field=logprobs")


def test_every_command_gets_exactly_one_terminal_event(daemon: DaemonProcess) -> None:
    commands = ["- 3 ids=5,6", "LIST_SLOTS", "SNAPSHOT 0", "FREE_SNAPSHOT 0", "park draft", "compress a b c",
                "SNAPSHOT_THIN 0 0 1", "nonsense", "- 3 ids=999", "STATUS", "PROPS", "HELLO", "free drafter",
                "RESTORE 5 - 2 ids=1", "generate x 1 y"]  # fmt: skip
    expected = Counter()
    for number in range(60):
        command = commands[number % len(commands)]
        daemon.send(f"{command} id=c{number}")
        expected[f"c{number}"] = 1
    seen: Counter[str] = Counter()
    daemon.send("STATUS id=end")
    while seen.total() < 60:
        event = parse_event(daemon.next_line())
        if isinstance(event, Done) and event.id != "end":
            seen[str(event.id)] += 1
    seen.update(str(parse_event(line).id) for line in daemon.quiet(0.3) if line.startswith("[done]"))
    seen.pop("end", None)
    assert seen == expected


def test_a_cancelled_command_without_any_other_end_gets_an_err_line(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.bin"
    source.write_bytes(b"\x02\0\0\0\x05\0\0\0\x06\0\0\0")
    with DaemonProcess(tiny_llama, "--max-ctx=20000") as daemon:
        daemon.send(f"generate {source} 19000 {tmp_path / 'out.bin'}", "LIST_SLOTS")
        while True:  # until the engine has it
            daemon.send("STATUS")
            if daemon.wait_json("status")["running"]:
                break
        daemon.send("CANCEL")
        assert daemon.next_line() == "[cancel] found=1"
        assert daemon.next_line() == "err cancelled"
        assert daemon.next_line() == "[snap] slots="
        assert not (tmp_path / "out.bin").exists()


def test_a_short_prompt_does_not_wait_for_a_long_one(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama, "--max-ctx=100000", "--chunk=64") as daemon:
        daemon.send(f"- 1 ids={','.join(['7'] * 60_000)} id=long")
        daemon.wait_line("[prefill] id=long")
        daemon.send("- 2 ids=5,6,7 id=short ignore_eos=1")
        assert daemon.wait_done("short").status == "length"
        daemon.send("STATUS")
        phases = {entry["id"]: entry["phase"] for entry in daemon.wait_json("status")["running"]}
        assert phases["long"] == "prefill"
        daemon.send("CANCEL id=long")
        daemon.wait_done("long")
