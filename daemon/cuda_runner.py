"""A loaded model on a CUDA device: prompt pieces launch by launch, steps as captured graphs.

A graph is kept for each combination of row bucket and context bucket, captured when it is first needed. Its
buffers are its own and stay where they are; a step fills one pinned buffer, launches, and reads one back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import wraps
from itertools import repeat
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from slotd.daemon.backend import Logits, Outputs
from slotd.daemon.kv.cuda_store import CudaPageStore
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.memory import DeviceLost, OutOfDeviceMemory
from slotd.daemon.memory.cuda_memory import CudaMemory
from slotd.daemon.models.model import Interrupt, Interrupted, Model
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceBatch, StepSpace
from slotd.daemon.ops.cuda_batch import BatchLayout, PageAddresses, Views, pack_prompt, pack_step
from slotd.daemon.ops.cuda_graphs import PinnedBuffer, Stream
from slotd.daemon.ops.cuda_greedy import greedy
from slotd.daemon.ops.cuda_ops import CudaCall, CudaOps
from slotd.daemon.row_checks import row_counts
from slotd.daemon.rows import Rows

#: Rows of a step are filled up to one of these.
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 64)

#: Tokens of the longest sequence of a step likewise; what is longer counts as the longest there may be.
CONTEXT_BUCKETS = (4096, 32768)

#: Graphs that are kept; the one that was not used for longest goes.
MOST_GRAPHS = 16

#: (rows, context of the longest sequence, pages of all).
Key = tuple[int, int, int]


class CudaOutputs:
    """Outputs on the device: see `backend.Outputs`.

    Args:
        runner: whose call it was; logits are there until its next call.
        logits: float32 [m or more, n_vocab] on the device.
        best: int32 [m, 2] in host memory: id and whether the row is finite.
        rows: int64 [m].
    """

    def __init__(
        self, runner: CudaRunner, logits: Any, best: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]
    ) -> None:
        self.rows = rows
        self._best = best
        self._runner, self._call, self._device = runner, runner.calls, logits
        self._fetched: Logits | None = None

    @property
    def logits(self) -> Logits:
        """float32 [m, n_vocab] in host memory.

        Raises:
            ValueError: asked for the first time after the next call.
        """
        if self._fetched is None:
            if self._runner.calls != self._call:
                raise ValueError("the logits of an earlier call are gone")
            self._fetched = self._runner.fetch(self._device, len(self.rows))
        return self._fetched

    def greedy(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        return self._best[:, 0].copy(), self._best[:, 1] != 0


@dataclass(slots=True)
class _Step:
    """What one graph needs.

    Attributes:
        layout: of its batch.
        host, views: the pinned batch, and its arrays.
        arrays: device arrays that must stay where they are.
        call: the batch as the ops see it.
        best: the pinned answer, int32 [rows, 2].
        logits: device array of the last step.
        graph: the captured graph.
    """

    layout: BatchLayout
    host: PinnedBuffer
    views: Views
    arrays: list[Any]
    call: CudaCall
    best: PinnedBuffer
    logits: Any = None
    graph: Any = None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt call between `embed` and `prompt`."""

    x: Any
    call: CudaCall
    arrays: list[Any]


P = ParamSpec("P")
T = TypeVar("T")


