"""The CUDA backend: one device, our kernels, captured steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from slotd.daemon.backend import Logits, Runner
from slotd.daemon.cuda_draft import CudaDraft, check_draft
from slotd.daemon.cuda_runner import CudaRunner
from slotd.daemon.kv.cuda_recurrent_store import CudaRecurrentStore
from slotd.daemon.kv.cuda_store import CudaPageStore
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.page_storage import PageStorage
from slotd.daemon.memory.cuda_device import describe
from slotd.daemon.memory.cuda_memory import CudaMemory
from slotd.daemon.models.dflash import DFlash
from slotd.daemon.models.registry import load_model
from slotd.daemon.ops.cuda_attention import CudaAttention, DeviceLimits
from slotd.daemon.ops.cuda_attention_shape import AttentionShape
from slotd.daemon.ops.cuda_delta import CudaDelta
from slotd.daemon.ops.cuda_graphs import Stream, device_properties
from slotd.daemon.ops.cuda_ops import CudaOps
from slotd.daemon.ops.cuda_pages import CudaPages
from slotd.daemon.ops.cuda_prepare import check_widths
from slotd.daemon.ops.cuda_taps import CudaFeatures
from slotd.daemon.ops.kernels import load_all
from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.draft_file import DraftFile, DraftParameters, target_layers
from slotd.daemon.weights.reader import ModelFile
from slotd.protocol.errors import ConfigError, ModelError

#: Seconds after which a thread of Python makes way for another: a busy one beside it must not hold up a step.
SWITCH_INTERVAL = 1e-4


class CudaBackend:
    """A CUDA device: see `backend.Backend`.

    Args:
        memory: its ledger.
        math: exact, q8 or fast, see `config.MATH`.
    """

    name = "cuda"
    kv_type = "f16"
    chunk = 2048
    logits_on_device = False

    def __init__(self, memory: CudaMemory, math: str = "exact") -> None:
        self.memory = memory
        self.math = math
        self.ops = CudaOps(memory, math)
        self.stream = Stream()
        self._properties = device_properties()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._delta: CudaDelta | None = None
        load_all()  # what is not compiled yet, side by side: one by one, at first use, takes a minute

    def page_store(self, hyper: HyperParameters, k_type: str, v_type: str) -> CudaPageStore:
        h = hyper
        shape = AttentionShape(
            h.n_head, h.n_head_kv, h.head_dim, h.value_dim, k_type, v_type, gated=h.delta_net is not None
        )
        self._attention = CudaAttention(shape, DeviceLimits.of(self._properties))
        copies = partial(CudaPages, stream=self.stream)
        return CudaPageStore(copies, self.memory, KvShape.of(h, k_type, v_type))

    def recurrent_store(self, hyper: HyperParameters) -> CudaRecurrentStore | None:
        net = hyper.delta_net
        self._delta = None
        if net is None:
            return None
        self._delta = CudaDelta(net, len(net.layers), DeviceLimits.of(self._properties))
        return CudaRecurrentStore(self.memory, self._delta, self.stream)

    def load_model(self, file: ModelFile, store: PageStorage, max_ctx: int) -> CudaRunner:
        assert isinstance(store, CudaPageStore)
        check_widths(file.hyper)
        self.stream.use()
        try:
            model = load_model(file, self.ops, max_ctx)
        finally:
            self.ops.loaded()
        return CudaRunner(
            model, self.ops, self._attention, store, self.memory, self.stream, max_ctx, self._delta
        )

    def draft_store(self, draft: DraftParameters) -> CudaPageStore:
        d, kv = draft, self.kv_type
        try:
            shape = AttentionShape(d.n_head, d.n_head_kv, d.head_dim, d.value_dim, kv, kv)
            self._draft_attention = CudaAttention(shape, DeviceLimits.of(self._properties))
        except ConfigError as error:
            raise ModelError(f"the draft: {error}") from None
        copies = partial(CudaPages, stream=self.stream)
        return CudaPageStore(copies, self.memory, KvShape.of_draft(draft, kv), tag="draft")

    def load_draft(self, file: DraftFile, target: Runner, store: PageStorage, max_ctx: int) -> CudaDraft:
        assert isinstance(target, CudaRunner)
        assert isinstance(store, CudaPageStore)
        hyper, d = target.model.hyper, file.parameters
        check_draft(file, hyper.n_vocab)
        self.stream.use()
        try:
            model = DFlash(file, self.ops, target.model, max_ctx)
        finally:
            self.ops.loaded()
        features = CudaFeatures(self.memory, target_layers(d, hyper.n_layer), hyper.n_embd)
        target.keep_features(features)
        return CudaDraft(
            model, self.ops, self._draft_attention, store, self.memory, self.stream, max_ctx, features
        )

    def keep_logits(self, logits: Logits) -> Logits:
        return logits.copy()

    def report(self) -> Mapping[str, Any]:
        return {"name": self.name, "math": self.math, **describe()}
