"""What a request starts from and what it leaves: ended sequences, slots, inline snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.link import Emit, Finished, Line
from slotd.daemon.retained import MIN_SHARED
from slotd.protocol.errors import Value
from slotd.protocol.messages import Restored, Sampling, Snap, SnapInline, SnapInlineFailed
from tests.fakes.scheduler_rig import SchedulerRig

TEXT = np.random.default_rng(31).integers(3, 320, 300).tolist()

Make = Callable[..., SchedulerRig]


@pytest.fixture
def make(tiny_llama: Path) -> Make:
    return lambda **options: SchedulerRig(tiny_llama, **options)


@pytest.fixture
def rig(make: Make) -> SchedulerRig:
    return make()


def reused(rig: SchedulerRig, key: str) -> Value:
    return rig.done(key).account["reused"]


def computed(rig: SchedulerRig, key: str, ids: list[int], **fields: object) -> int:
    """Prompt rows that the engine computed for an answer."""
    rig.engine.calls.clear()
    rig.answer(key, ids, **fields)  # type: ignore[arg-type]
    return sum(rig.pieces())


# ----- ended sequences


def test_a_shared_prefix_is_not_computed_again(rig: SchedulerRig, make: Make) -> None:
    longer = [*TEXT[:100], 7, 8, 9]
    golden = make().answer("golden", longer)
    rig.answer("a", TEXT[:200])
    assert computed(rig, "b", longer) == 3
    assert (reused(rig, "b"), rig.tokens("b")) == (100, golden)


def test_the_last_prompt_token_is_always_computed(rig: SchedulerRig, make: Make) -> None:
    golden = rig.answer("a", TEXT[:100])
    assert computed(rig, "b", TEXT[:100]) == 1
    assert (reused(rig, "b"), rig.tokens("b")) == (99, golden)


def test_the_answer_belongs_to_what_can_be_reused(rig: SchedulerRig) -> None:
    answer = rig.answer("a", TEXT[:100], n_gen=10)
    rig.answer("b", [*TEXT[:100], *answer, 5, 6])
    assert reused(rig, "b") == 109  # the last token was never computed


@pytest.mark.parametrize(("shared", "expected"), [(MIN_SHARED - 1, 0), (MIN_SHARED, MIN_SHARED)])
def test_a_short_prefix_is_not_worth_it(rig: SchedulerRig, shared: int, expected: int) -> None:
    rig.answer("a", TEXT[:100])
    rig.answer("b", [*TEXT[:shared], 0, 1, 2])
    assert reused(rig, "b") == expected


def test_the_longest_of_several_is_taken(rig: SchedulerRig) -> None:
    rig.answer("a", [*TEXT[:60], *TEXT[100:160]])
    rig.answer("b", [*TEXT[:80], *TEXT[120:160]])
    rig.answer("c", [*TEXT[:40], *TEXT[140:160]])
    rig.answer("d", TEXT[:100])
    assert reused(rig, "d") == 80


def test_two_that_share_a_prefix_do_not_disturb_each_other(rig: SchedulerRig, make: Make) -> None:
    texts = {key: [*TEXT[:70], *TEXT[start : start + 30]] for key, start in (("b", 100), ("c", 200))}
    golden = {key: make().answer(key, ids, n_gen=20) for key, ids in texts.items()}
    rig.answer("a", TEXT[:90])
    for key, ids in texts.items():
        rig.prompt(key, ids, n_gen=20)
    rig.until("b", "c")
    assert {key: rig.tokens(key) for key in texts} == golden
    assert (reused(rig, "b"), reused(rig, "c")) == (70, 70)


# ----- restore


def test_restore_starts_from_the_slot_and_says_so_first(rig: SchedulerRig, make: Make) -> None:
    golden = make().answer("golden", TEXT[:200])
    rig.answer("a", TEXT[:100], snap=Snap(90, 3))
    rig.forget()
    rig.engine.calls.clear()
    assert rig.answer("b", TEXT[:200], slot=3) == golden
    assert (reused(rig, "b"), sum(rig.pieces())) == (90, 110)
    own = [each for each in rig.messages if getattr(each, "key", None) == "b"]
    assert own[0] == Line(Restored(slot=3, cur_pos=90), "b")
    assert isinstance(own[-1], Finished)


def test_a_restore_with_no_new_tokens_computes_no_prompt(rig: SchedulerRig) -> None:
    golden = rig.answer("a", TEXT[:100], n_gen=10, snap=Snap(100, 3))
    rig.engine.calls.clear()
    assert rig.answer("b", TEXT[:100], n_gen=10, slot=3) == golden
    assert (reused(rig, "b"), rig.pieces()) == (100, [])


def test_a_restore_without_kept_logits_computes_the_last_token_again(rig: SchedulerRig, make: Make) -> None:
    golden = make().answer("golden", TEXT[:60], n_gen=10)
    rig.answer("a", TEXT[:100])
    rig.answer("b", TEXT[:100], snap=Snap(60, 3))  # inside what is reused: nobody knows its logits
    assert rig.slot(3).logits is None
    rig.engine.calls.clear()
    assert rig.answer("c", TEXT[:60], n_gen=10, slot=3) == golden
    assert (reused(rig, "c"), rig.pieces()) == (59, [1])
    assert rig.lines("c") == [Restored(slot=3, cur_pos=60)]


def test_a_restore_with_no_new_tokens_and_no_answer_is_ok(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(100, 3))
    rig.answer("b", TEXT[:100], n_gen=0, slot=3)
    assert (rig.done("b").status, rig.tokens("b")) == ("ok", [])


def test_kept_logits_are_not_changed_by_sampling(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(100, 3))
    assert rig.slot(3).logits is not None
    before = rig.slot(3).logits.tobytes()
    biased = Sampling(logit_bias=((50, 900.0),), repetition_penalty=1.5)
    assert rig.answer("b", TEXT[:100], n_gen=1, slot=3, sampling=biased) == [50]
    assert rig.slot(3).logits.tobytes() == before


@pytest.mark.parametrize(
    ("slot", "ids", "code", "reason"),
    [
        (5, TEXT[:100], "empty_slot", {"slot": 5}),
        (3, TEXT[:89], "prefix_shorter", {"slot": 3, "prompt": 89, "cur_pos": 90}),
        (3, [*TEXT[:50], 1, *TEXT[51:100]], "prefix_mismatch", {"slot": 3, "at": 50, "cur_pos": 90}),
    ],
)
def test_a_restore_that_can_not_be_is_refused_with_the_numbers(
    rig: SchedulerRig, slot: int, ids: list[int], code: str, reason: dict[str, Value]
) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(90, 3))
    pages = rig.engine.memory_report()["pages_used"]
    rig.prompt("b", ids, slot=slot)
    rig.until("b")
    done = rig.done("b")
    assert (done.status, done.code, done.reason) == ("err", code, reason)
    assert rig.lines("b") == []
    assert rig.engine.memory_report()["pages_used"] == pages


def test_a_restore_takes_an_ended_sequence_that_is_longer_than_the_slot(
    rig: SchedulerRig, make: Make
) -> None:
    golden = make().answer("golden", TEXT[:200])
    rig.answer("a", TEXT[:150], snap=Snap(90, 3))
    rig.engine.host_tier.budget = 1 << 20
    rig.engine.host_tier.demote(3)
    used = rig.slot(3).last_used
    rig.engine.calls.clear()
    assert rig.answer("b", TEXT[:200], slot=3) == golden
    assert (reused(rig, "b"), sum(rig.pieces())) == (150, 50)
    assert rig.lines("b") == [Restored(slot=3, cur_pos=90)]
    assert rig.slot(3).tier == "host"  # nothing of it was needed
    assert rig.slot(3).last_used > used


@pytest.mark.parametrize("shared", [80, 90])
def test_a_restore_takes_the_slot_that_is_not_shorter_than_any_ended_sequence(
    rig: SchedulerRig, make: Make, shared: int
) -> None:
    golden = make().answer("golden", TEXT[:200])
    rig.answer("a", TEXT[:100], snap=Snap(90, 3))
    rig.forget()
    rig.answer("c", [*TEXT[:shared], 5, 6, 7])
    assert rig.answer("b", TEXT[:200], slot=3) == golden
    assert reused(rig, "b") == 90


def test_a_longer_sequence_does_not_make_a_wrong_restore_right(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:150], snap=Snap(90, 3))
    rig.answer("b", [*TEXT[:50], 1, *TEXT[51:150]])
    rig.answer("c", [*TEXT[:50], 1, *TEXT[51:150]], slot=3)
    assert rig.done("c").code == "prefix_mismatch"


def test_the_longer_sequence_may_be_given_up_while_the_restore_waits_for_memory(
    make: Make,
) -> None:
    golden = make().answer("golden", TEXT[:200])
    rig = make(fault="restore:1:2")  # once for the trim, once for the only ended sequence
    rig.answer("a", TEXT[:150], snap=Snap(90, 3))
    assert rig.answer("b", TEXT[:200], slot=3) == golden
    assert reused(rig, "b") == 90


# ----- inline snapshots


def test_a_snapshot_within_the_reused_prefix_is_taken_before_anything_is_computed(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:200])
    rig.prompt("b", TEXT[:300], snap=Snap(150, 3))
    rig.engine.calls.clear()
    rig.until("b")
    own = [each for each in rig.messages if getattr(each, "key", None) == "b"]
    assert own[0] == Line(SnapInline(slot=3, cur_pos=150), "b")
    assert rig.slot(3).tokens.tolist() == TEXT[:150]
    assert rig.pieces() == [100]  # no stop for the snapshot


def test_a_snapshot_at_the_prompts_end_comes_before_the_first_token(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(100, 3))
    own = [
        type(each) for each in rig.messages if getattr(each, "key", None) == "a" and not hasattr(each, "of")
    ]
    assert own[:2] == [Line, Emit]


@pytest.mark.parametrize("n_gen", [0, 4])
def test_a_snapshot_past_the_prompt_is_said_before_the_end(rig: SchedulerRig, n_gen: int) -> None:
    rig.answer("first", TEXT[:50], n_gen=1, snap=Snap(50, 3))
    held = rig.slot(3)
    rig.answer("a", TEXT[100:200], n_gen=n_gen, snap=Snap(101, 3))
    own = [each for each in rig.messages if getattr(each, "key", None) == "a"]
    assert own[-2] == Line(SnapInlineFailed(slot=3, reason="past_prompt"), "a")
    assert rig.done("a").status == ("length" if n_gen else "ok")
    assert rig.slot(3) is held


def test_a_snapshot_replaces_what_the_slot_held(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], snap=Snap(100, 3))
    rig.answer("b", TEXT[200:260], snap=Snap(60, 3))
    assert rig.slot(3).tokens.tolist() == TEXT[200:260]
    assert list(rig.engine.slots) == [3]


def test_a_request_may_replace_the_slot_it_starts_from(rig: SchedulerRig, make: Make) -> None:
    golden = make().answer("golden", TEXT[:200], n_gen=10)
    rig.answer("a", TEXT[:100], snap=Snap(100, 3))
    assert rig.answer("b", TEXT[:200], n_gen=10, slot=3, snap=Snap(150, 3)) == golden
    assert rig.slot(3).tokens.tolist() == TEXT[:150]


# ----- endings that the model says


def test_the_models_end_of_text_ends_an_answer(rig: SchedulerRig, make: Make) -> None:
    answer = rig.answer("golden", TEXT[:50], n_gen=10)
    eos = answer[4]
    first = answer.index(eos)
    other = make(eos_ids=[eos])
    assert other.answer("a", TEXT[:50], n_gen=10) == answer[: first + 1]
    assert (other.done("a").status, other.done("a").reason) == ("stop", {"stop": eos})
    assert other.answer("b", TEXT[:50], n_gen=10, ignore_eos=True) == answer
    assert (other.done("b").status, other.done("b").reason) == ("length", {"limit": "n_gen"})


def test_a_prompt_without_an_answer_ends_ok(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], n_gen=0)
    assert (rig.done("a").status, rig.done("a").account["gen"]) == ("ok", 0)
