"""Conversations that take turns, against the client's caches and a daemon that does what it is asked. Pure.

The daemon keeps the sequences of its last few requests and reuses the longest common prefix, as the real one
does; a slot holds what a request was asked to put there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from slotd.client.boundaries import Cuts
from slotd.client.cache_costs import Costs, Recent
from slotd.client.cache_entries import WIDTH, Identity, as_bytes, shared_tokens
from slotd.client.caches import Caches

ME = Identity("model", "f32", "f32", 0, 1 << 20, "")

#: Sequences of ended requests that the daemon keeps, and the shortest prefix that it reuses of them.
RETAINED, MIN_SHARED = 4, 16

#: Tokens of a question with its markers, and of an answer.
QUESTION, ANSWER = 30, 70


@dataclass
class Talk:
    """One conversation. Ids of its own behind a system prompt that it may share with others."""

    number: int
    system: list[int]
    ids: list[int] = field(default_factory=list)
    turns: int = 0

    def ask(self) -> tuple[bytes, Cuts]:
        """The prompt of the next turn, and where it may be cut."""
        self.ids = self.ids or list(self.system)
        start = len(self.ids)
        self.ids += self._text(QUESTION)
        self.turns += 1
        return as_bytes(self.ids), Cuts((start, len(self.ids)), start)

    def answer(self) -> bytes:
        """What the daemon has computed when the turn ends."""
        self.ids += self._text(ANSWER)
        return as_bytes(self.ids[:-1])

    def _text(self, n: int) -> list[int]:
        return [10_000 + 1_000 * self.number + (self.turns * 7 + place) % 997 for place in range(n)]


class Load:
    """Runs turns through `Caches(slots)`; counts prompt tokens and those that were reused."""

    def __init__(self, slots: int) -> None:
        self.caches = Caches(slots)
        self.caches.reset(ME, "boot", 0, slots)
        self.prompt = self.reused = 0
        self._recent = Recent(RETAINED)
        self._costs = Costs(prefill=2000.0, restore=0.001)
        self._ended: deque[bytes] = deque(maxlen=RETAINED)
        self._slots: dict[int, bytes] = {}

    def turn(self, talk: Talk, *, counted: bool = True) -> None:
        """One turn of a conversation, from question to answer."""
        raw, cuts = talk.ask()
        plan = self.caches.plan(raw, cuts, costs=self._costs, expected=self._recent.worth)
        reused = self._reuse(raw, None if plan.lease is None else plan.lease.slot)
        if plan.lease is not None:
            self.caches.release(plan.lease)
        else:
            self._recent.judge(self._recent.expected(raw), reused)
        if plan.reservation is not None:
            held = plan.reservation
            self._slots[held.slot] = raw[: held.length * WIDTH]
            self.caches.ack(held, held.slot, held.length)
            assert self.caches.settle(held, ok=True, epoch=0)
        computed = talk.answer()
        self._recent.add(computed)
        self._ended.append(computed)
        if counted:
            self.prompt += len(raw) // WIDTH
            self.reused += reused

    def _reuse(self, raw: bytes, slot: int | None) -> int:
        if slot is not None:
            assert raw.startswith(self._slots[slot])
            return len(self._slots[slot]) // WIDTH
        known = max((shared_tokens(raw[:-WIDTH], each) for each in self._ended), default=0)
        return known if known >= MIN_SHARED else 0

    @property
    def share(self) -> float:
        """Reused share of all counted prompt tokens."""
        return self.reused / self.prompt


def talks(n: int, *, system: int = 200, shared: bool = False, first: int = 0) -> list[Talk]:
    """n new conversations; their system prompts are the same, or differ from the first token on."""
    head = list(range(3, 3 + system))
    return [Talk(k, head if shared else [5_000_000 + k, *head[1:]]) for k in range(first, first + n)]


def round_robin(n: int, turns: int, **kinds: int | bool) -> Iterator[Talk]:
    """Every conversation in turn, `turns` times."""
    all_of_them = talks(n, **kinds)  # type: ignore[arg-type]
    for _ in range(turns):
        yield from all_of_them


def at_random(n: int, requests: int, seed: int = 1, **kinds: int | bool) -> Iterator[Talk]:
    """Any conversation at any time."""
    all_of_them = talks(n, **kinds)  # type: ignore[arg-type]
    chance = random.Random(seed)
    for _ in range(requests):
        yield chance.choice(all_of_them)


def with_strangers(n: int, turns: int, per_round: int, **kinds: int | bool) -> Iterator[Talk]:
    """n conversations that go on, and in each round `per_round` prompts that never come again."""
    regular = talks(n, **kinds)  # type: ignore[arg-type]
    stranger = 1_000
    for _ in range(turns):
        yield from regular
        for _ in range(per_round):
            yield from talks(1, first=stranger, **kinds)  # type: ignore[arg-type]
            stranger += 1


def share(slots: int, load: Iterable[Talk]) -> float:
    """Reused share of a load; the first turn of a conversation does not count: nothing is known then."""
    run = Load(slots)
    for talk in load:
        run.turn(talk, counted=talk.turns > 0)
    return run.share


def loads() -> Iterator[tuple[str, Callable[[], Iterator[Talk]]]]:
    """Names of loads, and how to make them anew."""
    for n in (1, 4, 5, 6, 8, 9, 12, 20):
        yield f"{n} in turn", partial(round_robin, n, 12)
        yield f"{n} in turn, one head", partial(round_robin, n, 12, shared=True)
        yield f"{n} at random", partial(at_random, n, 12 * n)
    for n, others in ((1, 6), (3, 8), (6, 4)):
        yield f"{n} beside {others} strangers", partial(with_strangers, n, 12, others)


def main() -> None:
    """Print the reused share of several loads, by number of prefix slots."""
    counts = (0, 2, 4, 6, 8, 12, 16)
    print(f"{'prefix slots':<28}" + "".join(f"{n:>7}" for n in counts))
    for name, load in loads():
        print(f"{name:<28}" + "".join(f"{share(slots, load()):7.3f}" for slots in counts))


if __name__ == "__main__":
    main()
