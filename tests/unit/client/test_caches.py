"""The rules of the caches: keys, looking up, restoring, confirm and abort. One test each."""

from __future__ import annotations

import pytest

from slotd.client.cache_costs import Costs
from slotd.client.cache_entries import Identity
from slotd.client.caches import Caches, Plan
from tests.fakes.cache_requests import (
    AA,
    AAA,
    ME,
    NO_CUTS,
    SYSTEM,
    A,
    B,
    C,
    ask,
    bound,
    caches,
    finish,
    held_of,
    ids,
    keep,
)

# --------------------------------------------------------------------------------------------------
# Keys


@pytest.mark.parametrize(
    "other",
    [
        Identity("other", "f16", "f16", 0, 4096, "salt"),
        Identity("model", "f32", "f16", 0, 4096, "salt"),
        Identity("model", "f16", "f32", 0, 4096, "salt"),
        Identity("model", "f16", "f16", 1, 4096, "salt"),
        Identity("model", "f16", "f16", 0, 4097, "salt"),
        Identity("model", "f16", "f16", 0, 4096, "other"),
    ],
)
def test_a_key_says_everything_that_decides(other: Identity) -> None:
    assert ME.key(A) != other.key(A)
    assert ME.key(A) == Identity("model", "f16", "f16", 0, 4096, "salt").key(A)
    assert len(bytes.fromhex(ME.key(A))) == 16


# --------------------------------------------------------------------------------------------------
# Looking up, restoring


def test_the_deepest_of_all_hits_is_restored() -> None:
    made = caches()
    keep(made, A)
    deep = keep(made, AA)
    plan = ask(made, AAA)
    assert plan.restore is not None
    assert (plan.restore.slot, plan.restore.length) == (deep, 60)


def test_every_hit_counts_as_used() -> None:
    made = caches(3)
    slots = {name: keep(made, raw) for name, raw in (("a", A), ("b", B), ("c", C))}
    finish(made, ask(made, ids(SYSTEM, (2, 20), (9, 1)), 40))  # touches a, keeps nothing
    plan = ask(made, ids((7, 30)))
    assert held_of(plan).slot == slots["b"]  # the oldest now


def test_a_prompt_that_is_a_slot_is_restored_whole() -> None:
    made = caches()
    keep(made, A)
    plan = ask(made, A)
    assert plan.restore is not None
    assert plan.restore.length == 40
    assert plan.reservation is None  # it is cached already


def test_what_is_cached_is_not_kept_again() -> None:
    made = caches()
    keep(made, A)
    assert ask(made, AA, 40).reservation is None


def test_a_prefix_on_its_way_is_not_reserved_twice() -> None:
    made = caches()
    assert held_of(ask(made, A)).slot == 0
    assert ask(made, A).reservation is None


def test_a_short_prefix_is_not_worth_a_slot() -> None:
    assert ask(caches(), A, 15).reservation is None
    assert ask(caches(), A, 16).reservation is not None


def test_without_cuts_nothing_is_kept() -> None:
    assert caches().plan(A, NO_CUTS).reservation is None


def test_restoring_only_where_it_is_faster() -> None:
    made = caches()
    keep(made, A)
    slow = Costs(prefill=1000.0, restore=0.05)  # 40 tokens take 0.04 s
    assert ask(made, AA, costs=slow).restore is None
    fast = Costs(prefill=1000.0, restore=0.03)
    assert ask(made, AA, costs=fast).restore is not None
    assert made.counts["passed"] == 1


def test_the_faster_of_two_entries_not_the_longer() -> None:
    made = caches()
    slot = keep(made, A)
    made.adopt_prefix(AA, content=ME.content(AA))
    slow_disk = Costs(prefill=1000.0, load=0.01)
    plan = ask(made, AAA, costs=slow_disk)
    assert plan.load is None
    assert plan.restore is not None
    assert plan.restore.slot == slot
    finish(made, plan)
    fast_disk = Costs(prefill=1000.0, load=0.00001)
    assert ask(caches_with_cold(AA, A), AAA, costs=fast_disk).load is not None


def caches_with_cold(cold: bytes, hot: bytes) -> Caches:
    made = caches()
    keep(made, hot)
    made.adopt_prefix(cold, content=ME.content(cold))
    return made


def test_what_the_daemon_still_has_is_not_restored() -> None:
    made = caches()
    keep(made, A)
    assert ask(made, AAA, expected=lambda ids: 60).restore is None  # it would reuse 60, the slot has 40
    assert ask(made, AAA, expected=lambda ids: 20).restore is not None
    assert ask(made, ids(SYSTEM, (2, 20), (8, 9)), expected=lambda ids: 40).restore is not None  # sure


