"""SNAPSHOT_THIN and RESTORE_CHAIN on the real daemon: spans, chains of them, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.daemon_process import DaemonProcess

IDS = random.Random(6).choices(range(3, 259), k=210)
N_GEN = 8


@pytest.fixture
def daemon(tiny_llama: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tiny_llama, "--max-ctx=512", "--exact") as process:
        yield process


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.bin"
    path.write_bytes(np.asarray(IDS, "<i4").tobytes())
    return path


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def keep(daemon: DaemonProcess, thick: int | None, *cuts: int, ids: list[int] = IDS) -> None:
    """Slot 0: the first `thick` tokens; slots 1, 2, ..: what lies between that and the cuts."""
    snap = "" if thick is None else f" snap={thick}:0"
    daemon.send(f"- 0 ids={joined(ids)}{snap}")
    if thick is not None:
        assert daemon.next_line() == f"[snap] inline slot=0 cur_pos={thick}"
    assert daemon.read_stream() == []
    start = thick or 0
    for slot, end in enumerate(cuts, 1):
        daemon.send(f"SNAPSHOT_THIN {slot} {start} {end}")
        assert daemon.next_line() == f"[snap] thin slot={slot} kv={start},{end}"
        start = end


def forget(daemon: DaemonProcess) -> None:
    """End as many other requests as the daemon keeps: what is known is in the slots, and their pages only."""
    for number in range(4):
        daemon.send(f"- 0 ids={joined([7 + number] * 300)}")
        assert daemon.read_stream() == []


def reply(daemon: DaemonProcess, line: str) -> str:
    daemon.send(line)
    return daemon.next_line()


@pytest.mark.parametrize(
    ("thick", "cuts"),
    [
        (64, (128, 192)),  # at page edges
        (100, (130,)),  # inside of pages
        (100, (110, 120, 200)),  # several spans in one page
        (None, (70, 210)),
        (None, (210,)),
        (210, ()),
        (None, ()),
    ],
)
def test_a_chain_answers_as_the_whole_prompt(
    daemon: DaemonProcess, prompt: Path, thick: int | None, cuts: tuple[int, ...]
) -> None:
    expected, _ = daemon.generate(IDS, N_GEN, "ignore_eos=1", "whole")
    keep(daemon, thick, *cuts)
    forget(daemon)
    first = -1 if thick is None else 0
    thins = ",".join(str(slot) for slot in range(1, len(cuts) + 1)) or "-"
    end = (*(() if thick is None else (thick,)), *cuts)[-1:] or (0,)
    daemon.send(f"RESTORE_CHAIN {first} {thins} {prompt} {N_GEN} samp=0")
    assert daemon.next_line() == f"[snap] chain restored thick={first} thins={len(cuts)} cur_pos={end[0]}"
    stream = daemon.read_stream()
    assert stream == expected[: len(stream)]
    forget(daemon)
    daemon.send(f"RESTORE_CHAIN {first} {thins} - {N_GEN} ids={joined(IDS)} id=c ignore_eos=1")
    assert daemon.next_line().endswith(f"cur_pos={end[0]} id=c")
    done = daemon.wait_done("c")
    logits_are_kept = thick == 210
    assert done.fields["reused"] == (209 if end[0] == 210 and not logits_are_kept else end[0])


def test_slots_keep_their_spans_when_the_chain_goes_on(daemon: DaemonProcess) -> None:
    """What is computed behind a chain does not write into its pages."""
    keep(daemon, 100, 130)
    for turn in range(3):
        forget(daemon)
        daemon.send(f"RESTORE_CHAIN 0 1 - {N_GEN} ids={joined(IDS[: 140 + 20 * (turn % 2)])} id=t{turn}")
        daemon.wait_line("[snap] chain restored")
        assert daemon.wait_done(f"t{turn}").fields["reused"] == 130
    expected, _ = daemon.generate(IDS, N_GEN, "ignore_eos=1", "whole")
    forget(daemon)
    daemon.send(f"RESTORE_CHAIN 0 1 - {N_GEN} ids={joined(IDS)} id=last ignore_eos=1")
    tokens: list[int] = []
    while not (line := daemon.next_line()).startswith("[done] id=last"):
        if line.startswith("[tok] id=last"):
            tokens += [int(token) for token in line.split("ids=")[1].split(",")]
    assert tokens == expected


def test_a_span_of_the_answer_and_of_a_named_request(daemon: DaemonProcess) -> None:
    produced, _ = daemon.generate(IDS[:60], 10, "ignore_eos=1", "r")
    assert reply(daemon, "SNAPSHOT_THIN 4 60 70 of=r") == "[snap] thin slot=4 kv=60,70"
    limit = "err bad_args field=kv_end value=71 limit=1..70"
    assert reply(daemon, "SNAPSHOT_THIN 4 0 71 of=r") == limit
    assert reply(daemon, "SNAPSHOT_THIN 5 0 60 of=r") == "[snap] thin slot=5 kv=0,60"
    daemon.send(f"RESTORE_CHAIN -1 5,4 - 2 ids={joined(IDS[:60] + produced + [9])} id=q")
    assert daemon.next_line() == "[snap] chain restored thick=-1 thins=2 cur_pos=70 id=q"
    assert daemon.wait_done("q").fields["reused"] == 70


def test_kinds_are_told_apart(daemon: DaemonProcess, prompt: Path) -> None:
    keep(daemon, 64, 128, 192)
    thin, thick = "err bad_slot slot=1 kind=thin", "err bad_slot slot=0 kind=thick"
    for line, answer, ends in (
        (f"RESTORE 1 {prompt} 4", thin, True),
        ("SNAPSHOT 1", thin, False),
        ("SNAPSHOT_THIN 0 0 64", thick, False),
        (f"RESTORE_CHAIN 1 - {prompt} 4", thin, True),
        (f"RESTORE_CHAIN -1 0 {prompt} 4", thick, True),
    ):
        assert reply(daemon, line) == answer
        if ends:
            assert daemon.read_stream() == []
    daemon.send(f"- 0 ids={joined(IDS)} snap=10:1 id=s")
    assert daemon.wait_line("[snap]") == "[snap] inline-failed slot=1 reason=bad_slot id=s"
    assert daemon.wait_done("s").status == "ok"
    assert reply(daemon, "LIST_SLOTS") == "[snap] slots=0,1,2"
    assert reply(daemon, "FREE_SNAPSHOT 1") == "[snap] freed slot=1"
    assert reply(daemon, "SNAPSHOT 1") == "[snap] slot=1 cur_pos=210"


def test_links_that_do_not_go_on(daemon: DaemonProcess, prompt: Path) -> None:
    keep(daemon, 64, 128, 192)
    for chain, answer in (
        ("-1 1", "err bad_chain slot=1 kv_start=64 expected=0"),
        ("0 2", "err bad_chain slot=2 kv_start=128 expected=64"),
        ("0 2,1", "err bad_chain slot=2 kv_start=128 expected=64"),
        ("0 1,1", "err bad_chain slot=1 kv_start=64 expected=128"),
        ("0 1,5", "err empty_slot slot=5"),
        ("7 1", "err empty_slot slot=7"),
    ):
        assert reply(daemon, f"RESTORE_CHAIN {chain} {prompt} 4") == answer
        assert daemon.read_stream() == []


def test_a_span_counts_only_behind_the_very_same_tokens(daemon: DaemonProcess) -> None:
    """K/V of a span depend on everything before it: other tokens there are another span."""
    keep(daemon, 64, 128)
    other = [IDS[0] + 1, *IDS[1:]]
    daemon.send(f"- 0 ids={joined(other)} snap=64:3")
    assert daemon.next_line() == "[snap] inline slot=3 cur_pos=64"
    for chain, ids, answer in (
        ("3 1", other, "prefix_mismatch slot=1 at=0 cur_pos=128"),
        ("3 1", IDS, "prefix_mismatch slot=3 at=0 cur_pos=64"),
        ("0 1", IDS[:127] + [3], "prefix_mismatch slot=1 at=127 cur_pos=128"),
        ("0 1", IDS[:100], "prefix_shorter slot=1 prompt=100 cur_pos=128"),
    ):
        daemon.send(f"RESTORE_CHAIN {chain} - 2 ids={joined(ids)} id=x")
        done = daemon.wait_done("x")
        assert done.status == "err"
        said = " ".join(f"{key}={value}" for key, value in done.fields.items())
        assert said.startswith(f"code={answer} ")
