"""Requests to `Caches`, told as a daemon that does what it is asked would answer them."""

from __future__ import annotations

from slotd.client.boundaries import Cuts
from slotd.client.cache_entries import Identity, Reservation, as_bytes
from slotd.client.caches import Caches, Plan

ME = Identity("model", "f16", "f16", 0, 4096, "salt")
NO_CUTS = Cuts((), None)


def ids(*runs: tuple[int, int]) -> bytes:
    """(token, how often), ..."""
    return as_bytes([token for token, count in runs for _ in range(count)])


SYSTEM = (1, 20)
A = ids(SYSTEM, (2, 20))
AA = ids(SYSTEM, (2, 20), (3, 20))
AAA = ids(SYSTEM, (2, 20), (3, 20), (4, 20))
B = ids(SYSTEM, (5, 20))
C = ids(SYSTEM, (6, 20))


def caches(prefix: int = 4, full: int = 0, *, slots: int = 8, budget: int = 0) -> Caches:
    made = Caches(prefix, full, byte_budget=budget)
    made.reset(ME, "boot", 1, slots)
    return made


def ask(made: Caches, raw: bytes, cut: int | None = None, **options: object) -> Plan:
    """Plan a request whose target cut is the whole prompt, or `cut`."""
    at = len(raw) // 4 if cut is None else cut
    return made.plan(raw, Cuts((at,), at), **options)  # type: ignore[arg-type]


def held_of(plan: Plan) -> Reservation:
    assert plan.reservation is not None
    return plan.reservation


def keep(made: Caches, raw: bytes) -> int:
    """A whole request that leaves `raw` in a slot; the slot."""
    plan = ask(made, raw)
    held = held_of(plan)
    finish(made, plan)
    return held.slot


def finish(made: Caches, plan: Plan, *, ok: bool = True, ack: bool = True, epoch: int = 1) -> bool:
    """The daemon does what was asked, and says so."""
    if plan.lease is not None:
        made.release(plan.lease)
    if plan.reservation is None:
        return False
    if ack:
        made.ack(plan.reservation, plan.reservation.slot, plan.reservation.length)
    return made.settle(plan.reservation, ok=ok, epoch=epoch)


def bound(made: Caches) -> dict[int, bytes]:
    return {entry.slot: entry.ids for entry in made.prefix_entries() if entry.slot is not None}
