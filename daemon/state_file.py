"""Publishes what STATUS and PROPS say in a file, so that another process can watch this daemon.

A daemon speaks with whoever spawned it, and with nobody else. The file PID.json is replaced whole by a
thread of its own whenever the engine side has published its state, at most ten times a second, and removed
at the end. It is a view only: whatever goes wrong with it disturbs no request.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slotd.protocol.errors import ConfigError

#: Shape of the file; a reader refuses others.
FORMAT = 1

#: Shortest time between two replacements, in seconds.
INTERVAL = 0.1

#: `--state-dir -`: nothing is published.
OFF = "-"

#: Longest wait for a write that hangs, at the end, in seconds.
END_WRITE = 0.2

log = logging.getLogger(__name__)


def choose_folder(text: str | None) -> Path | None:
    """The folder that --state-dir names; None: nothing is published. Default: slotd's in the runtime folder.

    Raises:
        ConfigError: an empty name.
    """
    if text == OFF:
        return None
    if text is not None:
        if not text:
            raise ConfigError(f"--state-dir '': must name a folder, or be {OFF} for none")
        return Path(text).absolute()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where no XDG_RUNTIME_DIR is set another folder is as good
            import platformdirs

            return platformdirs.user_runtime_path("slotd", appauthor=False)
    except OSError as error:
        log.warning("no folder for the state file (`slotd top` cannot watch this daemon): %s", error)
        return None


class StateFile:
    """The file of this process.

    Args:
        folder: where it lies; made for its owner alone when it is not there.
        props: what PROPS reports, fixed at the start.
        status: what STATUS reports now; called on the thread of this object.
    """

    def __init__(
        self, folder: Path, props: Mapping[str, Any], status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._path = folder / f"{os.getpid()}.json"
        self._status = status
        self._facts = {
            "format": FORMAT, "pid": os.getpid(), "proc_start": _process_start(), "started": time.time(),
            "props": props,
        }  # fmt: skip
        self._changed = threading.Event()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="slotd-state", daemon=True)

    def start(self) -> None:
        """Begin to publish."""
        self._changed.set()
        self._thread.start()

    def changed(self) -> None:
        """There is something new to publish. Costs nothing and never waits; callable from any thread."""
        self._changed.set()

    def close(self) -> None:
        """Stop publishing and remove the file."""
        self._ending.set()
        self._changed.set()
        if self._lock.acquire(timeout=END_WRITE):  # else a write hangs; who reads sees that we are dead
            self._lock.release()
            _remove(self._path)

    def _run(self) -> None:
        remove_stale(self._path.parent)
        while not self._ending.is_set():
            self._changed.wait()
            self._changed.clear()
            with self._lock:
                if not self._ending.is_set():
                    self._publish()
            self._ending.wait(INTERVAL)

    def _publish(self) -> None:
        try:
            self._write(json.dumps({**self._facts, "written": time.time(), "status": self._status()}))
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "the state file cannot be written (`slotd top` cannot watch this daemon; --state-dir %s "
                    "turns it off): %s", OFF, error,
                )  # fmt: skip
        except Exception:
            log.exception("the state could not be published")
            self._ending.set()

    def _write(self, text: str) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        temporary = folder / f".{os.getpid()}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, self._path)
        except OSError:
            _remove(temporary)
            raise


def remove_stale(folder: Path) -> None:
    """Remove the files of processes that are gone: they were killed and could not do it themselves."""
    for path in [*folder.glob("*.json"), *folder.glob(".*.tmp")]:
        name = path.stem.removeprefix(".")
        if name.isascii() and name.isdecimal() and int(name) != os.getpid() and not _is_running(int(name)):
            _remove(path)


def _check_owner(folder: Path) -> None:
    """Raises PermissionError for a folder in which another user could put files in our place."""
    info = folder.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(f"{folder} is not ours alone to write to")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # it is somebody else's
    return True


def _process_start() -> str:
    """When this process started, in the kernel's own count; "" where there is no /proc.

    With it a reader can tell this process from a later one of the same number.
    """
    try:
        return Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s stays: %s", path, error)
