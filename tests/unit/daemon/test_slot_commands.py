from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.engine import Engine
from slotd.daemon.link import Finished, Flags, Key, Line, Started, Submit, ToFront
from slotd.daemon.memory import DeviceMemory, Faults, OutOfDeviceMemory, Policy
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.parking import Parking
from slotd.daemon.recovery import Recovery
from slotd.daemon.retained import Retained, RetainedSequences
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.slot_commands import SlotCommands, describe
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ModelError, RequestError
from slotd.protocol.messages import (
    Command,
    Event,
    FreeDrafter,
    FreeSnapshot,
    ListSlots,
    Park,
    Parked,
    SlotList,
    SnapFreed,
    Snapshot,
    SnapTaken,
    Unpark,
    Unparked,
    Unsupported,
)
from tests.fakes.front_rig import Clock
from tests.fakes.tiny_draft import write_tiny_draft
from tests.fakes.tiny_gguf import write_tiny_llama

TEXT = np.random.default_rng(41).integers(3, 320, 100).tolist()


class SlotRig:
    """Slot commands on a real engine with ended sequences that the test makes."""

    def __init__(
        self, model: Path, fault: str | None = None, policy: Policy = Policy.LADDER, draft: Path | None = None
    ) -> None:
        memory = DeviceMemory(faults=Faults.parse(fault))
        with open_model(model) as file:
            self.engine = Engine(file, NumpyBackend(memory, exact=True), draft=draft)
        self.retained = RetainedSequences(8, self.engine.close)
        self.messages: list[ToFront] = []
        self.clock = Clock()
        recovery = Recovery(self.engine, self.retained, self.messages.append, lambda: None, policy)
        recovery.epoch = 7
        parking = Parking(self.engine, recovery, self.clock)
        self.commands = SlotCommands(
            self.engine, self.retained, self.messages.append, recovery, parking, self.clock
        )

    def ended(self, key: Key, length: int, pending: tuple[int, ...] = ()) -> Retained:
        """A request that ended after `length` computed tokens of TEXT."""
        sequence = self.engine.open()
        self.engine.forward(Rows.chain(sequence, TEXT[:length], logits="none"), Kind.PROMPT)
        self.engine.commit(sequence, range(length))
        entry = Retained(key, sequence, pending)
        self.retained.add(entry)
        return entry

    def run(self, command: Command, key: Key = "k") -> tuple[list[Event], Finished]:
        """Run one command: its events and its one end, which comes last."""
        self.messages.clear()
        self.commands.run(Submit(key, command, Flags(), self.clock.now))
        begun, *lines, end = self.messages
        assert begun == Started(key)
        assert isinstance(end, Finished)
        assert all(isinstance(line, Line) and line.key == key for line in lines)
        assert end.key == key
        return [line.event for line in lines if isinstance(line, Line)], end


@pytest.fixture
def rig(tiny_llama: Path) -> SlotRig:
    return SlotRig(tiny_llama)


# ----- SNAPSHOT


def test_a_snapshot_holds_what_was_said_to_the_last_token(rig: SlotRig) -> None:
    entry = rig.ended("a", 50, pending=(9,))
    events, end = rig.run(Snapshot(slot=3))
    assert (events, end.status) == ([SnapTaken(slot=3, cur_pos=51)], "ok")
    held = rig.engine.slots[3]
    assert held.tokens.tolist() == [*TEXT[:50], 9]
    assert entry.pending == ()
    other = rig.engine.open()
    expected = rig.engine.forward(Rows.chain(other, [*TEXT[:50], 9]), Kind.PROMPT).logits[-1]
    assert held.logits is not None
    np.testing.assert_allclose(held.logits, expected, rtol=1e-4, atol=1e-4)


