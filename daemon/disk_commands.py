"""The verbs of the disk tier: SNAPSHOT tier=disk, STORED, LOAD_SNAPSHOT, DROP, and inline snapshots to disk.

Slots that the host tier sends to disk take the same way (`spilled_slots`).

Files are read and written on a thread beside the scheduler, so other requests go on meanwhile. That thread
touches K/V of pages that nobody writes: a snapshot's, which its own reference keeps as they are, or a load's,
which nobody else knows yet. Page counts, slots and replies belong to the scheduler's thread.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.background import Background, Closed, Steps
from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.kv.page_pieces import PieceReader, PieceWriter
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.kv.save_plan import Image
from slotd.daemon.kv.slot_files import Identity
from slotd.daemon.kv.slot_store import SlotStore, Stopped
from slotd.daemon.kv.slots import Slot
from slotd.daemon.link import Key, Line, Started, Submit, ToFront
from slotd.daemon.slot_chains import check_free_for, filled
from slotd.daemon.slot_commands import SlotCommands
from slotd.daemon.spilled_slots import Attempt, SpilledSlots
from slotd.daemon.weights.identity import content_hash
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ModelError, RequestError
from slotd.protocol.messages import (
    Command,
    Drop,
    Json,
    LoadSnapshot,
    SnapDropped,
    SnapInline,
    SnapLoaded,
    Snapshot,
    SnapTaken,
    Stored,
)

log = logging.getLogger(__name__)


class DiskCommands:
    """Runs the commands that need the store.

    Args:
        engine: owns pages and slots.
        store: the snapshots on disk; None: there is no folder for them.
        commands: knows the sequence that SNAPSHOT means, and ends commands.
        deliver: takes the replies.
        call_soon: makes the scheduler's thread call a function.
    """

    def __init__(
        self, engine: Engine, store: SlotStore | None, commands: SlotCommands,
        deliver: Callable[[ToFront], None], call_soon: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._maybe_store = store
        self._commands = commands
        self._deliver = deliver
        self._background = Background(call_soon)
        self._known_identity: Identity | None = None
        self._saves: dict[Key, int] = {}
        self._after: dict[Key, Callable[[], None]] = {}
        if store is not None:
            self._background.start(self._learn_identity(), _log_failure)
            self._spilled = SpilledSlots(engine, store, self._background, self._saving, call_soon)

    def takes(self, command: Command) -> bool:
        """Whether a command is one of these, or is about a slot that is on disk."""
        if isinstance(command, Snapshot):
            return command.tier == "disk" or (command.held and self._is_on_disk(command.slot))
        return isinstance(command, Stored | LoadSnapshot | Drop)

    def _is_on_disk(self, number: int) -> bool:
        slot = self._engine.slots.get(number)
        return slot is not None and slot.stored is not None

    def fetch(self, job: Job, number: int, attempt: Attempt) -> None:
        """Bring a slot back from disk that a job starts from. The job waits, those behind it do not."""
        job.fetching = True
        job.account.enter("restore")
        self._background.start(self._spilled.bring_back(number, attempt), job.fetched)

    def run(self, submit: Submit) -> None:
        """Start a command; its key ends when it is done."""
        self._deliver(Started(submit.key))
        self._background.start(self._steps(submit), lambda error: self._end(submit, error))

    def save_inline(self, key: Key, number: int, slot: Slot) -> None:
        """Save a snapshot that was just taken into slot `number` for request `key`, and say where it is."""
        self._saves[key] = self._saves.get(key, 0) + 1
        self._background.start(self._inline(key, number, slot), lambda error: self._saved(key, error))

    def saves(self, key: Key) -> bool:
        """Whether an inline snapshot of the request is being saved."""
        return key in self._saves

    def when_saved(self, key: Key, then: Callable[[], None]) -> None:
        """Call `then` when no inline snapshot of the request is being saved: now, if there is none."""
        if key in self._saves:
            self._after[key] = then
        else:
            then()

    def close(self) -> None:
        """Leave the file that is being read or written, answer what is open, let another process write."""
        if self._maybe_store is not None:
            self._maybe_store.stop()
        self._background.close()
        if self._maybe_store is not None:
            self._maybe_store.close()

    # ----- the verbs, each in steps

    def _steps(self, submit: Submit) -> Steps:
        match submit.command:
            case Snapshot() as command if command.held and self._is_on_disk(command.slot):
                return self._held_on_disk(submit, command)
            case Snapshot() as command:
                return self._snapshot(submit, command)
            case LoadSnapshot() as command:
                return self._load(submit, command)
            case Drop() as command:
                return self._drop(submit, command)
            case _:
                return self._list(submit)

    def _list(self, submit: Submit) -> Steps:
        report = yield self._store.report
        self._reply(submit, Json(kind="stored", data=report))

    def _drop(self, submit: Submit, command: Drop) -> Steps:
        name = command.hash or ""
        yield lambda: self._store.drop(name)
        self._reply(submit, SnapDropped(hash=name))

    def _snapshot(self, submit: Submit, command: Snapshot) -> Steps:
        """SNAPSHOT tier=disk: the slot is filled when its file is there, so a failure changes neither."""
        self._require_store()
        check_free_for(self._engine.slots, command.slot, "thick")
        if command.held:
            slot = filled(self._engine.slots, command.slot, "thick")
        else:
            slot = self._commands.captured(submit.key, command.of)
        pages = self._hold(slot)
        try:
            name = yield self._saving(slot)
            if not command.held:
                check_free_for(self._engine.slots, command.slot, "thick")
                self._engine.slots.put(command.slot, slot)
        finally:
            self._engine.store.pages.release(pages)
        taken = SnapTaken(slot=command.slot, cur_pos=len(slot), tier="disk", hash=name)
        self._reply(submit, taken)

    def _held_on_disk(self, submit: Submit, command: Snapshot) -> Steps:
        """SNAPSHOT held=1 of a slot in the disk tier: it stays there, or comes back first."""
        number, slots = command.slot, self._engine.slots
        if command.tier != "disk":
            while self._is_on_disk(number):
                yield from self._spilled.bring_back(number, self._commands.attempt)
            self._commands.hold(submit, command)
            return
        yield from self._spilled.confirm(number)
        if self._is_on_disk(number):
            held = slots[number]
            self._reply(submit, SnapTaken(slot=number, cur_pos=len(held), tier="disk", hash=held.stored))
        else:  # it is empty, or came back meanwhile
            yield from self._snapshot(submit, command)

    def _inline(self, key: Key, number: int, slot: Slot) -> Steps:
        pages = self._hold(slot)
        where: dict[str, str] = {"tier": "device"}
        try:
            name = yield self._saving(slot)
            where = {"tier": "disk", "hash": name}
        finally:
            self._engine.store.pages.release(pages)
            self._deliver(Line(SnapInline(slot=number, cur_pos=len(slot), **where), key))

    def _load(self, submit: Submit, command: LoadSnapshot) -> Steps:
        name = command.hash or ""
        check_free_for(self._engine.slots, command.slot, "thick")
        manifest = yield lambda: self._store.find(name, self._identity())
        recurrence = self._engine.recurrence
        ids = np.frombuffer(manifest.ids, "<i4")
        recurrence.check_bytes(name, manifest.state.n_bytes, len(ids))
        slot = self._commands.attempt(lambda: self._blank_slot(ids))
        pages, store = slot.pages, self._engine.store
        try:
            writer = PieceWriter(store.layout, lambda index, n, data: store.write_page(pages[index], n, data))
            data, found = yield lambda: self._store.read(name, writer)
            check_free_for(self._engine.slots, command.slot, "thick")
            logits = self._commands.attempt(lambda: self._kept_logits(data))
            state = self._commands.attempt(lambda: recurrence.write(found))
            self._engine.slots.put(command.slot, Slot(slot.tokens, pages, logits, state=state))
        finally:
            store.pages.release(pages)
        self._reply(submit, SnapLoaded(slot=command.slot, cur_pos=len(slot), hash=name))

    # ----- on the disk thread

    def _saving(self, slot: Slot) -> Callable[[], str]:
        """The work that saves a slot as it is now."""
        tokens, pages, logits, store = slot.tokens, slot.pages, slot.logits, self._engine.store
        read_state = self._engine.recurrence.reading(slot)
        host = slot.host

        def read_image(index: int, n: int, buffer: memoryview) -> None:
            if host is not None:
                host.read_page(index, n, buffer)
            else:
                store.read_page(pages[index], n, buffer)

        def work() -> str:
            image = Image(
                identity=self._identity(),
                ids=np.asarray(tokens, "<i4").tobytes(),
                logits=b"" if logits is None else np.asarray(logits, "<f4").tobytes(),
                read_page=PieceReader(store.layout, read_image),
                state=read_state(),
            )
            return self._store.save(image)

        return work

    def _identity(self) -> Identity:
        """What snapshots of this daemon depend on; the first call reads the whole model file."""
        if self._known_identity is None:
            self._known_identity = slot_identity(self._engine, self._store.check_stop)
        return self._known_identity

    def _blank_slot(self, ids: npt.NDArray[np.int32]) -> Slot:
        """A snapshot of these ids whose K/V are to be filled in; it holds one reference to each page."""
        with self._engine.memory.site("slot_move"):
            pages = self._engine.store.allocate(pages_for(len(ids)))
        return Slot(array("i", ids.astype(np.int32).tobytes()), tuple(pages), None)

    def _kept_logits(self, data: bytes) -> npt.NDArray[np.float32] | None:
        return self._engine.keep_logits(np.frombuffer(data, "<f4")) if data else None

    def _learn_identity(self) -> Steps:
        yield self._identity

    # ----- inside

    @property
    def _store(self) -> SlotStore:
        self._require_store()
        assert self._maybe_store is not None
        return self._maybe_store

    def _require_store(self) -> None:
        if self._maybe_store is None:
            raise RequestError("no_slot_dir")

    def _hold(self, slot: Slot) -> tuple[int, ...]:
        """One more reference to the slot's pages, to be released when the work is done."""
        self._engine.store.pages.share(slot.pages)
        return slot.pages

    def _reply(self, submit: Submit, event: Any) -> None:
        self._deliver(Line(event, submit.key))

    def _end(self, submit: Submit, error: Exception | None) -> None:
        stopped = isinstance(error, Closed | Stopped)
        self._commands.end(submit, RequestError("shutting_down") if stopped else error)

    def _saved(self, key: Key, error: Exception | None) -> None:
        """An inline save ended. Its failure costs the file only: the slot is filled."""
        _log_failure(error)
        self._saves[key] -= 1
        if not self._saves[key]:
            del self._saves[key]
            self._after.pop(key, lambda: None)()


def slot_identity(engine: Engine, check_stop: Callable[[], None]) -> Identity:
    """What the K/V of a snapshot depend on beside its ids. Reads the whole model file.

    check_stop: called now and then; may raise.

    Raises:
        ModelError: the file is not the one that was loaded at start.
    """
    with open_model(engine.path) as file:
        if file.identity != engine.identity:
            raise ModelError(f"{engine.path}: the file has changed since the daemon started")
        content = content_hash(engine.path, check_stop)
    return Identity(
        model=engine.identity, content=content, k=engine.k_type, v=engine.v_type, window=0,
        math=f"{engine.backend.name}-{engine.backend.math}", page=PAGE,
        page_bytes=PAGE * engine.store.bytes_per_token,
    )  # fmt: skip


def _log_failure(error: Exception | None) -> None:
    if error is not None and not isinstance(error, Closed | Stopped):
        log.warning("a snapshot was not saved: %s", error)
