"""One daemon, from its first line to its last: process, wire, bus, and the rule that no wait is endless."""

from __future__ import annotations

import logging
import time
from typing import Any

from slotd.client import commands
from slotd.client.bus import Bus, Callbacks, EventWaiter
from slotd.client.failure import start_error
from slotd.client.process import DaemonProcess
from slotd.client.transport import Pipe, Transport
from slotd.protocol import messages
from slotd.protocol.errors import (
    ConfigError,
    DaemonDiedError,
    DaemonError,
    DaemonStartError,
    DaemonTimeoutError,
    LocalProtocolError,
    RequestError,
)

logger = logging.getLogger(__name__)

#: Seconds in which a process must be gone once its output has ended.
_EXIT_GRACE = 2.0
#: How many reply timeouts a command that may wait for the engine has, while the daemon gives signs of life.
PATIENCE = 6


class Session:
    """The connection to one daemon. Make it with `spawn` or `attach`; it never comes back from the dead.

    Attributes:
        hello: the object of ``[hello]``.
        death_told: somebody was told by an exception that this daemon died.
        process: the daemon's process, None when attached.
    """

    def __init__(
        self,
        process: DaemonProcess | None,
        stdin: Pipe,
        stdout: Pipe,
        *,
        callbacks: Callbacks,
        new_id: commands.IdSource,
        reply_timeout: float,
    ) -> None:
        self.hello: dict[str, Any] = {}
        self.death_told = False
        self.ending = False  # it said that it is ending
        self.process = process
        self.reply_timeout = reply_timeout
        self.new_id = new_id
        self.bus = Bus(callbacks)
        self._closing = False
        self._cause = ""
        self.transport = Transport(
            stdin, stdout, on_line=self.bus.dispatch, on_end=self._on_end, owned=process is not None
        )

    @classmethod
    def spawn(
        cls,
        process: DaemonProcess,
        *,
        callbacks: Callbacks,
        new_id: commands.IdSource,
        start_timeout: float,
        reply_timeout: float,
    ) -> Session:
        """Take over a fresh process and wait until it is ready. Raises DaemonStartError; then it is gone."""
        session = cls(
            process,
            process.stdin,
            process.stdout,
            callbacks=callbacks,
            new_id=new_id,
            reply_timeout=reply_timeout,
        )
        with session.bus.expect(lambda event: isinstance(event, messages.Ready)) as ready:
            session._start(start_timeout, ready)
        return session

    @classmethod
    def attach(
        cls,
        stdin: Pipe,
        stdout: Pipe,
        *,
        callbacks: Callbacks,
        new_id: commands.IdSource,
        start_timeout: float,
        reply_timeout: float,
    ) -> Session:
        """Speak over given pipes, which stay the caller's. Raises DaemonStartError."""
        session = cls(None, stdin, stdout, callbacks=callbacks, new_id=new_id, reply_timeout=reply_timeout)
        session._start(start_timeout, None)
        return session

    def _start(self, timeout: float, ready: EventWaiter | None) -> None:
        """HELLO at once (it waits in the pipe while the model loads), then the ready line and the answer."""
        deadline = time.monotonic() + timeout
        hello = commands.Hello(self.new_id())
        try:
            self.transport.start()
            self.send(hello)
            if ready is not None:
                ready.wait(timeout)
            self.hello = hello.result.result(max(0.0, deadline - time.monotonic()))
        except RequestError as error:
            self._abort()
            raise DaemonStartError(f"it does not speak protocol version 2: HELLO gave {error}") from error
        except (DaemonTimeoutError, TimeoutError) as error:
            words = self._words()
            self._abort()
            raise DaemonStartError(f"the daemon was not ready within {timeout:g} s{words}") from error
        except DaemonDiedError as error:
            self._abort()
            raise self._start_error(error) from error
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        """End a daemon that is not ready: it has nothing yet that would be worth an orderly end."""
        self._closing = True
        if self.process is not None:
            self.process.kill()
        self.close()

    def _start_error(self, error: DaemonDiedError) -> DaemonStartError:
        if self.process is None:
            return DaemonStartError(str(error))
        return start_error(str(error), self.process.exit_code, self.process.last_words())

    def _words(self) -> str:
        words = "" if self.process is None else self.process.last_words()
        return f"; its last words:\n{words}" if words else ""

    # ----- asking

    def send(self, command: commands.Command) -> None:
        """Register `command`, then write it. Its futures tell the rest.

        Raises:
            ConfigError: it cannot be put on the wire; the message names the field.
            DaemonDiedError, DaemonTimeoutError: see `Transport.send`.
        """
        command.state = commands.State.ACTIVE
        try:
            self.bus.add(command)
            self.transport.send(command.request, self.reply_timeout)
        except BaseException as error:
            command.state = commands.State.DONE
            self.bus.remove(command)
            if isinstance(error, DaemonDiedError):
                raise self.death(error) from None
            if isinstance(error, DaemonTimeoutError):
                self._give_up("it took no commands any more and was ended")
            if isinstance(error, LocalProtocolError):
                raise ConfigError(str(error)) from error
            raise

    def ask(self, command: commands.Command) -> Any:
        """Send a short command and wait for its answer.

        Raises:
            RequestError: it was refused.
            DaemonDiedError: the daemon ended meanwhile.
            DaemonTimeoutError: no answer. One that the daemon owes at once has `reply_timeout` seconds; one
                that may wait for the engine has `PATIENCE` times that, as long as STATUS is answered.
        """
        self.send(command)
        limit = self.reply_timeout * (1 if command.immediate else PATIENCE)
        deadline = time.monotonic() + limit
        try:
            while True:
                try:
                    return command.result.result(self.reply_timeout)
                except TimeoutError:
                    self._look_into(command)
                    if time.monotonic() >= deadline:
                        text = f"{command.request.verb}: no answer within {limit:g} s"
                        raise DaemonTimeoutError(text) from None
        except DaemonDiedError:
            self.death_told = True  # by us, whatever the reader thread has come to
            raise
        finally:
            if not command.result.done():  # nobody waits for this one any more
                self.bus.remove(command)

    def _look_into(self, command: commands.Command) -> None:
        """Is only this command late, or is the daemon stuck? A stuck one is ended. Raises DaemonError."""
        if isinstance(command, commands.Status):
            self._give_up(f"it gave no answer to STATUS for {self.reply_timeout:g} s and was ended")
        else:
            self.check_alive()

    def check_alive(self) -> None:
        """Ask for a sign of life, unless the daemon was heard within the last `reply_timeout` seconds.

        Raises:
            DaemonTimeoutError: there was none. A daemon that we spawned is then killed.
            DaemonDiedError: it is dead.
        """
        if time.monotonic() - self.transport.heard_at < self.reply_timeout and self.bus.error is None:
            return
        try:
            self.ask(commands.Status(self.new_id()))
        except RequestError as error:
            logger.debug("STATUS was refused, which is a sign of life too: %s", error)

    # ----- dying

    @property
    def alive(self) -> bool:
        """Whether it can still answer."""
        return (
            not self.ending
            and self.bus.error is None
            and (self.process is None or self.process.exit_code is None)
        )

    def death(self, otherwise: DaemonError | None = None) -> DaemonError:
        """The error to raise for a dead daemon: with exit code and last words as soon as they are known."""
        self.death_told = True
        self.bus.wait_ended(_EXIT_GRACE + 1.0)
        return self.bus.error or otherwise or DaemonDiedError("the daemon is dead")

    def _give_up(self, cause: str) -> None:
        """End a daemon that is stuck, so that the next call may start another."""
        self._cause = cause
        self.death_told = True
        if self.process is not None:
            logger.warning("daemon %d: %s", self.process.pid, cause)
            self.process.kill()
            self.bus.wait_ended(_EXIT_GRACE + 1.0)

    def _on_end(self) -> None:
        """In the reader thread: the output has ended, or we stopped reading."""
        if self._closing:
            error = DaemonDiedError("the client was closed")
        elif self.process is None:
            error = DaemonDiedError("the daemon closed its output")
        else:
            if self.process.wait(_EXIT_GRACE) is None:
                self._cause = self._cause or "it closed its output and was ended"
            self.process.kill()
            cause = f"{self._cause}; " if self._cause else ""
            error = DaemonDiedError(f"the daemon died: {cause}{self.process.obituary()}")
        if self.bus.fail(error):
            self.death_told = True

    def close(self) -> None:
        """End the daemon that we spawned (or leave the given pipes) and fail whoever still waits."""
        self._closing = True
        if self.process is not None and self.process.exit_code is None:
            self._say_quit()
        self.transport.close_input()
        if self.process is not None:
            self.process.shutdown(quit=False)
        self.transport.close()

    def _say_quit(self) -> None:
        try:
            self.transport.send(messages.Quit(), 1.0)
        except DaemonError as error:
            logger.debug("no quit for the daemon: %s", error)
