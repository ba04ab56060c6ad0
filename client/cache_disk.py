"""The caches and the disk: what is loaded when a daemon starts, and what is written for the next one.

K/V lie in files of the daemon's, named by content; the folder of the client only remembers which ids they
are of. Used by the threads that make requests, never by the bus's reader thread: all of it may wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slotd.client import commands
from slotd.client.cache_bindings import Entry
from slotd.client.cache_entries import FullEntry, Identity, Reservation, array_of
from slotd.client.cache_metadata import MetadataFolder, Record
from slotd.client.caches import Caches
from slotd.protocol import messages
from slotd.protocol.errors import DaemonError, RequestError
from slotd.protocol.messages import Prompt, Snap

if TYPE_CHECKING:
    from slotd.client.session import Session

logger = logging.getLogger(__name__)


class CacheDisk:
    """Keeps the entries of `caches` on disk.

    Args:
        lock: guards `caches`.
        path: folder for what the client remembers; None: nothing is kept.

    Attributes:
        active: snapshots should go to the daemon's disk too.
        seconds_per_token: of the last file that the daemon loaded, 0 before.
    """

    def __init__(
        self, caches: Caches, lock: threading.RLock, new_id: Callable[[], str], path: Path | None
    ) -> None:
        self.active = False
        self.seconds_per_token = 0.0
        self._caches = caches
        self._lock = lock
        self._new_id = new_id
        self._path = path
        self._folder: MetadataFolder | None = None
        self._changed: list[str] = []

    # ----- a daemon starts

    def open(self, session: Session, identity: Identity) -> None:
        """Take over what the folder knows for this identity, and load the newest entries into slots.

        Raises:
            DaemonError: the daemon died or is stuck.
        """
        self._folder, self.active = None, False
        if self._path is None:
            return
        try:
            self._folder = MetadataFolder(self._path, identity)
        except OSError as error:
            logger.warning("the cache folder %s cannot be used: %s", self._path, error)
            return
        stored = self._stored(session)
        self.active = stored is not None
        for record in self._folder.load():
            self._adopt(self._folder, record, stored)
        for key in self._newest():
            with self._lock:
                held = self._caches.prepare_load(key)
            if held is not None:
                self.fill(session, held)

    def _stored(self, session: Session) -> frozenset[str] | None:
        """Hashes of the snapshots that the daemon has on disk; None when it keeps none there."""
        if "STORED" not in session.hello.get("verbs", ()):
            return None
        try:
            files = session.ask(commands.Stored(self._new_id())).get("files", ())
        except RequestError as error:
            logger.info("the daemon keeps no snapshots on disk: %s", error)
            return None
        return frozenset(str(file.get("hash")) for file in files if isinstance(file, Mapping))

    def _adopt(self, folder: MetadataFolder, record: Record, stored: frozenset[str] | None) -> None:
        with self._lock:
            if record.kind == "full":
                size = len(record.ids)
                self._caches.adopt_full(
                    record.key, record.ids, record.raw_length, artifact_bytes=size, hits=record.hits
                )
            elif stored is not None and record.content in stored:
                self._caches.adopt_prefix(record.ids, content=record.content, hits=record.hits)
            elif stored is not None:  # the daemon has dropped its file
                folder.remove(record.key)

    def _newest(self) -> list[str]:
        """Keys of as many cold entries as there are slots, the one used last at the end.

        Loaded in this order they keep their order of use.
        """
        with self._lock:
            cold = [entry.key for entry in self._caches.cold_entries()]
            whole = [entry.key for entry in self._caches.full_entries() if entry.slot is None]
            first = len(cold) - min(len(cold), self._caches.prefix_slots)
            return cold[first:] + whole[len(whole) - min(len(whole), self._caches.full_slots) :]

    # ----- into a slot

    def fill(self, session: Session, held: Reservation) -> bool:
        """Put a cold entry into the reserved slot; whether it is there now.

        A failure costs the entry its slot; a refused file costs it the entry.

        Raises:
            DaemonError: the daemon died or is stuck.
        """
        began = time.monotonic()
        try:
            bring = self._load if held.kind == "prefix" else self._compute
            slot, length = bring(session, held)
        except RequestError as error:
            logger.info("a kept prompt was not brought back: %s", error)
            self._refused(session, held, error)
            return False
        except DaemonError:
            with self._lock:
                self._caches.abort(held)
            raise
        if held.kind == "prefix" and length:
            self.seconds_per_token = (time.monotonic() - began) / length
        with self._lock:
            return self._caches.confirm(held, slot=slot, length=length, epoch=held.epoch, boot=held.boot)

    def _load(self, session: Session, held: Reservation) -> tuple[int, int]:
        assert self._caches.identity is not None
        content = self._caches.identity.content(held.ids)
        loaded = session.ask(commands.LoadSnapshot(self._new_id(), held.slot, content))
        return loaded.slot, loaded.cur_pos

    def _compute(self, session: Session, held: Reservation) -> tuple[int, int]:
        """Compute the ids of a full entry and keep them; (slot, length) as the daemon says them."""
        prompt = Prompt(id=self._new_id(), ids=array_of(held.ids), snap=Snap(held.length, held.slot))
        command = commands.Generation(prompt)
        done = session.ask(command)
        if done.status == "err":
            raise RequestError(str(done.fields.get("code", "internal")), id=command.id)
        while not command.events.empty():
            event = command.events.get()
            if isinstance(event, messages.SnapInline):
                return event.slot, event.cur_pos
        return held.slot, 0  # no word of a snapshot: nothing will be confirmed

    def _refused(self, session: Session, held: Reservation, error: RequestError) -> None:
        with self._lock:
            self._caches.abort(held)
            if held.kind == "prefix" and error.code != "oom":
                self._caches.drop_cold(held.key)
                if self._folder is not None:
                    self._folder.remove(held.key)
        try:
            session.ask(commands.FreeSnapshot(self._new_id(), held.slot))
        except RequestError as refused:
            logger.debug("slot %d was not freed: %s", held.slot, refused)

    # ----- to disk

    def changed(self, key: str) -> None:
        """The entry of this key is new; written with the next `write`. Does not wait."""
        self._changed.append(key)

    def close(self) -> None:
        """Write everything, with the order of use as it is now."""
        with self._lock:
            self._changed += [entry.key for entry in self._caches.prefix_entries()]
            self._changed += [entry.key for entry in self._caches.full_entries()]
        self.write()

    def write(self) -> None:
        """Write entries that became or changed, delete the files of those that went. Never raises OSError."""
        with self._lock:
            changed, self._changed = self._changed, []
            garbage, folder = self._caches.take_garbage(), self._folder
            if folder is None or not (changed or garbage):
                return
            records = self._records(changed)
        for key in garbage:
            folder.remove(key)
        for record in records:
            self._write_record(folder, record)

    def _records(self, keys: list[str]) -> list[Record]:
        """Records of the entries that are worth one: full ones, and prefixes with a file of the daemon's."""
        prefix = [*self._caches.cold_entries(), *self._caches.prefix_entries()]
        entries: dict[str, Entry] = {entry.key: entry for entry in prefix if entry.content}
        entries |= {entry.key: entry for entry in self._caches.full_entries()}
        now = time.time_ns()
        found = [entries[key] for key in dict.fromkeys(keys) if key in entries]
        return [_record(entry, now + order) for order, entry in enumerate(found)]

    def _write_record(self, folder: MetadataFolder, record: Record) -> None:
        try:
            size = folder.write(record)
        except OSError as error:
            logger.warning("an entry of the cache is not kept on disk: %s", error)
            return
        if record.kind == "full":
            with self._lock:
                self._caches.set_artifact(record.key, size)


def _record(entry: Entry, now: int) -> Record:
    if isinstance(entry, FullEntry):
        return Record("full", entry.key, entry.ids, entry.raw_length, entry.content, entry.hits, now)
    return Record("prefix", entry.key, entry.ids, entry.length, entry.content, entry.hits, now)
