"""Recurrent states in host memory, for the NumPy backend."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.recurrent_storage import RecurrentStorage
from slotd.daemon.memory import Ledger
from slotd.daemon.ops.numpy_delta_net import advance, for_value_heads
from slotd.daemon.ops.page_layout import Bytes
from slotd.daemon.ops.recurrent_state import RecurrentState, StepInputs
from slotd.daemon.rows import Kind
from slotd.daemon.weights.delta_net import DeltaNet


class RecurrentStore(RecurrentStorage):
    """See `RecurrentStorage`.

    Args:
        memory: the ledger.
        net: the recurrent layers.
    """

    def __init__(self, memory: Ledger, net: DeltaNet) -> None:
        self.n_bytes = net.state_bytes
        self._memory = memory
        self._net = net

    def _empty(self, tag: str) -> RecurrentState:
        return RecurrentState.of(self._net, self._memory.empty((self.n_bytes // 4,), tag=tag))

    def blank(self) -> RecurrentState:
        state = self._empty("state")
        state.flat[...] = 0
        return state

    def open(self, kind: Kind, n: int) -> RecurrentState | StepInputs:
        if kind is Kind.PROMPT:
            return self._empty("state")
        return StepInputs.of(self._net, n, self._memory.empty((StepInputs.size(self._net, n),), tag="state"))

    def commit(
        self, state: RecurrentState | None, opened: RecurrentState | StepInputs, path: npt.NDArray[np.int64]
    ) -> RecurrentState:
        if isinstance(opened, RecurrentState):
            return opened
        assert state is not None
        for row in path.tolist():
            k = for_value_heads(opened.k[:, row], self._net)
            advance(state.matrices, k, opened.v[:, row], opened.g[:, row], opened.beta[:, row])
        inputs = np.concatenate([state.conv, opened.u[:, path]], axis=1)
        state.conv[...] = inputs[:, inputs.shape[1] - state.conv.shape[1] :]
        return state

    def copy(self, state: RecurrentState, tag: str) -> RecurrentState:
        copied = self._empty(tag)
        copied.flat[...] = state.flat
        return copied

    def read(self, state: RecurrentState, buffer: Bytes) -> None:
        buffer[...] = state.flat.view(np.uint8)

    def write(self, data: Bytes, tag: str) -> RecurrentState:
        state = self._empty(tag)
        state.flat.view(np.uint8)[...] = data
        return state
