"""A scheduler on a real engine whose turns the test takes itself, and whose calls it can watch and break."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slotd.daemon.backend import Outputs
from slotd.daemon.engine import Engine
from slotd.daemon.kv.slots import Slot
from slotd.daemon.link import Emit, Finished, Flags, Key, Line, Started, State, Submit, ToFront
from slotd.daemon.memory import DeviceMemory, Faults
from slotd.daemon.models.model import Interrupt
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.sequence import Sequence
from slotd.daemon.speculation import Drafter
from slotd.daemon.weights.reader import open_model
from slotd.protocol.messages import Command, Event, Prompt, Restore
from tests.fakes.front_rig import Clock

#: More turns than any test needs: a job that never ends is a failure, not a hang.
MOST_TURNS = 3000


@dataclass(frozen=True)
class Call:
    """One forward: its kind, the rows of each sequence, and where they began."""

    kind: Kind
    rows: tuple[int, ...]
    starts: tuple[int, ...]


def ids_of(rows: Rows) -> list[list[int]]:
    """The whole text of each sequence of a call, its rows included."""
    return [
        [*sequence.tokens, *rows.tokens[rows.owner == owner].tolist()]
        for owner, sequence in enumerate(rows.sequences)
    ]


class WatchedEngine(Engine):
    """An engine that notes its calls and passes each to a hook of the test before it runs.

    Attributes:
        calls: every forward.
        before_forward: gets (rows, kind); may raise, may let time pass.
        before_commit: gets the sequence; may raise.
        change_logits: gets (rows, logits) and may write to the logits.
        closed: lengths of the sequences that were closed, in order.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[Call] = []
        self.closed: list[int] = []
        self.before_forward: Callable[[Rows, Kind], object] = lambda rows, kind: None
        self.before_commit: Callable[[Sequence], object] = lambda sequence: None
        self.change_logits: Callable[[Rows, Any], object] = lambda rows, logits: None

    def forward(self, rows: Rows, kind: Kind, interrupt: Interrupt | None = None) -> Outputs:
        counts = np.bincount(rows.owner, minlength=len(rows.sequences))
        starts = tuple(len(sequence) for sequence in rows.sequences)
        self.calls.append(Call(kind, tuple(counts.tolist()), starts))
        self.before_forward(rows, kind)
        outputs = super().forward(rows, kind, interrupt)
        self.change_logits(rows, outputs.logits)
        return outputs

    def commit(self, sequence: Sequence, path: SequenceOf[int]) -> None:
        self.before_commit(sequence)
        super().commit(sequence, path)

    def close(self, sequence: Sequence) -> None:
        self.closed.append(len(sequence))
        super().close(sequence)


class SchedulerRig:
    """Submits, turns, and what came of it.

    Args:
        model: path of the GGUF.
        fault: as in SLOTD_FAULT.
        draft: path of a draft.
        drafters: of the scheduler, or what makes them for the engine.
        options: of the scheduler.
    """

    def __init__(
        self, model: Path, *, fault: str | None = None, eos_ids: SequenceOf[int] = (),
        draft: Path | None = None,
        drafters: SequenceOf[Drafter] | Callable[[Engine], SequenceOf[Drafter]] = (), **options: Any,
    ) -> None:  # fmt: skip
        memory = DeviceMemory(faults=Faults.parse(fault))
        with open_model(model) as file:
            self.engine = WatchedEngine(file, NumpyBackend(memory, exact=True), draft=draft)
        self.clock = Clock()
        self.messages: list[ToFront] = []  # but Started
        self.started: list[Key] = []
        self.flags: dict[Key, Flags] = {}
        self.scheduler = Scheduler(
            self.engine, self._deliver, eos_ids=frozenset(eos_ids), clock=self.clock,
            drafters=drafters(self.engine) if callable(drafters) else drafters,
            **{"chunk": 128, "parallel": 4, "max_stall": 0.06, **options},
        )  # fmt: skip

    def _deliver(self, message: ToFront) -> None:
        if isinstance(message, Started):
            self.started.append(message.key)
        else:
            self.messages.append(message)

    # ----- what is asked

    def put(self, key: Key, command: Command) -> Flags:
        """Submit any command, a prompt with its ids as the front does."""
        ids = np.asarray(command.ids, np.int32) if isinstance(command, Prompt) else None
        self.flags[key] = Flags()
        self.scheduler.put(Submit(key, command, self.flags[key], self.clock.now, ids))
        return self.flags[key]

    def prompt(self, key: Key, ids: SequenceOf[int], n_gen: int = 4, **fields: Any) -> Flags:
        """Submit a prompt, or a RESTORE when fields name a slot."""
        kind = Restore if "slot" in fields else Prompt
        return self.put(key, kind(ids=list(ids), n_gen=n_gen, **fields))

    # ----- turns

    def turns(self, n: int) -> None:
        """Take n turns."""
        for _ in range(n):
            self.scheduler.turn()

    def until(self, *keys: Key) -> None:
        """Take turns until these have ended."""
        self.until_true(lambda: all(self.ended(key) for key in keys))

    def until_true(self, condition: Callable[[], bool]) -> None:
        """Take turns until a condition holds."""
        for _ in range(MOST_TURNS):
            if condition():
                return
            self.scheduler.turn()
        raise AssertionError("it never came")

    def answer(self, key: Key, ids: SequenceOf[int], n_gen: int = 4, **fields: Any) -> list[int]:
        """A prompt from start to end: its tokens."""
        self.prompt(key, ids, n_gen, **fields)
        self.until(key)
        return self.tokens(key)

    def forget(self) -> None:
        """End so many short requests that no older one's sequence is kept."""
        for number in range(4):
            self.answer(f"short{len(self.messages)}", [number + 3], n_gen=0)

    # ----- what came of it

    def ended(self, key: Key) -> bool:
        """Whether the key has its terminal message."""
        return any(isinstance(message, Finished) and message.key == key for message in self.messages)

    def done(self, key: Key) -> Finished:
        """The one terminal message of a key."""
        (found,) = (each for each in self.messages if isinstance(each, Finished) and each.key == key)
        return found

    def order(self) -> list[Key]:
        """The keys in the order in which they ended."""
        return [message.key for message in self.messages if isinstance(message, Finished)]

    def tokens(self, key: Key) -> list[int]:
        """What a key produced; every token has its place."""
        emitted = [each for each in self.messages if isinstance(each, Emit) and each.key == key]
        tokens: list[int] = []
        for each in emitted:
            assert each.at == len(tokens)
            tokens += each.ids
        return tokens

    def lines(self, key: Key) -> list[Event]:
        """The events of a key."""
        return [each.event for each in self.messages if isinstance(each, Line) and each.key == key]

    def pieces(self) -> list[int]:
        """Rows of each prefill piece."""
        return [call.rows[0] for call in self.engine.calls if call.kind is Kind.PROMPT]

    def states(self) -> list[dict[str, Any]]:
        """Every published state."""
        return [dict(each.data) for each in self.messages if isinstance(each, State)]

    def running(self) -> dict[Any, str]:
        """Id -> phase in the last published state."""
        return {entry["id"]: entry["phase"] for entry in self.states()[-1]["running"]}

    def slot(self, number: int) -> Slot:
        """What a slot holds."""
        return self.engine.slots[number]
