"""Snapshots on disk: what is stored, what it costs, and what has to go.

One thread uses a store. Nothing in here knows pages of the engine: an `Image` reads them, a caller's
function takes them. Errors for the client are `RequestError`s; a failure changes nothing in memory, and no
other snapshot on disk.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slotd.daemon.kv.page_transfer import ReadPage, WritePage, data_start, read_pages, write_pages
from slotd.daemon.kv.slot_files import (
    BadFile,
    Identity,
    Manifest,
    PageTable,
    Part,
    chain_hashes,
    decode_manifest,
    decode_page_table,
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


class Stopped(Exception):
    """The store was told to stop in the middle of a file."""


@dataclass(frozen=True, slots=True)
class Image:
    """A snapshot to be saved.

    Attributes:
        identity: what its K/V depend on.
        ids: int32 little-endian bytes of the ids it covers.
        logits: float32 little-endian bytes of the logits that follow, or none.
        read_page: gives its K/V.
    """

    identity: Identity
    ids: bytes
    logits: bytes
    read_page: ReadPage


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the whole pages of an image will be: reused ones by (file, index), None for one to be written."""

    chains: list[bytes]
    known: list[tuple[str, int] | None]

    @property
    def missing(self) -> list[int]:
        """Pages to be written."""
        return [index for index, place in enumerate(self.known) if place is None]


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
            "bytes": manifest.file_bytes + manifest.n_pages * identity.page_bytes,
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
        tail = self._tail(image)
        plan = self._plan(image, reuse=True)
        if self.budget is not None and self._cost(image, tail, plan) > self.budget:
            plan = self._plan(image, reuse=False)  # a long file must not be kept for a few pages of it
            cost = self._cost(image, tail, plan)
            if cost > self.budget:
                raise RequestError("snapshot_too_large", {"bytes": cost, "budget": self.budget})
        if not plan.missing and self._is_stored(name, image, plan, tail):
            self._use(name)
            return name
        reused = {place[0] for place in plan.known if place is not None}
        try:
            self._make_room(self._new_bytes(image, tail, plan), reused)
            self._write(name, image, plan, tail)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestError("write_snapshot", {"hash": name, "reason": reason}) from None
        finally:
            self._release()
        return name

    def _tail(self, image: Image) -> bytes:
        identity = image.identity
        n_pages, n = divmod(len(image.ids) // 4, identity.page)
        buffer = bytearray(n * (identity.page_bytes // identity.page))
        if n:
            image.read_page(n_pages, n, memoryview(buffer))
        return bytes(buffer)

    def _plan(self, image: Image, reuse: bool) -> _Plan:
        """Which pages are on disk already, with the very same bytes."""
        chains = chain_hashes(image.identity, image.ids)
        known: list[tuple[str, int] | None] = [None] * len(chains)
        if reuse:
            buffer = memoryview(bytearray(image.identity.page_bytes))
            for index, chain in enumerate(chains):
                places = self._index.places(chain)
                if places:
                    self.check_stop()
                    image.read_page(index, image.identity.page, buffer)
                    known[index] = places.get(zlib.crc32(buffer))
        return _Plan(chains, known)

    def _new_bytes(self, image: Image, tail: bytes, plan: _Plan) -> int:
        n = len(plan.missing)
        pages = data_start(image.identity.page_bytes, n) + n * image.identity.page_bytes if n else 0
        return pages + len(encode_manifest(image.identity, image.ids, _parts(plan, ""), tail, image.logits))

    def _cost(self, image: Image, tail: bytes, plan: _Plan) -> int:
        """Bytes of all files that the snapshot needs."""
        reused = {place[0] for place in plan.known if place is not None}
        kept = sum(self._index.files[name].n_bytes for name in reused)
        return kept + self._new_bytes(image, tail, plan)

    def _is_stored(self, name: str, image: Image, plan: _Plan, tail: bytes) -> bool:
        """Whether the very same snapshot is there; one without the logits that we have is not the same."""
        stored = self._index.stored.get(name)
        if stored is None:
            return False
        manifest = stored.manifest
        same_logits = not image.logits or manifest.logits.crc == zlib.crc32(image.logits)
        return (
            manifest.identity == image.identity
            and manifest.parts == _parts(plan, "")
            and manifest.tail.crc == zlib.crc32(tail)
            and same_logits
        )

    def _make_room(self, n_bytes: int, needed: set[str]) -> None:
        """Remove snapshots, least recently used first, until n_bytes more fit. Files in `needed` stay."""
        if self.budget is None:
            return
        for name in self._index.by_use():
            if self._index.n_bytes + n_bytes <= self.budget:
                return
            log.info("snapshot %s is removed: the folder is full (%d bytes)", name, self.budget)
            self._remove(name, needed)

    def _write(self, name: str, image: Image, plan: _Plan, tail: bytes) -> None:
        parts = _parts(plan, self._write_pages(name, image, plan) if plan.missing else "")
        data = encode_manifest(image.identity, image.ids, parts, tail, image.logits)

        def fill(descriptor: int) -> str:
            write_at(descriptor, data, 0)
            return name + MANIFEST_SUFFIX

        self._folder.write(name + MANIFEST_SUFFIX, fill)
        manifest = decode_manifest(lambda offset, n: data[offset : offset + n], len(data))
        self._index.add(name, manifest, 0)
        self._use(name)

    def _write_pages(self, name: str, image: Image, plan: _Plan) -> str:
        """A page file with the missing pages; returns its name."""
        identity = image.identity
        missing = plan.missing
        table: PageTable | None = None

        def fill(descriptor: int) -> str:
            nonlocal table
            table = write_pages(
                descriptor, identity.page_bytes, [plan.chains[index] for index in missing],
                lambda number, buffer: image.read_page(missing[number], identity.page, buffer),
                self.check_stop,
            )  # fmt: skip
            return table.name + PAGES_SUFFIX

        self._folder.write(name + PAGES_SUFFIX, fill)
        assert table is not None
        self._index.add_file(table)
        return table.name

    # ----- loading

    def read(self, name: str, write_page: WritePage) -> bytes:
        """Hand out the K/V of a snapshot, page by page; returns its logits, or no bytes.

        Raises:
            RequestError: unknown_snapshot; bad_snapshot, and then the damaged file was moved aside.
            Stopped: by `stop`.
        """
        stored = self._index.stored.get(name)
        if stored is None:
            raise RequestError("unknown_snapshot", {"hash": name})
        try:
            logits = self._read(name, stored.manifest, write_page)
        except Damaged as error:
            self._give_up(error)
            raise RequestError("bad_snapshot", {"hash": name, "reason": error.reason}) from None
        self._use(name)
        return logits

    def _read(self, name: str, manifest: Manifest, write_page: WritePage) -> bytes:
        page, done = manifest.identity.page, 0
        for part in manifest.parts:
            with self._folder.reading(part.name + PAGES_SUFFIX) as file:
                take = functools.partial(_take, write_page, done, page)
                read_pages(file, self._index.files[part.name], part, take, self.check_stop)
            done += part.count
        with self._folder.reading(name + MANIFEST_SUFFIX) as file:
            tail = read_section(file, manifest.tail, "tail")
            logits = read_section(file, manifest.logits, "logits")
        if tail:
            write_page(done, manifest.tail_tokens, memoryview(tail))
        return logits

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
        manifest = decode_manifest(reader, reader.n_bytes)
        identity = manifest.identity
        if name != hash_of_id_bytes(identity.model, identity.k, identity.v, identity.window, manifest.ids):
            raise BadFile("name")
        chains = []
        for part in manifest.parts:
            file = self._index.files.get(part.name)
            if file is None or file.page_bytes != identity.page_bytes:
                raise BadFile("pages_missing")
            chains += [entry.chain for entry in file.entries[part.first : part.first + part.count]]
        if chains != chain_hashes(identity, manifest.ids):
            raise BadFile("pages")
        self._index.add(name, manifest, reader.used_ns)

    def _use(self, name: str) -> None:
        used_ns = self._index.use(name, self._clock())
        if not self.read_only:
            self._folder.set_use(name + MANIFEST_SUFFIX, used_ns)

    def check_stop(self) -> None:
        """Raise `Stopped` when the store was told to stop."""
        if self._stop.is_set():
            raise Stopped


def _take(write_page: WritePage, first: int, page: int, number: int, data: memoryview) -> None:
    """Page `number` of a part whose first page is page `first` of the snapshot."""
    write_page(first + number, page, data)


def _parts(plan: _Plan, new: str) -> tuple[Part, ...]:
    """The whole pages in order; those to be written lie in page file `new`."""
    parts: list[Part] = []
    written = 0
    for place in plan.known:
        if place is None:
            place = (new or "0" * 32, written)
            written += 1
        name, index = place
        last = parts[-1] if parts else None
        if last is not None and last.name == name and last.first + last.count == index:
            parts[-1] = Part(name, last.first, last.count + 1)
        else:
            parts.append(Part(name, index, 1))
    return tuple(parts)
