"""The caches of a real client and a real daemon that runs out of memory at any moment, in both policies.

The client's part of the promise: answers are those of a process without any fault, no slot is taken for what
it does not hold, none is lost, a slot that was freed is not restored, nothing hangs (every wait has a bound).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slotd.client import Client, Completion, RequestError
from slotd.client.cache_entries import array_of
from slotd.protocol.messages import AllCleared, FreeSnapshot, Restore, SnapInline

PAGE, CHUNK, N_GEN = 64, 64, 3
PREFIX, FULL = 2, 1
#: `--exact`: the bits of an answer do not depend on where its prompt was cut.
FLAGS = (f"--chunk={CHUNK}", "--max-ctx=512", "--slots=4", "--parallel=2", "--exact")

#: Bytes: the weights, and pages for less than the histories would keep.
LIMIT = 1_800_000

#: A conversation: the numbers of its turns.
Turns = tuple[int, ...]


def ids_of(path: Turns) -> list[int]:
    """A growing text without markers: one page for each turn, then a few ids, so that it is cut at pages."""
    turns = [turn * 31 + place % 29 + 3 for turn in path for place in range(PAGE)]
    return [*turns, 5, 6, *path]


#: Shorter than a page: computed as one piece, kept whole in the slot of whole prompts.
SHORT = list(range(40, 60))
#: Three pages and a rest; cut behind the third.
VICTIM: Turns = (1, 2, 3)
#: Starts from the head that VICTIM shares with it, or from nothing.
AFTER: tuple[Turns, ...] = ((1, 2, 4), (1, 2, 3), (5,))


@dataclass(frozen=True)
class Fresh:
    """Answers of a daemon that keeps nothing for anybody and never fails."""

    client: Client
    known: dict[tuple[int, ...], tuple[int, ...]]

    def says(self, ids: list[int]) -> tuple[int, ...]:
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = self.client.generate(ids, max_tokens=N_GEN, ignore_eos=True).ids
        return self.known[key]


@pytest.fixture(scope="module")
def fresh(tiny_llama: Path) -> Iterator[Fresh]:
    with Client(tiny_llama, daemon_args=FLAGS, prefix_slots=0) as client:
        yield Fresh(client, {})


class Watched:
    """A client whose commands and slots are followed from outside the caches.

    Attributes:
        filled: slot -> epoch in which the daemon said that it was filled.
        wrong: RESTOREs that were sent although the client had heard that the slot was freed.
    """

    def __init__(self, client: Client, fresh: Fresh) -> None:
        self.client = client
        self.fresh = fresh
        self.failed: list[RequestError] = []
        self.cleared: list[AllCleared] = []
        self.filled: dict[int, int] = {}
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        client.register_event_callback(AllCleared, self._take_cleared)
        client.register_event_callback(SnapInline, self._take_inline)
        self._send = client._session.transport.send
        client._session.transport.send = self._watch  # type: ignore[method-assign]

    def _take_cleared(self, event: AllCleared) -> None:
        with self._lock:
            self.cleared.append(event)
            self.filled = {slot: epoch for slot, epoch in self.filled.items() if slot not in event.freed}

    def _take_inline(self, event: SnapInline) -> None:
        with self._lock:
            self.filled[event.slot] = len(self.cleared)

    def _watch(self, message: Any, timeout: float) -> None:
        with self._lock:
            if isinstance(message, Restore) and message.slot not in self.filled:
                self.wrong.append(f"{message.id}: RESTORE {message.slot}")
            if isinstance(message, FreeSnapshot):
                self.filled.pop(message.slot, None)
        self._send(message, timeout)

    @contextmanager
    def may_run_out(self) -> Iterator[None]:
        """Memory may run out inside; any other error is one."""
        try:
            yield
        except RequestError as error:
            if error.code != "oom":
                raise
            self.failed.append(error)

    def ask(self, ids: list[int]) -> Completion | None:
        """None when memory ran out; else the answer, which is right."""
        answer = None
        with self.may_run_out():
            answer = self.client.generate(ids, max_tokens=N_GEN, ignore_eos=True)
        if answer is None:
            return None
        assert answer.ids == self.fresh.says(ids), f"{len(ids)} ids, {answer.cached_tokens} from the cache"
        return answer

    def two(self, first: list[int], second: list[int]) -> None:
        """Side by side."""
        streams = [self.client.stream(ids, max_tokens=N_GEN, ignore_eos=True) for ids in (first, second)]
        for ids, stream in zip((first, second), streams, strict=True):
            with self.may_run_out():
                assert stream.result().ids == self.fresh.says(ids)

    def begin_and_cancel(self, ids: list[int]) -> None:
        """Leave after the first token."""
        with self.may_run_out(), self.client.stream(ids, max_tokens=100, ignore_eos=True) as stream:
            next(stream)

    def check(self, sites: dict[str, int] | None = None) -> None:
        """Nothing is lost, nothing is wrong, and everything is usable; the caches are empty afterwards."""
        status, stats = self.client.status(), self.client.cache_stats()
        if sites is not None:
            assert status["recovery"]["oom"] == sites
        assert self.wrong == []
        assert stats["pending"] == self.client._cache._caches.leases == 0
        assert stats["stale_restores"] == 0  # the daemon never refused a slot that the caches restored
        assert stats["epoch"] == status["epoch"] == len(self.cleared)
        caches = self.client._cache._caches
        for entry in (*caches.prefix_entries(), *caches.full_entries()):
            assert entry.slot is not None
            assert status["slots"][str(entry.slot)]["tokens"] == entry.length
            ids = [*array_of(entry.ids), 7, 8, 9]
            answer = self.client.generate(ids, slot=entry.slot, max_tokens=N_GEN, ignore_eos=True)
            assert (answer.ids, answer.cached_tokens) == (self.fresh.says(ids), entry.length)
        for number in range(PREFIX):  # every slot can be had: none has leaked
            self.ask(ids_of((8 + number,)))
            self.ask(ids_of((8 + number,)))
        held = {entry.slot for entry in caches.prefix_entries()}
        assert held == set(range(PREFIX))


@contextmanager
def watched(model: Path, fresh: Fresh, policy: str, fault: str, *flags: str) -> Iterator[Watched]:
    """A client with caches of a daemon with a fault; the daemon is the same at the end."""
    args = (*FLAGS, f"--oom-policy={policy}", *flags)
    env = {"SLOTD_FAULT": fault}
    with Client(
        model, daemon_args=args, env=env, prefix_slots=PREFIX, full_slots=FULL, reply_timeout=30
    ) as client:
        pid = client.pid
        yield Watched(client, fresh)
        assert client.pid == pid


# ----- every site, at the first, second and last piece of a request that starts from a slot

#: Fills the slot of whole prompts and both of prefixes.
FIRST = (SHORT, ids_of((1,)), ids_of((5,)))

#: Passes of each site by FIRST; those of VICTIM come next.
BEFORE = {
    "prefill_reserve": 2, "prefill_embed": 5, "prefill_build": 5, "prefill_compute": 5, "commit": 11,
    "decode": 6, "snapshot": 3, "restore": 0,
}  # fmt: skip

CASES = [
    *((site, nth) for site in ("prefill_embed", "prefill_build", "prefill_compute") for nth in (1, 2, 3)),
    *(("commit", nth) for nth in (1, 2, 3, 5)),  # the pieces, then a step
    *(("decode", nth) for nth in (1, 2)),
    *(("prefill_reserve", 1), ("snapshot", 1), ("restore", 1)),
]  # fmt: skip


@pytest.mark.parametrize("policy", ["ladder", "seed"])
@pytest.mark.parametrize(("site", "nth"), CASES, ids=lambda value: str(value))
def test_p7_p9_p10_p13_a_fault_in_a_request_that_starts_from_a_slot(
    tiny_llama: Path, fresh: Fresh, site: str, nth: int, policy: str
) -> None:
    with watched(tiny_llama, fresh, policy, f"{site}:{BEFORE[site] + nth}") as client:
        for ids in FIRST:
            assert client.ask(ids) is not None
        before = client.client.cache_stats()
        assert (before["prefix"]["entries"], before["full"]["entries"]) == (PREFIX, FULL)
        answer = client.ask(ids_of(VICTIM))
        stats = client.client.cache_stats()
        assert stats["prefix_hits"] == before["prefix_hits"] + 1
        lost = site == "prefill_embed" or (policy == "seed" and site != "snapshot")
        assert (answer is None) is lost
        assert [error.fields["site"] for error in client.failed] == ([site] if lost else [])
        clears = lost and site != "prefill_embed"
        assert len(client.cleared) == clears
        if clears:
            assert client.cleared[0].freed == (0, 1, 2)
            assert (stats["prefix"]["entries"], stats["full"]["entries"]) == (0, 0)
        for path in AFTER:
            assert client.ask(ids_of(path)) is not None
        assert client.ask(SHORT) is not None
        client.check({site: 1})


def test_p9_a_late_confirm_of_an_old_epoch_is_refused(tiny_llama: Path, fresh: Fresh) -> None:
    """A long answer whose snapshot was acknowledged is cleared by its neighbour before it ends (trap 3)."""
    long, other = ids_of(VICTIM), ids_of((6, 7))
    with watched(tiny_llama, fresh, "seed", "prefill_compute:5") as client:
        stream = client.client.stream(long, max_tokens=200, ignore_eos=True)
        next(stream)
        assert client.filled == {0: 0}
        assert client.ask(other) is None
        answer = stream.result()
        assert answer.ids[:N_GEN] == fresh.says(long)
        stats = client.client.cache_stats()
        assert (stats["refused"], stats["prefix"]["entries"], stats["pending"]) == (1, 0, 0)
        assert client.client.slots() == ()
        assert client.ask(other) is not None
        assert client.ask(long) is not None
        client.check({"prefill_compute": 1})


# ----- any history, a fault anywhere

#: Site -> the last pass of it that the fault may hit; every history passes it more often.
SITES = {
    "prefill_reserve": 6, "prefill_embed": 12, "prefill_build": 12, "prefill_compute": 12, "commit": 12,
    "decode": 8, "snapshot": 3, "restore": 1, "slot_move": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("site", "policy"),
    [*((site, "ladder") for site in SITES), *((site, "seed") for site in SITES if site != "slot_move")],
)
def test_p7_p10_p13_any_history_with_faults_and_too_little_memory(
    tiny_llama: Path, fresh: Fresh, site: str, policy: str
) -> None:
    """Growing and returning conversations, several at once, cancelled ones, emptied slots."""
    chance = random.Random(f"{policy} {site}")
    fault = f"{site}:{chance.randint(1, SITES[site])}:{min(SITES[site], chance.randint(1, 3))}"
    with watched(tiny_llama, fresh, policy, fault, f"--memory-limit={LIMIT}") as client:
        for _ in range(16):
            path = tuple(chance.randint(1, 2) for _ in range(chance.randint(1, 4)))
            match chance.choice(["ask", "ask", "ask", "short", "two", "cancel", "free"]):
                case "ask":
                    client.ask(ids_of(path))
                case "short":
                    client.ask(SHORT)
                case "two":
                    client.two(ids_of(path), ids_of((*path, 2)))
                case "cancel":
                    client.begin_and_cancel(ids_of(path))
                case "free":
                    client.client.free_slot(chance.randrange(PREFIX + FULL))
        recovery = client.client.status()["recovery"]
        assert recovery["oom"].get(site, 0) >= 1, recovery
        client.check()
