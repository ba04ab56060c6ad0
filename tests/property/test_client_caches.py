"""P7-P12: the caches against a daemon whose lines get lost or reordered, and that runs out of memory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slotd.client.boundaries import Cuts
from slotd.client.cache_entries import WIDTH, Identity, as_bytes
from slotd.client.cache_metadata import MetadataFolder, Record, parse_meta
from slotd.client.caches import Caches, Plan
from tests.fakes.slot_model import Running, Said, SlotModel

ME = Identity("model", "f16", "f16", 0, 4096, "salt")

#: Growing conversations that share heads: a prompt is a path of these turns, 16 tokens each.
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=4)


def prompt_of(path: list[int]) -> bytes:
    return as_bytes([turn for turn in path for _ in range(16)])


class CachesAndDaemon(RuleBasedStateMachine):
    """One client, one daemon at a time. Rules are what either does, or what happens to a line."""

    @initialize(prefix=st.sampled_from([1, 1, 2, 3, 0]), full=st.sampled_from([0, 0, 1, 2]))
    def begin(self, prefix: int, full: int) -> None:
        self.caches = Caches(prefix, full)
        self.daemon = SlotModel()
        self.boot = 0
        self.caches.reset(ME, "0", self.daemon.epoch, 8)
        self.open: dict[int, Plan] = {}
        self.number = 0
        self.stale: list[tuple[Plan, int]] = []  # settled long ago, or of a daemon that died

    # ----- the client

    @rule(paths=st.lists(prompts, min_size=1, max_size=3))
    def some_requests_without_trouble(self, paths: list[list[int]]) -> None:
        for path in paths:
            self.ask(path, 0, len(path))
            while self.number in self.daemon.running:
                self.daemon.step(self.number)
            self.hear(len(self.daemon.said))

    @rule(
        paths=st.lists(prompts, min_size=1, max_size=3),
        order=st.lists(st.sampled_from("aaabbbcccxOK"), max_size=12),
        trouble=st.lists(st.sampled_from(["", "", "lose", "overtake", "fail"]), max_size=6),
        hear=st.integers(0, 12),
    )
    def some_requests_with_trouble(
        self, paths: list[list[int]], order: list[str], trouble: list[str], hear: int
    ) -> None:
        """Side by side: a, b, c go on, x ends the oldest early, O is out of memory, K that but for slot 0."""
        for path in paths:
            self.ask(path, 0, len(path))
        for what in order:
            if what in "OK":
                self.daemon.run_out((0,) if what == "K" else ())
            elif what == "x":
                self.end_early(0, True)
            else:
                self.step("abc".index(what), "fail" in trouble)
        for index, what in enumerate(trouble):
            if what == "lose":
                self.lose(index)
            elif what == "overtake":
                self.overtake(index)
        self.hear(hear)

    @rule(path=prompts, expected=st.sampled_from([0, 0, 16, 48]), cut=st.integers(1, 5))
    def ask(self, path: list[int], expected: int, cut: int) -> None:
        raw = prompt_of(path)
        at = min(cut, len(path)) * 16
        plan = self.caches.plan(raw, Cuts((at,), at), expected=lambda ids: expected)
        assert plan.load is None
        assert plan.ids == raw
        self.number += 1
        held = plan.reservation
        self.daemon.running[self.number] = Running(
            self.number,
            plan.ids,
            None if plan.lease is None else plan.lease.slot,
            None if held is None else (held.length, held.slot),
        )
        self.open[self.number] = plan

    @rule(path=prompts)
    def ask_and_fail_to_send(self, path: list[int]) -> None:
        raw = prompt_of(path)
        plan = self.caches.plan(raw, Cuts((16,), 16))
        if plan.lease is not None:
            self.caches.release(plan.lease)
        if plan.reservation is not None:
            self.caches.abort(plan.reservation, sent=False)

    @rule(pick=st.integers(0, 20), epoch=st.integers(0, 4))
    def confirm_late(self, pick: int, epoch: int) -> None:
        if self.stale:
            plan, boot = self.stale[pick % len(self.stale)]
            held = plan.reservation
            assert held is not None
            told = min(epoch, self.caches.epoch)
            done = self.caches.confirm(held, slot=held.slot, length=held.length, epoch=told, boot=str(boot))
            assert not done

    @rule(slot=st.integers(0, 20))
    def program_takes_a_slot(self, slot: int) -> None:
        waiting = [request.restore for request in self.daemon.running.values() if not request.started]
        if slot > 4 or slot in waiting:  # the second one a real daemon refuses
            return
        self.caches.claim(slot)
        self.daemon.slots[slot] = prompt_of([9])

    @rule(slot=st.integers(0, 6))
    def program_empties_a_slot(self, slot: int) -> None:
        self.caches.unclaim(slot)
        self.daemon.slots.pop(slot, None)

    # ----- the daemon

    @rule(pick=st.integers(0, 20), fails=st.sampled_from([False, False, False, True]))
    def step(self, pick: int, fails: bool) -> None:
        running = list(self.daemon.running)
        if running:
            self.daemon.step(running[pick % len(running)], snapshot_fails=fails)

    @rule(pick=st.integers(0, 20), ok=st.booleans())
    def end_early(self, pick: int, ok: bool) -> None:
        running = list(self.daemon.running)
        if running:
            self.daemon.end(running[pick % len(running)], ok=ok)

    @rule(kept=st.sets(st.integers(0, 4), max_size=2), luck=st.integers(0, 3))
    def run_out_of_memory(self, kept: set[int], luck: int) -> None:
        if luck == 0:
            self.daemon.run_out(tuple(kept))

    @rule(luck=st.integers(0, 9))
    def die(self, luck: int) -> None:
        if luck:
            return
        self.boot += 1
        self.stale += [(plan, self.boot - 1) for plan in self.open.values() if plan.reservation is not None]
        self.open.clear()
        self.daemon = SlotModel(wrong=self.daemon.wrong)
        self.caches.reset(ME, str(self.boot), self.daemon.epoch, 8)

    # ----- the pipes

    @rule(count=st.integers(1, 4))
    def hear(self, count: int) -> None:
        for _ in range(min(count, len(self.daemon.said))):
            self._take(self.daemon.said.pop(0))

    @rule(pick=st.integers(0, 20))
    def lose(self, pick: int) -> None:
        """A line is lost; not a done line, which a client waits for as long as the daemon lives."""
        lines = [line for line in self.daemon.said if line.kind != "done"]
        if lines:
            self.daemon.said.remove(lines[pick % len(lines)])

    @rule(pick=st.integers(0, 20))
    def overtake(self, pick: int) -> None:
        """A line comes earlier than the one before it."""
        said = self.daemon.said
        if len(said) > 1:
            at = pick % (len(said) - 1)
            said[at], said[at + 1] = said[at + 1], said[at]

    @rule()
    def look_at_kept_slots(self) -> None:
        """STATUS says what slots hold at this moment."""
        for slot in self.caches.kept:
            held = self.daemon.slots.get(slot)
            if held is not None:
                self.caches.rebind(slot, ME.content(held), len(held) // WIDTH, self.daemon.epoch)

    def _take(self, line: Said) -> None:
        plan = self.open.get(line.number)
        if line.kind == "cleared":
            self.caches.all_cleared(line.epoch, line.kept)
            return
        if plan is None:
            return
        held = plan.reservation
        if line.kind == "restored" and plan.lease is not None:
            self.caches.release(plan.lease)
        elif line.kind == "inline" and held is not None:
            self.caches.ack(held, line.slot, line.length)
        elif line.kind == "failed" and held is not None:
            self.caches.ack_untouched(held, line.slot)
        elif line.kind == "done":
            del self.open[line.number]
            if plan.lease is not None:
                self.caches.release(plan.lease)
            if held is None:
                self.caches.observe_epoch(line.epoch)
            else:
                self.caches.settle(held, ok=line.ok, epoch=line.epoch)
                self.stale.append((plan, self.boot))

    # ----- what always holds

    @invariant()
    def p7_an_entry_is_never_taken_for_something_else(self) -> None:
        if not hasattr(self, "caches"):
            return
        for entry in (*self.caches.prefix_entries(), *self.caches.full_entries()):
            if entry.slot is not None:
                held = self.daemon.slots.get(entry.slot)
                unheard = self.daemon.epoch > self.caches.epoch  # of a clearing: then the slot may be empty
                assert held == entry.ids or (unheard and held is None), f"slot {entry.slot}"
        assert self.daemon.wrong == []

    @invariant()
    def p8_one_entry_for_each_slot(self) -> None:
        if not hasattr(self, "caches"):
            return
        prefix = [entry.slot for entry in self.caches.prefix_entries()]
        full = [entry.slot for entry in self.caches.full_entries() if entry.slot is not None]
        assert len(set(prefix + full)) == len(prefix + full)
        assert set(prefix) <= set(range(self.caches.prefix_slots))
        first = self.caches.prefix_slots
        assert set(full) <= set(range(first, first + self.caches.full_slots))

    def teardown(self) -> None:
        """P10: when everything has ended and was heard, no slot is lost."""
        if not hasattr(self, "caches"):
            return
        while self.daemon.running:
            self.daemon.step(next(iter(self.daemon.running)))
        while self.daemon.said:
            self._take(self.daemon.said.pop(0))
        assert (self.caches.pending, self.caches.leases) == (0, 0)
        for slot in range(5):
            self.caches.unclaim(slot)
        self.caches.all_cleared(self.daemon.epoch + 1)
        assert self.caches.prefix_entries() == []
        assert self.caches.full_entries() == []
        raws = [prompt_of([4, turn]) for turn in range(self.caches.prefix_slots)]
        plans = [self.caches.plan(raw, Cuts((32,), 32)) for raw in raws]
        slots = {plan.reservation.slot for plan in plans if plan.reservation is not None}
        assert slots == set(range(self.caches.prefix_slots))


TestCachesAndDaemon = CachesAndDaemon.TestCase
TestCachesAndDaemon.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("slots", [(1, 0), (2, 0), (3, 1), (1, 2)])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_p7_p8_p10_long_histories(slots: tuple[int, int], seed: int) -> None:
    """The same rules, 250 of them in an order that a daemon in trouble could have."""
    chance = random.Random(seed)
    both = CachesAndDaemon()
    both.begin(*slots)
    for _ in range(250):
        _do_something(both, chance)
        both.p7_an_entry_is_never_taken_for_something_else()
        both.p8_one_entry_for_each_slot()
    both.teardown()


def _do_something(both: CachesAndDaemon, chance: random.Random) -> None:
    path = [chance.randint(1, 2) for _ in range(chance.randint(1, 4))]
    any = chance.randint(0, 20)
    what = chance.random()
    if what < 0.25 and len(both.daemon.running) < 4:
        both.ask(path, chance.choice([0, 0, 16]), chance.randint(1, 4))
    elif what < 0.60:
        both.step(any, chance.random() < 0.1)
    elif what < 0.85:
        both.hear(chance.randint(1, 4))
    elif what < 0.88:
        both.lose(any)
    elif what < 0.92:
        both.overtake(any)
    elif what < 0.94:
        both.end_early(any, chance.random() < 0.5)
    elif what < 0.96:
        both.run_out_of_memory({chance.randint(0, 3)}, 0)
    elif what < 0.98:
        both.look_at_kept_slots()
        both.confirm_late(any, chance.randint(0, 4))
    elif what < 0.985:
        both.program_takes_a_slot(chance.randint(0, 3))
    elif what < 0.99:
        both.program_empties_a_slot(chance.randint(0, 3))
    elif what < 0.995:
        both.ask_and_fail_to_send(path)
    else:
        both.die(0)


# --------------------------------------------------------------------------------------------------
# P9


@given(
    paths=st.lists(prompts, min_size=1, max_size=6),
    prefix=st.integers(0, 3),
    full=st.integers(0, 2),
    acked=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_p9_nothing_from_before_a_clearing_comes_in_after_it(
    paths: list[list[int]], prefix: int, full: int, acked: bool, epoch: int
) -> None:
    caches = Caches(prefix, full)
    caches.reset(ME, "b", 1, 8)
    plans = [caches.plan(prompt_of(path), Cuts((len(path) * 16,), len(path) * 16)) for path in paths]
    late = [plan.reservation for plan in plans if plan.reservation is not None]
    for held in late[: len(late) // 2]:
        caches.confirm(held, slot=held.slot, length=held.length, epoch=1, boot="b")
    caches.all_cleared(2)
    assert caches.prefix_entries() == []
    assert caches.full_entries() == []
    for held in late:
        if acked:
            caches.ack(held, held.slot, held.length)
        assert not caches.confirm(held, slot=held.slot, length=held.length, epoch=epoch, boot="b")
    assert caches.prefix_entries() == []
    assert caches.full_entries() == []


# --------------------------------------------------------------------------------------------------
# P11, P12


@given(paths=st.lists(prompts, min_size=1, max_size=6, unique_by=tuple), full=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_p11_what_was_saved_gives_the_same_hits(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], full: bool
) -> None:
    folder = MetadataFolder(tmp_path_factory.mktemp("cache"), ME)
    for order, path in enumerate(paths):
        ids = prompt_of(path)
        kind = "full" if full else "prefix"
        record = Record(kind, ME.key(ids), ids, len(ids) // WIDTH, "" if full else ME.content(ids), 0, order)
        assert folder.write(record) == len(ids)
    caches = Caches(0 if full else 6, 6 if full else 0)
    caches.reset(ME, "b", 1, 8)
    for record in folder.load():
        if full:
            caches.adopt_full(record.key, record.ids, record.raw_length, artifact_bytes=len(record.ids))
        else:
            caches.adopt_prefix(record.ids, content=record.content)
    entries = caches.full_entries() if full else caches.cold_entries()
    assert [entry.ids for entry in entries] == [prompt_of(path) for path in paths]  # oldest first
    for entry in entries:
        held = caches.prepare_load(entry.key)
        assert held is not None
        assert caches.confirm(held, slot=held.slot, length=held.length, epoch=1, boot="b")
    for path in paths:
        plan = caches.plan(prompt_of(path), Cuts((), None))
        assert plan.restore is not None
        assert plan.restore.ids == prompt_of(path)


@given(data=st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
@settings(max_examples=50, deadline=None)
def test_p11_no_file_makes_a_load_fail(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("cache")
    (path / f"{'a' * 32}.meta.json").write_bytes(data)
    (path / f"{'b' * 32}.meta.json").mkdir()
    assert MetadataFolder(path, ME).load() == []


@given(changes=st.dictionaries(st.sampled_from(sorted({
    "version", "kind", "key_hex", "model", "kv_k_type", "kv_v_type", "fa_window", "max_ctx", "salt",
    "cur_ids_len", "raw_prompt_len", "ids_hash", "content", "hits", "last_used_ns",
})), st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers()),
    min_size=1, max_size=2))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_p11_a_changed_field_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, object]
) -> None:
    import json

    path = tmp_path_factory.mktemp("cache")
    folder = MetadataFolder(path, ME)
    ids = prompt_of([1, 2])
    key = ME.key(ids)
    folder.write(Record("prefix", key, ids, 32, ME.content(ids), 3, 7))
    meta = path / f"{key}.meta.json"
    good = json.loads(meta.read_bytes())
    meta.write_text(json.dumps({**good, **changes}))
    loaded = folder.load()
    if loaded:  # what passed is a number that decides nothing
        assert parse_meta(meta.read_bytes(), ME)
        same = {name for name, value in changes.items() if type(good[name]) is type(value)}
        assert set(changes) == same
        assert loaded[0].ids == ids
        assert loaded[0].key == key


@given(writes=st.lists(st.tuples(prompts, st.sampled_from(["write", "remove", "fail"])), max_size=12))
@settings(max_examples=25, deadline=None)
def test_p12_no_temporary_file_remains(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[list[int], str]]
) -> None:
    path = tmp_path_factory.mktemp("cache")
    folder = MetadataFolder(path, ME)
    expected: set[str] = set()
    for turns, what in writes:
        ids = prompt_of(turns)
        key = ME.key(ids)
        if what == "remove":
            folder.remove(key)
            expected.discard(key)
        elif what == "write":
            folder.write(Record("prefix", key, ids, len(ids) // WIDTH, ME.content(ids)))
            expected.add(key)
        else:
            _fail_to_write(folder, path)
    names = {name for key in expected for name in (f"{key}.bin", f"{key}.meta.json")}
    assert set(os.listdir(path)) == names


def _fail_to_write(folder: MetadataFolder, path: Path) -> None:
    """A folder stands where the file should go: the rename fails after the bytes were written."""
    key = "c" * 32
    blocked = path / f"{key}.bin"
    (blocked / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        folder.write(Record("prefix", key, as_bytes([1]), 1))
    (blocked / "inside").rmdir()
    blocked.rmdir()
