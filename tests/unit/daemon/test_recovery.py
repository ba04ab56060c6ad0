"""What running out of memory costs: the ladder on real sequences and slots."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from slotd.daemon.backend import Outputs
from slotd.daemon.memory import Policy
from slotd.daemon.models.model import Interrupt
from slotd.daemon.rows import Kind, Rows
from slotd.protocol.messages import (
    FreeSnapshot,
    Park,
    Restore,
    RestoreChain,
    Restored,
    Snap,
    SnapInline,
    SnapInlineFailed,
    Snapshot,
    SnapshotThin,
    SnapTaken,
    Unpark,
)
from tests.fakes.pressure_rig import PressureRig

FIRST = [(7 * i) % 300 + 3 for i in range(150)]
SECOND = [(11 * i) % 290 + 5 for i in range(150)]
THIRD = [(13 * i) % 280 + 7 for i in range(150)]

HOST = 8 << 20
LOGITS_BYTES = 320 * 4


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    """The answers of a scheduler without faults."""
    answers = {}
    for name, ids in {"first": FIRST, "second": SECOND, "third": THIRD}.items():
        rig = PressureRig(tiny_llama, exact=True)
        rig.prompt(name, ids)
        rig.run()
        answers[name] = rig.ids(name)
    return answers


def filled(model: Path, faults: str | None = None, **options: object) -> PressureRig:
    """FIRST in slot 1 and SECOND in slot 2, 128 tokens each. Two pieces and one snapshot each."""
    rig = PressureRig(model, None, faults, chunk=128, exact=True, **options)
    rig.prompt("first", FIRST, 0, snap=Snap(128, 1))
    rig.run()
    rig.prompt("second", SECOND, 0, snap=Snap(128, 2))
    rig.run()
    assert set(rig.engine.slots) == {1, 2}
    return rig


def rungs(rig: PressureRig) -> dict[str, int]:
    return dict(rig.state["recovery"]["rungs"])


# ----- the rungs


def test_one_fault_costs_a_trim(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    rig = filled(tiny_llama, "decode:1")
    rig.prompt("third", THIRD)
    rig.run()
    assert rig.ids("third") == expected["third"]
    assert rungs(rig) == {"trim": 1}
    assert rig.cleared == []
    assert set(rig.engine.slots) == {1, 2}


def test_the_whole_ladder_then_success(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    """Trim, two ended sequences, nothing to move without a host tier, clear: the next try succeeds."""
    rig = filled(tiny_llama, "decode:1:4")
    rig.prompt("third", THIRD)
    rig.run()
    assert rig.ids("third") == expected["third"]  # no token came twice
    assert rungs(rig) == {"trim": 1, "giveup": 2, "clear": 1}
    (cleared,) = rig.cleared
    assert (cleared.epoch, cleared.freed, cleared.kept) == (1, (1, 2), ())
    assert cleared.bytes == 2 * (2 * rig.engine.store.page_bytes + LOGITS_BYTES)
    assert rig.ended("third").account["epoch"] == 1
    assert float(rig.ended("third").account["recover_s"]) > 0


def test_slots_move_to_host_memory_least_recently_used_first(tiny_llama: Path) -> None:
    rig = filled(tiny_llama, "decode:5:4", host_cache=HOST)
    rig.submit(Restore(id="use", slot=1, n_gen=4, ignore_eos=True), FIRST)  # decodes three times
    rig.run()
    rig.prompt("third", THIRD)  # trim, first and second and "use" given up, then slots
    rig.run()
    assert rungs(rig) == {"trim": 1, "giveup": 3}
    rig = filled(tiny_llama, "decode:4:5", host_cache=HOST)
    rig.submit(Restore(id="use", slot=1, n_gen=4, ignore_eos=True), FIRST)
    rig.run()
    rig.prompt("third", THIRD)
    rig.run()
    assert rungs(rig) == {"trim": 1, "giveup": 3, "move": 1}
    assert [rig.engine.slots[slot].tier for slot in (1, 2)] == ["device", "host"]
    assert rig.cleared == []


def test_host_slots_survive_a_clear_and_are_named(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    """The tier has room for one of the two slots: the other one is cleared."""
    room = 3 * 64 * 512  # two pages of the tiny model, and a little
    rig = filled(tiny_llama, "decode:1:99", host_cache=room)
    rig.prompt("third", THIRD)
    rig.run()
    ended = rig.ended("third")
    assert (ended.code, ended.reason["site"]) == ("oom", "decode")
    assert rungs(rig) == {"trim": 1, "giveup": 2, "move": 2, "fail": 1}
    assert rig.engine.host_tier.counts.dropped == 1  # the second move dropped what the first one brought
    assert rig.cleared == []
    assert list(rig.engine.slots) == [2]
    assert rig.state["host_tier"]["dropped"] == 1


def test_what_this_request_has_acknowledged_is_kept(tiny_llama: Path) -> None:
    rig = filled(tiny_llama, "decode:1:99")
    rig.prompt("third", THIRD, snap=Snap(100, 5))
    rig.run()
    assert rig.ended("third").code == "oom"
    (cleared,) = rig.cleared
    assert (cleared.freed, cleared.kept) == ((1, 2), (5,))
    assert list(rig.engine.slots) == [5]
    assert len(rig.events(SnapInline)) == 3


def test_a_restored_slot_is_kept(tiny_llama: Path) -> None:
    rig = filled(tiny_llama, "prefill_compute:5:99")
    rig.submit(Restore(id="r", slot=1, n_gen=4), FIRST)
    rig.run()
    assert len(rig.events(Restored)) == 1
    assert (rig.cleared[0].freed, rig.cleared[0].kept) == ((2,), (1,))


def test_a_slot_that_another_request_has_replaced_is_not_this_ones(tiny_llama: Path) -> None:
    rig = filled(tiny_llama, "decode:1:99")
    flags = rig.prompt("third", THIRD, snap=Snap(100, 5))
    while not rig.ids("third"):
        rig.scheduler.turn()
    flags.paused = True
    rig.prompt("other", SECOND, 0, snap=Snap(64, 5))
    for _ in range(6):
        rig.scheduler.turn()
    flags.paused = False
    rig.run()
    assert rig.cleared[0].kept == ()


def test_the_failed_request_alone_fails_and_is_gone(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    rig = filled(tiny_llama, "prefill_compute:5:99")
    used = rig.engine.store.pages.n_used
    rig.prompt("third", THIRD)
    rig.run()
    assert rig.ended("third").reason == {
        "site": "prefill_compute", "requested": 0, "free": rig.ended("third").reason["free"],
    }  # fmt: skip
    assert rig.engine.store.pages.n_used == 0 < used
    gc.disable()
    try:
        assert rig.engine.trim() == 0  # everything is back already
        assert rig.engine.memory.live() == rig.engine.memory.live("weights")
    finally:
        gc.enable()


def test_the_embedding_clears_nothing(tiny_llama: Path) -> None:
    for policy in (Policy.LADDER, Policy.SEED):
        rig = filled(tiny_llama, "prefill_embed:5:99", policy=policy)
        rig.prompt("third", THIRD)
        rig.run()
        assert rig.ended("third").reason["site"] == "prefill_embed"
        assert rungs(rig) == {"fail": 1}
        assert rig.cleared == []
        assert set(rig.engine.slots) == {1, 2}


def test_only_a_prompt_of_several_pieces_passes_prefill_reserve(tiny_llama: Path) -> None:
    rig = PressureRig(tiny_llama, None, "prefill_reserve:1:99", chunk=150)
    rig.prompt("short", FIRST)
    rig.prompt("long", [*FIRST, 5])
    rig.run()
    assert rig.ended("short").status == "length"
    assert rig.ended("long").reason["site"] == "prefill_reserve"


# ----- snapshots


@pytest.mark.parametrize("policy", [Policy.LADDER, Policy.SEED])
def test_p16_a_failed_snapshot_keeps_every_slot(tiny_llama: Path, policy: Policy) -> None:
    rig = filled(tiny_llama, "snapshot:3:99", policy=policy)
    kept = rig.engine.slots[1]
    rig.prompt("third", THIRD, snap=Snap(100, 1))
    rig.run()
    assert rig.ended("third").status == "length"
    assert [(event.slot, event.reason) for event in rig.events(SnapInlineFailed)] == [(1, "oom")]
    rig.submit(Snapshot(id="s", slot=2))
    rig.run()
    assert rig.ended("s").reason["site"] == "snapshot"
    assert rig.engine.slots[1] is kept
    assert rig.cleared == []


def test_a_snapshot_command_never_gives_up_its_own_sequence(tiny_llama: Path) -> None:
    rig = PressureRig(tiny_llama, None, "snapshot:1:1")
    rig.prompt("first", FIRST)
    rig.run()
    rig.submit(Snapshot(id="s", slot=3))
    rig.run()
    assert [event.cur_pos for event in rig.events(SnapTaken)] == [154]
    assert len(rig.engine.slots[3].logits) == 320


def test_a_snapshot_larger_than_the_host_tier_is_refused_by_name(tiny_llama: Path) -> None:
    """Field report 21."""
    rig = filled(tiny_llama, host_cache=1000)
    rig.prompt("third", THIRD, snap=Snap(100, 1), tier="host")
    rig.run()
    assert [event.reason for event in rig.events(SnapInlineFailed)] == ["host_full"]
    assert rig.engine.slots[1].tokens.tolist() == FIRST[:128]
    rig.submit(Snapshot(id="s", slot=1, held=True, tier="host"))
    rig.run()
    ended = rig.ended("s")
    assert ended.code == "oom"
    size = 2 * 64 * 512 + LOGITS_BYTES
    assert ended.reason == {"site": "slot_move", "tier": "host", "requested": size, "budget": 1000}
    assert rig.engine.slots[1].tier == "device"


# ----- several at once


@pytest.mark.parametrize("site", ["decode:2", "commit:8", "commit:9", "commit:10"])
def test_a_shared_step_that_fails_is_stepped_one_by_one(
    tiny_llama: Path, expected: dict[str, list[int]], site: str
) -> None:
    rig = PressureRig(tiny_llama, None, site, exact=True)
    for name, ids in {"first": FIRST, "second": SECOND, "third": THIRD}.items():
        rig.prompt(name, ids)
    rig.run()
    for name, answer in expected.items():
        assert (rig.ended(name).status, rig.ids(name)) == ("length", answer)
    assert rig.state["recovery"]["oom"] == {site.partition(":")[0]: 1}


def test_only_the_sequence_that_fails_alone_is_failed(
    tiny_llama: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real shortage that hits only steps with `second` in them."""
    rig = PressureRig(tiny_llama, exact=True)
    forward = rig.engine.forward

    def short(rows: Rows, kind: Kind, interrupt: Interrupt | None = None) -> Outputs:
        outputs = forward(rows, kind, interrupt)
        if kind is Kind.STEP and any(s.tokens[1] == SECOND[1] for s in rows.sequences):
            rig.engine.memory.empty((2**59,))
        return outputs

    monkeypatch.setattr(rig.engine, "forward", short)
    for name, ids in {"first": FIRST, "second": SECOND, "third": THIRD}.items():
        rig.prompt(name, ids)
    rig.run()
    assert rig.ended("second").code == "oom"
    assert rig.ids("second") == expected["second"][:1]
    assert [rig.ids(name) for name in ("first", "third")] == [expected["first"], expected["third"]]


