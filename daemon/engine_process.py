"""Starting the process that hosts the engine side, and ending it.

It is a fresh Python (a fork would share a CUDA context with us), in a process group of its own, so that a
Ctrl-C on the terminal reaches the front only. What it needs it gets in one argument and by descriptor: a
socket for messages and the shared block.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotd.daemon import blas_threads
from slotd.daemon.config import Config, Inactive
from slotd.daemon.log import verbosity

#: The word behind ``python -m slotd.daemon`` that leads here.
VERB = "engine"

#: How long a killed process may take to be gone, in seconds: it may hang in a driver.
KILL_PATIENCE = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine process is started with.

    Attributes:
        config: of the daemon.
        socket: descriptor that messages go over.
        shared: descriptor of the shared block.
        epoch: of the slots.
        replacements: how many such processes were started in place of one that died.
        parent: process id of the front.
        verbosity: of the log.
    """

    config: Config
    socket: int
    shared: int
    epoch: int
    replacements: int
    parent: int
    verbosity: int

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> EngineSettings:
        """From the text that `to_json` made."""
        fields: dict[str, Any] = json.loads(text)
        config = fields.pop("config")
        for name in ("model", "slot_dir"):
            config[name] = None if config[name] is None else Path(config[name])
        config["inactive"] = tuple(Inactive(**inactive) for inactive in config["inactive"])
        return cls(config=Config(**config), **fields)


class EngineProcess:
    """One such process.

    Args:
        config: of the daemon.
        shared: descriptor of the shared block.
        epoch, replacements: as in `EngineSettings`.

    Attributes:
        socket: our end.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, config: Config, shared: int, epoch: int, replacements: int) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            settings = EngineSettings(
                config=config, socket=theirs.fileno(), shared=shared, epoch=epoch, replacements=replacements,
                parent=os.getpid(), verbosity=verbosity(),
            )  # fmt: skip
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", "slotd.daemon", VERB, settings.to_json()],
                    stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(), shared),
                    env=blas_threads.environment(), process_group=0,
                )  # fmt: skip
            except BaseException:
                self.socket.close()
                raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def kill(self) -> None:
        """End it now."""
        self._popen.kill()

    def last_words(self) -> str:
        """How it ended: waits for it."""
        try:
            code = self._popen.wait(KILL_PATIENCE)
        except subprocess.TimeoutExpired:
            return "it cannot be killed"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
