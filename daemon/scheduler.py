"""Who runs next: the engine side's turn.

One turn: take messages; admit; compute one step for every decoding sequence together; run at most one
prefill piece. A running answer therefore waits at most one piece between two of its tokens, and a piece
is kept short while anything decodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from slotd.daemon.admission import Admission, SlotOnDisk
from slotd.daemon.backend import HostOutputs, Outputs
from slotd.daemon.decoding import Decoding
from slotd.daemon.disk_commands import DiskCommands
from slotd.daemon.engine import Engine
from slotd.daemon.inline_snapshots import InlineSnapshots
from slotd.daemon.job import Job, Phase
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.kv.slot_hash import SlotHash
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.link import Finished, Line, Progress, Started, State, Stop, Submit, ToEngine, ToFront
from slotd.daemon.memory import OutOfDeviceMemory, Policy
from slotd.daemon.memory.pressure import Extent
from slotd.daemon.models.model import Interrupted
from slotd.daemon.next_token import NextTokens
from slotd.daemon.parking import Parking
from slotd.daemon.recovery import Recovery
from slotd.daemon.retained import Retained, RetainedSequences
from slotd.daemon.rows import MAX_STEP_ROWS, Kind, Rows
from slotd.daemon.slot_chains import chain_restored
from slotd.daemon.slot_commands import SlotCommands, describe
from slotd.daemon.speculation import Drafter, Speculation
from slotd.daemon.totals import Totals
from slotd.protocol.errors import Value
from slotd.protocol.messages import Park, Prompt, RestoreChain, Restored, SnapInlineFailed, Unpark

#: State is published at least this often while anything runs, in seconds.
STATE_INTERVAL = 0.1

#: How long to wait for the front when every running answer is paused, in seconds.
PAUSED_WAIT = 0.01

log = logging.getLogger(__name__)

T = TypeVar("T")


class Scheduler:
    """Runs jobs on an engine; one thread calls `run`, any thread calls `put`.

    Args:
        engine: token ids in, logits out.
        deliver: takes every message for the front, on the scheduler's thread.
        chunk: longest prefill piece while nothing decodes, in tokens.
        parallel: most requests that run at once, at most MAX_STEP_ROWS.
        max_stall: longest gap a prefill piece should put between two tokens of another answer, in
            seconds; a piece is never shorter than one page of rows.
        eos_ids: ids at which the model ends a text.
        slot_store: snapshots on disk, if there are any.
        epoch: of the slots, at the start.
        flush: called when all tokens of a step are delivered.
        policy: what running out of memory may cost.
        trim_tokens: give cached blocks of the pool back each time a prompt has computed so many tokens;
            0 = never.
        idle_unload: seconds without use after which the weights are unloaded; None = never.
        drafters: guess what comes next; none = plain decoding.
        adapts: guesses follow what they cost and what comes of them.
    """

    def __init__(
        self, engine: Engine, deliver: Callable[[ToFront], None], *, chunk: int, parallel: int,
        max_stall: float, eos_ids: frozenset[int], policy: Policy = Policy.LADDER, trim_tokens: int = 0,
        slot_store: SlotStore | None = None, clock: Callable[[], float] = time.monotonic, epoch: int = 0,
        flush: Callable[[], None] = lambda: None, idle_unload: float | None = None,
        drafters: SequenceOf[Drafter] = (), adapts: bool = False,
    ) -> None:  # fmt: skip
        assert parallel <= MAX_STEP_ROWS
        self._engine = engine
        self._deliver, self._flush = deliver, flush
        self._chunk = chunk
        self._parallel = parallel
        self._max_stall = max_stall
        self._eos_ids = eos_ids
        self._clock = clock
        self._inbox: deque[ToEngine] = deque()
        self._arrived = threading.Event()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._exclusive: deque[Submit] = deque()  # park and unpark wait until nothing runs
        self._retained = RetainedSequences(max(4, parallel), engine.close, engine.recurrence.resumable)
        self._recovery = Recovery(engine, self._retained, deliver, lambda: self._publish(True), policy, epoch)
        self._parking = Parking(engine, self._recovery, clock, idle_unload)
        self._commands = SlotCommands(engine, self._retained, deliver, self._recovery, self._parking, clock)
        self._admission = Admission(engine, self._retained, self._recovery, self._parking, chunk)
        self._slot_hash = SlotHash(engine.identity, engine.k_type, engine.v_type)
        self._trim_tokens = trim_tokens
        self._full = False  # the first in the queue waits for memory, until something ends
        self._calls: deque[Callable[[], None]] = deque()  # from the disk thread
        self._disk = DiskCommands(engine, slot_store, self._commands, deliver, self._call_soon)
        self._snapshots = InlineSnapshots(engine, self._recovery, self._disk, deliver)
        self._stopping = False
        self._rows_per_second = 0.0
        self._published = -STATE_INTERVAL
        self._totals = Totals()
        speculation = Speculation(drafters, engine.hyper.n_vocab, self._totals, adapts, clock)
        self._decoding = Decoding(engine, self._recovery, speculation, self._totals, deliver, self, clock)

    # ----- the loop

    def put(self, message: ToEngine | None) -> None:
        """Queue a message of the front; None: look whether there is something to do, publish the state."""
        if message is not None:
            self._inbox.append(message)
        self._arrived.set()

    def run(self) -> None:
        """Take turns until a Stop message; then every open key is answered and everything is freed."""
        while not self._stopping:
            if not self.turn():
                self._publish(force=True)
                self._arrived.wait(self.rest())
        for job in [*self._running, *self._waiting]:
            self.finish(job, "cancelled")
        for submit in self._exclusive:
            self._deliver(Finished(submit.key, "cancelled"))
        self._disk.close()
        self._run_calls()
        while self._retained.drop_oldest():
            pass

    def turn(self) -> bool:
        """One turn; False when there was nothing to do."""
        self._arrived.clear()
        took = self._take_messages()
        self._drop_cancelled()
        self._run_exclusive()
        if self._admit():
            self._publish(force=True)  # so that STATUS shows a request before its first piece is done
        stepped = self._step()
        self._flush()
        filled = self._prefill_piece(beside_decode=stepped)
        if filled or not stepped:
            self._decoding.break_off()
        self._flush()
        self._publish()
        if took or stepped or filled:
            self._parking.used()
        return took or stepped or filled

    def rest(self) -> float | None:
        """Behind a turn with nothing to do: how long to wait for a message, in seconds; None: for ever."""
        if self._running:
            return PAUSED_WAIT
        return None if self._waiting or self._exclusive else self._parking.rest()

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Have the scheduler's thread call a function; from any thread."""
        self._calls.append(call)
        self._arrived.set()

    def _run_calls(self) -> bool:
        called = bool(self._calls)
        while self._calls:
            self._calls.popleft()()
        return called

    def _take_messages(self) -> bool:
        took = self._run_calls()
        while self._inbox:
            took = True
            message = self._inbox.popleft()
            if isinstance(message, Stop):
                self._stopping = True
            elif isinstance(message.command, Prompt):
                self._totals.requests += 1
                job = Job(message, self._engine.max_ctx, self._eos_ids, self._clock, self._trim_tokens)
                self._waiting.append(job)
            elif isinstance(message.command, Park | Unpark):
                self._exclusive.append(message)
            elif self._disk.takes(message.command):
                self._disk.run(message)
            else:
                self._commands.run(message)
                self._full = False
        return took

    def _drop_cancelled(self) -> None:
        for job in [*self._running, *self._waiting]:
            if job.flags.cancelled:
                self.finish(job, "cancelled")

    def _run_exclusive(self) -> None:
        while self._exclusive and not self._running:
            self._commands.run(self._exclusive.popleft())

    # ----- admission

    def _admit(self) -> bool:
        """Start what may start, in the order it came. True when something did."""
        before = len(self._running)
        while len(self._running) < self._parallel and not self._exclusive and not self._full:
            job = next((job for job in self._waiting if not job.fetching), None)
            if job is None:
                break
            self._deliver(Started(job.key))
            try:
                self._start(job)
            except SlotOnDisk as error:
                self._fetch(job, error.number)
            except OutOfDeviceMemory as error:
                if self._running:
                    self._full = True  # what runs now will give its pages back
                else:
                    self.fail(job, error)
            except Exception as error:
                self.fail(job, error)
            else:
                self._waiting.remove(job)
                self._running.append(job)
        return len(self._running) > before

    def _start(self, job: Job) -> None:
        """Give the job a sequence that holds what is known of its prompt, and every page it will need."""
        job.raise_failure()
        with job.account.inside("restore"):
            sequence, logits = self._admission.sequence_for(job, self._extent)
        job.sequence = sequence
        job.reused = len(sequence)
        job.phase = Phase.PREFILL
        job.account.enter("prefill")
        self._totals.admit(len(job.ids), job.reused, slot=job.from_slot)
        if job.restore_slot is not None:
            held = self._engine.slots[job.restore_slot]
            self._deliver(Line(Restored(slot=job.restore_slot, cur_pos=len(held)), job.key))
        elif isinstance(job.command, RestoreChain):
            self._deliver(Line(chain_restored(self._engine.slots, job.command), job.key))
        job.restored_logits = logits

    @property
    def _extent(self) -> Extent:
        """What may be given up for a request that waits: while others run it can wait for their memory."""
        return Extent.LOSSLESS if self._running else Extent.ALL

    def _fetch(self, job: Job, number: int) -> None:
        self._disk.fetch(job, number, lambda work: self._try(job, work, self._extent))

    # ----- prefill

    def _prefill_piece(self, beside_decode: bool) -> bool:
        job = next((job for job in self._running if job.phase is Phase.PREFILL), None)
        if job is None:
            return False
        interrupted = False
        try:
            self._advance(job, beside_decode)
        except Interrupted:
            interrupted = True  # ended below, where the frames of the piece and their arrays are gone
        except Exception as error:
            self.fail(job, error)
        else:
            self._take_turns(job)
        if interrupted:
            self.finish(job, "cancelled")
        return True

    def _take_turns(self, job: Job) -> None:
        """Put a job whose prompt goes on behind the others: a short prompt must not wait for a long one."""
        if job.phase is Phase.PREFILL and job in self._running:
            self._running.remove(job)
            self._running.append(job)

    def _advance(self, job: Job, beside_decode: bool) -> None:
        assert job.sequence is not None
        self._snapshots.take(job, None)
        if job.restored_logits is not None:
            self._prompt_is_known(job, HostOutputs(job.restored_logits[None], np.zeros(1, dtype=np.int64)))
            return
        start, end = job.prefilled, self._piece_end(job, beside_decode)
        at_snapshot = not job.snap_done and job.command.snap is not None and end == job.command.snap.at
        wanted = "last" if end == len(job.ids) or at_snapshot else "none"
        rows = Rows.chain(job.sequence, job.ids[start:end].tolist(), logits=wanted)
        outputs = self._try(job, lambda: self._compute_piece(job, rows))
        if job.trims.completed(end - start):
            self._recovery.trim("interval")
        self._deliver(Progress(job.key, end, len(job.ids)))
        if wanted == "last" and not job.snap_done:
            self._snapshots.take(job, outputs.logits[-1])
        if end == len(job.ids):
            self._prompt_is_known(job, outputs)

    def _compute_piece(self, job: Job, rows: Rows) -> Outputs:
        began = self._clock()
        outputs = self._engine.forward(rows, Kind.PROMPT, lambda: job.flags.cancelled)
        self._engine.commit(job.running_sequence, range(len(rows)))
        self._totals.computed_tokens += len(rows)
        self._rows_per_second = len(rows) / max(self._clock() - began, 1e-9)
        return outputs

    def _piece_end(self, job: Job, beside_decode: bool) -> int:
        size = self._chunk
        if self._engine.recurrence.checkpoints:
            size = min(size, max(self._engine.recurrence.every, PAGE))  # a state is kept between pieces
        if beside_decode:
            size = min(size, int(self._rows_per_second * self._max_stall))
        return job.piece_end(size, whole_pages=size >= PAGE or (beside_decode and self._chunk >= PAGE))

    def _try(self, job: Job, work: Callable[[], T], extent: Extent = Extent.ALL) -> T:
        return self._recovery.attempt(work, job.account, job.pinned, extent=extent)

    def _prompt_is_known(self, job: Job, outputs: Outputs) -> None:
        if job.n_gen == 0:
            self.finish(job, "ok")
            return
        job.phase = Phase.DECODE
        job.account.enter("decode")
        self._decoding.choose(job, NextTokens([job], outputs, len(outputs.rows) - 1), 0)

    # ----- decode

    def _step(self) -> bool:
        """One step of every decoding sequence. False when none could step."""
        jobs = [job for job in self._running if job.phase is Phase.DECODE and not job.flags.paused]
        if not jobs:
            return False
        self._decoding.step(jobs)
        return True

    # ----- endings

    def finish(self, job: Job, status: str, reason: dict[str, Value] | None = None) -> None:
        """End a job; what it computed stays usable for the next request that shares it."""
        self._leave(job)
        if job.sequence is not None:
            self._engine.truncate(job.sequence, len(job.sequence))  # pages reserved for what never came
            # The last token was handed out but never computed; SNAPSHOT computes it when it is asked for.
            self._retained.add(Retained(job.key, job.sequence, pending=tuple(job.produced[-1:])))
        self._settle()
        if not job.snap_done and job.command.snap is not None and status != "cancelled":
            self._deliver(Line(SnapInlineFailed(slot=job.command.snap.slot, reason="past_prompt"), job.key))
        self._end(job, status, None, reason or {})

    def fail(self, job: Job, error: Exception) -> None:
        """End a job with an error; its sequence is closed, nobody else's is touched."""
        self._leave(job)
        if job.sequence is not None:
            self._engine.close(job.sequence)
        self._settle()
        code, reason = describe(error)
        self._end(job, "err", code, reason)

    def _end(self, job: Job, status: str, code: str | None, reason: dict[str, Value]) -> None:
        """The last word about a job: when what it saves is saved."""
        job.account.enter("snapshot" if self._disk.saves(job.key) else "other")

        def say() -> None:
            self._deliver(Finished(job.key, status, code, reason, job.summary(self._recovery.epoch)))

        self._disk.when_saved(job.key, say)

    def _settle(self) -> None:
        """A job has ended: when it was the last one its scratch goes back."""
        if not self._running:
            self._recovery.trim("end")
            self._publish(force=True)

    def _leave(self, job: Job) -> None:
        self._full = False
        if job in self._running:
            self._running.remove(job)
        else:
            self._waiting.remove(job)

    # ----- state

    def _publish(self, force: bool = False) -> None:
        now = self._clock()
        if not force and now - self._published < STATE_INTERVAL:
            return
        self._published = now
        self._deliver(State({
            "epoch": self._recovery.epoch,
            "parked": self._engine.parked,
            "target": self._parking.target.value,
            "running": [job.report() for job in self._running],
            "queued": len(self._waiting) + len(self._exclusive),
            "retained": len(self._retained),
            "slots": self._engine.host_tier.slot_report(self._slot_hash.of),
            "memory": self._engine.memory_report(),
            "host_tier": self._engine.host_tier.report(),
            "recovery": self._recovery.report(),
            "totals": asdict(self._totals),
        }))  # fmt: skip
