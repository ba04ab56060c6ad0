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


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Descriptors that an engine process inherits.

    Attributes:
        state: of the shared block.
        arena: of the host tier, None: there is none.
        arena_bytes: most bytes of slots in it.
    """

    state: int
    arena: int | None = None
    arena_bytes: int = 0

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them."""
        return (self.state,) if self.arena is None else (self.state, self.arena)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine process is started with.

    Attributes:
        config: of the daemon.
        socket: descriptor that messages go over.
        memory: what it shares with the front.
        epoch: of the slots.
        replacements: how many such processes were started in place of one that died.
        parent: process id of the front.
        verbosity: of the log.
    """

    config: Config
    socket: int
    memory: SharedMemory
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
        memory = SharedMemory(**fields.pop("memory"))
        return cls(config=Config(**config), memory=memory, **fields)


class EngineProcess:
    """One such process.

    Args:
        config: of the daemon.
        memory: what it shares with the front.
        epoch, replacements: as in `EngineSettings`.

    Attributes:
        socket: our end.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, config: Config, memory: SharedMemory, epoch: int, replacements: int) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            settings = EngineSettings(
                config=config, socket=theirs.fileno(), memory=memory, epoch=epoch, replacements=replacements,
                parent=os.getpid(), verbosity=verbosity(),
            )  # fmt: skip
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", "slotd.daemon", VERB, settings.to_json()],
                    stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(), *memory.descriptors),
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