def test_what_can_wait_costs_nobody_a_slot(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    """No pages for a second request while the first one runs: it waits, and no slot is cleared for it."""
    rig = PressureRig(tiny_llama, exact=True, chunk=128)
    rig.prompt("first", FIRST, 0, snap=Snap(128, 1))
    rig.run()
    flags = rig.prompt("second", SECOND, 800)
    flags.paused = True
    for _ in range(4):
        rig.scheduler.turn()
    memory = rig.engine.memory
    memory.limit = memory.live() + rig.engine.store.segment_bytes // 2
    rig.prompt("third", THIRD, 120)
    for _ in range(8):
        rig.scheduler.turn()
    state = rig.state
    assert ([job["id"] for job in state["running"]], state["queued"]) == (["second"], 1)
    assert state["recovery"]["oom"]["prefill_reserve"] <= 4  # asked once, not in every turn
    assert list(rig.engine.slots) == [1]
    memory.limit = None  # pages are there when `second` is gone; this is for the scratch of `third`
    rig.scheduler.turn()
    assert rig.state["queued"] == 1
    flags.cancelled = True
    rig.run()
    assert rig.ended("third").status == "length"
    assert rig.ids("third")[:4] == expected["third"]


def test_what_can_never_fit_is_refused_and_gives_nothing_up(tiny_llama: Path) -> None:
    rig = filled(tiny_llama)
    rig.engine.memory.limit = rig.engine.memory.live("weights") + rig.engine.store.segment_bytes - 1
    rig.prompt("large", FIRST, 50)
    rig.run()
    ended = rig.ended("large")
    assert ended.code == "oom"
    segment = rig.engine.store.segment_bytes
    assert ended.reason == {"site": "prefill_reserve", "requested": segment, "free": segment - 1}
    assert set(rig.engine.slots) == {1, 2}
    assert rig.cleared == []


# ----- seed


def test_seed_frees_every_tier_once_and_ends_the_request(tiny_llama: Path) -> None:
    rig = filled(tiny_llama, "prefill_compute:6", policy=Policy.SEED, host_cache=HOST)
    rig.submit(Snapshot(id="m", slot=1, held=True, tier="host"))
    rig.run()
    rig.prompt("third", THIRD, snap=Snap(64, 5))
    rig.run()
    (cleared,) = rig.cleared
    assert (cleared.epoch, cleared.freed, cleared.kept) == (1, (1, 2, 5), ())
    assert cleared.bytes > 6 * rig.engine.store.page_bytes
    assert rig.ended("third").code == "oom"
    assert len(rig.engine.slots) == rig.engine.store.pages.n_used == rig.engine.host_tier.used == 0
    rig.prompt("again", THIRD)
    rig.run()
    assert rig.ended("again").status == "length"


def test_seed_gives_ended_sequences_up_without_a_failure(tiny_llama: Path) -> None:
    rig = PressureRig(tiny_llama, policy=Policy.SEED)
    room = rig.engine.store.segment_bytes
    rig.engine.memory.limit = rig.engine.memory.live() + room + (4 << 20)
    for number in range(12):
        rig.prompt(f"p{number}", [number + 3] * 300, 100)
        rig.run()
        assert rig.ended(f"p{number}").status == "length"
    assert rig.cleared == []


# ----- other commands


def test_unpark_gives_slots_up_for_the_weights(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    rig = filled(tiny_llama, host_cache=HOST)
    rig.submit(Park(id="p"))
    rig.run()
    memory = rig.engine.memory
    memory.limit = memory.live() + 200_000
    rig.submit(Unpark(id="u"))
    rig.run()
    assert rig.ended("u").code is None
    assert rungs(rig)["move"] >= 1
    memory.limit = None
    rig.submit(Restore(id="r", slot=1, n_gen=4, ignore_eos=True), FIRST)
    rig.run()
    assert rig.ids("r") == expected["first"]
    rig.submit(FreeSnapshot(id="f", slot=1))
    rig.run()
    assert list(rig.engine.slots) == [2]


# ----- chains


def test_a_chain_survives_that_its_links_move_while_it_waits_for_memory(
    tiny_llama: Path, expected: dict[str, list[int]]
) -> None:
    """A thick and a thin slot in host memory; the restore fails twice, pages are moved together meanwhile."""
    rig = PressureRig(tiny_llama, None, "restore:1:2", exact=True, host_cache=HOST)
    rig.prompt("first", FIRST, 0, snap=Snap(70, 1))
    rig.prompt("other", THIRD, 4)
    rig.run()
    rig.submit(SnapshotThin(id="t", slot=2, kv_start=70, kv_end=130, of="first"))
    rig.submit(Snapshot(id="m", slot=1, held=True, tier="host"))
    rig.run()
    rig.engine.host_tier.demote(2)
    assert [rig.engine.slots[slot].tier for slot in (1, 2)] == ["host", "host"]
    rig.submit(RestoreChain(id="c", thick=1, thins=(2,), n_gen=4, ignore_eos=True), FIRST)
    rig.run()
    assert rungs(rig) == {"trim": 1, "giveup": 1}
    assert rig.ids("c") == expected["first"]
    assert rig.ended("c").account["reused"] == 130
    assert rig.cleared == []
