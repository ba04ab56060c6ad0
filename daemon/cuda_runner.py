"""A loaded model on a CUDA device: prompts launch by launch, steps as captured graphs (`cuda_steps`)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.backend import Logits, Outputs
from slotd.daemon.candidates import Candidates, View
from slotd.daemon.cuda_errors import errors_that_stick
from slotd.daemon.cuda_steps import CudaSteps, tokens_of
from slotd.daemon.kv.cuda_store import CudaPageStore
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.memory.cuda_memory import CudaMemory
from slotd.daemon.models.model import Interrupt, Interrupted, Model
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceBatch
from slotd.daemon.ops.cuda_batch import BatchLayout, PageAddresses, pack_prompt
from slotd.daemon.ops.cuda_delta import CudaDelta
from slotd.daemon.ops.cuda_graphs import PinnedBuffer, Stream
from slotd.daemon.ops.cuda_greedy import greedy
from slotd.daemon.ops.cuda_ops import CudaCall, CudaOps
from slotd.daemon.ops.cuda_recurrent import PromptRecurrence
from slotd.daemon.ops.cuda_sample import SampleLayout, can_be_looked_at, pack, sample, unpack
from slotd.daemon.ops.cuda_taps import CudaFeatures
from slotd.daemon.rows import Rows


class CudaOutputs:
    """Outputs on the device: see `backend.Outputs`.

    `at_hand` does not tell what was fetched: how a token was found must not depend on who read what before.

    Args:
        runner: whose call it was; logits are there until its next call.
        logits: float32 [m or more, n_vocab] on the device.
        best: int32 [m, 2] in host memory: id and whether the row is finite.
        rows: int64 [m].
        steps: when it was a step: they are told when more is asked for than what is best.
    """

    at_hand = False

    def __init__(
        self, runner: CudaRunner, logits: Any, best: npt.NDArray[np.int32], rows: npt.NDArray[np.int64],
        steps: CudaSteps | None = None,
    ) -> None:  # fmt: skip
        self.rows = rows
        self._best, self._steps = best, steps
        self._runner, self._call, self._device = runner, runner.calls, logits
        self._fetched: Logits | None = None

    @property
    def logits(self) -> Logits:
        """float32 [m, n_vocab] in host memory.

        Raises:
            ValueError: asked for the first time after the next call.
        """
        if self._fetched is None:
            self._check_there()
            self._fetched = self._runner.fetch(self._device, len(self.rows))
        return self._fetched

    def row(self, index: int) -> Logits:
        """float32 [n_vocab] in host memory. Raises ValueError as `logits`."""
        if self._fetched is not None:
            rows, at = self._fetched, index
        else:
            self._check_there()
            rows, at = self._runner.fetch(self._device[index : index + 1], 1), 0
        found: Logits = rows[at]
        return found

    def candidates(self, views: SequenceOf[View]) -> list[Candidates | None]:
        """See `backend.Outputs`.

        Raises:
            ValueError: asked after the next call.
        """
        self._check_there()
        if self._steps is not None:
            self._steps.foresee_nothing()
        return self._runner.candidates(self._device, views)

    def greedy(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        return self._best[:, 0].copy(), self._best[:, 1] != 0

    def _check_there(self) -> None:
        if self._runner.calls != self._call:
            raise ValueError("the logits of an earlier call are gone")


@dataclass(frozen=True, slots=True)
class _Room:
    """What `reserve` has taken for a prompt call.

    Attributes:
        addresses: of the pages, by sequence.
        layout, buffer: of the batch.
        recurrent: of a model with recurrent layers.
        x: as large as the embedding. It is held until then: a pool would cut a free block up for others.
    """

    addresses: list[PageAddresses]
    layout: BatchLayout
    buffer: Any
    recurrent: PromptRecurrence | None
    x: Any


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt call between `embed` and `prompt`."""

    x: Any
    call: CudaCall


