"""The daemon as a child process: spawn, last words, exit code, and the ladder that ends it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slotd.protocol.errors import DaemonStartError

logger = logging.getLogger(__name__)

#: Lines of stderr that are kept as last words, and the length at which one is cut.
LAST_LINES = 40
MAX_LINE = 2000

_HINTS = {
    2: "a flag is wrong",
    3: "the model cannot be used",
    5: "the line protocol was broken",
    -signal.SIGKILL: "killed from outside, often because memory ran out",
    -signal.SIGSEGV: "it crashed",
    -signal.SIGABRT: "it crashed",
    -signal.SIGBUS: "it crashed; was the model file cut while it ran?",
    -signal.SIGILL: "it crashed; is a library built for another CPU?",
}

_SIGNALS = {number.value: number.name for number in signal.Signals}


def daemon_argv(model: str | Path, flags: Sequence[str] = ()) -> list[str]:
    """The command line that runs the daemon of this very Python on `model`.

    -P keeps the current folder off the daemon's import path: a stray ``queue.py`` there must not be found.
    """
    return [sys.executable, "-P", "-m", "slotd.daemon", "daemon", str(model), *flags]


def exit_hint(code: int | None) -> str:
    """An exit code in words, e.g. ``exit code 3 (the model cannot be used)``."""
    if code is None:
        return "still running"
    words = f"exit code {code}" if code >= 0 else f"signal {_SIGNALS.get(-code, -code)}"
    hint = _HINTS.get(code)
    return f"{words} ({hint})" if hint else words


class DaemonProcess:
    """One daemon process in a session of its own, so that a Ctrl-C on the terminal does not reach it.

    Args:
        argv: what to run.
        env: variables to set on top of this process's environment.
        stream: also make a token stream: ``--stream-fd=N`` is appended and `stream_fd` is its read end.
        log: called with every stderr line, from the thread that reads stderr.

    Raises:
        DaemonStartError: it cannot be run at all.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stream: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.stream_fd: int | None = None
        self._log = log
        self._killed = False
        self._tail: deque[str] = deque(maxlen=LAST_LINES)
        argv = list(argv)
        write_end: int | None = None
        if stream:
            self.stream_fd, write_end = os.pipe()
            argv.append(f"--stream-fd={write_end}")
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=None if env is None else {**os.environ, **env},
                pass_fds=() if write_end is None else (write_end,),
                start_new_session=True,
            )
        except OSError as error:
            self._close_stream()
            raise DaemonStartError(f"cannot run {argv[0]}: {error.strerror or error}") from error
        finally:
            if write_end is not None:
                os.close(write_end)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self.stdin, self.stdout = self._popen.stdin, self._popen.stdout
        self._pump = threading.Thread(target=self._pump_stderr, name=f"slotd-stderr-{self.pid}", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._popen.poll()

    def wait(self, timeout: float) -> int | None:
        """Wait for its end, at most `timeout` seconds; the exit code or None."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """The last lines of its stderr. Of a dead process: all of them were read, or half a second passed."""
        if self.exit_code is not None:
            self._pump.join(0.5)
        return "\n".join(self._tail)

    def obituary(self) -> str:
        """Exit code with a hint, and the last words if there are any."""
        words = self.last_words()
        return exit_hint(self.exit_code) + (f"; its last words:\n{words}" if words else "")

    def shutdown(self, *, quit: bool = True, grace: float = 5.0, term: float = 3.0) -> int:
        """End it: ``quit`` and end of input, after `grace` seconds SIGTERM, after `term` more SIGKILL.

        Signals go to the whole process group. `quit` is False when somebody else who writes to `stdin`
        has seen to that. Returns the exit code. Safe to call again.
        """
        if quit:
            self._say_quit()
        code = self.wait(grace)
        if code is None:
            logger.warning("daemon %d did not quit in %.1f s: SIGTERM", self.pid, grace)
            self._signal(signal.SIGTERM)
            code = self.wait(term)
        if code is None:
            logger.warning("daemon %d ignored SIGTERM for %.1f s: SIGKILL", self.pid, term)
        code = self.kill()
        self._pump.join(1.0)
        self._close_stream()
        return code

    def kill(self) -> int:
        """SIGKILL to the process group, also to what a dead daemon left behind; the exit code."""
        if not self._killed:  # once: later the number may be another group's
            self._killed = True
            self._signal(signal.SIGKILL)
        code = self.wait(10.0)  # late only by what the kernel has to give back
        if code is None:
            logger.error("daemon %d does not go although it was killed", self.pid)
        return -signal.SIGKILL if code is None else code

    def _say_quit(self) -> None:
        if self.stdin.closed:
            return
        try:
            os.set_blocking(self.stdin.fileno(), False)  # a daemon that does not read must not hold us up
            os.write(self.stdin.fileno(), b"quit\n")
        except OSError:
            logger.debug("daemon %d takes no quit any more", self.pid)
        self.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            logger.debug("daemon %d: nobody left to get %s", self.pid, number.name)

    def _close_stream(self) -> None:
        if self.stream_fd is not None:
            os.close(self.stream_fd)
            self.stream_fd = None

    def _pump_stderr(self) -> None:
        """Read stderr for ever, so that the daemon never blocks on it; keep a bounded tail."""
        assert self._popen.stderr is not None
        with self._popen.stderr as stderr:
            rest = b""
            while piece := stderr.read(65536):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._take_stderr(line)
                rest = rest[-MAX_LINE:]
            if rest:
                self._take_stderr(rest)

    def _take_stderr(self, line: bytes) -> None:
        text = line[:MAX_LINE].decode("utf-8", "replace").rstrip("\r")
        self._tail.append(text)
        logger.debug("daemon %d: %s", self.pid, text)
        if self._log is not None:
            try:
                self._log(text)
            except Exception:
                logger.exception("the log callback failed")
