"""Out of memory in the real daemon, at every site, at the first, second and last chance, in both policies.

P13: what survives is exact. P14: memory is what it was. P16: a slot is kept, or its loss is announced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slotd.protocol.messages import AllCleared, Done
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess

CHUNK = 64
FLAGS = (f"--chunk={CHUNK}", "--host-cache=1MiB", "--exact")

#: One piece; kept in slots 2 and 3. The next prompts share nothing with it.
OLD = [(7 * i) % 250 + 3 for i in range(40)]
#: Three pieces.
VICTIM = [(11 * i) % 240 + 5 for i in range(3 * CHUNK)]
NEXT = [(13 * i) % 230 + 9 for i in range(100)]
N_GEN = 4

#: Memory may stay this much above what it was, in bytes: tables that grow with the positions seen.
EPS = 64 << 10


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


@dataclass(frozen=True)
class Case:
    """Where the fault hits.

    Attributes:
        site: its site.
        nth: passes of the site up to the fault, those of the preparation (one piece, two snapshots) included.
        snap: cut of the victim's inline snapshot, 0 = none.
        restore: the victim continues slot 2 instead.
    """

    site: str
    nth: int
    snap: int = 0
    restore: bool = False


CASES = [
    Case("prefill_reserve", 1),
    *(Case(f"prefill_{site}", 1 + nth) for site in ("embed", "build", "compute") for nth in (1, 2, 3)),
    *(Case("commit", 1 + nth) for nth in (1, 2, 3, 4, 6)),  # the pieces of the prompt, then steps
    *(Case("decode", nth) for nth in (1, 2, 3)),
    *(Case("snapshot", 3, snap=snap) for snap in (CHUNK, 2 * CHUNK, 3 * CHUNK)),
    Case("restore", 1, restore=True),
    Case("slot_move", 2, restore=True),  # the first one moved the slot out
]  # fmt: skip


def case_id(case: Case) -> str:
    return f"{case.site}-{case.nth}" + (f"-snap{case.snap}" if case.snap else "")


@contextmanager
def prepared(model: Path, policy: str, case: Case | None) -> Iterator[DaemonProcess]:
    """A daemon with OLD in slots 2 (host tier, where the victim restores it) and 3."""
    env = {} if case is None else {"SLOTD_FAULT": f"{case.site}:{case.nth}"}
    with DaemonProcess(model, *FLAGS, f"--oom-policy={policy}", env=env) as daemon:
        daemon.send("HELLO")
        daemon.send(f"- 0 ids={joined(OLD)} id=old snap=40:2")
        assert daemon.wait_done("old").status == "ok"
        daemon.send("SNAPSHOT 3 id=s")
        assert daemon.wait_done("s").status == "ok"
        if case is None or case.restore:
            daemon.send("SNAPSHOT 2 held=1 tier=host id=m")
            assert daemon.wait_done("m").status == "ok"
        yield daemon


def victim(daemon: DaemonProcess, case: Case) -> tuple[list[int], Done, list[AllCleared]]:
    """The request that is hit: its ids, its end, and what was announced before the end."""
    seen = len(daemon.lines)
    fields = f"snap={case.snap}:5 " if case.snap else ""
    if case.restore:
        daemon.send(f"RESTORE 2 - {N_GEN} ids={joined(OLD + VICTIM)} ignore_eos=1 id=victim")
        done = daemon.wait_done("victim")
        tokens = [
            token
            for line in daemon.lines[seen:]
            if line.startswith("[tok] id=victim")
            for token in parse_event(line).ids  # type: ignore[attr-defined]
        ]
    else:
        tokens, done = daemon.generate(VICTIM, N_GEN, fields + "ignore_eos=1", "victim")
    events = [parse_event(line) for line in daemon.lines[seen:]]
    return tokens, done, [event for event in events if isinstance(event, AllCleared)]


@cache
def fresh_answers(model: Path) -> dict[str, list[int]]:
    """What a process without any fault says."""
    with DaemonProcess(model, *FLAGS) as daemon:
        return {
            "victim": daemon.generate(VICTIM, N_GEN, "ignore_eos=1", "a")[0],
            "restored": daemon.generate(OLD + VICTIM, N_GEN, "ignore_eos=1", "b")[0],
            "next": daemon.generate(NEXT, N_GEN, "ignore_eos=1", "c")[0],
            "old": daemon.generate([*OLD, 9], N_GEN, "ignore_eos=1", "d")[0],
        }


def live_bytes(daemon: DaemonProcess) -> int:
    daemon.send("STATUS")
    memory = daemon.wait_json("status")["memory"]
    return sum(memory["live"].values()) + int(memory["cached"])


def status(daemon: DaemonProcess) -> dict[str, Any]:
    daemon.send("STATUS")
    return daemon.wait_json("status")


@pytest.mark.parametrize("policy", ["ladder", "seed"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_p13_p14_p16_a_fault_costs_one_request_at_most(tiny_llama: Path, case: Case, policy: str) -> None:
    expected = fresh_answers(tiny_llama)
    with prepared(tiny_llama, policy, case) as daemon:
        pid, before = daemon.process.pid, live_bytes(daemon)
        tokens, done, cleared = victim(daemon, case)
        whole = expected["restored" if case.restore else "victim"]
        after = status(daemon)
        assert after["recovery"]["oom"] == {case.site: 1}
        aborted = case.site == "prefill_embed" or (policy == "seed" and case.site != "snapshot")
        if aborted:
            assert (done.status, done.fields["code"], done.fields["site"]) == ("err", "oom", case.site)
            assert tokens == whole[: len(tokens)]  # what was said before was true, and nothing came twice
        else:
            assert (done.status, tokens) == ("length", whole)
            assert float(done.fields["recover_s"]) >= 0
        clears = aborted and case.site != "prefill_embed"
        slots = {} if clears else {"2", "3"} | ({"5"} if case.snap and policy == "ladder" else set())
        assert set(after["slots"]) == set(slots)
        assert [event.freed for event in cleared] == ([(2, 3)] if clears else [])
        assert done.fields["epoch"] == after["epoch"] == len(cleared)
        if not clears:
            restored, end = restore(daemon, 3)
            assert (end.status, restored, end.fields["reused"]) == ("length", expected["old"], len(OLD))
        again, end = daemon.generate(NEXT, N_GEN, "ignore_eos=1", "next")
        assert (end.status, again) == ("length", expected["next"])
        daemon.send("FREE_SNAPSHOT 5 id=f")
        daemon.wait_done("f")
        assert daemon.process.pid == pid
        assert daemon.process.poll() is None
        assert live_bytes(daemon) <= before + EPS


def restore(daemon: DaemonProcess, slot: int) -> tuple[list[int], Done]:
    seen = len(daemon.lines)
    daemon.send(f"RESTORE {slot} - {N_GEN} ids={joined([*OLD, 9])} ignore_eos=1 id=restored")
    done = daemon.wait_done("restored")
    lines = [line for line in daemon.lines[seen:] if line.startswith("[tok] id=restored")]
    return [token for line in lines for token in parse_event(line).ids], done  # type: ignore[attr-defined]
