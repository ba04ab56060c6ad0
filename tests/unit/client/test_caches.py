"""The rules of the caches, one test each."""

from __future__ import annotations

import pytest

from slotd.client.boundaries import Cuts
from slotd.client.cache_costs import Costs
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


# --------------------------------------------------------------------------------------------------
# All cleared (S124-S131)


def test_all_cleared_drops_prefix_and_full_entries_and_counts_both() -> None:  # S124-S126
    made = caches(2, 2)
    keep(made, A)
    keep(made, A)  # the prefix is known: the whole prompt is kept
    assert [entry.slot for entry in made.full_entries()] == [2]
    assert made.all_cleared(2) == (1, 1)
    assert bound(made) == {}
    assert made.full_entries() == []
    assert made.all_cleared(2) == (0, 0)  # idempotent


@pytest.mark.parametrize(("prefix", "full"), [(0, 2), (2, 0)])
def test_all_cleared_works_with_one_cache_off(prefix: int, full: int) -> None:  # S127
    made = caches(prefix, full)
    keep(made, A)
    late = held_of(ask(made, B))
    assert sum(made.all_cleared(2)) == 1
    assert not made.confirm(late, slot=late.slot, length=late.length, epoch=1, boot="boot")
    assert bound(made) == {}
    assert made.full_entries() == []


def test_the_next_request_after_a_clearing_restores_nothing() -> None:  # S129
    made = caches(2, 2)
    keep(made, A)
    keep(made, A)
    made.all_cleared(2)
    plan = ask(made, A)
    assert plan.restore is None
    assert held_of(plan).slot == 0  # from the first slot on again


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_reservation_from_before_a_clearing_is_refused(epoch: int) -> None:
    made = caches()
    plan = ask(made, A)
    made.ack(held_of(plan), 0, 40)
    made.all_cleared(2)
    assert not made.settle(held_of(plan), ok=True, epoch=epoch)
    assert bound(made) == {}


def test_a_slot_stays_taken_while_a_request_from_before_the_clearing_may_fill_it() -> None:
    made = caches(1)
    old = ask(made, A)
    made.all_cleared(2)
    assert ask(made, B).reservation is None
    finish(made, old, epoch=2)
    assert held_of(ask(made, B)).slot == 0


def test_a_later_epoch_in_an_answer_is_a_clearing_that_was_not_heard() -> None:
    made = caches()
    keep(made, A)
    made.observe_epoch(2)
    assert bound(made) == {}
    assert made.epoch == 2
    keep_epoch = ask(made, B)
    assert not finish(made, keep_epoch, epoch=1)  # an old one confirms nothing, and clears nothing
    assert made.epoch == 2


def test_a_clearing_without_an_epoch_clears() -> None:
    made = caches()
    keep(made, A)
    made.all_cleared()
    assert bound(made) == {}
    assert made.epoch == 1


def test_full_entries_with_files_become_cold() -> None:
    made = caches(0, 2)
    keep(made, A)
    keep(made, B)
    made.set_artifact(ME.key(A), 100)
    made.all_cleared(2)
    assert [(entry.key, entry.slot) for entry in made.full_entries()] == [(ME.key(A), None)]
    plan = ask(made, A)  # computed again, not restored
    assert plan.restore is None
    assert held_of(plan).kind == "full"
    finish(made, plan, epoch=2)
    assert ask(made, A).restore is not None


def test_a_kept_slot_comes_back_with_evidence_only() -> None:
    def cleared() -> Caches:
        made = caches()
        keep(made, A)
        made.all_cleared(2, kept=(0, 5))
        return made

    assert cleared().kept == (0,)
    made = cleared()
    assert made.rebind(0, ME.content(A), 40, 2)
    assert bound(made) == {0: A}
    assert not made.rebind(0, ME.content(A), 40, 2)
    assert not cleared().rebind(0, ME.content(B), 40, 2)
    assert not cleared().rebind(0, ME.content(A), 39, 2)
    assert not cleared().rebind(0, ME.content(A), 40, 1)
    assert not cleared().rebind(5, ME.content(A), 40, 2)


def test_a_kept_slot_that_was_given_away_does_not_come_back() -> None:
    made = caches()
    keep(made, A)
    made.all_cleared(2, kept=(0,))
    plan = ask(made, B)
    assert held_of(plan).slot == 0
    made.abort(held_of(plan))
    assert not made.rebind(0, ME.content(A), 40, 2)


def test_a_slot_that_the_request_itself_had_filled_may_come_back() -> None:
    made = caches()
    plan = ask(made, A)
    made.ack(held_of(plan), 0, 40)
    made.all_cleared(2, kept=(0,))
    assert not made.rebind(0, ME.content(A), 40, 2)  # not while the request runs
    assert not finish(made, plan, epoch=2)
    assert made.rebind(0, ME.content(A), 40, 2)


# --------------------------------------------------------------------------------------------------
# Another daemon


def test_a_new_process_holds_nothing() -> None:
    made = caches(2, 2)
    keep(made, A)
    late = ask(made, B)
    made.reset(ME, "other", 1, 8)
    assert bound(made) == {}
    assert (made.pending, made.leases) == (0, 0)
    assert not finish(made, late)
    assert bound(made) == {}


