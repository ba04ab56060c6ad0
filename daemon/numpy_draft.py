"""A DFlash draft on the NumPy backend, and what the target's runner keeps for it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from slotd.daemon.draft_rows import ContextRows, DraftBlock, Proposals
from slotd.daemon.kv.batches import block_batch, context_batch
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory, OutOfDeviceMemory
from slotd.daemon.models.dflash import DFlash
from slotd.daemon.models.dflash_heads import DFlash2, MarkovHead, SelectorHead
from slotd.daemon.models.model import Model
from slotd.daemon.ops.batch import Array
from slotd.daemon.ops.blas import BlasThreads
from slotd.daemon.ops.numpy_ops import NumpyOps
from slotd.daemon.ops.top_logprobs import top_logprobs
from slotd.daemon.weights.draft_file import DraftFile


class Features:
    """The features of one call of the target: its `model.Taps`.

    Args:
        memory: the ledger.
        layers: whose outputs, in this order.
        n_embd: width of each.
    """

    def __init__(self, memory: DeviceMemory, layers: SequenceOf[int], n_embd: int) -> None:
        self._memory = memory
        self._columns = {layer: slice(i * n_embd, (i + 1) * n_embd) for i, layer in enumerate(layers)}
        self._width = len(layers) * n_embd
        self._rows: Array | None = None

    def begin(self, n: int) -> bool:
        """A call of n rows begins; whether there is room for what they leave."""
        self.forget()
        try:
            self._rows = self._memory.empty((n, self._width), tag="draft")
        except OutOfDeviceMemory:
            return False
        return True

    def forget(self) -> None:
        """There are none."""
        self._rows = None

    def after(self, layer: int, x: Array) -> None:
        if self._rows is not None and layer in self._columns:
            self._rows[:, self._columns[layer]] = x

    def rows(self, index: Array, tag: str = "scratch") -> Array:
        """float32 [m, layers * n_embd], of rows of the call.

        Raises:
            OutOfDeviceMemory: there was no room for them.
        """
        if self._rows is None:
            raise OutOfDeviceMemory(self._memory.current_site, 0, self._memory.free)
        picked = self._memory.empty((len(index), self._width), tag=tag)
        return np.take(self._rows, index, axis=0, out=picked, mode="clip")


class NumpyDraft:
    """See `backend.DraftRunner`.

    Args:
        file: the draft.
        ops: of the backend.
        target: the loaded target.
        max_ctx: most positions of a sequence.
        store: the draft's pages.
        threads: of the BLAS.
        features: of the target's last call.
    """

    def __init__(
        self, file: DraftFile, ops: NumpyOps, target: Model, max_ctx: int, store: PageStore,
        threads: BlasThreads, features: Features,
    ) -> None:  # fmt: skip
        heads = file.parameters.heads
        self.model = (DFlash if heads.conv is None else DFlash2)(file, ops, target, max_ctx)
        self._head: SelectorHead | MarkovHead | None = None
        if heads.selector is not None:
            self._head = SelectorHead(file, ops)
        elif heads.markov is not None:
            self._head = MarkovHead(file, ops)
        self._ops = ops
        self._store = store
        self._threads = threads
        self._features = features

    #: The weights are read once for all of them: alone, each takes 2 % of a plain step.
    puts_off = 31

    @property
    def block_size(self) -> int:
        return self.model.parameters.look_ahead + 1

    def take(self, rows: npt.NDArray[np.int64]) -> Array:
        return self._features.rows(rows, tag="draft")

    def extend_context(self, rows: ContextRows) -> None:
        if rows.features:
            width = rows.features[0].shape[1]
            features = self._ops.memory.empty((len(rows.rows), width))
            np.concatenate(rows.features, out=features)
        else:
            features = self._features.rows(rows.rows)
        with self._threads.call("context", len(features)):
            self.model.context(features, context_batch(rows, self._store))

    def finish(self) -> None:
        """It is."""

    def propose(
        self, blocks: SequenceOf[DraftBlock], depth: int, width: int, temperature: float
    ) -> Proposals:
        model, d = self.model, self.model.parameters
        first = d.first_row
        n = first + depth
        tokens = model.block_tokens([block.token for block in blocks], n)
        with self._threads.call("draft", len(tokens)), np.errstate(over="ignore", invalid="ignore"):
            batch = sliding = block_batch(blocks, tokens, n, self._store, causal=d.causal)
            if d.sliding:
                sliding = block_batch(blocks, tokens, n, self._store, causal=True, window=d.window)
            hidden = model.forward(model.embed(tokens), batch, sliding)
            behind = hidden.reshape(len(blocks), n, -1)[:, first:].reshape(len(blocks) * depth, -1)
            if self._head is not None:
                return self._choose(self._head, blocks, behind, width, temperature)
            rows, logprobs = top_logprobs(model.logits(behind), width, temperature)
        shape = (len(blocks), depth, width)
        return Proposals(model.token_ids(rows).reshape(shape), logprobs.reshape(shape))

    def _choose(
        self, head: SelectorHead | MarkovHead, blocks: SequenceOf[DraftBlock], hidden: Array, width: int,
        temperature: float,
    ) -> Proposals:  # fmt: skip
        ops, m = self._ops, len(blocks)
        normed = ops.rms_norm(hidden, self.model.output_norm, self.model.parameters.rms_eps)
        logits = ops.linear(normed, self.model.output).reshape(m, len(hidden) // m, -1)
        anchors = np.array([block.token for block in blocks], dtype=np.int32)
        normed = normed.reshape(m, len(hidden) // m, -1)
        return Proposals(*head.choose(self.model, normed, logits, anchors, width, temperature))
