"""The ladder as a pure machine: which rung comes next."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.memory.pressure import (
    EMBED,
    Clear,
    DropDraft,
    Extent,
    Fail,
    GiveUp,
    Held,
    Ladder,
    Move,
    Policy,
    Rung,
    Situation,
    Trim,
)


def held(slot: int, tier: str = "device", own: int = 10, used: float = 0.0, pinned: bool = False) -> Held:
    return Held(slot, tier, 20, own, used, pinned)


def situation(*slots: Held, ended: int = 0, host_room: int = 100, draft: bool = False) -> Situation:
    return Situation(ended, slots, host_room, draft)


def climb(now: Situation, policy: Policy = Policy.LADDER, extent: Extent = Extent.ALL) -> list[Rung]:
    """All rungs when none helps and nothing that is given up comes back."""
    ladder, rungs = Ladder(policy, "decode", extent), []
    while not rungs or not isinstance(rungs[-1], Fail):
        rung = ladder.next(now)
        rungs.append(rung)
        match rung:
            case GiveUp():
                now = replace(now, ended=now.ended - 1)
            case Move(slot=number):
                moved = tuple(held(s.slot, "host") if s.slot == number else s for s in now.slots)
                now = replace(now, slots=moved)
            case DropDraft():
                now = replace(now, draft=False)
            case Clear(freed=freed):
                now = replace(now, slots=tuple(s for s in now.slots if s.slot not in freed))
    return rungs


def test_the_rungs_come_in_order() -> None:
    shared = held(3, own=0)
    rungs = climb(situation(held(1, used=5), held(2, used=4), shared, ended=2, draft=True))
    assert rungs == [
        Trim(), GiveUp(), GiveUp(), Move(2), Move(1), DropDraft(),
        Clear(freed=(3,), kept=(1, 2), ended=False, retry=True), Fail(),
    ]  # fmt: skip


def test_nothing_to_clear_is_not_announced() -> None:
    assert climb(situation()) == [Trim(), Fail()]
    assert climb(situation(held(1, "host"))) == [Trim(), Fail()]


def test_what_the_request_has_acknowledged_is_neither_moved_nor_freed() -> None:
    assert climb(situation(held(1, pinned=True))) == [Trim(), Fail()]
    rungs = climb(situation(held(1, pinned=True), held(2), host_room=0))
    assert rungs == [Trim(), Clear((2,), (1,), ended=False, retry=True), Fail()]


def test_a_slot_larger_than_the_host_tier_is_not_moved() -> None:
    assert climb(situation(held(1), host_room=19))[1] == Clear((1,), (), ended=False, retry=True)
    assert climb(situation(held(1), host_room=20))[1] == Move(1)


def test_a_slot_that_could_not_be_moved_is_offered_once() -> None:
    ladder = Ladder(Policy.LADDER, "commit")
    now = situation(held(1), held(2))
    assert [ladder.next(now) for _ in range(5)] == [
        Trim(), Move(1), Move(2), Clear((1, 2), (), ended=False, retry=True), Fail(),
    ]  # fmt: skip


def test_a_lossless_ladder_clears_nothing() -> None:
    rungs = climb(situation(held(1), held(2, own=0), ended=1, draft=True), extent=Extent.LOSSLESS)
    assert rungs == [Trim(), GiveUp(), Move(1), Fail()]


def test_seed_clears_every_tier_once_and_gives_the_request_up() -> None:
    now = situation(held(1), held(2, "host"), held(3, pinned=True), ended=1, draft=True)
    assert climb(now, Policy.SEED) == [Clear((1, 2, 3), (), ended=True, retry=False), Fail()]
    assert climb(situation(), Policy.SEED) == [Clear((), (), ended=True, retry=False), Fail()]


def test_seed_loses_nothing_for_what_can_wait() -> None:
    assert climb(situation(held(1)), Policy.SEED, Extent.LOSSLESS) == [Fail()]


@pytest.mark.parametrize("policy", Policy)
def test_a_failed_embedding_costs_nobody_anything(policy: Policy) -> None:
    assert Ladder(policy, EMBED).next(situation(held(1), ended=3)) == Fail()


def test_once_has_no_ladder() -> None:
    assert climb(situation(held(1), ended=3), Policy.ONCE) == [Fail()]


slots = st.lists(
    st.builds(Held, st.integers(0, 7), st.sampled_from(["device", "host"]), st.integers(0, 50),
              st.integers(0, 50), st.floats(0, 9), st.booleans()),
    max_size=6, unique_by=lambda slot: slot.slot,
)  # fmt: skip


@given(slots, st.integers(0, 3), st.integers(0, 50))
def test_a_climb_ends_and_only_gets_worse(slots: list[Held], ended: int, host_room: int) -> None:
    rungs = climb(Situation(ended, tuple(slots), host_room))
    cost = [(Trim, GiveUp, Move, Clear, Fail).index(type(rung)) for rung in rungs]
    assert cost == sorted(cost)
    assert len(rungs) <= 2 + ended + len(slots) + 1
    pinned = {slot.slot for slot in slots if slot.pinned}
    for rung in rungs:
        assert not (isinstance(rung, Clear) and pinned.intersection(rung.freed))
        assert not (isinstance(rung, Move) and rung.slot in pinned)
