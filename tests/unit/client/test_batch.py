"""The batch itself, on a scripted client: order, bounds, retries, records, stops."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slotd.client import batch as module
from slotd.client.batch import Batch, Gate, PipeSink, open_source, read_lines
from slotd.client.completion import Completion
from slotd.protocol.errors import (
    ConfigError,
    DaemonDiedError,
    DaemonStartError,
    DaemonTimeoutError,
    RequestError,
)
from tests.fakes.fake_client import FakeClient, completion


def lines(*jobs: Any) -> bytes:
    return b"".join(job if isinstance(job, bytes) else json.dumps(job).encode() + b"\n" for job in jobs)


def run(
    tmp_path: Path, content: bytes, client: FakeClient, **options: Any
) -> tuple[list[Any], module.Counts]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    out = io.BytesIO()
    batch = Batch(client, PipeSink(out), **({"parallel": 2, "defaults": {}, "model": "m"} | options))
    source = os.open(path, os.O_RDONLY)
    try:
        counts = batch.run(source)
    finally:
        os.close(source)
    return [json.loads(line) for line in out.getvalue().splitlines()], counts


def once(error: Exception) -> Callable[[dict[str, Any]], Completion]:
    """Fails with `error` the first time a prompt is asked, then answers."""
    seen: set[str] = set()

    def answer(request: dict[str, Any]) -> Completion:
        if request["prompt"] not in seen:
            seen.add(request["prompt"])
            raise error
        return completion()

    return answer


# ----- lines in


def all_lines(pieces: Iterable[bytes]) -> list[bytes]:
    """What read_lines makes of `pieces` written to a pipe one by one."""
    read, write = os.pipe()

    def feed() -> None:
        for piece in pieces:
            os.write(write, piece)
        os.close(write)

    thread = threading.Thread(target=feed)
    thread.start()
    found = list(read_lines(read, lambda: False))
    thread.join()
    os.close(read)
    return found


@pytest.mark.parametrize(
    "pieces",
    [[b"a\nbc\n\nd"], [b"a", b"\n", b"bc\n\n", b"d"], [bytes([byte]) for byte in b"a\nbc\n\nd"]],
)
def test_lines_at_any_cut(pieces: list[bytes]) -> None:
    assert all_lines(pieces) == [b"a\n", b"bc\n", b"\n", b"d"]


def test_a_line_is_there_before_the_next_one_begins() -> None:
    read, write = os.pipe()
    reader = read_lines(read, lambda: False)
    os.write(write, b"a\n")
    assert next(reader) == b"a\n"
    os.close(write)
    assert list(reader) == []
    os.close(read)


def test_an_overlong_line_is_cut_and_the_next_one_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 10)
    line = b"x" * 70 + b"\n"
    for pieces in ([line + b"ok\n"], [line, b"ok\n"], [line[:9], line[9:30], line[30:] + b"ok\n"]):
        cut, whole = all_lines(pieces)
        assert len(cut) == 11
        assert whole == b"ok\n"


def test_a_stop_ends_reading_while_nobody_writes() -> None:
    read, write = os.pipe()
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    start = time.monotonic()
    assert list(read_lines(read, stop.is_set)) == []
    assert time.monotonic() - start < 5
    os.close(read)
    os.close(write)


# ----- jobs


def test_every_line_gets_one_record_and_blank_lines_none(tmp_path: Path) -> None:
    content = lines({"id": "a", "prompt": "x"}, b"\n", b"oops\n", b"  \n", {"ids": [1]}, {"messages": 1})
    records, counts = run(tmp_path, content, FakeClient())
    assert sorted(record["line"] for record in records) == [1, 3, 5, 6]
    by_line = {record["line"]: record for record in records}
    assert by_line[1]["text"] == "t1 t2 t3 "
    assert by_line[3]["error"]["code"] == "bad_json"
    assert by_line[6]["error"]["message"] == "messages is not a list"
    assert (counts.done, counts.failed, counts.tokens, counts.read) == (4, 2, 6, len(content))


def test_a_jobs_own_params_win_over_the_defaults(tmp_path: Path) -> None:
    client = FakeClient()
    job = {"prompt": "x", "params": {"temperature": 0, "max_tokens": 5}}
    run(tmp_path, lines(job), client, defaults={"temperature": 0.8, "top_k": 40})
    assert client.requests == [
        {"prompt": "x", "messages": None, "temperature": 0.0, "max_tokens": 5, "top_k": 40}
    ]


def test_params_that_do_not_go_with_the_defaults(tmp_path: Path) -> None:
    job = {"id": "a", "prompt": "x", "params": {"min_tokens": 9}}
    records, _ = run(tmp_path, lines(job), FakeClient(), defaults={"max_tokens": 4})
    assert records[0]["error"] == {"code": "bad_job", "message": "min_tokens is 9, above max_tokens 4"}


def test_ids_and_messages_reach_the_client(tmp_path: Path) -> None:
    client = FakeClient()
    messages = [{"role": "user", "content": "hi"}]
    run(tmp_path, lines({"ids": [5, 6]}, {"messages": messages}), client, parallel=1)
    assert [(request["prompt"], request["messages"]) for request in client.requests] == [
        ([5, 6], None),
        (None, messages),
    ]


def test_jobs_run_side_by_side_and_no_more_than_allowed(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=20)  # breaks unless three are inside at once
    inside, most, lock = 0, 0, threading.Lock()
    client = FakeClient()

    def step(index: int) -> None:
        nonlocal inside, most
        if index == 0:
            with lock:
                inside += 1
                most = max(most, inside)
            together.wait()
        if index == 2:
            with lock:
                inside -= 1

    client.step = step
    records, _ = run(tmp_path, lines(*[{"id": i, "prompt": "x"} for i in range(6)]), client, parallel=3)
    assert most == 3
    assert all("error" not in record for record in records)


def test_input_is_read_lazily(tmp_path: Path) -> None:
    read_ahead = []
    client = FakeClient()
    content = lines(*[{"id": i, "prompt": "x" * 70_000} for i in range(40)])
    counts: list[module.Counts] = []
    client.step = lambda index: read_ahead.append(counts[0].read if counts else 0)
    run(tmp_path, content, client, parallel=1, on_change=lambda found: counts.append(found))
    assert max(read_ahead[: 3 * 10]) < len(content) / 2


def test_a_duplicate_id_fails_the_later_line(tmp_path: Path) -> None:
    content = lines({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": 1, "prompt": "z"})
    records, counts = run(tmp_path, content, FakeClient())
    bad = [record for record in records if "error" in record]
    assert [(r["line"], r["error"]["code"]) for r in bad] == [(2, "duplicate_id")]
    assert "line 1" in bad[0]["error"]["message"]
    assert counts.failed == 1


def test_a_server_may_use_an_id_again_once_it_is_answered() -> None:
    read, write = os.pipe()
    answers, out = os.pipe()
    with os.fdopen(answers, "rb") as replies, os.fdopen(out, "wb") as sink:
        batch = Batch(FakeClient(), PipeSink(sink), parallel=2, defaults={}, model="m", live=True)
        thread = threading.Thread(target=batch.run, args=(read,), daemon=True)
        thread.start()
        for _ in range(3):
            os.write(write, lines({"id": "same", "prompt": "x"}))
            assert json.loads(replies.readline())["finish_reason"] == "length"
        os.close(write)
        thread.join(20)
    os.close(read)
    assert not thread.is_alive()
    assert batch.counts.failed == 0


# ----- faults


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("overflow", {"prompt": 70}), "overflow"),
        (RequestError("oom"), "oom"),
        (DaemonTimeoutError("stuck"), "daemon_timeout"),
        (ConfigError("stop is wrong"), "bad_job"),
    ],
)
def test_a_failed_job_is_an_error_record_and_is_not_tried_again(
    tmp_path: Path, error: Exception, code: str
) -> None:
    client = FakeClient(once(error))
    records, counts = run(tmp_path, lines({"id": "a", "prompt": "x"}), client)
    assert records[0]["error"]["code"] == code
    assert len(client.requests) == 1
    assert counts.failed == 1


@pytest.mark.parametrize("error", [DaemonDiedError("exit code 1"), RequestError("device_lost")])
def test_a_daemon_death_costs_one_retry(tmp_path: Path, error: Exception) -> None:
    client = FakeClient(once(error))
    records, counts = run(tmp_path, lines({"id": "a", "prompt": "x"}), client)
    assert "error" not in records[0]
    assert (len(client.requests), counts.failed) == (2, 0)


def test_two_deaths_fail_the_job(tmp_path: Path) -> None:
    def die(request: dict[str, Any]) -> Completion:
        raise DaemonDiedError("exit code 1")

    client = FakeClient(die)
    records, _ = run(tmp_path, lines({"id": "a", "prompt": "x"}), client)
    assert records[0]["error"]["code"] == "daemon_died"
    assert len(client.requests) == 2


def test_a_job_that_kills_daemons_takes_no_neighbour_with_it(tmp_path: Path) -> None:
    """Whoever is inside together with the poison dies with it once; the second tries are alone."""
    death = threading.Condition()
    deaths = 0
    starts = threading.Barrier(3, timeout=20)
    first_round = threading.Event()

    def answer(request: dict[str, Any]) -> Completion:
        nonlocal deaths
        with death:
            seen = deaths
        if not first_round.is_set():
            starts.wait()
            first_round.set()
        if request["prompt"] == "poison":
            time.sleep(0.05)
            with death:
                deaths += 1
                death.notify_all()
            raise DaemonDiedError("killed")
        with death:
            if death.wait_for(lambda: deaths > seen, timeout=0.15):
                raise DaemonDiedError("killed")
        return completion()

    jobs = [{"id": name, "prompt": name} for name in ("a", "poison", "b", "c", "d")]
    records, _ = run(tmp_path, lines(*jobs), FakeClient(answer), parallel=3)
    assert [record["id"] for record in records if "error" in record] == ["poison"]


def test_a_daemon_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    client = FakeClient(once(DaemonStartError("no memory")))
    with pytest.raises(DaemonStartError):
        run(tmp_path, lines(*[{"id": i, "prompt": str(i)} for i in range(20)]), client)


def test_a_server_goes_on_when_the_daemon_cannot_start(tmp_path: Path) -> None:
    client = FakeClient(once(DaemonStartError("no memory")))
    content = lines({"id": 1, "prompt": "x"}, {"id": 2, "prompt": "x"})
    records, _ = run(tmp_path, content, client, live=True, parallel=1)
    assert [record.get("error", {}).get("code") for record in records] == ["daemon_start", None]


def test_a_reader_that_went_away_ends_the_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines({"id": 1, "prompt": "x"}))
    out = os.fdopen(write, "wb", buffering=0)
    batch = Batch(FakeClient(), PipeSink(out), parallel=1, defaults={}, model="m")
    with open(path, "rb") as source, pytest.raises(BrokenPipeError):
        batch.run(source.fileno())
    out.close()


# ----- deltas


def test_stream_writes_deltas_before_the_record(tmp_path: Path) -> None:
    records, _ = run(tmp_path, lines({"id": "a", "prompt": "x"}), FakeClient(), stream=True)
    assert [record.get("delta") for record in records] == ["t1 ", "t2 ", "t3 ", None]
    assert records[0] == {"id": "a", "line": 1, "delta": "t1 ", "ids": [1]}
    assert records[-1]["text"] == "t1 t2 t3 "


@pytest.mark.parametrize("wanted", [True, False])
def test_thoughts_are_in_deltas_and_records_unless_they_are_hidden(tmp_path: Path, wanted: bool) -> None:
    client = FakeClient(lambda request: completion(reasoning="Hm.", reasoning_tokens=1))
    job = lines({"id": "a", "prompt": "x"})
    records, _ = run(tmp_path, job, client, stream=True, reasoning=wanted)
    thoughts = [record["reasoning"] for record in records if "reasoning" in record]
    assert thoughts == (["Hm.", "Hm."] if wanted else [])


def test_after_a_death_the_stream_says_that_it_begins_anew(tmp_path: Path) -> None:
    client = FakeClient()
    deaths = iter([True])

    def step(index: int) -> None:
        if index == 1 and next(deaths, False):
            raise DaemonDiedError("gone")

    client.step = step
    records, _ = run(tmp_path, lines({"id": "a", "prompt": "x"}), client, stream=True)
    assert [record.get("delta") or record.get("restart") for record in records] == [
        "t1 ",
        True,
        "t1 ",
        "t2 ",
        "t3 ",
        None,
    ]


# ----- parts


def test_gate_lets_one_alone_pass_before_others() -> None:
    gate = Gate()
    order: list[str] = []
    waiting = threading.Event()

    def alone() -> None:
        waiting.set()
        with gate.alone():
            order.append("alone")

    def shared() -> None:
        with gate.shared():
            order.append("shared")

    with gate.shared():
        first = threading.Thread(target=alone)
        first.start()
        waiting.wait(10)
        time.sleep(0.05)
        second = threading.Thread(target=shared)
        second.start()
        time.sleep(0.05)
        assert order == []
    first.join(10)
    second.join(10)
    assert order == ["alone", "shared"]


def test_input_that_is_the_output_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"")
    for out in (path, tmp_path / "sub" / ".." / "x.jsonl"):
        (tmp_path / "sub").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="overwritten"):
            open_source(str(path), str(out))
    part = tmp_path / "y.jsonl.part"
    part.write_bytes(b"")
    with pytest.raises(ConfigError, match="overwritten"):
        open_source(str(part), str(tmp_path / "y.jsonl"))
