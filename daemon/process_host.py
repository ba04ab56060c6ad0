"""Hosting the engine side by a process of its own, and replacing that process when it dies.

One thread, the keeper, lives as long as the daemon: it reads what the engine process says, watches whether it
says anything, and starts the next one. (The system ends an engine process together with the thread that
started it, so it must be one that stays.) A second thread writes, so that nobody waits for a process that
does not read. What a dying process has said is delivered before its death is dealt with.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from slotd.daemon.arena_directory import intact_slots
from slotd.daemon.config import Config
from slotd.daemon.engine_life import EngineLife, Phase
from slotd.daemon.engine_process import KILL_PATIENCE, EngineProcess, SharedMemory
from slotd.daemon.idle_unload import Target
from slotd.daemon.in_flight import InFlight
from slotd.daemon.link import (
    Emit,
    Failed,
    Finished,
    Line,
    Opened,
    Ping,
    Progress,
    Started,
    State,
    Stop,
    Submit,
    ToEngine,
    ToFront,
)
from slotd.daemon.link_wire import Frames, decode_to_front, encode_to_engine
from slotd.daemon.shared_state import MAX_REQUESTS, SharedState
from slotd.daemon.slots_seen import SlotsSeen
from slotd.daemon.weights.identity import file_stamp
from slotd.protocol.errors import ConfigError, ModelError, RequestError, SlotdError
from slotd.protocol.messages import AllCleared

log = logging.getLogger(__name__)

READ_SIZE = 1 << 18

#: How often the keeper looks at the clock, in seconds.
WATCH_INTERVAL = 0.25

#: What an engine process that cannot start may say, as the error that it is.
ERRORS: dict[str, type[SlotdError]] = {"ConfigError": ConfigError, "ModelError": ModelError}


class ProcessHost:
    """The engine side, whatever process it is in.

    Args:
        config: of the daemon.
        shared: the block that the processes share with the front.
        memory: its descriptor, and that of the host tier.
        process: the first one, just started.
    """

    def __init__(
        self, config: Config, shared: SharedState, memory: SharedMemory, process: EngineProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._config = config
        self._clock = clock
        self._shared = shared
        self._memory = memory
        self._process = process
        self._life = EngineLife(clock(), config.engine_timeout)
        self._frames = Frames()
        self._opened: Opened | None = None
        self._stamp = file_stamp(config.model)
        self._failure: str | None = None
        self._deliver: Callable[[ToFront], None] = lambda message: None
        self._seen = SlotsSeen()
        self._in_flight = InFlight(MAX_REQUESTS)
        self._queue: deque[ToEngine | Ping] = deque()
        self._changed = threading.Condition()  # guards life, in_flight and queue
        self._writing = threading.Lock()  # held while a socket is written to, or closed
        self._shown = 0.0
        self._state_from = 0.0  # older states are of a process that is gone
        self._keeper = threading.Thread(target=self._keep, name="slotd-engine", daemon=True)

    # ----- what the front calls

    def open(self) -> Opened:
        """Wait until the first process has loaded the model.

        Raises:
            ConfigError, ModelError: it cannot, and said why.
            SlotdError: it died.
        """
        while self._opened is None and self._failure is None:
            if not self._receive():
                break
        if self._opened is not None:
            return self._opened
        kind, _, reason = (self._failure or "").partition(": ")
        self._process.kill()
        words = self._process.last_words()
        if kind in ERRORS:
            raise ERRORS[kind](reason)
        raise SlotdError(f"the engine process did not start: {self._failure or words}")

    def connect(self, deliver: Callable[[ToFront], None], _: object) -> ProcessHost:
        """Give the messages for the front to `deliver`, on the keeper's thread; it never ends the daemon."""
        self._deliver = deliver
        return self

    def start(self) -> None:
        """Begin to read and write messages."""
        self._keeper.start()
        threading.Thread(target=self._write_all, name="slotd-engine-writer", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine side; while there is no process, it waits for the next one.

        Raises:
            RequestError: engine_down.
        """
        with self._changed:
            if isinstance(message, Submit):
                if self._life.phase is Phase.DOWN and not self._life.may_start(self._clock()):
                    raise RequestError("engine_down", self._life.refusal())
                place = self._in_flight.add(message)
                message.flags.move(self._shared.cells, self._shared.flags_at(place))
            self._queue.append(message)
            self._changed.notify_all()

    def stop(self, timeout: float) -> bool:
        """Ask it to end and wait; False when it has not ended within `timeout` seconds and was killed."""
        with self._changed:
            running = self._life.phase is Phase.RUNNING
            self._life.ending()
            if running:
                self._queue.append(Stop())
            self._changed.notify_all()
        if not running:
            self._process.kill()
        self._keeper.join(timeout)
        ended = not self._keeper.is_alive()
        if not ended:
            self._process.kill()
        return ended

    def state(self) -> State:
        """The newest state, with what is known of the process; it never waits for the engine."""
        state = self._shared.read()
        data = {} if state is None else dict(state.data)
        at = None if state is None else state.at
        with self._changed:
            if at is None or at < self._state_from:  # of nothing that runs now
                data |= {"running": [], "queued": len(self._in_flight), "retained": 0, "slots": {}}
            epoch = max(self._life.epoch, data.get("epoch", 0))
            process = {"host": "process", "pid": self._process.pid, **self._life.report()}
        return State({**data, "epoch": epoch, "engine": process}, at)

    # ----- the keeper

    def _keep(self) -> None:
        while True:
            reason = self._converse()
            log.info("the engine process has ended: %s", reason)
            while not self._replace(reason):
                with self._changed:
                    self._changed.wait_for(self._is_wanted)
                    if self._life.phase is Phase.ENDING:
                        return
                reason = self._life.reason

    def _is_wanted(self) -> bool:
        """Whether somebody waits for an engine that is down, or for the end."""
        return bool(self._queue) or self._life.phase is not Phase.DOWN

    def _converse(self) -> str:
        """Take what the process says until it is gone; returns what it died of."""
        killed: tuple[str, float] | None = None
        while self._receive():
            self._show_state()
            if killed is None:
                silent = self._silence()
                if silent is not None:
                    killed = f"no sign of life for {silent:.1f} s", self._clock()
                elif self._failure is not None:
                    killed = self._failure, self._clock()
                if killed is not None:
                    self._process.kill()
            elif self._clock() - killed[1] > KILL_PATIENCE:
                break  # it hangs where no signal reaches it, and holds its end of the socket
        words = self._process.last_words()
        return self._failure or (killed[0] if killed else words)

    def _show_state(self) -> None:
        """Deliver a new state, for whoever watches the states and does not ask."""
        written = self._shared.written()
        if written != self._shown:
            self._shown = written
            self._deliver(self.state())

    def _receive(self) -> bool:
        """Wait a little for messages and take them; False when the process is gone."""
        poll = select.poll()
        poll.register(self._process.socket, select.POLLIN)
        if not poll.poll(1000 * min(WATCH_INTERVAL, self._config.engine_timeout / 8)):
            return True
        try:
            data = self._process.socket.recv(READ_SIZE)
        except OSError:  # it died with something of ours unread
            return False
        for header, ids in self._frames.feed(data):
            self._take(decode_to_front(header, ids))
        return bool(data)

    def _silence(self) -> float | None:
        now, last_sign = self._clock(), self._shared.last_sign()
        with self._changed:
            if self._life.wants_ping(now, last_sign):
                self._queue.append(Ping())
                self._changed.notify_all()
            silent = self._life.overdue(now, last_sign)
        if silent is None or not self._is_loading():
            return silent
        with self._changed:
            return self._life.overdue(now, last_sign, loading=True)

    def _is_loading(self) -> bool:
        """Whether the process has said that it loads weights."""
        state = self._shared.read()
        return state is not None and state.at is not None and (
            state.at >= self._state_from and state.data.get("target") == Target.LOADING.value
        )  # fmt: skip

    def _take(self, message: ToFront) -> None:
        match message:
            case Opened():
                self._take_opened(message)
            case Failed(kind=kind, reason=reason):
                self._failure = f"{kind}: {reason}"
            case Started(key=key):
                with self._changed:
                    self._in_flight.start(key)
            case Finished(key=key):
                self._release(key)
                self._deliver(message)
            case Line(event=event):
                self._seen.note(event)
                self._deliver(message)
            case Emit() | Progress():
                self._deliver(message)

    def _take_opened(self, opened: Opened) -> None:
        first = self._opened or opened
        if (opened.n_vocab, opened.max_ctx, opened.props["model"]) != (
            first.n_vocab, first.max_ctx, first.props["model"],
        ) or file_stamp(self._config.model) != self._stamp:  # fmt: skip
            self._failure = "ModelError: the model file has changed since the daemon started"
            return
        self._opened = first
        with self._changed:
            self._life.opened(self._clock())
            self._changed.notify_all()

    def _release(self, key: str | int) -> None:
        """The request has ended: its flags leave the shared block, their place is somebody else's."""
        with self._changed:
            submit = self._in_flight.finish(key)
            if submit is not None:
                submit.flags.move(bytearray(2), 0)

    # ----- a death

    def _replace(self, reason: str) -> bool:
        """Deal with a death; whether another process was started."""
        state = self._shared.read()
        now = self._clock()
        with self._changed:
            known = state.data["epoch"] if state is not None else 0
            asked = self._life.phase is Phase.DOWN
            again = self._life.may_start(now) if asked else self._life.died(now, reason, known)
            if self._life.phase is Phase.ENDING:
                return False
            lost, waiting = self._in_flight.started(), self._in_flight.waiting()
            self._queue.clear()
            self._queue.extend(waiting if again else ())
        self._close_socket()
        kept = tuple(intact_slots(self._memory.arena)) if not asked else ()
        if again:
            again = self._start_next()
        if not asked:
            self._announce(reason, state, kept)
            self._fail(lost, "device_lost", {"reason": reason})
        if not again:
            self._fail(waiting, "engine_down", self._life.refusal())
        return again

    def _start_next(self) -> bool:
        self._frames, self._failure = Frames(), None
        self._state_from = self._clock()
        with self._changed:
            self._life.started(self._clock())
        try:
            self._process = EngineProcess(
                self._config, self._memory, self._life.epoch, self._life.replacements
            )
        except OSError as error:
            log.critical("no engine process can be started: %s", error)
            self._life.died(self._clock(), str(error), self._life.epoch)
            return False
        return True

    def _announce(self, reason: str, state: State | None, kept: tuple[int, ...]) -> None:
        """Say which slots went with the process, before any line about the requests that did."""
        lost = self._seen.lost(state, kept)
        log.critical("the engine process died (%s): slots %s are lost, %s kept", reason, lost.slots, kept)
        event = AllCleared(epoch=self._life.epoch, freed=lost.slots, kept=kept, bytes=lost.device_bytes)
        self._deliver(Line(event))

    def _fail(self, submits: Iterable[Submit], code: str, fields: dict[str, str | int | float]) -> None:
        for submit in submits:
            self._release(submit.key)
            wall = round(self._clock() - submit.submitted_at, 6)
            account = {"epoch": self._life.epoch, "wall_s": wall}
            self._deliver(Finished(submit.key, "err", code, fields, account))

    def _close_socket(self) -> None:
        try:
            self._process.socket.shutdown(2)  # a writer that waits for a process that hangs comes back
        except OSError:
            pass  # the other end is gone already
        with self._writing:
            self._process.socket.close()

    # ----- the writer

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._can_write)
                message, process = self._queue.popleft(), self._process
                place = self._in_flight.place(message.key) if isinstance(message, Submit) else 0
            if place is None:
                continue  # given up meanwhile
            data = encode_to_engine(message, self._shared.flags_at(place))
            with self._writing:
                try:
                    process.socket.sendall(data)
                except OSError:
                    pass  # it is gone, which the keeper notices; what was not begun is sent to the next one

    def _can_write(self) -> bool:
        return bool(self._queue) and self._life.phase in (Phase.RUNNING, Phase.ENDING)
