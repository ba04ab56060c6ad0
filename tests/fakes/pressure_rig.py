"""A real scheduler and engine without front or process: submit, take turns, look at the messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from slotd.daemon.engine import Engine
from slotd.daemon.link import Emit, Finished, Flags, Line, State, Submit, ToFront
from slotd.daemon.memory import DeviceMemory, Faults, Policy
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.weights.reader import open_model
from slotd.protocol.messages import AllCleared, Command, Event, Prompt


class PressureRig:
    """One engine under one scheduler.

    Args:
        model: path of the GGUF.
        room: limit of device memory beside the weights, in bytes; None = no limit.
        faults: as in SLOTD_FAULT.
        options: `chunk`, `parallel`, `policy`, `trim_tokens` of the scheduler, `exact` of the backend, the
            others of the engine.
    """

    def __init__(
        self, model: Path, room: int | None = None, faults: str | None = None, **options: Any
    ) -> None:
        scheduling = {
            "chunk": options.pop("chunk", 64), "parallel": options.pop("parallel", 4), "max_stall": 60.0,
            "policy": options.pop("policy", Policy.LADDER), "trim_tokens": options.pop("trim_tokens", 0),
            "eos_ids": frozenset(),
        }  # fmt: skip
        backend = NumpyBackend(DeviceMemory(None, Faults.parse(faults)), options.pop("exact", False))
        with open_model(model) as file:
            self.engine = Engine(file, backend, **options)
        if room is not None:
            self.engine.memory.limit = self.engine.memory.live() + room
        self.messages: list[ToFront] = []
        self.scheduler = Scheduler(self.engine, self.messages.append, **scheduling)

    def submit(self, command: Command, ids: list[int] | None = None) -> Flags:
        """Queue a command; a prompt's ids beside it."""
        flags = Flags()
        tokens = None if ids is None else np.array(ids, dtype=np.int32)
        assert command.id is not None
        self.scheduler.put(Submit(command.id, command, flags, time.monotonic(), tokens))
        return flags

    def prompt(self, key: str, ids: list[int], n_gen: int = 4, **fields: Any) -> Flags:
        """Queue a bare prompt."""
        return self.submit(Prompt(id=key, n_gen=n_gen, ignore_eos=True, **fields), ids)

    def run(self) -> None:
        """Take turns until nothing is left to do."""
        while self.scheduler.turn():
            pass

    def ended(self, key: str) -> Finished:
        """How a request ended; it has ended exactly once."""
        (finished,) = [m for m in self.messages if isinstance(m, Finished) and m.key == key]
        return finished

    def ids(self, key: str) -> list[int]:
        """The ids of an answer; each came once, in order."""
        emitted = [m for m in self.messages if isinstance(m, Emit) and m.key == key]
        assert [m.at for m in emitted] == list(range(len(emitted)))
        return [token for m in emitted for token in m.ids]

    def events(self, kind: type[Event]) -> list[Any]:
        """Events of one class, in order."""
        return [m.event for m in self.messages if isinstance(m, Line) and isinstance(m.event, kind)]

    @property
    def cleared(self) -> list[AllCleared]:
        """What was announced."""
        return self.events(AllCleared)

    @property
    def state(self) -> dict[str, Any]:
        """What STATUS would report now."""
        self.scheduler._publish(force=True)
        return dict([m for m in self.messages if isinstance(m, State)][-1].data)
