"""A DFlash draft on a CUDA device: its context row by row, its blocks as captured graphs.

Rows of steps that were committed become context when somebody asks for a proposal, or before their features
or pages go: many steps' rows in one launch while nobody does. Nothing waits for that, and a proposal is one
copy in and one out. Arrays of these graphs have places of their own (tag `draft`): the logits of the target's
last step stay while they run.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.cuda_errors import errors_that_stick
from slotd.daemon.cuda_steps import ROW_BUCKETS, tokens_of
from slotd.daemon.draft_rows import ContextRows, DraftBlock, Proposals
from slotd.daemon.kv.cuda_store import CudaPageStore
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.memory.cuda_memory import CudaMemory
from slotd.daemon.models.dflash import DFlash
from slotd.daemon.ops import cuda_blocks
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceBatch, StepSpace
from slotd.daemon.ops.cuda_batch import BatchLayout, HostBatch
from slotd.daemon.ops.cuda_blocks import Block, block_layout, context_layout, pack_blocks, pack_context
from slotd.daemon.ops.cuda_graphs import Mark, PinnedBuffer, Stream
from slotd.daemon.ops.cuda_ops import CudaCall, CudaOps
from slotd.daemon.ops.cuda_prepare import Picked, most_width
from slotd.daemon.ops.cuda_taps import CudaFeatures
from slotd.daemon.ops.cuda_topk import CHOICE, MOST_VOCAB, WIDTHS, topk
from slotd.daemon.rows import MAX_STEP_ROWS
from slotd.daemon.weights.draft_file import DraftFile
from slotd.protocol.errors import ModelError

#: Rows of a prompt that become context at a time.
PIECE_ROWS = 512

#: Fewest pages of all contexts of a call that a graph has room for: those of one at its usual length.
LEAST_PAGES = 48

#: Graphs of blocks that are kept; the one that was not used for longest goes.
MOST_GRAPHS = 12

#: Copies of rows of context that may be under way.
UNDER_WAY = 4

#: (rows, pages of all, width, temperature).
Key = tuple[int, int, int, float]


class _Uploads:
    """Pinned buffers for calls of one layout, used in turn."""

    def __init__(self, attention: CudaAttention, layout: BatchLayout, stream: Stream) -> None:
        self._layout, self._stream = layout, stream
        self._buffers = [PinnedBuffer(layout.nbytes) for _ in range(UNDER_WAY)]
        self._hosts = [attention.host_batch(layout, buffer.array) for buffer in self._buffers]
        self._sent: list[Mark | None] = [None] * UNDER_WAY
        self._turn = 0

    def next(self) -> HostBatch:
        """What to fill; the copy before the last ones has been made."""
        self._turn = (self._turn + 1) % UNDER_WAY
        sent = self._sent[self._turn]
        if sent is not None:
            sent.wait()
        return self._hosts[self._turn]

    def send(self, target: int) -> None:
        """Enqueue the copy of what `next` gave to an address of the device."""
        self._stream.upload(target, self._buffers[self._turn], self._layout.nbytes)
        self._sent[self._turn] = self._stream.mark()


@dataclass(slots=True, eq=False)
class _Context:
    """Rows of context in a captured graph.

    Attributes:
        layout, buffer, call: of its batch, the buffer on the device.
        uploads: of its batches.
        graph: None before the first run.
    """

    layout: BatchLayout
    buffer: Any
    call: CudaCall
    uploads: _Uploads
    graph: Any = None


@dataclass(slots=True, eq=False)
class _Seen:
    """A batch of blocks: pinned, on the device, and as the ops see it."""

    pinned: PinnedBuffer
    host: HostBatch
    buffer: Any
    call: CudaCall


@dataclass(slots=True, eq=False)
class _Blocks:
    """Blocks in a captured graph.

    Attributes:
        batch: what layers see.
        sliding: what those with a window see; the same object when there are none.
        answer: CHOICEs of all rows, pinned.
        graph: None before the first run.
    """

    batch: _Seen
    sliding: _Seen
    answer: PinnedBuffer
    graph: Any = None


class CudaDraft:
    """See `backend.DraftRunner`.

    Args:
        model: the loaded draft.
        ops: its ops.
        attention: the kernels for its heads.
        store: its pages.
        memory: the ledger.
        stream: that of the target.
        max_ctx: most positions of a sequence.
        features: of the target's last call.
    """

    def __init__(
        self, model: DFlash, ops: CudaOps, attention: CudaAttention, store: CudaPageStore, memory: CudaMemory,
        stream: Stream, max_ctx: int, features: CudaFeatures,
    ) -> None:  # fmt: skip
        self.model = model
        self._ops, self._attention, self._store = ops, attention, store
        self._memory, self._stream, self._max_ctx, self._features = memory, stream, max_ctx, features
        self._contexts: dict[int, _Context] = {}
        self._blocks: OrderedDict[Key, _Blocks] = OrderedDict()
        self._pieces: _Uploads | None = None
        # Rows of steps that are not in the context yet, by page table where they end, and page tables with
        # rows that never will be.
        self._left: list[cuda_blocks.ContextRows] = []
        self._ends: dict[int, tuple[list[int], int]] = {}
        self._lost: list[list[int]] = []
        store.before_reuse = weakref.WeakMethod(self.finish)

    @property
    def block_size(self) -> int:
        return self.model.parameters.block_size

    def drop_graphs(self) -> None:
        """Forget all graphs; the next calls capture theirs again."""
        self._contexts.clear()
        self._blocks.clear()

    def device_is_broken(self) -> bool:
        """Whether nothing can be computed any more."""
        return self._stream.broken()

    # ----- context

    #: The device does it on the side.
    puts_off = 0

    def take(self, rows: npt.NDArray[np.int64]) -> Any:
        raise ValueError("nothing is put off")

    @errors_that_stick
    def extend_context(self, rows: ContextRows) -> None:
        features, index = self._features.of(rows.rows)
        addresses = self._store.addresses(rows.pages)
        taken = cuda_blocks.ContextRows(index, rows.position, rows.place, addresses)
        if features is not self._features.of_steps:
            self.finish()  # rows that were taken back must not be written over these
            self._stream.use()
            for part in _in_parts(taken, PIECE_ROWS):
                self._extend_by_piece(part, features)
            return
        known = self._ends.get(id(rows.pages))
        if known is not None and rows.place < known[1]:
            self.finish()  # no place is written twice in a launch
        self._features.hold(self.finish)
        self._left.append(taken)
        self._ends[id(rows.pages)] = rows.pages, rows.place + len(index)

    @errors_that_stick
    def finish(self) -> None:
        if not self._left:
            return
        self._stream.use()
        parts = [part for rows in self._left for part in _in_parts(rows, MAX_STEP_ROWS)]
        tables = [pages for pages, _ in self._ends.values()]
        self._left.clear()
        self._ends.clear()
        self._features.held_no_more()
        try:
            while parts:
                n, count = len(parts[0].features), 1
                while count < len(parts) and n + len(parts[count].features) <= MAX_STEP_ROWS:
                    n, count = n + len(parts[count].features), count + 1
                self._extend_by_step(parts[:count], n)
                del parts[:count]
        except OutOfDeviceMemory:
            self._lost += tables

    def _extend_by_step(self, parts: list[cuda_blocks.ContextRows], n: int) -> None:
        bucket = next(b for b in ROW_BUCKETS if b >= n)
        context = self._contexts.get(bucket)
        if context is None:
            context = self._new_context(bucket)
        pack_context(context.uploads.next(), parts)
        context.uploads.send(context.buffer.data.ptr)
        if context.graph is None:
            self._capture_context(context)
        self._stream.launch(context.graph)
        self._contexts[bucket] = context

    def _capture_context(self, context: _Context) -> None:
        def work() -> None:
            source = tokens_of(context.layout, context.buffer)
            self.model.context(Picked(self._features.of_steps, source), context.call)

        with self._memory.capture_pool(self.drop_graphs, "draft"), self._memory.driver_failures():
            work()  # so that every kernel and every block of memory is there
            context.graph = self._stream.capture(work)

    def _new_context(self, rows: int) -> _Context:
        layout = context_layout(rows, self._max_ctx)
        with self._memory.capture_pool(self.drop_graphs, "draft"):
            buffer = self._memory.empty((layout.nbytes,), np.uint8)
        call = CudaCall(self._attention, DeviceBatch(layout, buffer.data.ptr, rows), None, buffer)
        return _Context(layout, buffer, call, _Uploads(self._attention, layout, self._stream))

    def _extend_by_piece(self, rows: cuda_blocks.ContextRows, features: Any) -> None:
        """Launch by launch: rows of a prompt."""
        layout, n = context_layout(PIECE_ROWS, self._max_ctx), len(rows.features)
        if self._pieces is None:
            self._pieces = _Uploads(self._attention, layout, self._stream)
        buffer = self._memory.empty((layout.nbytes,), np.uint8)
        pack_context(self._pieces.next(), [rows])
        self._pieces.send(buffer.data.ptr)
        call = CudaCall(self._attention, DeviceBatch(layout, buffer.data.ptr, n), None, buffer)
        self.model.context(Picked(features, tokens_of(layout, buffer)[:n]), call)

    # ----- blocks

    @errors_that_stick
    def propose(
        self, blocks: SequenceOf[DraftBlock], depth: int, width: int, temperature: float
    ) -> Proposals:
        n = depth + 1
        self.finish()
        self._check_whole(blocks)
        at_once = max(1, MAX_STEP_ROWS // n)
        self._stream.use()
        found = np.concatenate(
            [
                self._run(blocks[start : start + at_once], n, width, temperature)
                for start in range(0, len(blocks), at_once)
            ]
        )
        behind = found.reshape(len(blocks), n, width)[:, 1:]
        ids = self.model.token_ids(behind["id"].reshape(-1)).reshape(behind.shape)
        return Proposals(ids, behind["logprob"].copy())

    def _check_whole(self, blocks: SequenceOf[DraftBlock]) -> None:
        """Raises OutOfDeviceMemory: rows of a context were lost for want of it, so it has to be forgotten."""
        lost = [pages for pages in self._lost if any(block.pages is pages for block in blocks)]
        if lost:
            self._lost = [pages for pages in self._lost if not any(pages is one for one in lost)]
            raise OutOfDeviceMemory(self._memory.current_site, 0, self._memory.free)

    def _run(self, blocks: SequenceOf[DraftBlock], n: int, width: int, temperature: float) -> Any:
        """CHOICEs of all rows of some blocks, as many as a call takes: [rows, width]."""
        tokens = self.model.block_tokens([block.token for block in blocks], n).reshape(-1, n)
        tables = [self._store.addresses(b.pages)[:, : pages_for(b.length + n)] for b in blocks]
        at_once = next((w for w in WIDTHS if w >= width), None)
        if at_once is None:
            raise ValueError(f"{width} tokens of each position, the limit is {WIDTHS[-1]}")
        room, total = LEAST_PAGES, sum(table.shape[1] for table in tables)
        while room < total:
            room *= 2
        bucket = next(b for b in ROW_BUCKETS if b >= tokens.size)
        key = bucket, room, at_once, temperature
        step = self._blocks.get(key)
        if step is None:
            step = self._new_blocks(key)
        parts = [
            Block(row, block.position, block.length, table)
            for row, block, table in zip(tokens, blocks, tables, strict=True)
        ]
        d = self.model.parameters
        pack_blocks(step.batch.host, parts, causal=d.causal)
        if step.sliding is not step.batch:
            pack_blocks(step.sliding.host, [_within(part, d.window) for part in parts], causal=True)
        if step.graph is None:
            self._capture_blocks(step, key)
        self._stream.launch(step.graph)
        self._blocks[key] = step
        self._blocks.move_to_end(key)
        self._stream.mark().wait()
        return step.answer.array.view(CHOICE).reshape(-1, at_once)[: tokens.size, :width].copy()

    def _capture_blocks(self, step: _Blocks, key: Key) -> None:
        with self._memory.capture_pool(self.drop_graphs, "draft"), self._memory.driver_failures():
            self._work(step, key)  # so that every kernel and every block of memory is there
            step.graph = self._stream.capture(lambda: self._work(step, key))

    def _work(self, step: _Blocks, key: Key) -> None:
        _, _, width, temperature = key
        layout = step.batch.call.batch.layout
        for seen in dict.fromkeys((step.batch, step.sliding)):
            self._stream.upload(seen.buffer.data.ptr, seen.pinned, layout.nbytes)
        with self._ops.step():
            x = self.model.embed(tokens_of(layout, step.batch.buffer))
            hidden = self.model.forward(x, step.batch.call, step.sliding.call)
            logits = self.model.logits(hidden)
        best = topk(self._memory, logits, width, temperature)
        self._stream.download(step.answer, best.data.ptr, best.nbytes)

    def _new_blocks(self, key: Key) -> _Blocks:
        rows, pages, width, _ = key
        layout = block_layout(self._attention.step_layout(rows, pages, pages * PAGE))
        while len(self._blocks) >= MOST_GRAPHS:
            self._blocks.popitem(last=False)
        with self._memory.capture_pool(self.drop_graphs, "draft"):
            scratch = self._memory.empty((StepSpace.nbytes(layout, self._attention.shape),), np.uint8)
            batch = self._new_seen(layout, scratch)
            sliding = self._new_seen(layout, scratch) if self.model.parameters.sliding else batch
        return _Blocks(batch, sliding, PinnedBuffer(rows * width * CHOICE.itemsize))

    def _new_seen(self, layout: BatchLayout, scratch: Any) -> _Seen:
        pinned = PinnedBuffer(layout.nbytes)
        host = self._attention.host_batch(layout, pinned.array)
        buffer = self._memory.empty((layout.nbytes,), np.uint8)
        space = StepSpace.at(scratch.data.ptr, layout, self._attention.shape)
        batch = DeviceBatch(layout, buffer.data.ptr, layout.rows)
        return _Seen(pinned, host, buffer, CudaCall(self._attention, batch, space, scratch))


def _in_parts(rows: cuda_blocks.ContextRows, most: int) -> Iterator[cuda_blocks.ContextRows]:
    for start in range(0, len(rows.features), most):
        part = rows.features[start : start + most]
        yield cuda_blocks.ContextRows(part, rows.position + start, rows.place + start, rows.addresses)


def check_draft(file: DraftFile, n_vocab: int) -> None:
    """Raises ModelError for a draft that there are no kernels for. n_vocab: tokens of the target."""
    d = file.parameters
    if d.heads:
        raise ModelError(
            f"{file.path}: {d.heads} of a draft is not supported on a CUDA device (--device cpu runs it)"
        )
    if d.n_features * d.n_embd > most_width("taken") or d.n_embd % 4:
        raise ModelError(
            f"{file.path}: {d.n_features} features of {d.n_embd} numbers, a CUDA device takes up to "
            f"{most_width('taken')} in all, in multiples of 4"
        )
    n_rows = n_vocab if d.n_own_ids is None else d.n_own_ids
    if not WIDTHS[-1] <= n_rows <= MOST_VOCAB:
        raise ModelError(
            f"{file.path}: {n_rows} tokens, a CUDA device takes {WIDTHS[-1]} to {MOST_VOCAB} for a draft"
        )


def _within(block: Block, window: int) -> Block:
    """The block as layers with a window see it: whole pages, so that some rows see up to a page more."""
    n = max(0, block.context - window) // PAGE
    return Block(block.tokens, block.position, block.context - n * PAGE, block.addresses[:, n:])
