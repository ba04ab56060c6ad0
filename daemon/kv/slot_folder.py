"""The folder of stored snapshots, as a file system sees it: one writer, whole files or none.

A file appears under its name only when all of it is on disk (temporary name, fsync, rename, fsync of the
folder), so whatever ends the process leaves either no file or a whole one, and at most a temporary one
that the next writer removes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slotd.daemon.kv.slot_files import BadFile
from slotd.protocol.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_NAME = "lock"
BAD_NAME = "bad"
TEMPORARY_SUFFIX = ".tmp"


class Damaged(Exception):
    """A file cannot be used.

    Attributes:
        file: its name.
        reason: why.
        gone: it is not there at all.
    """

    def __init__(self, file: str, reason: str, gone: bool = False) -> None:
        self.file = file
        self.reason = reason
        self.gone = gone
        super().__init__(file, reason)


class SlotFolder:
    """A folder, locked for writing by this process unless it may only be read.

    Args:
        path: the folder; it is made when it is not there.

    Attributes:
        read_only: why nothing may be written, or "".
        moved_aside: how many files were moved to the folder of bad ones.

    Raises:
        ConfigError: it cannot be made, or is no folder that can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_only = ""
        self.moved_aside = 0
        self._lock: int | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(path)
        except OSError as error:
            raise ConfigError(f"--slot-dir {path}: {error.strerror or error}") from None
        self._take_lock()
        if self.read_only:
            log.warning("--slot-dir %s is only read: %s", path, self.read_only)
        else:
            self._remove_temporaries()

    def close(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        try:
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.read_only = error.strerror or str(error)
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
            self.read_only = f"another daemon writes it (pid {owner or 'unknown'})"
            self.close()
            return
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # a full disk: snapshots can still be read and removed
            log.warning("%s: %s", self.path / LOCK_NAME, error)

    def _remove_temporaries(self) -> None:
        for name in self.names():
            if name.endswith(TEMPORARY_SUFFIX):
                log.info("%s: unfinished, removed", self.path / name)
                self.remove(name)

    # ----- looking

    def names(self) -> list[str]:
        """Names of all entries but those that the folder itself needs, sorted."""
        return sorted(name for name in os.listdir(self.path) if name not in (LOCK_NAME, BAD_NAME))

    @contextmanager
    def reading(self, name: str) -> Iterator[FileReader]:
        """A file, open for reading.

        Raises:
            Damaged: it cannot be read, is no regular file, or a BadFile or OSError was raised inside.
        """
        # O_NONBLOCK: a pipe in place of a file must not block.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path / name, flags)
            try:
                yield FileReader(descriptor)
            finally:
                os.close(descriptor)
        except BadFile as error:
            raise Damaged(name, error.reason) from None
        except OSError as error:
            raise Damaged(name, error.strerror or str(error), error.errno == errno.ENOENT) from None

    # ----- changing

    def write(self, temporary: str, fill: Callable[[int], str]) -> tuple[str, int]:
        """Make one file. `fill` writes to the descriptor it gets and returns the file's name.

        Returns:
            (name, bytes).

        Raises:
            OSError: and nothing is left of it.
        """
        path = self.path / (temporary + TEMPORARY_SUFFIX)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                name = fill(descriptor)
                os.fsync(descriptor)
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            os.rename(path, self.path / name)
        except BaseException:
            self.remove(path.name)
            raise
        self.sync()
        return name, size

    def sync(self) -> None:
        """Flush the entries of the folder."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone or cannot be removed is passed over."""
        try:
            os.unlink(self.path / name)
        except OSError as error:
            log.debug("%s is not removed: %s", self.path / name, error)

    def move_aside(self, name: str, reason: str) -> None:
        """Put a file that cannot be used where nobody looks for it, and say so."""
        log.warning("%s is not a usable snapshot file: %s", self.path / name, reason)
        if self.read_only:
            return
        bad = self.path / BAD_NAME
        try:
            bad.mkdir(mode=0o700, exist_ok=True)
            os.rename(self.path / name, self._free_name(bad, name))
            self.moved_aside += 1
        except OSError as error:
            log.warning("%s could not be moved to %s: %s", self.path / name, bad, error)

    @staticmethod
    def _free_name(folder: Path, name: str) -> Path:
        number, path = 1, folder / name
        while os.path.lexists(path):
            path = folder / f"{name}.{number}"
            number += 1
        return path

    def set_use(self, name: str, nanoseconds: int) -> None:
        """Keep when a file was used last: its modification time."""
        try:
            os.utime(self.path / name, ns=(nanoseconds, nanoseconds))
        except (OSError, OverflowError) as error:
            log.debug("%s: %s", self.path / name, error)


class FileReader:
    """Bytes of an open file, by offset.

    Raises:
        OSError: it is no regular file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        self.n_bytes = status.st_size
        self.used_ns = status.st_mtime_ns

    def __call__(self, offset: int, n: int) -> bytes:
        """n bytes from an offset on, fewer at the end."""
        parts = []
        while n > 0 and (part := os.pread(self._descriptor, n, offset)):
            parts.append(part)
            offset, n = offset + len(part), n - len(part)
        return b"".join(parts)

    def expect(self, offset: int, n: int) -> None:
        """Have the system read these bytes ahead, beside whatever is done with those before them."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, n, os.POSIX_FADV_WILLNEED)

    def into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from an offset on.

        Raises:
            BadFile: the file ends before.
        """
        while buffer:
            n = os.preadv(self._descriptor, [buffer], offset)
            if not n:
                raise BadFile("cut")
            buffer, offset = buffer[n:], offset + n


class SystemWriting:
    """Has the system put bytes on disk while later ones are still made, where it can be asked to (Linux).

    Without it everything waits in memory for the fsync at the end.
    """

    STEP = 8 << 20
    _WRITE = 2  # SYNC_FILE_RANGE_WRITE: start, do not wait

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._call = getattr(ctypes.CDLL(None), "sync_file_range", None)

    def written_to(self, end: int) -> None:
        """Bytes in front of `end` have been written; it does no harm if some of them still are not."""
        if self._call is not None and end - self._start >= self.STEP:
            n = end - self._start
            self._call(self._descriptor, ctypes.c_int64(self._start), ctypes.c_int64(n), self._WRITE)
            self._start = end


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at an offset."""
    view = memoryview(data)
    while view:
        n = os.pwrite(descriptor, view, offset)
        view, offset = view[n:], offset + n
