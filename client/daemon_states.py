"""Finds running daemons by the state files that they publish, and reads them. For `slotd top`."""

from __future__ import annotations

import json
import os
import stat
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotd.protocol.errors import ConfigError, SlotdError

STATE_VARIABLE = "SLOTD_STATE_DIR"

#: Shape of the files that is understood.
FORMAT = 1

#: Longer files are no state files: one takes some kilobytes.
MOST_BYTES = 16 << 20


class NoStateError(SlotdError):
    """There is no running daemon to show, or its file cannot be understood."""


@dataclass(frozen=True, slots=True)
class DaemonState:
    """One state file.

    Attributes:
        pid: of the daemon.
        proc_start: start of that process in the kernel's count, "" where the daemon did not know.
        started, written: seconds since 1970.
        props, status: as PROPS and STATUS report them.
    """

    pid: int
    proc_start: str
    started: float
    written: float
    props: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def running(self) -> bool:
        """Whether the process that wrote it still runs."""
        try:
            words = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except FileNotFoundError:
            return not Path("/proc/self/stat").exists() and _answers(self.pid)
        except OSError:
            return False
        return words[0] not in "ZX" and (not self.proc_start or words[19] == self.proc_start)

    def as_dict(self) -> dict[str, Any]:
        """For --json: the facts of the file, and `age_s`, how old they are."""
        return {
            "pid": self.pid, "started": self.started, "written": self.written,
            "age_s": round(max(0.0, time.time() - self.written), 3), "props": self.props,
            "status": self.status,
        }  # fmt: skip


def _answers(pid: int) -> bool:
    """For systems without /proc."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def state_folder(given: str | None) -> Path:
    """The folder to look in: `given`, else SLOTD_STATE_DIR, else slotd's in the user's runtime folder.

    Raises:
        ConfigError: the name is `-`, with which daemons publish nothing, or there is no such folder.
    """
    text = given if given is not None else os.environ.get(STATE_VARIABLE)
    if text in ("-", ""):
        raise ConfigError(
            f"{'--state-dir' if given is not None else STATE_VARIABLE} {text!r}: names no folder"
        )
    if text is not None:
        return Path(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as the daemon does it: both must come to the same folder
            import platformdirs

            return platformdirs.user_runtime_path("slotd", appauthor=False)
    except OSError as error:
        raise ConfigError(f"no folder of state files: {error}; name one with --state-dir") from None


def read_state(path: Path) -> DaemonState:
    """Read a state file.

    Raises:
        NoStateError: it is not there, or is no state file of this version.
    """
    try:
        found = json.loads(_read_regular(path))
    except FileNotFoundError:
        raise NoStateError(f"{path}: no such file; the daemon has ended, or publishes elsewhere") from None
    except OSError as error:
        raise NoStateError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise NoStateError(f"{path} is no state file of a daemon: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise NoStateError(f"{path} is no state file of a daemon of this version (format {FORMAT})")
    try:
        state = DaemonState(
            pid=int(found["pid"]), proc_start=str(found["proc_start"]), started=float(found["started"]),
            written=float(found["written"]), props=dict(found["props"]), status=dict(found["status"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise NoStateError(f"{path} is no state file of a daemon: {error!r}") from None
    return state


def _read_regular(path: Path) -> bytes:
    """A file that can be read without waiting, up to MOST_BYTES; a pipe or a device could go on for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    return content


def running_daemons(folder: Path) -> list[DaemonState]:
    """The daemons that run and publish there, the one that was started last at the end.

    Files that cannot be read, and those of processes that are gone, are passed over.
    """
    states = []
    for path in sorted(folder.glob("*.json")):
        try:
            state = read_state(path)
        except NoStateError:
            continue
        if state.running:
            states.append(state)
    return sorted(states, key=lambda state: (state.started, state.pid))


def path_of(pid: int, folder: Path) -> Path:
    """Where the daemon `pid` publishes."""
    return folder / f"{pid}.json"
