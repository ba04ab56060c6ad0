"""Snapshots on disk: what is stored, what it costs, and what has to go.

One thread uses a store. Nothing in here knows pages of the engine: an `Image` reads them, a caller's
function takes them. Errors for the client are `RequestError`s; a failure changes nothing in memory, and no
other snapshot on disk.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slotd.daemon.kv.page_files import PageTable, Prefixes, decode_page_table
from slotd.daemon.kv.page_transfer import WritePage, read_pieces, write_pieces
from slotd.daemon.kv.save_plan import Image, SavePlan, plan_save
from slotd.daemon.kv.slot_files import (
    BadFile,
    Identity,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_section,
)
from slotd.daemon.kv.slot_folder import Damaged, FileReader, SlotFolder, write_at
from slotd.daemon.kv.slot_index import SlotIndex
from slotd.protocol.errors import RequestError
from slotd.protocol.slot_identity import hash_of_id_bytes

log = logging.getLogger(__name__)

MANIFEST_SUFFIX = ".slot"
PAGES_SUFFIX = ".pages"

#: Logits are written once for so many times their bytes of K/V. Without them a restore computes one token.
KV_FOR_LOGITS = 4


class Stopped(Exception):
    """The store was told to stop in the middle of a file."""


class SlotStore:
    """The snapshots of one folder.

    Args:
        path: the folder.
        budget: most bytes of all files together, None = no limit.
        clock: nanoseconds since the epoch; it may jump, the order of uses stays.

    Attributes:
        removed: called with the hash of a snapshot that can be loaded no more, on the thread that found out.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, path: Path, budget: int | None, clock: Callable[[], int] = time.time_ns) -> None:
        self.budget = budget
        self._folder = SlotFolder(path)
        self._clock = clock
        self._stop = threading.Event()
        self.removed: Callable[[str], None] = lambda name: None
        self._scan()

    @property
    def read_only(self) -> str:
        """Why nothing can be saved, or ""."""
        return self._folder.read_only

    def stop(self) -> None:
        """Leave the file that is being written or read; from any thread."""
        self._stop.set()

    def close(self) -> None:
        """Let another process write."""
        self._folder.close()

    # ----- what is there

    def report(self) -> dict[str, Any]:
        """The object of a [stored] line: files by last use, oldest first; sizes in bytes, times in seconds.

        `bytes` of a file is what loading it reads; files share pages, so their sum may be more than what is
        on disk.
        """
        self._refresh()
        return {
            "files": [self._describe(name) for name in self._index.by_use()],
            "bytes": self._index.n_bytes,
            "budget": self.budget,
            "read_only": self.read_only,
            "moved_aside": self._folder.moved_aside,
        }

    def holds(self, name: str) -> bool:
        """Whether a snapshot is stored."""
        return name in self._index.stored

    def find(self, name: str, identity: Identity) -> Manifest:
        """The head of a snapshot that can be loaded with this identity.

        Raises:
            RequestError: unknown_snapshot, wrong_snapshot.
        """
        self._refresh()
        stored = self._index.stored.get(name)
        if stored is None:
            raise RequestError("unknown_snapshot", {"hash": name})
        there, wanted = asdict(stored.manifest.identity), asdict(identity)
        for key, value in there.items():
            if value != wanted[key]:
                fields = {"hash": name, "field": key, "stored": value, "wanted": wanted[key]}
                raise RequestError("wrong_snapshot", fields)
        return stored.manifest

    def _describe(self, name: str) -> dict[str, Any]:
        stored = self._index.stored[name]
        manifest, identity = stored.manifest, stored.manifest.identity
        return {
            "hash": name, "model": identity.model, "k": identity.k, "v": identity.v,
            "window": identity.window, "length": manifest.length,
            "bytes": manifest.file_bytes + manifest.length * identity.token_bytes,
            "last_used": stored.used_ns / 1e9,
        }  # fmt: skip

    # ----- saving

    def save(self, image: Image) -> str:
        """Store a snapshot; returns its hash when it is on disk for good.

        Raises:
            RequestError: read_only_slot_dir, snapshot_too_large, write_snapshot.
            Stopped: by `stop`.
        """
        if self.read_only:
            raise RequestError("read_only_slot_dir", {"reason": self.read_only})
        identity = image.identity
        name = hash_of_id_bytes(identity.model, identity.k, identity.v, identity.window, image.ids)
        logits = self._worth_writing(image)
        plan = plan_save(image, self._index, self.check_stop)
        if self.budget is not None and self._cost(plan, logits) > self.budget:
            plan = plan_save(image, None, self.check_stop)  # no long file is kept for a few tokens of it
            cost = self._cost(plan, logits)
            if cost > self.budget:
                raise RequestError("snapshot_too_large", {"bytes": cost, "budget": self.budget})
        if not plan.missing and self._is_stored(name, plan, logits):
            self._use(name)
            return name
        try:
            self._make_room(_new_bytes(plan, logits), plan.reused)
            self._write(name, plan, logits)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestError("write_snapshot", {"hash": name, "reason": reason}) from None
        finally:
            self._release()
        return name

    def _worth_writing(self, image: Image) -> bytes:
        """The logits, unless there are few K/V since the last snapshot of a shorter prefix that has some.

        A recurrent state cannot be taken back by the token that would have to be computed without them.
        """
        if image.state is not None:
            return image.logits
        before = max(
            (
                stored.manifest.length
                for stored in self._index.stored.values()
                if stored.manifest.logits.n_bytes
                and stored.manifest.identity == image.identity
                and stored.manifest.length < image.length
                and image.ids.startswith(stored.manifest.ids)
            ),
            default=0,
        )
        new = (image.length - before) * image.identity.token_bytes
        return image.logits if KV_FOR_LOGITS * len(image.logits) <= new else b""

    def _cost(self, plan: SavePlan, logits: bytes) -> int:
        """Bytes of all files that the snapshot needs."""
        kept = sum(self._index.files[name].n_bytes for name in plan.reused)
        return kept + _new_bytes(plan, logits)

    def _is_stored(self, name: str, plan: SavePlan, logits: bytes) -> bool:
        """Whether the very same snapshot is there; one without the logits that we have is not the same."""
        stored = self._index.stored.get(name)
        if stored is None:
            return False
        manifest = stored.manifest
        same_logits = not logits or manifest.logits.crc == zlib.crc32(logits)
        state = plan.image.state
        same_state = manifest.state.crc == (state.crc if state is not None else 0)
        same_kv = manifest.identity == plan.image.identity and manifest.parts == plan.parts()
        return same_kv and same_logits and same_state

    def _make_room(self, n_bytes: int, needed: set[str]) -> None:
        """Remove snapshots, least recently used first, until n_bytes more fit. Files in `needed` stay."""
        if self.budget is None:
            return
        for name in self._index.by_use():
            if self._index.n_bytes + n_bytes <= self.budget:
                return
            log.info("snapshot %s is removed: the folder is full (%d bytes)", name, self.budget)
            self._remove(name, needed)

    def _write(self, name: str, plan: SavePlan, logits: bytes) -> None:
        parts = plan.parts(self._write_pieces(name, plan)) if plan.missing else plan.parts()
        image = plan.image
        data = encode_manifest(image.identity, image.length, parts, logits, image.state)
        n_bytes = len(data) + _state_bytes(image)

        def fill(descriptor: int) -> str:
            write_at(descriptor, data, 0)
            if image.state is not None:
                write_at(descriptor, image.state.data, len(data))
            return name + MANIFEST_SUFFIX

        self._folder.write(name + MANIFEST_SUFFIX, fill)
        manifest = decode_manifest(lambda offset, n: data[offset : offset + n], n_bytes, self._index.ids_of)
        self._index.add(name, manifest, 0)
        self._use(name)

    def _write_pieces(self, name: str, plan: SavePlan) -> str:
        """A page file with the missing pieces; returns its name."""
        image = plan.image
        identity = image.identity
        table: PageTable | None = None

        def fill(descriptor: int) -> str:
            nonlocal table
            table = write_pieces(
                descriptor, identity.token_bytes, identity.page, plan.missing, plan.missing_ids,
                image.read_page, self.check_stop,
            )  # fmt: skip
            return table.name + PAGES_SUFFIX

        self._folder.write(name + PAGES_SUFFIX, fill)
        assert table is not None
        self._index.add_file(table)
        return table.name

    # ----- loading

    def read(self, name: str, write_page: WritePage) -> tuple[bytes, bytes]:
        """Hand out the K/V of a snapshot, page by page; returns its logits and its state, or no bytes.

        Raises:
            RequestError: unknown_snapshot; bad_snapshot, and then the damaged file was moved aside.
            Stopped: by `stop`.
        """
        stored = self._index.stored.get(name)
        if stored is None:
            raise RequestError("unknown_snapshot", {"hash": name})
        try:
            rest = self._read(name, stored.manifest, write_page)
        except Damaged as error:
            self._give_up(error)
            raise RequestError("bad_snapshot", {"hash": name, "reason": error.reason}) from None
        self._use(name)
        return rest

    def _read(self, name: str, manifest: Manifest, write_page: WritePage) -> tuple[bytes, bytes]:
        at, page = 0, manifest.identity.page
        for part in manifest.parts:
            with self._folder.reading(part.name + PAGES_SUFFIX) as file:
                pages = self._index.files[part.name]
                at = read_pieces(file, pages, part, at, page, write_page, self.check_stop)
        with self._folder.reading(name + MANIFEST_SUFFIX) as file:
            return read_section(file, manifest.logits, "logits"), read_section(file, manifest.state, "state")

    # ----- removing

    def drop(self, name: str) -> None:
        """Remove a snapshot.

        Raises:
            RequestError: unknown_snapshot, read_only_slot_dir.
        """
        self._refresh()
        if name not in self._index.stored:
            raise RequestError("unknown_snapshot", {"hash": name})
        if self.read_only:
            raise RequestError("read_only_slot_dir", {"reason": self.read_only})
        self._remove(name, ())
        self._folder.sync()

    def _remove(self, name: str, needed: Iterable[str]) -> None:
        # The manifest goes first: a crash in between leaves pages that nobody names, which a scan removes.
        self._folder.remove(name + MANIFEST_SUFFIX)
        self._forget(name)
        self._release(needed)

    def _release(self, needed: Iterable[str] = ()) -> None:
        """Remove the page files that no snapshot needs, nor anybody else."""
        for name in set(self._index.unneeded()).difference(needed):
            self._folder.remove(name + PAGES_SUFFIX)
            self._index.forget_file(name)

    def _give_up(self, error: Damaged) -> None:
        """Move a damaged file aside, and with a page file every snapshot that needs it."""
        name = error.file.partition(".")[0]
        if error.file == name + PAGES_SUFFIX:
            for user in list(self._index.files[name].users):
                self._folder.move_aside(user + MANIFEST_SUFFIX, f"needs {error.file}")
                self._forget(user)
            self._index.forget_file(name)
        else:
            self._forget(name)
        self._folder.move_aside(error.file, error.reason)
        if not self.read_only:
            self._release()

    def _forget(self, name: str) -> None:
        self._index.forget(name)
        self.removed(name)

    # ----- the index

    def _scan(self) -> None:
        """Read the heads of all files. Damaged ones are moved aside, pages that nobody names removed."""
        self._index = SlotIndex()
        names = self._folder.names()
        for file in (name for name in names if name.endswith(PAGES_SUFFIX)):
            self._look_at(file, self._scan_pages)
        for file in (name for name in names if name.endswith(MANIFEST_SUFFIX)):
            self._look_at(file, self._scan_manifest)
        if not self.read_only:
            self._release()
            self._make_room(0, set())

    def _refresh(self) -> None:
        """Another process may have written since the last look."""
        if self.read_only:
            self._scan()

    def _look_at(self, file: str, look: Callable[[str, FileReader], None]) -> None:
        try:
            with self._folder.reading(file) as reader:
                look(file.partition(".")[0], reader)
        except Damaged as error:
            if not error.gone:  # its writer may have removed it
                self._folder.move_aside(file, error.reason)

    def _scan_pages(self, name: str, reader: FileReader) -> None:
        table = decode_page_table(reader, reader.n_bytes)
        if table.name != name:
            raise BadFile("name")
        self._index.add_file(table)

    def _scan_manifest(self, name: str, reader: FileReader) -> None:
        manifest = decode_manifest(reader, reader.n_bytes, self._index.ids_of)
        identity = manifest.identity
        if name != hash_of_id_bytes(identity.model, identity.k, identity.v, identity.window, manifest.ids):
            raise BadFile("name")
        self._check_pieces(manifest)
        self._index.add(name, manifest, reader.used_ns)

    def _check_pieces(self, manifest: Manifest) -> None:
        """The pieces of a snapshot follow each other, and belong to its ids and identity."""
        at, identity, prefixes = 0, manifest.identity, Prefixes(manifest.identity, manifest.ids)
        for part in manifest.parts:
            file = self._index.files[part.name]
            if file.table.token_bytes != identity.token_bytes:
                raise BadFile("pages")
            for entry in file.entries(part):
                end = at + entry.n
                if entry.offset != at % identity.page or entry.offset + entry.n > identity.page:
                    raise BadFile("pages")
                if (entry.start, entry.end) != (prefixes(at), prefixes(end)):
                    raise BadFile("pages")
                at = end

    def _use(self, name: str) -> None:
        used_ns = self._index.use(name, self._clock())
        if not self.read_only:
            self._folder.set_use(name + MANIFEST_SUFFIX, used_ns)

    def check_stop(self) -> None:
        """Raise `Stopped` when the store was told to stop."""
        if self._stop.is_set():
            raise Stopped


def _new_bytes(plan: SavePlan, logits: bytes) -> int:
    """Bytes that are to be written."""
    image = plan.image
    manifest = encode_manifest(image.identity, image.length, plan.parts(), logits, image.state)
    return plan.new_page_bytes + len(manifest) + _state_bytes(image)


def _state_bytes(image: Image) -> int:
    return 0 if image.state is None else len(image.state.data)
