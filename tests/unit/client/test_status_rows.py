"""STATUS as rows of text, whatever it holds."""

from __future__ import annotations

from typing import Any

import pytest

from slotd.client.status_rows import (
    SLOT_COLUMNS,
    Speeds,
    ago,
    clean,
    columns,
    counter_rows,
    head_line,
    memory_rows,
    request_rows,
    size,
    slot_rows,
)

STATUS: dict[str, Any] = {
    "epoch": 2,
    "queued": 1,
    "running": [{"id": "r1", "phase": "decode", "prompt": 300, "at": 300, "reused": 256, "gen": 8}],
    "slots": {
        "10": {"tokens": 12000, "kind": "thick", "tier": "device", "bytes": 3 << 20, "own_bytes": 1024,
               "idle_s": 3700, "hash": "0123456789abcdef" * 2},
        "2": {"tokens": 5, "kind": "thin", "tier": "host", "bytes": 10, "own_bytes": 0, "idle_s": 1,
              "hash": None},
    },
    "memory": {"live": {"kv": 5000, "weights": 9 << 30, "logits": 0}, "cached": 2048, "pool": "legacy",
               "free": 1 << 30, "total": 4 << 30, "pages_used": 7, "pages_free": 9},
    "host_tier": {"used": 10, "budget": 100, "moves_out": 3, "moves_in": 2, "dropped": 1},
    "recovery": {"oom": {"decode": 1}, "rungs": {"trim": 1, "move": 2}, "all_cleared": 2,
                 "trims": {"end": {"count": 4, "bytes": 1 << 20}}},
    "totals": {"requests": 9, "from_slot": 3, "from_ended": 2, "from_nothing": 4, "prompt_tokens": 1000,
               "reused_tokens": 400, "computed_tokens": 600, "generated_tokens": 70},
}  # fmt: skip


def test_slots_by_number_with_all_that_is_known() -> None:
    assert slot_rows(STATUS, idle=2.0) == [
        ("2", "5", "thin", "host", "10 B", "0 B", "3.0 s ago", ""),
        ("10", "12,000", "thick", "device", "3.00 MiB", "1.00 KiB", "1.0 h ago", "0123456789ab"),
    ]
    assert len(SLOT_COLUMNS) == len(slot_rows(STATUS)[0])


def test_memory_by_purpose_the_largest_first() -> None:
    assert memory_rows(STATUS) == [
        ("weights", "9.00 GiB"), ("kv", "4.88 KiB"), ("cached", "2.00 KiB (legacy pool)"),
        ("free", "1.00 GiB of 4.00 GiB"), ("pages", "7 used, 9 free"), ("host tier", "10 B of 100 B"),
    ]  # fmt: skip


def test_counters() -> None:
    assert dict(counter_rows(STATUS)) == {
        "requests": "9",
        "began from": "slots 3, ended requests 2, nothing 4",
        "prompt tokens": "1,000, 400 of them reused (40%)",
        "answer tokens": "70",
        "out of memory": "decode 1",
        "given up": "trim 1, move 2",
        "all-cleared": "2",
        "pool trims": "end 4 (1.00 MiB)",
        "slots moved": "3 to host memory, 2 back, 1 dropped",
    }


def test_the_process_that_computes_is_shown_when_there_is_one() -> None:
    engine: dict[str, Any] = {"host": "process", "pid": 4321, "phase": "running", "replacements": 2}
    assert counter_rows(STATUS | {"engine": engine})[0] == (
        "engine", "process 4321, running, replaced 2 times"
    )  # fmt: skip
    engine |= {"phase": "down", "died_of": "signal SIGKILL\x1b"}
    assert counter_rows(STATUS | {"engine": engine})[0][1] == (
        "process 4321, down, replaced 2 times, the last one died of: signal SIGKILL?"
    )
    assert counter_rows(STATUS | {"engine": "odd"})[0][0] == "requests"


@pytest.mark.parametrize("target", ["unloaded", "loading", "parked"])
def test_the_head_says_when_the_weights_are_away(target: str) -> None:
    assert head_line({}, STATUS | {"target": target}).endswith(f", weights {target}")
    assert "weights" not in head_line({}, STATUS | {"target": "loaded"})


def test_requests_and_head() -> None:
    assert request_rows(STATUS) == [("r1", "decode", "300/300", "256", "8")]
    props = {"model": {"name": "tiny"}, "backend": {"name": "numpy"}, "kv": {"k": "f16", "v": "f32"},
             "max_ctx": 4096, "parallel": 4, "oom_policy": "seed"}  # fmt: skip
    assert head_line(props, STATUS) == (
        "tiny, on numpy, K/V f16/f32, context 4,096, 1 of 4 running, 1 waiting, epoch 2, "
        "policy when out of memory: seed"
    )


@pytest.mark.parametrize(
    "odd",
    [{}, {"slots": None, "running": 5, "memory": [], "totals": "x"},
     {"slots": {"0": 7, "x": {}}, "running": ["?"]}, {"memory": {"live": {"kv": "much"}},
      "recovery": {"trims": 1}}],
)  # fmt: skip
def test_what_is_missing_or_odd_breaks_nothing(odd: dict[str, Any]) -> None:
    for rows in (slot_rows, request_rows, memory_rows, counter_rows):
        assert all(isinstance(cell, str) for row in rows(odd) for cell in row)
    assert head_line({}, odd).startswith("no model named")


def test_nothing_of_it_can_drive_the_terminal() -> None:
    assert clean("a\x1b[2Jb\n") == "a?[2Jb?"
    assert "\x1b" not in head_line({"model": {"name": "\x1b]0;x\x07"}}, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (15 * 1024, "15.0 KiB"), (300 << 20, "300 MiB"), ("x", "0 B")],
)
def test_sizes(value: Any, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.42, "0.4 s"), (59, "59 s"), (90, "1.5 min"), (90000, "1.0 d")]
)
def test_times(value: float, text: str) -> None:
    assert ago(value) == text


def test_columns_are_aligned() -> None:
    assert columns(["a", "bb"], [("xyz", "1"), ("", "22")]) == ["a    bb", "xyz  1", "     22"]


def totals(computed: int, generated: int) -> dict[str, Any]:
    return {"totals": {"computed_tokens": computed, "generated_tokens": generated}}


def test_speeds_are_those_of_the_last_seconds() -> None:
    speeds = Speeds(window=3.0)
    assert speeds.see(0.0, totals(0, 0)) == (0.0, 0.0)
    assert speeds.see(1.0, totals(300, 10)) == (300.0, 10.0)
    for second in range(2, 20):
        rate = speeds.see(float(second), totals(300, 10 + 5 * second))
    assert rate == (0.0, 5.0)
    assert speeds.see(20.0, totals(5, 0)) == (0.0, 0.0)  # a new daemon
