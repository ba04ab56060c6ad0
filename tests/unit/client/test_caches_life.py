"""The rules of the caches: clearings, other daemons, slots of the program, full and cold entries."""

from __future__ import annotations

import pytest

from slotd.client.cache_entries import Identity
from slotd.client.caches import Caches
from tests.architecture.sources import product_sources
from tests.fakes.cache_requests import (
    AA,
    AAA,
    ME,
    NO_CUTS,
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
    [
        (4, 2, 8, (4, 2)),
        (4, 2, 5, (3, 2)),
        (4, 2, 3, (2, 1)),
        (4, 2, 0, (0, 0)),
        (8, 2, 8, (6, 2)),
        (4, 6, 8, (4, 4)),
    ],
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


# --------------------------------------------------------------------------------------------------
# What they are made of


@pytest.mark.parametrize(
    "name", ["boundaries", "cache_bindings", "cache_costs", "cache_entries", "cache_eviction", "caches"]
)
def test_the_state_machine_does_no_input_or_output(name: str) -> None:
    source = next(each for each in product_sources() if each.module == f"slotd.client.{name}")
    tops = {found.target.partition(".")[0] for found in source.imports}
    assert not tops & {"os", "io", "pathlib", "time", "threading", "logging", "tempfile", "socket", "random"}
    mine = {found.target for found in source.imports if found.target.startswith("slotd.client")}
    assert not mine & {"slotd.client.session", "slotd.client.commands", "slotd.client.bus"}