def test_off() -> None:
    made = caches(0, 0)
    plan = ask(made, A)
    assert plan == Plan(A)
    fresh = Caches(4)
    assert ask(fresh, A) == Plan(A)  # no daemon yet


# --------------------------------------------------------------------------------------------------
# Confirm and abort


def test_an_entry_needs_the_acknowledgement() -> None:
    made = caches()
    plan = ask(made, A)
    assert not finish(made, plan, ack=False)
    assert bound(made) == {}
    assert made.pending == 0


@pytest.mark.parametrize(
    ("slot", "length", "epoch", "boot"),
    [
        (1, 40, 1, "boot"),
        (0, 39, 1, "boot"),
        (0, 41, 1, "boot"),
        (0, 40, 0, "boot"),
        (0, 40, 2, "boot"),
        (0, 40, 1, "x"),
    ],
)
def test_confirm_compares_slot_length_epoch_and_process(
    slot: int, length: int, epoch: int, boot: str
) -> None:
    made = caches()
    held = held_of(ask(made, A))
    assert not made.confirm(held, slot=slot, length=length, epoch=epoch, boot=boot)
    assert bound(made) == {}
    assert made.pending == 0
    assert not made.confirm(held, slot=0, length=40, epoch=1, boot="boot")  # once refused, for good


def test_confirm_with_everything() -> None:
    made = caches()
    held = held_of(ask(made, A))
    assert made.confirm(held, slot=0, length=40, epoch=1, boot="boot")
    assert bound(made) == {0: A}
    assert not made.confirm(held, slot=0, length=40, epoch=1, boot="boot")


def test_a_wrong_acknowledgement_takes_a_right_one_back() -> None:
    made = caches()
    held = held_of(ask(made, A))
    made.ack(held, held.slot, held.length)
    made.ack(held, held.slot, held.length - 1)
    assert not made.settle(held, ok=True, epoch=1)


def test_a_failed_request_confirms_nothing() -> None:  # S131
    made = caches()
    assert not finish(made, ask(made, A), ok=False)
    assert bound(made) == {}


def test_the_victim_is_out_of_sight_until_the_outcome_is_known() -> None:
    made = caches(1)
    keep(made, A)
    plan = ask(made, B)
    assert bound(made) == {}
    assert ask(made, AA).restore is None  # another request must not start from a slot that is being filled
    assert finish(made, plan)
    assert bound(made) == {0: B}


def test_a_request_may_start_from_the_slot_that_it_fills() -> None:
    made = caches(1)
    keep(made, A)
    plan = ask(made, AA)
    assert plan.restore is not None
    assert plan.lease is not None
    assert plan.lease.slot == held_of(plan).slot == 0
    assert finish(made, plan)
    assert bound(made) == {0: AA}


def test_abort_drops_the_victim() -> None:
    made = caches(1)
    keep(made, A)
    finish(made, ask(made, B), ack=False)
    assert bound(made) == {}
    assert made.counts["doubted"] == 1


def test_abort_before_sending_keeps_the_victim() -> None:
    made = caches(1)
    keep(made, A)
    made.abort(held_of(ask(made, B)), sent=False)
    assert bound(made) == {0: A}


def test_a_slot_that_is_as_it_was_keeps_its_entry() -> None:
    made = caches(1)
    keep(made, A)
    plan = ask(made, B)
    made.ack_untouched(held_of(plan), 0)
    assert not made.settle(held_of(plan), ok=True, epoch=1)
    assert bound(made) == {0: A}
    plan = ask(made, B)
    made.ack_untouched(held_of(plan), 3)  # some other slot: no evidence
    made.settle(held_of(plan), ok=True, epoch=1)
    assert bound(made) == {}


def test_abort_twice_is_abort() -> None:
    made = caches(1)
    keep(made, A)
    held = held_of(ask(made, B))
    made.abort(held)
    slot = keep(made, C)
    made.abort(held)
    assert bound(made) == {slot: C}


def test_a_confirmed_slot_has_one_entry() -> None:
    made = caches(2)
    keep(made, A)
    keep(made, B)
    keep(made, C)
    assert sorted(bound(made)) == [0, 1]
    assert len(bound(made)) == 2


def test_a_slot_that_a_request_starts_from_is_no_victim() -> None:
    made = caches(1)
    keep(made, A)
    plan = ask(made, AA, 40)
    assert plan.lease is not None
    assert ask(made, B).reservation is None
    assert made.counts["no_slot"] == 1
    made.release(plan.lease)
    assert ask(made, B).reservation is not None


def test_a_slot_that_the_daemon_disagrees_about_is_forgotten() -> None:
    made = caches()
    slot = keep(made, A)
    made.doubt(slot)
    assert bound(made) == {}
