"""The reference backend: NumPy on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon import blas_threads
from slotd.daemon.backend import HostOutputs, Outputs, Runner
from slotd.daemon.kv.batches import build_batch
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.page_storage import PageStorage
from slotd.daemon.kv.recurrent_store import RecurrentStore
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory, OutOfDeviceMemory
from slotd.daemon.models.model import Interrupt, Model
from slotd.daemon.models.registry import load_model
from slotd.daemon.numpy_draft import Features, NumpyDraft
from slotd.daemon.ops.batch import Array, Batch
from slotd.daemon.ops.blas import BlasThreads
from slotd.daemon.ops.numpy_ops import BIG_WEIGHT, NumpyOps
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.draft_file import DraftFile, DraftParameters, target_layers
from slotd.daemon.weights.reader import ModelFile


class NumpyBackend:
    """NumPy as a device: see `backend.Backend`.

    Args:
        memory: the ledger; default: one without a limit.
        exact: make the bits of a row independent of the rows beside it.
    """

    name = "numpy"
    kv_type = "f32"
    chunk = 128
    logits_on_device = True

    def __init__(self, memory: DeviceMemory | None = None, exact: bool = False) -> None:
        self.memory = memory or DeviceMemory()
        self.math = "exact" if exact else "float32"
        self.ops = NumpyOps(self.memory, exact)
        self._threads = BlasThreads(adapt=not exact and not blas_threads.chosen_by_user())

    def page_store(self, hyper: HyperParameters, k_type: str, v_type: str) -> PageStore:
        return PageStore(self.memory, KvShape.of(hyper, k_type, v_type))

    def recurrent_store(self, hyper: HyperParameters) -> RecurrentStore | None:
        return None if hyper.delta_net is None else RecurrentStore(self.memory, hyper.delta_net)

    def load_model(self, file: ModelFile, store: PageStorage, max_ctx: int) -> NumpyRunner:
        assert isinstance(store, PageStore)
        model = load_model(file, self.ops, max_ctx)
        if self.ops.exact:
            self._check_exact(model)
        return NumpyRunner(model, store, self.memory, self._threads)

    def draft_store(self, draft: DraftParameters) -> PageStore:
        return PageStore(self.memory, KvShape.of_draft(draft, self.kv_type), tag="draft")

    def load_draft(self, file: DraftFile, target: Runner, store: PageStorage, max_ctx: int) -> NumpyDraft:
        assert isinstance(target, NumpyRunner)
        assert isinstance(store, PageStore)
        hyper = target.model.hyper
        features = Features(self.memory, target_layers(file.parameters, hyper.n_layer), hyper.n_embd)
        draft = NumpyDraft(file, self.ops, target.model, max_ctx, store, self._threads, features)
        target.features = features
        return draft

    def keep_logits(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        kept = self.memory.empty(logits.shape, tag="snapshot")
        kept[...] = logits
        return kept

    def report(self) -> Mapping[str, Any]:
        return {"name": self.name, "numpy": np.__version__, "math": self.math}

    def _check_exact(self, model: Model) -> None:
        checked: set[tuple[int, ...]] = set()
        for weight in model.linear_weights():
            if weight.size >= BIG_WEIGHT and weight.shape not in checked:
                checked.add(weight.shape)
                self.ops.check_exact(weight)


class NumpyRunner:
    """A model on host arrays: see `backend.Runner`.

    Args:
        model: the loaded model.
        store: the pages.
        memory: the ledger.
        threads: of the BLAS.

    Attributes:
        features: what its calls leave for a draft; None: there is no draft.
    """

    features: Features | None = None

    def __init__(self, model: Model, store: PageStore, memory: DeviceMemory, threads: BlasThreads) -> None:
        self.model = model
        self._store = store
        self._memory = memory
        self._threads = threads

    def forget_draft(self) -> None:
        self.features = None

    def reserve(self, rows: Rows) -> None:
        # Taken and given back: the pool keeps the block for the embedding.
        self._memory.empty((len(rows), self.model.hyper.n_embd))

    def embed(self, rows: Rows) -> Array:
        embedded: Array = self.model.embed(rows.tokens)
        return embedded

    def prompt(self, rows: Rows, x: Array, interrupt: Interrupt | None) -> Outputs:
        with self._threads.call(Kind.PROMPT.value, len(rows)):
            return self._compute(rows, x, interrupt)

    def step(self, rows: Rows, interrupt: Interrupt | None) -> Outputs:
        with self._threads.call(Kind.STEP.value, len(rows)):
            return self._compute(rows, self.embed(rows), interrupt)

    def _compute(self, rows: Rows, x: Array, interrupt: Interrupt | None) -> Outputs:
        batch = build_batch(rows, self._store)
        wanted = np.flatnonzero(rows.logits)
        # exp(-gate) may pass the largest float32 (silu is 0 then); values that are not finite show in the
        # logits, where the caller looks for them.
        with np.errstate(over="ignore", invalid="ignore"):
            hidden = self._forward(rows, x, batch, interrupt)
            return HostOutputs(self.model.logits(hidden[wanted]), wanted)

    def _forward(self, rows: Rows, x: Array, batch: Batch, interrupt: Interrupt | None) -> Array:
        """With what a draft wants, and without it where that does not fit."""
        features = self.features
        if features is not None and features.begin(len(rows)):
            try:
                seen: Array = self.model.forward(x, batch, interrupt, features)
                return seen
            except OutOfDeviceMemory:
                features.forget()
                x = self.embed(rows)
        hidden: Array = self.model.forward(x, batch, interrupt)
        return hidden