class CudaRunner:
    """See `backend.Runner`.

    Args:
        model: the loaded model.
        ops: its ops.
        attention: the kernels for its heads.
        store: the pages.
        memory: the ledger.
        stream: where everything runs; current for the engine's thread.
        max_ctx: most positions of a sequence.
        delta: the kernels for its recurrent layers; None: it has none.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(
        self, model: Model, ops: CudaOps, attention: CudaAttention, store: CudaPageStore, memory: CudaMemory,
        stream: Stream, max_ctx: int, delta: CudaDelta | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.calls = 0
        self._ops, self._attention, self._store, self._memory = ops, attention, store, memory
        self._stream = stream
        self._max_ctx = max_ctx
        self._delta = delta
        self._steps = CudaSteps(model, ops, attention, store, memory, stream, max_ctx, delta)
        self._room: _Room | None = None
        self._features: CudaFeatures | None = None
        self._staging = PinnedBuffer(1 << 16)

    def keep_features(self, features: CudaFeatures) -> None:
        """From now on calls leave theirs there."""
        self._features = self._steps.features = features
        self._steps.drop_graphs()  # those that are there leave none

    def forget_draft(self) -> None:
        self._features = self._steps.features = None
        self._steps.drop_graphs()  # they write features where nobody reads them

    # ----- prompts

    def reserve(self, rows: Rows) -> None:
        self._room = None
        addresses = self._steps.addresses(rows)
        pages = sum(table.shape[1] for table in addresses)
        layout = BatchLayout.for_prompt(len(rows), pages, self._max_ctx)
        buffer = self._memory.empty((layout.nbytes,), np.uint8)
        recurrent = None if self._delta is None else PromptRecurrence(self._delta, self._memory, rows)
        x = self._memory.empty((len(rows), self.model.hyper.n_embd))
        self._room = _Room(addresses, layout, buffer, recurrent, x)

    @errors_that_stick
    def embed(self, rows: Rows) -> _Prompt:
        self._begin_call()
        self._steps.forget(rows.sequences)
        room, self._room = self._room, None
        assert room is not None  # the engine reserves before it embeds
        layout, buffer = room.layout, room.buffer
        pinned = self._pinned(layout.nbytes)
        packed = pack_prompt(self._attention.host_batch(layout, pinned.array), rows, room.addresses)
        self._stream.upload(buffer.data.ptr, pinned, layout.nbytes)
        batch = DeviceBatch(layout, buffer.data.ptr, len(rows), packed.n_entries)
        if room.recurrent is not None:
            room.recurrent.upload()
        call = CudaCall(self._attention, batch, None, buffer, room.recurrent)
        del room  # the block for the embedding is what the embedding gets
        return _Prompt(self.model.embed(tokens_of(layout, buffer)), call)

    @errors_that_stick
    def prompt(self, rows: Rows, x: _Prompt, interrupt: Interrupt | None) -> Outputs:
        taps = None if self._features is None else self._features.prompt_taps(len(rows))
        try:
            hidden = self.model.forward(x.x, x.call, interrupt, taps)
        except Interrupted:
            self._stream.wait()  # the batch's pinned buffer is used again
            raise
        wanted = np.flatnonzero(rows.logits)
        if not len(wanted):
            self._stream.wait()
            empty = self._memory.empty((0, self.model.hyper.n_vocab))
            return CudaOutputs(self, empty, np.empty((0, 2), np.int32), wanted)
        logits = self.model.logits(self._ops.pick(hidden, wanted))
        best = greedy(self._memory, logits).get()  # waits
        return CudaOutputs(self, logits, best, wanted)

    # ----- steps

    @errors_that_stick
    def step(self, rows: Rows, interrupt: Interrupt | None) -> Outputs:
        self._begin_call()
        step = self._steps.run(rows)
        if self._features is not None:
            self._features.left_by_step(step.first_feature)
        wanted = np.flatnonzero(rows.logits)
        logits = step.logits if len(wanted) == len(rows) else step.logits[wanted]
        return CudaOutputs(self, logits, step.ids[wanted], wanted, self._steps)

    def device_is_broken(self) -> bool:
        """Whether nothing can be computed any more."""
        return self._stream.broken()

    @errors_that_stick
    def fetch(self, logits: Any, n: int) -> Logits:
        """The first n rows in host memory."""
        n_bytes = n * logits.shape[1] * 4
        pinned = self._pinned(n_bytes)
        self._stream.download(pinned, logits.data.ptr, n_bytes)
        self._stream.wait()
        rows: Logits = pinned.array[:n_bytes].view(np.float32).reshape(n, -1).copy()
        return rows

    @errors_that_stick
    def candidates(self, logits: Any, views: SequenceOf[View]) -> list[Candidates | None]:
        """What is best in views of logits, float32 [m, n_vocab] on the device; see `backend.Outputs`."""
        n_vocab = logits.shape[1]
        asked = [view for view in views if can_be_looked_at(view, n_vocab)]
        if not asked:
            return [None] * len(views)
        layout = SampleLayout.of(asked)
        try:
            work = self._memory.empty((layout.offsets[-1],), np.uint8)
        except OutOfDeviceMemory:
            return [None] * len(views)  # the rows give the same tokens
        pinned = self._pinned(max(layout.n_bytes_in, layout.n_bytes_out))
        pack(layout, asked, pinned.array)
        self._stream.upload(work.data.ptr, pinned, layout.n_bytes_in)
        sample(logits, layout, work.data.ptr)
        self._stream.download(pinned, work.data.ptr + layout.offsets[1], layout.n_bytes_out)
        self._stream.wait()
        found = iter(unpack(layout, asked, n_vocab, pinned.array[: layout.n_bytes_out]))
        return [next(found) if can_be_looked_at(view, n_vocab) else None for view in views]

    # ----- both

    def _pinned(self, n_bytes: int) -> PinnedBuffer:
        """The runner's pinned buffer, made larger when it has to be; its user waits before the next one."""
        if n_bytes > len(self._staging.array):
            self._staging = PinnedBuffer(n_bytes)
        return self._staging

    def _begin_call(self) -> None:
        self.calls += 1
        if self._features is not None:
            self._features.forget()
        self._stream.use()
