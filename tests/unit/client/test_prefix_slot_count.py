"""How many prefix slots there should be, and what they are worth when there are too few of them.

A simulation: the client's caches as they are, a daemon that does what it is asked (`conversation_load`).
``python -m tests.fakes.conversation_load`` prints the whole table.
"""

from __future__ import annotations

import pytest

from slotd.client.params import PREFIX_SLOTS
from slotd.daemon.config import Config
from tests.fakes.conversation_load import Load, at_random, round_robin, share, talks, with_strangers

TURNS = 12


def test_the_default_is_all_slots_that_a_daemon_has_by_default() -> None:
    assert Config.__dataclass_fields__["slots"].default == PREFIX_SLOTS


@pytest.mark.parametrize("shared", [False, True], ids=["own heads", "one head"])
@pytest.mark.parametrize("conversations", [1, 2, 4, 5, 6, 7])
def test_up_to_seven_conversations_are_all_kept(conversations: int, shared: bool) -> None:
    assert share(PREFIX_SLOTS, round_robin(conversations, TURNS, shared=shared)) > 0.84


def test_half_the_slots_would_lose_a_third_of_it_at_six() -> None:
    assert share(4, round_robin(6, TURNS)) < 0.5


@pytest.mark.parametrize(("conversations", "least"), [(9, 0.7), (12, 0.5), (16, 0.35), (20, 0.3)])
def test_too_many_conversations_do_not_push_each_other_out(conversations: int, least: float) -> None:
    """To give up what was used least recently would give up what comes next: nothing would be reused."""
    assert share(PREFIX_SLOTS, round_robin(conversations, TURNS)) > least
    assert share(PREFIX_SLOTS, at_random(conversations, 300)) > least


@pytest.mark.parametrize(("conversations", "strangers"), [(1, 20), (3, 8), (4, 12), (6, 4)])
def test_prompts_that_never_come_again_push_no_conversation_out(conversations: int, strangers: int) -> None:
    # A conversation is known by its second turn only, which is computed whole: 0.82 in place of 0.84.
    assert share(PREFIX_SLOTS, with_strangers(conversations, TURNS, strangers)) > 0.8


@pytest.mark.parametrize(("before", "now"), [(8, 6), (12, 6), (16, 8)])
def test_conversations_that_have_ended_make_way(before: int, now: int) -> None:
    run = Load(PREFIX_SLOTS)
    for talk in round_robin(before, TURNS):
        run.turn(talk)
    new = talks(now, first=500)
    shares = []
    for _ in range(4):
        run.prompt = run.reused = 0
        for talk in new:
            run.turn(talk)
        shares.append(run.share)
    assert min(shares[2:]) > 0.65, shares  # from the third turn on; 0.7 is all that there is to reuse there