def test_a_second_snapshot_computes_nothing(rig: SlotRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ended("a", 50, pending=(9,))
    rig.run(Snapshot(slot=3))
    monkeypatch.setattr(rig.engine, "forward", lambda *_: 1 / 0)
    events, _ = rig.run(Snapshot(slot=4))
    assert events == [SnapTaken(slot=4, cur_pos=51)]


def test_a_request_that_was_cut_in_its_prompt_can_be_kept(rig: SlotRig) -> None:
    rig.ended("a", 50)
    assert rig.run(Snapshot(slot=3))[0] == [SnapTaken(slot=3, cur_pos=50)]
    assert rig.engine.slots[3].logits is None


@pytest.mark.parametrize(
    ("key", "of", "length"),
    [("k", "a", 20), ("k", None, 50), (9, None, 40), (9, "b", 30), (9, "a", 20)],
)
def test_which_sequence_is_meant(rig: SlotRig, key: Key, of: str | None, length: int) -> None:
    """A named one; else the last one of all, for a command of the serial lane the last one of the lane."""
    for ended, n in (("a", 20), ("b", 30), (1, 35), (2, 40), ("c", 50)):
        rig.ended(ended, n)  # type: ignore[arg-type]
    assert rig.run(Snapshot(slot=0, of=of), key)[0] == [SnapTaken(slot=0, cur_pos=length)]


@pytest.mark.parametrize(("key", "of"), [("k", "nobody"), (9, None)])
def test_nothing_to_keep(rig: SlotRig, key: Key, of: str | None) -> None:
    rig.ended("a", 20)  # of another kind of request
    events, end = rig.run(Snapshot(slot=0, of=of), key)
    assert (events, end.status, end.code) == ([], "err", "nothing_to_snapshot")
    assert end.reason == ({} if of is None else {"of": of})
    assert rig.run(Snapshot(slot=0))[1].status == "ok"


def test_without_weights_only_a_complete_sequence_can_be_kept(rig: SlotRig) -> None:
    entry = rig.ended("a", 20, pending=(9,))
    rig.ended("b", 30)
    rig.run(Park())
    assert rig.run(Snapshot(slot=0, of="a"))[1].code == "target_parked"
    assert entry.pending == (9,)
    assert rig.run(Snapshot(slot=0, of="b"))[1].status == "ok"
    rig.run(Unpark())
    assert rig.run(Snapshot(slot=0, of="a"))[0] == [SnapTaken(slot=0, cur_pos=21)]


@pytest.mark.parametrize("fault", ["snapshot:2", "snapshot:3", "decode:2", "commit:4"])
def test_a_snapshot_that_fails_keeps_the_slot_and_can_be_tried_again(tiny_llama: Path, fault: str) -> None:
    """The first SNAPSHOT passes snapshot twice, decode once and commit twice, with two ended sequences."""
    rig = SlotRig(tiny_llama, fault, Policy.ONCE)
    rig.ended("a", 20, pending=(9,))
    rig.ended("b", 30, pending=(9,))
    tries = [rig.run(Snapshot(slot=0, of=of))[1] for of in ("a", "b")]
    failed = next(number for number, end in enumerate(tries) if end.code)
    assert tries[failed].code == "oom"
    assert tries[failed].reason["site"] == fault.split(":")[0]
    assert len(rig.engine.slots.get(0, ())) == (21 if failed else 31)  # the other one's
    of = "ab"[failed]
    assert rig.run(Snapshot(slot=0, of=of))[0] == [SnapTaken(slot=0, cur_pos=21 + 10 * failed)]


# ----- slots


def test_listing_and_freeing(rig: SlotRig) -> None:
    rig.ended("a", 20)
    for slot in (5, 0, 3):
        rig.run(Snapshot(slot=slot))
    assert rig.run(ListSlots())[0] == [SlotList(slots=(0, 3, 5))]
    assert rig.run(FreeSnapshot(slot=3))[0] == [SnapFreed(slot=3)]
    assert rig.run(FreeSnapshot(slot=3))[0] == [SnapFreed(slot=3)]  # an empty one too
    assert rig.run(ListSlots())[0] == [SlotList(slots=(0, 5))]


# ----- parking


def test_parking_says_what_changed_and_nothing_else(rig: SlotRig) -> None:
    assert rig.run(Unpark())[0] == []
    assert rig.run(Park(what="draft"))[0] == []
    assert not rig.engine.parked
    assert rig.run(Park(what="target"))[0] == [Parked(what="target")]
    assert rig.run(Park())[0] == []
    assert rig.run(Unpark(what="draft"))[0] == []
    assert rig.engine.parked
    assert rig.run(Unpark())[0] == [Unparked(what="target")]
    assert rig.run(FreeDrafter())[0] == []


def test_a_draft_is_parked_alone_and_goes_with_its_target(tiny_llama: Path, tmp_path: Path) -> None:
    rig = SlotRig(tiny_llama, draft=write_tiny_draft(tmp_path / "draft.gguf"))
    both = [Parked(what="target"), Parked(what="draft")]
    back = [Unparked(what="target"), Unparked(what="draft")]
    assert rig.run(Park(what="draft"))[0] == both[1:]
    assert rig.run(Park(what="draft"))[0] == []
    assert (rig.engine.drafts, rig.engine.memory.live("draft")) == (False, 0)
    assert rig.run(Unpark(what="target"))[0] == []
    assert rig.run(Unpark(what="draft"))[0] == back[1:]
    assert rig.run(Park(what="target"))[0] == both
    assert rig.run(Unpark(what="target"))[0] == back
    assert rig.run(Park())[0] == both
    assert rig.run(Unpark(what="target"))[0] == back[:1]  # the draft was parked by name too
    assert rig.run(Unpark())[0] == back[1:]
    assert rig.run(Park())[0] == both
    assert rig.run(Unpark(what="draft"))[0] == []
    assert rig.run(Unpark(what="target"))[0] == back


def test_a_model_that_changed_while_it_was_parked_is_named(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf")
    rig = SlotRig(model)
    rig.run(Park())
    kept = model.rename(tmp_path / "kept.gguf")
    write_tiny_llama(model, seed=2)
    events, end = rig.run(Unpark())
    assert (events, end.code) == ([], "internal")
    assert str(model) in str(end.reason["reason"])
    assert "changed" in str(end.reason["reason"])
    kept.replace(model)
    assert rig.run(Unpark())[0] == [Unparked(what="target")]


# ----- ends


def test_every_end_has_the_epoch_and_the_wall_time(rig: SlotRig) -> None:
    submit = Submit("k", ListSlots(), Flags(), rig.clock.now - 2.5)
    rig.commands.run(submit)
    end = rig.messages[-1]
    assert isinstance(end, Finished)
    assert end.account == {"epoch": 7, "wall_s": 2.5}


def test_a_command_that_nobody_knows_is_refused(rig: SlotRig) -> None:
    assert rig.run(Unsupported(name="compress"))[1].code == "unsupported"


def test_an_unforeseen_fault_ends_the_command_and_is_logged(
    rig: SlotRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rig.engine, "park", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        events, end = rig.run(Park())
    assert (events, end.code) == ([], "internal")
    assert end.reason == {"reason": "ZeroDivisionError: division by zero"}
    assert caplog.records[0].exc_info


def test_errors_as_the_wire_says_them() -> None:
    assert describe(RequestError("bad_slot", {"slot": 9})) == ("bad_slot", {"slot": 9})
    assert describe(OutOfDeviceMemory("decode", 5, 3)) == (
        "oom",
        {"site": "decode", "requested": 5, "free": 3},
    )
    assert describe(ModelError("m.gguf: gone")) == ("internal", {"reason": "m.gguf: gone"})
