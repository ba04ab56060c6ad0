"""``OUT.jsonl.part``: the finished records of a batch, kept from the moment each is done.

One line per record: ``{"line": N, "hash": H, "settings": S, "record": {...}}``. N is the number of the
input line and H a hash of its bytes, so that a record is taken again only for the very line it answers;
S stands for the model and the default parameters. Records are in the order they finished. When all are
there, `publish` writes them to OUT in input order: to a temporary file, flushed to disk, then renamed.

A run holds an exclusive lock on the file. A kill can tear the last line only; it is cut off on resume.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slotd.client.durable import sync_folder
from slotd.client.jobs import Record, encode_record
from slotd.protocol.errors import ConfigError

Place = tuple[int, int]  # offset and length of a record's line in the part file


def line_hash(raw: bytes) -> str:
    """Hash of an input line without its line end."""
    return hashlib.blake2b(raw.rstrip(b"\r\n"), digest_size=16).hexdigest()


class Journal:
    """The part file of one output. `record` is safe to call from several threads.

    Args:
        out: the final file.
        settings: hash of what else decides the answers; see the module text.
        resume: take up an existing part file. Without it, one that has records is refused.

    Raises:
        ConfigError: `out` is no regular file, another run holds the part file, or that one has records and
            `resume` was not asked for.
        OSError: it cannot be written.
    """

    def __init__(self, out: Path, settings: str, *, resume: bool) -> None:
        if out.exists() and not out.is_file():
            raise ConfigError(f"{out} is not a regular file; for standard output use -")
        self.out = out
        self.path = out.with_name(out.name + ".part")
        self.settings = settings
        self.stale = 0  # whole records on file that were made with other settings
        self._lock = threading.Lock()
        self._published = False
        self._file = self._open_locked()
        self._done: dict[int, tuple[str, Place]] = {}
        try:
            if not resume and os.fstat(self._file).st_size:
                raise ConfigError(
                    f"{self.path} holds the records of a run that was stopped: "
                    "add --resume to go on with it, or delete it"
                )
            self._end = self._read()
            self._fresh = self._end == 0
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise

    def _open_locked(self) -> int:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A run that ended meanwhile has removed the file that we locked: then look again.
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise ConfigError(f"another batch is writing to {self.out} (it holds {self.path})") from None
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def _read(self) -> int:
        """Index the whole records; returns where the last whole line ends."""
        end = 0
        with open(self.path, "rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                entry = _entry(raw)
                if entry is not None and entry["settings"] == self.settings:
                    self._done[entry["line"]] = (entry["hash"], (end, len(raw)))
                elif entry is not None:
                    self.stale += 1
                end += len(raw)
        return end

    @property
    def fresh(self) -> bool:
        """Whether no record was on file at the start."""
        return self._fresh

    @property
    def empty(self) -> bool:
        """Whether no record is on file now."""
        return self._end == 0

    def has(self, line: int, digest: str) -> bool:
        """Whether the record of this very line is there."""
        found = self._done.get(line)
        return found is not None and found[0] == digest

    def failed(self, line: int) -> bool:
        """Whether the record on file for `line` is an error record."""
        return self._load(self._done[line][1]).get("error") is not None

    def record(self, line: int, digest: str, record: Record) -> None:
        """Append one record; it survives a crash from when this returns."""
        entry = {"line": line, "hash": digest, "settings": self.settings, "record": record}
        raw = encode_record(entry)
        with self._lock:
            view = memoryview(raw)
            try:
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError:
                os.ftruncate(self._file, self._end)  # disk full in the middle: leave no half line behind
                raise
            os.fsync(self._file)
            self._done[line] = (digest, (self._end, len(raw)))
            self._end += len(raw)

    def publish(self, lines: Iterator[int]) -> None:
        """Write the records of `lines` to the output in that order, by one rename; remove the part file."""
        temporary = self.out.with_name(f".{self.out.name}.tmp")  # ours alone: the lock is held
        try:
            with open(temporary, "wb") as file:
                for line in lines:
                    file.write(encode_record(self._load(self._done[line][1])))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.out)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self.out.parent)
        self.path.unlink()
        self._published = True

    def close(self) -> None:
        """Let go of the file and its lock. An empty part file is not left behind."""
        if self._end == 0 and not self._published:
            self.path.unlink(missing_ok=True)
        with self._lock:  # a late `record` must not write to a descriptor that is somebody else's by then
            os.close(self._file)
            self._file = -1

    def _load(self, place: Place) -> Record:
        offset, length = place
        record: Record = json.loads(os.pread(self._file, length, offset))["record"]
        return record


def _entry(raw: bytes) -> dict[str, Any] | None:
    """The journal line, or None when it is not one (an edited or damaged file)."""
    try:
        entry = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(entry, dict) or set(entry) != {"line", "hash", "settings", "record"}:
        return None
    whole = isinstance(entry["line"], int) and isinstance(entry["record"], dict)
    return entry if whole and isinstance(entry["hash"], str) else None