def _errors_that_stick(
    method: Callable[Concatenate[CudaRunner, P], T],
) -> Callable[Concatenate[CudaRunner, P], T]:
    """A failure after which the context is gone is DeviceLost, whatever it said."""

    @wraps(method)
    def guarded(runner: CudaRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(runner, *args, **kwargs)
        except (OutOfDeviceMemory, Interrupted):
            raise
        except Exception as error:
            if not runner.device_is_broken():
                raise
            reason = f"{type(error).__name__}: {error}"
        raise DeviceLost(reason)

    return guarded


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

    Attributes:
        calls: number of calls so far.
    """

    def __init__(
        self, model: Model, ops: CudaOps, attention: CudaAttention, store: CudaPageStore, memory: CudaMemory,
        stream: Stream, max_ctx: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.calls = 0
        self._ops, self._attention, self._store, self._memory = ops, attention, store, memory
        self._stream = stream
        self._max_ctx = max_ctx
        self._steps: OrderedDict[Key, _Step] = OrderedDict()
        self._staging = PinnedBuffer(1 << 16)

    # ----- prompts

    def reserve(self, rows: Rows) -> None:
        # Taken and given back: the pool keeps the block for the embedding.
        self._memory.empty((len(rows), self.model.hyper.n_embd))

    @_errors_that_stick
    def embed(self, rows: Rows) -> _Prompt:
        self._begin_call()
        n, addresses = len(rows), self._table_addresses(rows)
        layout = BatchLayout.for_prompt(n, sum(table.shape[1] for table in addresses), self._max_ctx)
        buffer = self._memory.empty((layout.nbytes,), np.uint8)
        if layout.nbytes > len(self._staging.array):
            self._staging = PinnedBuffer(layout.nbytes)
        views = layout.views(self._staging.array)
        packed = pack_prompt(layout, views, rows, addresses, *self._row_bytes)
        self._stream.upload(buffer.data.ptr, self._staging, layout.nbytes)
        batch = DeviceBatch(layout, buffer.data.ptr, n, packed.n_entries)
        offset, shape, dtype = layout.fields["tokens"]
        tokens = buffer[offset : offset + shape[0] * dtype.itemsize].view(dtype)
        return _Prompt(self.model.embed(tokens), CudaCall(self._attention, batch, None), [buffer])

    @_errors_that_stick
    def prompt(self, rows: Rows, x: _Prompt, interrupt: Interrupt | None) -> Outputs:
        try:
            hidden = self.model.forward(x.x, x.call, interrupt)
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

    @_errors_that_stick
    def step(self, rows: Rows, interrupt: Interrupt | None) -> Outputs:
        self._begin_call()
        addresses = self._table_addresses(rows)
        key = self._key(len(rows), addresses)
        step = self._steps.get(key)
        fresh = step is None
        if step is None:
            step = self._new_step(key)
        pack_step(step.layout, step.views, rows, addresses, *self._row_bytes, self._attention.shape.per_group)
        if fresh:
            self._first_run(key, step)
        else:
            self._steps.move_to_end(key)
            self._stream.launch(step.graph)
        self._stream.wait()
        wanted = np.flatnonzero(rows.logits)
        best = step.best.array.view(np.int32).reshape(-1, 2)[wanted]
        logits = step.logits if len(wanted) == len(rows) else step.logits[wanted]
        return CudaOutputs(self, logits, best, wanted)

    def device_is_broken(self) -> bool:
        """Whether nothing can be computed any more."""
        return self._stream.broken()

    def drop_graphs(self) -> None:
        """Forget all graphs; the next steps capture theirs again."""
        self._steps.clear()

    @_errors_that_stick
    def fetch(self, logits: Any, n: int) -> Logits:
        """The first n rows in host memory."""
        n_bytes = n * logits.shape[1] * 4
        if n_bytes > len(self._staging.array):
            self._staging = PinnedBuffer(n_bytes)
        self._stream.download(self._staging, logits.data.ptr, n_bytes)
        self._stream.wait()
        rows: Logits = self._staging.array[:n_bytes].view(np.float32).reshape(n, -1).copy()
        return rows

    def _key(self, n: int, addresses: SequenceOf[PageAddresses]) -> Key:
        pages = [table.shape[1] for table in addresses]
        longest = max(pages) * PAGE
        context = next((b for b in CONTEXT_BUCKETS if longest <= b), self._max_ctx)
        room, total = pages_for(context), sum(pages)
        while room < total:
            room *= 4
        return next(b for b in ROW_BUCKETS if b >= n), context, room

    def _new_step(self, key: Key) -> _Step:
        rows, context, pages = key
        shape = self._attention.shape
        layout = self._attention.step_layout(rows, pages, context)
        host = PinnedBuffer(layout.nbytes)
        while len(self._steps) >= MOST_GRAPHS:
            self._steps.popitem(last=False)
        with self._memory.capture_pool(self.drop_graphs):
            buffer = self._memory.empty((layout.nbytes,), np.uint8)
            scratch = self._memory.empty((StepSpace.nbytes(layout, shape),), np.uint8)
        call = CudaCall(
            self._attention,
            DeviceBatch(layout, buffer.data.ptr, rows),
            StepSpace.at(scratch.data.ptr, layout, shape),
        )
        return _Step(layout, host, layout.views(host.array), [buffer, scratch], call, PinnedBuffer(rows * 8))

    def _first_run(self, key: Key, step: _Step) -> None:
        """Run a step as it is, so that the capture finds every kernel and block; then capture and run it."""
        with self._memory.capture_pool(self.drop_graphs), self._memory.driver_failures():
            self._enqueue(step)
            step.logits = None
            step.graph = self._stream.capture(lambda: self._enqueue(step))
        self._steps[key] = step
        self._stream.launch(step.graph)

    def _enqueue(self, step: _Step) -> None:
        (buffer, _), layout = step.arrays, step.layout
        self._stream.upload(buffer.data.ptr, step.host, layout.nbytes)
        offset, shape, dtype = layout.fields["tokens"]
        tokens = buffer[offset : offset + shape[0] * dtype.itemsize].view(dtype)
        x = self.model.embed(tokens)
        step.logits = self.model.logits(self.model.forward(x, step.call, None))
        best = greedy(self._memory, step.logits)
        self._stream.download(step.best, best.data.ptr, layout.rows * 8)

    # ----- both

    def _begin_call(self) -> None:
        self.calls += 1
        self._stream.use()

    @property
    def _row_bytes(self) -> tuple[int, int]:
        return self._attention.shape.k_row_bytes, self._attention.shape.v_row_bytes

    def _table_addresses(self, rows: Rows) -> list[PageAddresses]:
        """For each sequence where the pages lie that hold its tokens and rows."""
        counts = row_counts(rows) if len(rows) != len(rows.sequences) else repeat(1)
        found: list[PageAddresses] = []
        for sequence, n in zip(rows.sequences, counts, strict=False):
            found.append(self._store.addresses(sequence.pages)[:, : pages_for(len(sequence) + n)])
        return found
