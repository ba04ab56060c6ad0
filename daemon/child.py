"""The process that hosts the engine side: ``python -m slotd.daemon engine SETTINGS``, started by the front.

It dies with the front: the system kills it when the thread that started it ends, and it ends itself when its
socket does. Signals that a terminal or a service manager sends to all processes are the front's business.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading

from slotd.daemon.engine_process import EngineSettings
from slotd.daemon.kv.host_arena import HostArena, open_arena
from slotd.daemon.link import Emit, Failed, Ping, State, ToFront
from slotd.daemon.link_wire import Frames, decode_to_engine, encode_to_front
from slotd.daemon.log import setup_logging
from slotd.daemon.loop import end_process
from slotd.daemon.memory import DeviceLost, Faults
from slotd.daemon.memory.faults import VARIABLE
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.serve import open_engine_side
from slotd.daemon.shared_state import SharedState
from slotd.protocol.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

READ_SIZE = 1 << 20

#: Of prctl(2): the signal that this process gets when its parent dies.
PR_SET_PDEATHSIG = 1

EXIT_FAILED = 1


def main(text: str) -> None:
    """Serve the front until it says Stop, then leave the process. `text`: the settings as JSON."""
    settings = EngineSettings.from_json(text)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with(settings.parent)
    setup_logging(settings.verbosity)
    code = Child(settings).run()
    end_process(code)


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent dies; end it now when that has happened."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_process(EXIT_FAILED)


class Child:
    """Both directions of the socket, and the scheduler between them."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._socket = socket.socket(fileno=settings.socket)
        self._shared = SharedState(settings.memory.state)
        self._unsent: list[bytes] = []
        faults = Faults.parse(os.environ.get(VARIABLE))
        if faults is not None and faults.spares(settings.replacements):
            del os.environ[VARIABLE]

    def run(self) -> int:
        """Load the model and run to the end; returns the exit code."""
        try:
            scheduler, opened = open_engine_side(
                self._settings.config,
                self.deliver,
                self._arena(),
                flush=self.flush,
                epoch=self._settings.epoch,
            )
            scheduler.turn()  # publishes a state, so that the front never has none
            self.deliver(opened)
            reader = threading.Thread(target=self._read, args=(scheduler,), name="slotd-reader", daemon=True)
            reader.start()
            scheduler.run()
        except (Exception, DeviceLost) as error:
            if not isinstance(error, ConfigError | ModelError):  # those say all in one line
                log.critical("the engine side died", exc_info=True)
            self.deliver(Failed(type(error).__name__, str(error)))
            return EXIT_FAILED
        self.flush()
        return 0

    def _arena(self) -> HostArena | None:
        memory = self._settings.memory
        return open_arena(memory.arena, memory.arena_bytes, recorded=True)

    def deliver(self, message: ToFront) -> None:
        """Send a message; ids wait until `flush` or the next other message."""
        if isinstance(message, State):
            self._shared.write(message.data)
            return
        self._unsent.append(encode_to_front(message))
        if not isinstance(message, Emit):
            self.flush()

    def flush(self) -> None:
        """Send the ids that wait: those of one step together."""
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._socket.sendall(data)

    def _read(self, scheduler: Scheduler) -> None:
        frames = Frames()
        while data := self._receive():
            for header, ids in frames.feed(data):
                message = decode_to_engine(header, ids, self._shared.flags)
                scheduler.put(None if isinstance(message, Ping) else message)
        log.info("the front is gone")
        end_process(EXIT_FAILED)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(READ_SIZE)
        except OSError:
            return b""
