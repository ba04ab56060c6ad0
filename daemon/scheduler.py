"""Who runs next: the engine side's turn.

One turn: take messages; admit; compute one step for every decoding sequence together; run at most one
prefill piece. A running answer therefore waits at most one piece between two of its tokens, and a piece
is kept short while anything decodes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slotd.daemon.disk_commands import DiskCommands
from slotd.daemon.engine import Engine
from slotd.daemon.job import Job, Phase
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.kv.slots import Slot
from slotd.daemon.link import Emit, Finished, Line, Progress, State, Stop, Submit, ToEngine, ToFront
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.models.model import Interrupted
from slotd.daemon.retained import Retained, RetainedSequences
from slotd.daemon.rows import MAX_STEP_ROWS, Kind, Rows
from slotd.daemon.sampling import logprobs
from slotd.daemon.sequence import Sequence
from slotd.daemon.slot_chains import chain, chain_restored, free_for, prefix_in
from slotd.daemon.slot_commands import SlotCommands, describe
from slotd.protocol.errors import RequestError, Value
from slotd.protocol.messages import Park, Prompt, RestoreChain, Restored, SnapInline, SnapInlineFailed, Unpark

#: Pages are reserved for this many positions beyond prompt + answer: provisional rows of a step.
STEP_MARGIN = PAGE

#: State is published at least this often while anything runs, in seconds.
STATE_INTERVAL = 0.1

#: How long to wait for the front when every running answer is paused, in seconds.
PAUSED_WAIT = 0.01

Logits = npt.NDArray[np.float32]


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
    """

    def __init__(
        self, engine: Engine, deliver: Callable[[ToFront], None], *, chunk: int, parallel: int,
        max_stall: float, eos_ids: frozenset[int], clock: Callable[[], float] = time.monotonic,
        slot_store: SlotStore | None = None,
    ) -> None:  # fmt: skip
        assert parallel <= MAX_STEP_ROWS
        self._engine = engine
        self._deliver = deliver
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
        self._retained = RetainedSequences(max(4, parallel), engine.close)
        self._epoch = 0
        self._commands = SlotCommands(engine, self._retained, deliver, lambda: self._epoch, clock)
        self._calls: deque[Callable[[], None]] = deque()  # from the disk thread
        self._disk = DiskCommands(engine, slot_store, self._commands, deliver, self._call_soon)
        self._stopping = False
        self._rows_per_second = 0.0
        self._published = -STATE_INTERVAL
        self._totals = {"requests": 0, "prompt_tokens": 0, "reused_tokens": 0, "generated_tokens": 0}

    # ----- the loop

    def put(self, message: ToEngine) -> None:
        """Queue a message of the front."""
        self._inbox.append(message)
        self._arrived.set()

    def run(self) -> None:
        """Take turns until a Stop message; then every open key is answered and everything is freed."""
        while not self._stopping:
            if not self.turn():
                self._publish(force=True)
                self._arrived.wait(PAUSED_WAIT if self._running else None)
        for job in [*self._running, *self._waiting]:
            self._finish(job, "cancelled")
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
        filled = self._prefill_piece(beside_decode=stepped)
        self._publish()
        return took or stepped or filled

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
                self._totals["requests"] += 1
                self._waiting.append(Job(message, self._engine.max_ctx, self._eos_ids, self._clock))
            elif isinstance(message.command, Park | Unpark):
                self._exclusive.append(message)
            elif self._disk.takes(message.command):
                self._disk.run(message)
            else:
                self._commands.run(message)
        return took

    def _drop_cancelled(self) -> None:
        for job in [*self._running, *self._waiting]:
            if job.flags.cancelled:
                self._finish(job, "cancelled")

    def _run_exclusive(self) -> None:
        while self._exclusive and not self._running:
            self._commands.run(self._exclusive.popleft())

    # ----- admission

    def _admit(self) -> bool:
        """Start what may start, in the order it came. True when something did."""
        before = len(self._running)
        while self._waiting and len(self._running) < self._parallel and not self._exclusive:
            job = self._waiting[0]
            try:
                self._start(job)
            except OutOfDeviceMemory as error:
                if self._running:
                    break  # what runs now will give its pages back
                self._fail(job, error)
            except Exception as error:
                self._fail(job, error)
            else:
                self._waiting.popleft()
                self._running.append(job)
        return len(self._running) > before

    def _start(self, job: Job) -> None:
        """Give the job a sequence that holds what is known of its prompt, and every page it will need."""
        if self._engine.parked:
            raise RequestError("target_parked")
        with job.account.inside("restore"):
            sequence, logits = self._known_prefix(job)
            try:
                self._reserve(sequence, len(job.ids) + job.n_gen + STEP_MARGIN)
            except OutOfDeviceMemory:
                self._engine.close(sequence)
                raise
        job.sequence = sequence
        job.reused = len(sequence)
        job.phase = Phase.PREFILL
        job.account.enter("prefill")
        self._totals["reused_tokens"] += job.reused
        self._totals["prompt_tokens"] += len(job.ids)
        if job.restore_slot is not None:
            held = self._engine.slots[job.restore_slot]
            self._deliver(Line(Restored(slot=job.restore_slot, cur_pos=len(held.tokens)), job.key))
        elif isinstance(job.command, RestoreChain):
            self._deliver(Line(chain_restored(self._engine.slots, job.command), job.key))
        job.restored_logits = logits

    def _known_prefix(self, job: Job) -> tuple[Sequence, Logits | None]:
        """A sequence with the longest known prefix of the prompt; its logits when that is all of it."""
        slots = self._engine.slots
        if job.restore_slot is not None:
            length, logits = _reusable(prefix_in(slots, job.restore_slot, "thick", job.ids), job)
            return self._engine.restore(job.restore_slot, length), logits
        if isinstance(job.command, RestoreChain):
            whole = chain(slots, job.command, job.ids)
            length, logits = _reusable(whole, job)
            return self._engine.restore(whole, length), logits
        match = self._retained.best_match(job.ids)
        if match is None:
            return self._engine.open(), None
        entry, shared = match
        return self._engine.fork(entry.sequence, shared), None

    def _reserve(self, sequence: Sequence, n_tokens: int) -> None:
        """Reserve pages, giving up ended sequences, oldest first, while they do not fit."""
        while True:
            try:
                self._engine.reserve(sequence, n_tokens, "prefill_reserve")
                return
            except OutOfDeviceMemory:
                if not self._retained.drop_oldest():
                    raise

    # ----- prefill

    def _prefill_piece(self, beside_decode: bool) -> bool:
        job = next((job for job in self._running if job.phase is Phase.PREFILL), None)
        if job is None:
            return False
        try:
            self._advance(job, beside_decode)
        except Interrupted:
            self._finish(job, "cancelled")
        except Exception as error:
            self._fail(job, error)
        else:
            self._take_turns(job)
        return True

    def _take_turns(self, job: Job) -> None:
        """Put a job whose prompt goes on behind the others: a short prompt must not wait for a long one."""
        if job.phase is Phase.PREFILL and job in self._running:
            self._running.remove(job)
            self._running.append(job)

    def _advance(self, job: Job, beside_decode: bool) -> None:
        assert job.sequence is not None
        self._take_snapshot(job, None)
        if job.restored_logits is not None:
            self._prompt_is_known(job, job.restored_logits)
            return
        start, end = job.prefilled, self._piece_end(job, beside_decode)
        at_snapshot = not job.snap_done and job.command.snap is not None and end == job.command.snap.at
        wanted = "last" if end == len(job.ids) or at_snapshot else "none"
        rows = Rows.chain(job.sequence, job.ids[start:end].tolist(), logits=wanted)
        began = self._clock()
        outputs = self._engine.forward(rows, Kind.PROMPT, lambda: job.flags.cancelled)
        self._engine.commit(job.sequence, range(end - start))
        self._rows_per_second = (end - start) / max(self._clock() - began, 1e-9)
        self._deliver(Progress(job.key, end, len(job.ids)))
        if wanted == "last":
            self._take_snapshot(job, outputs.logits[-1])
        if end == len(job.ids):
            self._prompt_is_known(job, outputs.logits[-1])

    def _piece_end(self, job: Job, beside_decode: bool) -> int:
        """Where the next piece stops: at the snapshot, the prompt's end, or a page edge within the limit."""
        start, size = job.prefilled, self._chunk
        if beside_decode:
            size = min(size, int(self._rows_per_second * self._max_stall))
        end = start + max(size, 1)
        if size >= PAGE or (beside_decode and self._chunk >= PAGE):
            end = max(end // PAGE, start // PAGE + 1) * PAGE
        end = min(end, len(job.ids))
        if not job.snap_done and job.command.snap is not None and start < job.command.snap.at < end:
            end = job.command.snap.at
        return end

    def _take_snapshot(self, job: Job, logits: Logits | None) -> None:
        """The inline snapshot, as soon as its tokens are there. A failure costs the snapshot only."""
        snap = job.command.snap
        if job.snap_done or snap is None or job.sequence is None or len(job.sequence) < snap.at:
            return
        job.snap_done = True
        at_end, tier = snap.at == len(job.sequence), job.command.tier
        if tier == "host" or not free_for(self._engine.slots, snap.slot, "thick"):
            reason = "unsupported" if tier == "host" else "bad_slot"
            self._deliver(Line(SnapInlineFailed(slot=snap.slot, reason=reason), job.key))
            return
        with job.account.inside("snapshot"):
            try:
                slot = self._engine.snapshot(
                    snap.slot, job.sequence, logits if at_end else None, length=snap.at
                )
            except OutOfDeviceMemory:
                self._deliver(Line(SnapInlineFailed(slot=snap.slot, reason="oom"), job.key))
            else:
                if tier == "disk":
                    self._disk.save_inline(job.key, snap.slot, slot)
                else:
                    self._deliver(Line(SnapInline(slot=snap.slot, cur_pos=snap.at, tier=tier), job.key))

    def _prompt_is_known(self, job: Job, logits: Logits) -> None:
        if job.n_gen == 0:
            self._finish(job, "ok")
            return
        job.phase = Phase.DECODE
        job.account.enter("decode")
        self._choose(job, logits)

    # ----- decode

    def _step(self) -> bool:
        """One row for every decoding sequence, in one call. False when none could step."""
        jobs = [job for job in self._running if job.phase is Phase.DECODE and not job.flags.paused]
        if not jobs:
            return False
        self._step_together(jobs)
        return True

    def _step_together(self, jobs: list[Job]) -> None:
        rows = Rows.join([Rows.chain(job.running_sequence, job.produced[-1:]) for job in jobs])
        try:
            outputs = self._engine.forward(rows, Kind.STEP)
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return
            for job in jobs:  # nothing was changed: each again on its own, so that only the cause fails
                self._step_together([job])
            return
        for row, job in enumerate(jobs):
            try:
                self._engine.commit(job.running_sequence, [row])
                self._choose(job, outputs.logits[row])
            except Exception as error:
                self._fail(job, error)

    def _choose(self, job: Job, logits: Logits) -> None:
        """Sample the next token, hand it out, and end the answer when it says so."""
        job.account.enter("sample")
        token = job.sampler.sample(logits, job.history, len(job.produced), job.banned)
        scores = (logprobs(logits, token, job.command.logprobs),) if job.command.logprobs else ()
        job.take(token)
        self._totals["generated_tokens"] += 1
        job.account.enter("emit")
        self._deliver(Emit(job.key, len(job.produced) - 1, (token,), scores))
        ending = job.ending()
        if ending is not None:
            self._finish(job, *ending)
        else:
            job.account.enter("decode")

    # ----- endings

    def _finish(self, job: Job, status: str, reason: dict[str, Value] | None = None) -> None:
        """End a job; what it computed stays usable for the next request that shares it."""
        self._leave(job)
        if job.sequence is not None:
            self._engine.truncate(job.sequence, len(job.sequence))  # pages reserved for what never came
            # The last token was handed out but never computed; SNAPSHOT computes it when it is asked for.
            self._retained.add(Retained(job.key, job.sequence, pending=tuple(job.produced[-1:])))
        if not job.snap_done and job.command.snap is not None and status != "cancelled":
            self._deliver(Line(SnapInlineFailed(slot=job.command.snap.slot, reason="past_prompt"), job.key))
        self._end(job, status, None, reason or {})

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job with an error; its sequence is closed, nobody else's is touched."""
        self._leave(job)
        if job.sequence is not None:
            self._engine.close(job.sequence)
        code, reason = describe(error)
        self._end(job, "err", code, reason)

    def _end(self, job: Job, status: str, code: str | None, reason: dict[str, Value]) -> None:
        """The last word about a job: when what it saves is saved."""
        job.account.enter("snapshot" if self._disk.saves(job.key) else "other")

        def say() -> None:
            self._deliver(Finished(job.key, status, code, reason, job.summary(self._epoch)))

        self._disk.when_saved(job.key, say)

    def _leave(self, job: Job) -> None:
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
            "epoch": self._epoch,
            "parked": self._engine.parked,
            "running": [job.report() for job in self._running],
            "queued": len(self._waiting) + len(self._exclusive),
            "retained": len(self._retained),
            "slots": {str(slot): len(held.tokens) for slot, held in sorted(self._engine.slots.items())},
            "memory": self._engine.memory_report(),
            "totals": dict(self._totals),
        }))  # fmt: skip


def _reusable(held: Slot, job: Job) -> tuple[int, Logits | None]:
    """How much of a snapshot that the prompt starts with is reused, and the logits when that is all of it."""
    if len(held) < len(job.ids):
        return len(held), None
    if held.logits is None:
        return len(held) - 1, None  # the answer starts from the last token's logits: compute it once more
    return len(held), held.logits
