"""Steps on a CUDA device as captured graphs, one step ahead where the next one can be foreseen.

A graph is kept for each combination of row bucket and context bucket, captured when it is first needed; its
buffers are its own and stay where they are. Each comes as a pair, so that one can run while the host reads
the other.

Plain greedy decoding asks for a step, gets the best ids, and asks for the next step with them. When that was
so last time, the next step is enqueued at once, behind the one that was asked for: it takes its tokens from
where the device leaves them. If the caller then asks for that very step, it is under way already, and what
the host does costs nothing; if not, its results are forgotten. It wrote one place of K/V behind the
committed end of each sequence, which nobody reads before a row is written there, and recurrent states of its
own, which nobody has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.cuda_store import CudaPageStore
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.memory.cuda_memory import CudaMemory
from slotd.daemon.models.model import Model
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceBatch, StepSpace
from slotd.daemon.ops.cuda_batch import BatchLayout, HostBatch, PageAddresses, pack_ahead, pack_step
from slotd.daemon.ops.cuda_delta import CudaDelta
from slotd.daemon.ops.cuda_graphs import Mark, PinnedBuffer, Stream
from slotd.daemon.ops.cuda_greedy import greedy, take
from slotd.daemon.ops.cuda_ops import CudaCall, CudaOps
from slotd.daemon.ops.cuda_recurrent import CudaState, KeptInputs, StepRecurrence
from slotd.daemon.ops.cuda_taps import CudaFeatures
from slotd.daemon.row_checks import row_counts
from slotd.daemon.rows import Rows
from slotd.daemon.sequence import Sequence

#: Rows of a step are filled up to one of these.
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 64)

#: Tokens of the longest sequence of a step likewise; what is longer counts as the longest there may be.
CONTEXT_BUCKETS = (4096, 32768)

#: Pairs of graphs that are kept; the one that was not used for longest goes.
MOST_PAIRS = 16

#: (rows, context of the longest sequence, pages of all).
Key = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class CapturedStep:
    """What one graph needs, and where it leaves its results.

    Attributes:
        layout: of its batch.
        pinned, host: the pinned buffer of its batch, and what fills it.
        buffer: the batch on the device.
        call: the batch as the ops see it.
        best: int32 [rows, 2] on the device: what the step finds best.
        answer: the same in pinned memory.
        first_feature: number of the first row of features that its last run left.
        logits: float32 [rows, n_vocab] on the device.
        graph: the captured graph, None before its first run.
        done: the end of its last run.
    """

    layout: BatchLayout
    pinned: PinnedBuffer
    host: HostBatch
    buffer: Any
    call: CudaCall
    best: Any
    answer: PinnedBuffer
    first_feature: int = 0
    logits: Any = None
    graph: Any = None
    done: Mark | None = None

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """int32 [rows, 2]: id and whether the row is finite, once the run is done."""
        return self.answer.array.view(np.int32).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A step of plain decoding: one row of each sequence.

    Attributes:
        sequences: in call order.
        lengths: committed tokens of each.
        pages: the page that each row is written to.
        step: where its results are, or will be.
        read, write: of recurrent layers, the states of each that it starts from and leaves; else none.
    """

    sequences: tuple[Sequence, ...]
    lengths: tuple[int, ...]
    pages: tuple[int, ...]
    step: CapturedStep
    read: tuple[CudaState, ...] = ()
    write: tuple[CudaState, ...] = ()

    @classmethod
    def of(cls, rows: Rows, step: CapturedStep, ahead: int = 0, write: tuple[CudaState, ...] = ()) -> _Asked:
        lengths = tuple(len(sequence) + ahead for sequence in rows.sequences)
        pages = tuple(s.pages[n // PAGE] for s, n in zip(rows.sequences, lengths, strict=True))
        read = tuple(sequence.open_state.after for sequence in rows.sequences) if write else ()
        return cls(rows.sequences, lengths, pages, step, read, write)

    def hand_over(self, rows: Rows) -> None:
        """The rows are these: what their commits take is what this step leaves."""
        for sequence, state in zip(rows.sequences, self.write, strict=False):
            sequence.open_state.after = state

    def is_same(self, rows: Rows) -> bool:
        """Whether `rows` are these but for their tokens."""
        return (
            len(rows) == len(rows.sequences)
            and rows.sequences == self.sequences
            and tuple(map(len, rows.sequences)) == self.lengths
            and all(s.state is state for s, state in zip(rows.sequences, self.read, strict=False))
            and all(
                sequence.pages[n // PAGE] == page
                for sequence, n, page in zip(self.sequences, self.lengths, self.pages, strict=True)
            )
        )


class CudaSteps:
    """Runs steps of one model.

    Args:
        model, ops, attention, store, memory, stream, max_ctx: as CudaRunner's.

    Attributes:
        features: what steps leave for a draft; None: nothing.
    """

    features: CudaFeatures | None = None

    def __init__(
        self, model: Model, ops: CudaOps, attention: CudaAttention, store: CudaPageStore, memory: CudaMemory,
        stream: Stream, max_ctx: int, delta: CudaDelta | None = None,
    ) -> None:  # fmt: skip
        self._model, self._ops, self._attention, self._store = model, ops, attention, store
        self._memory, self._stream, self._max_ctx, self._delta = memory, stream, max_ctx, delta
        self._pairs: OrderedDict[Key, tuple[CapturedStep, CapturedStep]] = OrderedDict()
        self._last: _Asked | None = None  # the step that was asked for last, if it was plain decoding
        self._ahead: _Asked | None = None  # the step behind it, if that is under way

    def run(self, rows: Rows) -> CapturedStep:
        """Compute a step; returns when its results are there."""
        goes_on = self._goes_on(rows)
        ahead, self._ahead = self._ahead, None
        if goes_on and ahead is not None and ahead.is_same(rows):
            step = ahead.step
            ahead.hand_over(rows)
        else:
            step = self._launch(rows, not_this=ahead.step if ahead is not None else None)
        plain = len(rows) == len(rows.sequences)
        if plain and goes_on:
            with suppress(OutOfDeviceMemory):  # what was asked for is under way
                self._ahead = self._launch_ahead(rows, step)
        self._last = _Asked.of(rows, step) if plain else None
        assert step.done is not None
        step.done.wait()
        return step

    def forget(self, sequences: Collection[Sequence]) -> None:
        """Other rows of these sequences are computed: what was foreseen for them is worth nothing."""
        if self._last is not None and not set(sequences).isdisjoint(self._last.sequences):
            self._last = self._ahead = None

    def foresee_nothing(self) -> None:
        """The tokens of the next step are not those that the last one found best, or only by chance."""
        self._last = None

    def drop_graphs(self) -> None:
        """Forget all graphs; the next steps capture theirs again."""
        self._pairs.clear()
        self._last = self._ahead = None

    # ----- what comes next

    def _goes_on(self, rows: Rows) -> bool:
        """Whether the rows are the best tokens of the step before."""
        last = self._last
        if last is None or len(rows) != len(rows.sequences) or rows.sequences != last.sequences:
            return False
        best = last.step.ids[: len(rows), 0]
        return bool((best == rows.tokens).all()) and all(
            len(sequence) == length + 1 for sequence, length in zip(last.sequences, last.lengths, strict=True)
        )

    def _launch_ahead(self, rows: Rows, before: CapturedStep) -> _Asked | None:
        """Enqueue the step behind one of plain decoding; None where it does not fit what there is."""
        for sequence in rows.sequences:
            if pages_for(len(sequence) + 2) > len(sequence.pages) or len(sequence) + 1 >= self._max_ctx:
                return None
        addresses = self.addresses(rows, more=1)
        key = self._key(len(rows), addresses)
        pair = self._pairs.get(key)
        if pair is None or before not in pair:
            return None
        step = pair[1] if before is pair[0] else pair[0]
        self._before_packing(step)
        pack_ahead(step.host, rows, addresses)
        self._place_features(step, len(rows))
        states: tuple[CudaState, ...] = ()
        if isinstance(step.call.recurrent, StepRecurrence):
            states = step.call.recurrent.fill_ahead(rows)
        self._enqueue(step, pair)
        return _Asked.of(rows, step, 1, states)

    # ----- launches

    def _launch(self, rows: Rows, not_this: CapturedStep | None) -> CapturedStep:
        addresses = self.addresses(rows)
        key = self._key(len(rows), addresses)
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._new_pair(key)
        step = pair[1] if pair[0] is not_this else pair[0]
        self._before_packing(step)
        pack_step(step.host, rows, addresses)
        self._place_features(step, len(rows))
        if step.call.recurrent is not None:
            assert isinstance(step.call.recurrent, StepRecurrence)
            step.call.recurrent.fill(rows)
        self._enqueue(step, pair)
        self._pairs[key] = pair
        self._pairs.move_to_end(key)
        return step

    def _place_features(self, step: CapturedStep, n: int) -> None:
        if self.features is not None:
            step.first_feature = self.features.places(step.host.views["features"], n)

    def _before_packing(self, step: CapturedStep) -> None:
        """A run that nobody waited for may still read the pinned batch."""
        if step.done is not None:
            step.done.wait()

    def _enqueue(self, step: CapturedStep, pair: tuple[CapturedStep, CapturedStep]) -> None:
        if step.graph is None:
            self._capture(step, pair[1] if step is pair[0] else pair[0])
        self._stream.launch(step.graph)
        step.done = self._stream.mark()

    def _capture(self, step: CapturedStep, other: CapturedStep) -> None:
        """Run it once as it is, so that every kernel and every block of memory is there; then capture it."""
        with self._memory.capture_pool(self.drop_graphs), self._memory.driver_failures():
            self._work(step, other)
            step.logits = None
            step.graph = self._stream.capture(lambda: self._work(step, other))

    def _work(self, step: CapturedStep, other: CapturedStep) -> None:
        layout = step.layout
        self._stream.upload(step.buffer.data.ptr, step.pinned, layout.nbytes)
        if isinstance(step.call.recurrent, StepRecurrence):
            step.call.recurrent.tables.upload(self._stream)
        tokens = tokens_of(layout, step.buffer)
        take(tokens, other.best)
        places = array_of(layout, step.buffer, "features")
        taps = None if self.features is None else self.features.step_taps(places)
        with self._ops.step():
            x = self._model.embed(tokens)
            step.logits = self._model.logits(self._model.forward(x, step.call, None, taps))
        greedy(self._memory, step.logits, step.best)
        self._stream.download(step.answer, step.best.data.ptr, layout.rows * 8)

    def _new_pair(self, key: Key) -> tuple[CapturedStep, CapturedStep]:
        rows, context, pages = key
        layout = self._attention.step_layout(rows, pages, context)
        while len(self._pairs) >= MOST_PAIRS:
            self._pairs.popitem(last=False)
        with self._memory.capture_pool(self.drop_graphs):
            scratch = self._memory.empty((StepSpace.nbytes(layout, self._attention.shape),), np.uint8)
            kept = None if self._delta is None else KeptInputs(self._delta, self._memory, layout.rows)
            first, second = (self._new_step(layout, scratch, kept) for _ in range(2))
        return first, second

    def _new_step(self, layout: BatchLayout, scratch: Any, kept: KeptInputs | None) -> CapturedStep:
        """scratch: of step attention; kept: of recurrent layers. The two of a pair never run at once."""
        pinned = PinnedBuffer(layout.nbytes)
        host = self._attention.host_batch(layout, pinned.array)
        buffer = self._memory.empty((layout.nbytes,), np.uint8)
        best = self._memory.empty((layout.rows, 2), np.int32)
        space = StepSpace.at(scratch.data.ptr, layout, self._attention.shape)
        batch = DeviceBatch(layout, buffer.data.ptr, layout.rows)
        recurrent = None
        if self._delta is not None and kept is not None:
            recurrent = StepRecurrence(self._delta, self._memory, kept)
        call = CudaCall(self._attention, batch, space, scratch, recurrent)
        answer = PinnedBuffer(layout.rows * 8)
        return CapturedStep(layout, pinned, host, buffer, call, best, answer)

    # ----- where things lie

    def addresses(self, rows: Rows, more: int = 0) -> list[PageAddresses]:
        """For each sequence where the pages lie that hold its tokens and rows, and `more` behind them."""
        one_each = len(rows) == len(rows.sequences)
        counts = [1] * len(rows) if one_each else row_counts(rows)
        return [
            self._store.addresses(sequence.pages)[:, : pages_for(len(sequence) + n + more)]
            for sequence, n in zip(rows.sequences, counts, strict=True)
        ]

    def _key(self, n: int, addresses: SequenceOf[PageAddresses]) -> Key:
        pages = [table.shape[1] for table in addresses]
        longest = max(pages) * PAGE
        context = next((b for b in CONTEXT_BUCKETS if longest <= b), self._max_ctx)
        room, total = pages_for(context), sum(pages)
        while room < total:
            room *= 4
        return next(b for b in ROW_BUCKETS if b >= n), context, room


def tokens_of(layout: BatchLayout, buffer: Any) -> Any:
    """The tokens of a batch on the device: int32 [rows]."""
    return array_of(layout, buffer, "tokens")


def array_of(layout: BatchLayout, buffer: Any, name: str) -> Any:
    """An array of one dimension of a batch on the device."""
    offset, (n,), dtype = layout.fields[name]
    return buffer[offset : offset + n * dtype.itemsize].view(dtype)