def test_counts_survive_everything() -> None:
    made = caches()
    keep(made, A)
    finish(made, ask(made, AA))
    made.all_cleared(2)
    made.reset(ME, "other", 1, 8)
    stats = made.stats()
    assert (stats["prefix_hits"], stats["prefix_hit_tokens"], stats["confirmed"]) == (1, 40, 2)
    assert stats["prefix"] == {"slots": 4, "entries": 0, "tokens": 0, "cold": 0}


def test_another_model_shares_nothing() -> None:
    made = caches(2, 2)
    made.adopt_prefix(A, content=ME.content(A))
    made.adopt_full(ME.key(B), B, 40, artifact_bytes=10)
    made.reset(Identity("other", "f16", "f16", 0, 4096, "salt"), "b", 1, 8)
    assert made.cold_entries() == []
    assert made.full_entries() == []


@pytest.mark.parametrize(
    ("prefix", "full", "slots", "got"),
    [(4, 2, 8, (4, 2)), (4, 2, 5, (4, 1)), (4, 2, 3, (3, 0)), (4, 2, 0, (0, 0))],
)
def test_slots_are_clamped_to_what_the_daemon_has(
    prefix: int, full: int, slots: int, got: tuple[int, int]
) -> None:
    made = caches(prefix, full, slots=slots)
    assert (made.prefix_slots, made.full_slots) == got


# --------------------------------------------------------------------------------------------------
# Slots of the program


def test_a_claimed_slot_is_left_alone() -> None:
    made = caches(2)
    slot = keep(made, A)
    made.claim(slot)
    assert bound(made) == {}
    assert {keep(made, raw) for raw in (B, C, AA)} == {1 - slot}
    made.unclaim(slot)
    assert keep(made, A) == slot


def test_a_claim_voids_what_is_on_its_way() -> None:
    made = caches(2)
    plan = ask(made, A)
    made.claim(held_of(plan).slot)
    assert not finish(made, plan)
    assert bound(made) == {}


# --------------------------------------------------------------------------------------------------
# Free slots, two ranges


def test_a_free_slot_is_found_by_occupancy_not_by_a_counter() -> None:
    made = caches(3)
    for raw in (A, B, C):
        keep(made, raw)
    made.doubt(1)
    assert held_of(ask(made, AA)).slot == 1


def test_aborts_burn_no_slots() -> None:
    made = caches(2)
    slot = keep(made, A)
    for _ in range(10):
        plan = ask(made, B)
        assert held_of(plan).slot != slot
        finish(made, plan, ack=False)
    assert bound(made) == {slot: A}


def test_the_two_caches_never_share_a_slot() -> None:
    made = caches(2, 2)
    for raw in (A, B, C, AA, AAA):
        keep(made, raw)
        finish(made, ask(made, raw))
    assert set(bound(made)) <= {0, 1}
    assert {entry.slot for entry in made.full_entries()} <= {2, 3}


# --------------------------------------------------------------------------------------------------
# Full entries


def test_a_full_hit_sends_the_kept_ids() -> None:
    made = caches(0, 2)
    short = ids((9, 17))
    made.adopt_full(ME.key(AAA), short, 80, artifact_bytes=68)
    plan = made.plan(AAA, NO_CUTS)
    assert (plan.ids, plan.restore) == (short, None)
    assert (held_of(plan).slot, held_of(plan).length) == (0, 17)
    finish(made, plan)
    plan = made.plan(AAA, NO_CUTS)
    assert plan.ids == short
    assert plan.restore is not None
    assert made.plan(AA, NO_CUTS).ids == AA  # the exact prompt only


def test_a_full_entry_without_its_file_is_dropped_and_named_once() -> None:
    made = caches(0, 2)
    made.adopt_full(ME.key(A), A, 40, artifact_bytes=1)
    made.drop_full(ME.key(A))
    assert made.full_entries() == []
    assert made.take_garbage() == [ME.key(A)]
    assert made.take_garbage() == []


def test_files_of_full_entries_keep_to_the_byte_budget() -> None:
    made = caches(0, 4, budget=250)
    for raw in (A, B, C):
        keep(made, raw)
        made.set_artifact(ME.key(raw), 100)
    assert made.take_garbage() == [ME.key(A)]  # equal worth: the oldest
    assert [entry.key for entry in made.full_entries()] == [ME.key(B), ME.key(C)]


# --------------------------------------------------------------------------------------------------
# Cold prefixes


def test_an_evicted_prefix_with_a_file_becomes_cold_and_can_be_loaded() -> None:
    made = caches(1)
    plan = ask(made, A)
    made.ack(held_of(plan), 0, 40, "f" * 32)
    made.settle(held_of(plan), ok=True, epoch=1)
    keep(made, B)
    assert [entry.ids for entry in made.cold_entries()] == [A]
    plan = ask(made, AA)
    assert plan.restore is None
    assert plan.load is not None
    assert made.confirm(plan.load, slot=0, length=40, epoch=1, boot="boot")
    assert bound(made) == {0: A}
    assert made.cold_entries() == []
    assert ask(made, AA).restore is not None


def test_a_load_that_fails_costs_the_slot_only() -> None:
    made = caches()
    made.adopt_prefix(A, content=ME.content(A))
    held = made.prepare_load(ME.key(A))
    assert held is not None
    assert made.prepare_load(ME.key(A)) is None
    made.abort(held)
    assert [entry.ids for entry in made.cold_entries()] == [A]
    made.drop_cold(ME.key(A))
    assert made.prepare_load(ME.key(A)) is None
