"""Work that waits for a disk: one thread beside the scheduler, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

from slotd.daemon.memory import DeviceLost

#: A command in several steps: each value it yields is work for the disk thread, whose result is sent back
#: (or whose exception is raised) on the scheduler's thread, where everything else of it runs.
Steps = Generator[Callable[[], Any], Any, None]


class Closed(Exception):
    """The thread has ended; the work was not done."""


class Background:
    """Runs steps, their work on a thread of its own.

    Args:
        call_soon: makes the scheduler's thread call a function; may be called from any thread.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._call_soon = call_soon
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, steps: Steps, ended: Callable[[Exception | None], None]) -> None:
        """Run steps to their end; `ended` gets what they raised, on the scheduler's thread."""
        self._advance(steps, ended, None, None)

    def close(self) -> None:
        """Let the work that runs come to its end; steps that want more get `Closed`."""
        self._closed = True
        self._work.put(None)
        if self._thread is not None:
            self._thread.join()

    def _advance(
        self, steps: Steps, ended: Callable[[Exception | None], None], value: Any, error: BaseException | None
    ) -> None:
        try:
            work = steps.send(value) if error is None else steps.throw(error)
        except StopIteration:
            ended(None)
        except Exception as own_error:
            ended(own_error)
        else:
            self._submit(work, lambda value, error: self._advance(steps, ended, value, error))

    def _submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def run() -> None:
            value: Any = None
            failure: BaseException | None = None
            try:
                if self._closed:
                    raise Closed
                value = work()
            except (Exception, DeviceLost) as error:  # the latter ends the scheduler's thread, not this one
                failure = error
            self._call_soon(lambda: done(value, failure))

        if self._closed:
            run()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="slotd-disk", daemon=True)
            self._thread.start()
        self._work.put(run)

    def _loop(self) -> None:
        while (run := self._work.get()) is not None:
            run()
