"""The scheduler's turn: who starts, how long a piece is, who steps, what stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.account import PARTS
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.link import Progress, Stop
from slotd.daemon.models.model import Interrupt
from slotd.daemon.numpy_backend import NumpyRunner
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.scheduler import STATE_INTERVAL
from slotd.protocol.messages import ListSlots, Park, Parked, Snap, Unpark, Unparked
from slotd.protocol.slot_identity import slot_hash
from tests.fakes.scheduler_rig import SchedulerRig

TEXT = np.random.default_rng(11).integers(3, 320, 400).tolist()
OTHER = np.random.default_rng(12).integers(3, 320, 400).tolist()

Make = Callable[..., SchedulerRig]


@pytest.fixture
def make(tiny_llama: Path) -> Make:
    return lambda **options: SchedulerRig(tiny_llama, **options)


@pytest.fixture
def rig(make: Make) -> SchedulerRig:
    return make()


def memory_for(rig: SchedulerRig, pages: int) -> None:
    """Leave room for this many more pages (in whole segments) and the scratch of short pieces."""
    segment = rig.engine.store.segment_bytes
    rig.engine.trim()
    rig.engine.memory.limit = rig.engine.memory.live() + (pages * segment) // 16 + segment * 3 // 4


# ----- admission


def test_requests_start_in_the_order_they_came_and_at_most_parallel_run(make: Make) -> None:
    rig = make(parallel=2)
    for key in "abcd":
        rig.prompt(key, TEXT[:20], n_gen=6)
    rig.turns(1)
    assert list(rig.running()) == ["a", "b"]
    assert rig.states()[-1]["queued"] == 2
    rig.until(*"abcd")
    assert rig.order() == ["a", "b", "c", "d"]
    assert max(len(state["running"]) for state in rig.states()) == 2


def test_prompts_take_turns_piece_by_piece(rig: SchedulerRig) -> None:
    rig.prompt("a", TEXT, n_gen=1)
    rig.prompt("b", OTHER, n_gen=1)
    rig.prompt("short", OTHER[50:100], n_gen=1)
    rig.until("a", "b", "short")
    progress = [message for message in rig.messages if isinstance(message, Progress)]
    assert [message.key for message in progress] == ["a", "b", "short", "a", "b", "a", "b", "a", "b"]
    assert [message.at for message in progress if message.key == "a"] == [128, 256, 384, 400]
    assert {message.of for message in progress if message.key == "b"} == {400}


def test_decoding_sequences_share_one_call(rig: SchedulerRig) -> None:
    alone = [rig.answer(f"alone{n}", TEXT[n : n + 20], n_gen=8) for n in range(3)]
    for n in range(3):
        rig.prompt(n, TEXT[n : n + 20], n_gen=8)
    rig.turns(3)
    rig.engine.calls.clear()
    rig.turns(1)
    assert [call.rows for call in rig.engine.calls] == [(1, 1, 1)]
    rig.until(0, 1, 2)
    assert [rig.tokens(n) for n in range(3)] == alone


def test_what_does_not_fit_beside_what_runs_waits_and_nobody_overtakes_it(make: Make) -> None:
    rig = make(chunk=16)
    memory_for(rig, pages=16)
    rig.prompt("a", TEXT[:300], n_gen=150)  # 9 of the 16 pages with what is reserved beyond
    rig.prompt("b", OTHER[:300], n_gen=150)
    rig.prompt("c", OTHER[:10], n_gen=1)
    rig.turns(30)
    assert list(rig.running()) == ["a"]
    assert rig.states()[-1]["queued"] == 2
    rig.until("a", "b", "c")
    assert [rig.done(key).status for key in "abc"] == ["length"] * 3
    assert rig.order().index("a") == 0
    given_up = [length for length in rig.engine.closed if length]
    assert given_up == [449]  # the ended sequence of a, for b


def test_the_oldest_ended_sequences_are_given_up_first_and_no_more_than_needed(make: Make) -> None:
    rig = make(chunk=16)
    memory_for(rig, pages=16)
    for number, key in enumerate("abc"):
        rig.answer(key, TEXT[50 * number : 50 * number + 201 + number], n_gen=1)  # 4 pages each are kept
    assert rig.engine.closed == []
    rig.answer("d", OTHER[:400], n_gen=100)
    assert rig.done("d").status == "length"
    assert rig.engine.closed == sorted(rig.engine.closed)
    assert rig.engine.closed[0] == 201
    assert len(rig.engine.closed) < 3


def test_what_can_never_fit_fails_alone_with_the_numbers(make: Make) -> None:
    rig = make(chunk=16)
    memory_for(rig, pages=0)
    rig.prompt("big", TEXT[:300], n_gen=4)
    rig.until("big")
    assert rig.done("big").code == "oom"
    assert rig.done("big").reason["site"] == "prefill_reserve"
    assert int(rig.done("big").reason["requested"]) >= rig.engine.store.segment_bytes
    rig.engine.memory.limit = None
    assert len(rig.answer("next", TEXT[:300])) == 4


# ----- prefill pieces


@pytest.mark.parametrize(
    ("chunk", "pieces"),
    [(128, [128, 128, 44]), (300, [256, 44]), (1000, [300]), (100, [64] * 4 + [44]), (64, [64] * 4 + [44]),
     (50, [50] * 6), (1, [1] * 300)],
)  # fmt: skip
def test_a_piece_ends_at_a_page_edge_within_the_chunk(make: Make, chunk: int, pieces: list[int]) -> None:
    rig = make(chunk=chunk)
    rig.answer("a", TEXT[:300], n_gen=1)
    assert rig.pieces() == pieces


def test_pieces_of_a_reused_prefix_come_back_to_page_edges(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:20], n_gen=1)
    rig.engine.calls.clear()
    rig.answer("b", TEXT[:300], n_gen=1)
    assert rig.pieces() == [108, 128, 44]


@pytest.mark.parametrize(
    ("at", "pieces"),
    [(100, [100, 92, 108]), (128, [128, 128, 44]), (1, [1, 127, 128, 44]), (300, [128, 128, 44]),
     (290, [128, 128, 34, 10])],
)  # fmt: skip
def test_a_piece_stops_where_a_snapshot_is_due(rig: SchedulerRig, at: int, pieces: list[int]) -> None:
    rig.answer("a", TEXT[:300], n_gen=1, snap=Snap(at, 3))
    assert rig.pieces() == pieces
    assert rig.slot(3).tokens.tolist() == TEXT[:at]
    assert rig.slot(3).logits is not None


@pytest.mark.parametrize(
    ("rows_per_second", "piece"), [(100, 64), (1000, 64), (2200, 128), (5000, 256), (1e6, 256)]
)
def test_beside_an_answer_a_piece_takes_no_longer_than_max_stall(
    make: Make, rows_per_second: float, piece: int
) -> None:
    """Whole pages, at least one, at most the chunk; the rate is the one of the last piece."""
    rig = make(chunk=256, max_stall=0.06)

    def work(rows: Rows, kind: Kind) -> None:
        if kind is Kind.PROMPT:
            rig.clock.now += len(rows) / rows_per_second

    rig.engine.before_forward = work
    rig.prompt("a", OTHER[:64], n_gen=300)
    rig.turns(2)
    rig.engine.calls.clear()
    rig.prompt("b", TEXT[:320], n_gen=1)
    rig.turns(1)
    assert rig.pieces() == [piece]


def test_without_a_rate_a_piece_beside_an_answer_is_one_page(make: Make) -> None:
    rig = make(chunk=256)
    rig.prompt("a", OTHER[:20], n_gen=300)
    rig.turns(2)
    rig.scheduler._rows_per_second = 0.0
    rig.engine.calls.clear()
    rig.prompt("b", TEXT[:320], n_gen=1)
    rig.turns(1)
    assert rig.pieces() == [PAGE]


def test_an_answer_that_is_paused_does_not_shorten_pieces(rig: SchedulerRig) -> None:
    rig.engine.before_forward = lambda rows, kind: setattr(rig.clock, "now", rig.clock.now + 1.0)
    flags = rig.prompt("a", OTHER[:20], n_gen=300)
    rig.turns(2)
    flags.paused = True
    rig.engine.calls.clear()
    rig.prompt("b", TEXT[:300], n_gen=1)
    rig.turns(1)
    assert rig.pieces() == [128]


# ----- cancel


def test_cancel_while_it_waits(make: Make) -> None:
    rig = make(parallel=1)
    rig.prompt("a", TEXT[:20], n_gen=10)
    flags = rig.prompt("b", TEXT[:20], n_gen=10)
    rig.turns(2)
    flags.cancelled = True
    rig.turns(1)
    assert rig.order() == ["b"]
    assert (rig.done("b").status, rig.done("b").account["gen"], rig.tokens("b")) == ("cancelled", 0, [])
    rig.until("a")
    assert len(rig.tokens("a")) == 10


def test_cancel_between_two_pieces_keeps_what_was_computed(rig: SchedulerRig) -> None:
    flags = rig.prompt("a", TEXT[:300], snap=Snap(200, 0))
    rig.turns(1)
    flags.cancelled = True
    rig.turns(1)
    assert rig.done("a").status == "cancelled"
    assert rig.lines("a") == []  # a snapshot that was not reached is not called a failed one
    assert rig.pieces() == [128]
    rig.answer("b", TEXT[:300])
    assert rig.done("b").account["reused"] == 128


def test_cancel_between_two_layers_drops_the_piece(
    rig: SchedulerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = rig.prompt("a", TEXT[:300])
    rig.turns(1)
    assert isinstance(rig.engine._runner, NumpyRunner)
    model = type(rig.engine._runner.model)
    forward = model.forward

    def cancelled_before_the_second_layer(
        self: object, x: object, batch: object, interrupt: Interrupt
    ) -> object:
        def asked() -> bool:
            answer = interrupt()
            flags.cancelled = True
            return answer

        return forward(self, x, batch, asked)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", cancelled_before_the_second_layer)
    rig.turns(1)
    assert rig.done("a").status == "cancelled"
    monkeypatch.undo()
    golden = SchedulerRig(rig.engine.path).answer("a", TEXT[:300])
    assert rig.answer("b", TEXT[:300]) == golden
    assert rig.done("b").account["reused"] == 128


def test_cancel_while_it_decodes(rig: SchedulerRig) -> None:
    flags = rig.prompt("a", TEXT[:20], n_gen=100)
    rig.prompt("b", OTHER[:20], n_gen=10)
    rig.until_true(lambda: len(rig.tokens("a")) == 5)
    flags.cancelled = True
    rig.turns(1)
    done = rig.done("a")
    assert (done.status, done.code, done.account["gen"], len(rig.tokens("a"))) == ("cancelled", None, 5, 5)
    rig.until("b")
    assert len(rig.tokens("b")) == 10
    rig.turns(3)
    assert len(rig.tokens("a")) == 5
    # The fifth token was handed out but never computed.
    rig.answer("c", TEXT[:20] + rig.tokens("a") + [7])
    assert rig.done("c").account["reused"] == 24


# ----- paused answers


def test_a_paused_answer_does_not_step_and_the_others_do(rig: SchedulerRig) -> None:
    golden = rig.answer("golden", TEXT[:20], n_gen=20)
    flags = rig.prompt("a", TEXT[:20], n_gen=20)
    rig.prompt("b", OTHER[:20], n_gen=12)
    rig.until_true(lambda: len(rig.tokens("a")) == 5)
    flags.paused = True
    rig.until("b")
    assert len(rig.tokens("b")) == 12
    assert rig.tokens("a") == golden[:5]
    assert not rig.scheduler.turn()  # nothing can be done: the thread may sleep
    flags.paused = False
    rig.until("a")
    assert rig.tokens("a") == golden


def test_a_paused_answer_can_be_cancelled(rig: SchedulerRig) -> None:
    flags = rig.prompt("a", TEXT[:20], n_gen=20)
    rig.turns(3)
    flags.paused = flags.cancelled = True
    rig.turns(1)
    assert rig.done("a").status == "cancelled"


# ----- park


def test_park_waits_for_what_runs_and_holds_up_what_waits(rig: SchedulerRig) -> None:
    rig.prompt("a", TEXT[:20], n_gen=5)
    rig.turns(1)
    rig.put("p", Park())
    rig.prompt("b", TEXT[:20], n_gen=5)
    rig.turns(2)
    assert list(rig.running()) == ["a"]
    assert not rig.engine.parked
    rig.until("a", "p", "b")
    assert rig.order() == ["a", "p", "b"]
    assert len(rig.tokens("a")) == 5
    assert rig.lines("p") == [Parked(what="target")]
    assert (rig.done("b").code, rig.tokens("b")) == ("target_parked", [])


def test_unpark_makes_answers_possible_again(rig: SchedulerRig) -> None:
    golden = rig.answer("golden", TEXT[:20])
    rig.put("p", Park())
    rig.put("u", Unpark())
    rig.prompt("b", TEXT[:20])
    rig.until("b")
    assert rig.lines("u") == [Unparked(what="target")]
    assert rig.tokens("b") == golden


def test_other_commands_do_not_wait_for_what_runs(rig: SchedulerRig) -> None:
    rig.prompt("a", TEXT[:300], n_gen=5)
    rig.put("l", ListSlots())
    rig.turns(1)
    assert rig.ended("l")


# ----- state, totals, time


def test_state_is_published_when_something_starts_and_then_ten_times_a_second(rig: SchedulerRig) -> None:
    rig.turns(1)
    assert len(rig.states()) == 1
    rig.turns(5)
    assert len(rig.states()) == 1
    rig.prompt("a", TEXT[:200], n_gen=300)
    rig.turns(1)
    assert rig.running() == {"a": "prefill"}
    published = len(rig.states())
    rig.turns(9)
    assert len(rig.states()) == published
    rig.clock.now += 1.01 * STATE_INTERVAL
    rig.turns(9)
    assert len(rig.states()) == published + 1
    assert rig.running() == {"a": "decode"}


def test_the_state_says_what_is_there(rig: SchedulerRig) -> None:
    rig.answer("a", TEXT[:100], n_gen=4, snap=Snap(70, 5))
    rig.answer("b", TEXT[:100], n_gen=4)
    rig.clock.now += 1
    rig.turns(1)
    state = rig.states()[-1]
    assert (state["running"], state["queued"], state["retained"], state["parked"]) == ([], 0, 2, False)
    assert {slot: (held["tokens"], held["tier"]) for slot, held in state["slots"].items()} == {
        "5": (70, "device")
    }
    assert state["totals"] == {
        "requests": 2, "from_slot": 0, "from_ended": 1, "from_nothing": 1,
        "prompt_tokens": 200, "reused_tokens": 99, "computed_tokens": 101, "generated_tokens": 8,
        "drafted_tokens": 0, "accepted_tokens": 0,
    }  # fmt: skip
    assert state["slots"]["5"]["hash"] == slot_hash(rig.engine.identity, "f32", "f32", 0, TEXT[:70])
    assert state["memory"]["pages_used"] > 0


def test_the_account_sums_to_the_wall_time(make: Make) -> None:
    rig = make(parallel=1)
    rig.engine.before_forward = lambda rows, kind: setattr(rig.clock, "now", rig.clock.now + 0.5)
    rig.prompt("a", TEXT[:300], n_gen=4)
    rig.prompt("b", OTHER[:300], n_gen=4, snap=Snap(200, 0))
    rig.until("a", "b")
    first, second = (dict(rig.done(key).account) for key in "ab")
    assert (first["prefill_s"], first["decode_s"], first["queue_s"], first["wall_s"]) == (1.5, 1.5, 0.0, 3.0)
    assert second["queue_s"] == first["wall_s"]
    assert (second["prefill_s"], second["decode_s"], second["wall_s"]) == (1.5, 1.5, 6.0)
    for account in (first, second):
        assert sum(account[f"{part}_s"] for part in PARTS) == pytest.approx(account["wall_s"])


def test_answers_beside_a_prefill_count_its_time_too(rig: SchedulerRig) -> None:
    rig.engine.before_forward = lambda rows, kind: setattr(rig.clock, "now", rig.clock.now + 0.5)
    rig.prompt("a", OTHER[:20], n_gen=10)
    rig.turns(2)
    rig.prompt("b", TEXT[:300], n_gen=1)
    rig.until("a", "b")
    account = dict(rig.done("a").account)
    assert sum(account[f"{part}_s"] for part in PARTS) == pytest.approx(account["wall_s"])


# ----- the end


def test_stop_answers_every_key_and_frees_everything(make: Make) -> None:
    rig = make(parallel=1)
    rig.answer("old", TEXT[:100])
    rig.prompt("a", TEXT[:20], n_gen=100)
    rig.prompt("b", TEXT[:20])
    rig.turns(3)
    rig.put("p", Park())
    rig.scheduler.put(Stop())
    rig.scheduler.run()
    assert {key: rig.done(key).status for key in ("a", "b", "p")} == dict.fromkeys(
        ("a", "b", "p"), "cancelled"
    )
    assert rig.engine.memory_report()["pages_used"] == 0


def test_run_works_until_it_is_stopped(rig: SchedulerRig) -> None:
    """A stop that comes from within: nobody else is there to send one."""
    rig.prompt("a", TEXT[:20], n_gen=3)
    append = rig.messages.append

    def deliver(message: object) -> None:
        append(message)  # type: ignore[arg-type]
        if rig.ended("a"):
            rig.scheduler.put(Stop())

    rig.scheduler._deliver = deliver
    rig.scheduler.run()
    assert (rig.done("a").status, len(rig.tokens("a"))) == ("length", 3)
