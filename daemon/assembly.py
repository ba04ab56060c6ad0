"""The front's parts and the wires between them, whatever hosts the engine side."""

from __future__ import annotations

import os
from collections.abc import Callable

from slotd.daemon.config import Config
from slotd.daemon.door import Limits
from slotd.daemon.front import Front
from slotd.daemon.link import Host, Opened, State, ToFront
from slotd.daemon.loop import Loop
from slotd.daemon.outbox import Outbox
from slotd.daemon.state_file import StateFile, choose_folder
from slotd.protocol.connection import DaemonConnection
from slotd.protocol.messages import Ready

#: Makes the host: from what takes its messages, and what ends the daemon (reason, exit code).
MakeHost = Callable[[Callable[[ToFront], None], Callable[[str, int], None]], Host]


class Daemon:
    """A daemon on stdin and stdout.

    Args:
        config: its settings.
        opened: the loaded model.
        make_host: called once.
        stdout_fd: the real stdout.

    Raises:
        ConfigError: the folder of the state file.
    """

    def __init__(self, config: Config, opened: Opened, make_host: MakeHost, stdout_fd: int) -> None:
        state_folder = choose_folder(config.state_dir)
        connection = DaemonConnection(max_line=config.max_line)
        stream_fd = config.stream_fd if isinstance(config.stream_fd, int) else None
        self.outbox = Outbox(stdout_fd, stream_fd, self._stdout_gone, self._stream_gone)
        self.host = make_host(
            self.deliver,
            lambda reason, exit_code: self.loop.request_end(reason, exit_code),
        )
        self.front = Front(
            connection, self.outbox, self.host.send,
            Limits(
                n_vocab=opened.n_vocab, max_ctx=opened.max_ctx, slots=config.slots, stored=opened.stored
            ),
            props={**opened.props, "pid": os.getpid(), "engine": config.engine}, peek=self.host.state,
            lines_for_stream=config.stream_fd == "-", stall_timeout=config.stall_timeout,
        )  # fmt: skip
        self.loop = Loop(0, stdout_fd, connection, self.front, self.outbox, self.host, config.stall_timeout)
        self.state_file = None
        if state_folder is not None:
            self.state_file = StateFile(state_folder, self.front.props, self.front.status)

    def run(self) -> int:
        """Serve until something ends the daemon; returns the exit code."""
        self.loop.install_signals()
        self.host.start()
        if self.state_file is not None:
            self.state_file.start()
        self.front.put(Ready())
        try:
            return self.loop.run()
        finally:
            if self.state_file is not None:
                self.state_file.close()

    def deliver(self, message: ToFront) -> None:
        """Take a message of the engine side."""
        self.front.deliver(message)
        if self.state_file is not None and isinstance(message, State):
            self.state_file.changed()

    def _stdout_gone(self) -> None:
        self.loop.request_end("nobody reads stdout")

    def _stream_gone(self) -> None:
        self.front.stream_gone()
