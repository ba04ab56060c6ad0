"""Recurrent states in device memory, for the CUDA backend."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from slotd.daemon.kv.recurrent_storage import RecurrentStorage
from slotd.daemon.memory import Ledger
from slotd.daemon.ops.cuda_delta import CudaDelta, Sequences
from slotd.daemon.ops.cuda_graphs import Mark, PinnedBuffer, Stream
from slotd.daemon.ops.cuda_recurrent import CudaState, OpenedStep
from slotd.daemon.ops.page_layout import Bytes
from slotd.daemon.rows import MAX_STEP_ROWS, Kind

#: Bytes that go to host memory and back at a time.
PIECE_BYTES = 8 << 20


class CudaRecurrentStore(RecurrentStorage):
    """See `RecurrentStorage`.

    Args:
        memory: the ledger.
        delta: the kernels for the model's layers.
        stream: where everything runs.
    """

    def __init__(self, memory: Ledger, delta: CudaDelta, stream: Stream) -> None:
        self.n_bytes = delta.state_bytes
        self._memory, self._delta, self._stream = memory, delta, stream
        # Of a commit: read, write, first row, rows of the path, one path; then the path, by rows of the step.
        self._host = PinnedBuffer(32 + 4 * MAX_STEP_ROWS)
        self._table = memory.empty((len(self._host.array),), np.uint8, tag="state")
        self._sent: Mark | None = None
        self._moving = threading.Lock()
        self._piece = PinnedBuffer(min(PIECE_BYTES, self.n_bytes))

    def _empty(self, tag: str) -> CudaState:
        return CudaState(self._memory.empty((self.n_bytes // 4,), np.float32, tag=tag))

    def blank(self) -> CudaState:
        state = self._empty("state")
        state.flat.fill(0)
        return state

    def open(self, kind: Kind, n: int) -> CudaState | OpenedStep:
        if kind is Kind.PROMPT:
            return self._empty("state")
        return OpenedStep()  # the step knows whether it needs a state

    def commit(
        self, state: CudaState | None, opened: CudaState | OpenedStep, path: npt.NDArray[np.int64]
    ) -> CudaState:
        """As `RecurrentStorage.commit`.

        Raises:
            ValueError: rows of another step lie where those of this one did.
        """
        if isinstance(opened, CudaState):
            return opened
        if opened.after is not None:
            return opened.after
        assert state is not None
        if opened.kept is None or opened.kept.run != opened.run:
            raise ValueError("the inputs of an earlier step are gone")
        self._replay(state, opened, path)
        return state

    def _replay(self, state: CudaState, opened: OpenedStep, path: npt.NDArray[np.int64]) -> None:
        assert opened.kept is not None
        if self._sent is not None:
            self._sent.wait()  # the table may be on its way
        host = self._host.array
        host[:16].view(np.uint64)[:] = state.address
        host[16:28].view(np.int32)[:] = (opened.first, len(path), 1)
        host[32:].view(np.int32)[opened.first : opened.first + len(path)] = path
        at = int(self._table.data.ptr)
        self._stream.upload(at, self._host, len(host))
        self._sent = self._stream.mark()
        sequences = Sequences(at, at + 8, at + 16, at + 20, at + 24)
        self._delta.delta_commit(opened.kept.all, opened.kept.rows, sequences, at + 32, 1)

    def copy(self, state: CudaState, tag: str) -> CudaState:
        copied = self._empty(tag)
        copied.flat[...] = state.flat
        return copied

    def read(self, state: CudaState, buffer: Bytes) -> None:
        with self._moving:
            self._stream.use()
            for start in range(0, self.n_bytes, PIECE_BYTES):
                n = min(PIECE_BYTES, self.n_bytes - start)
                self._stream.download(self._piece, state.address + start, n)
                self._stream.wait()
                buffer[start : start + n] = self._piece.array[:n]

    def write(self, data: Bytes, tag: str) -> CudaState:
        state = self._empty(tag)
        with self._moving:
            for start in range(0, self.n_bytes, PIECE_BYTES):
                n = min(PIECE_BYTES, self.n_bytes - start)
                self._piece.array[:n] = data[start : start + n]
                self._stream.upload(state.address + start, self._piece, n)
                self._stream.wait()
        return state
