"""Recurrent layers of a call on the GPU: where the states of its sequences lie, and what a layer launches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.cuda_attention import DeviceBatch
from slotd.daemon.ops.cuda_delta import ConvWeights, CudaDelta, Inputs, RowTables, Sequences
from slotd.daemon.ops.cuda_graphs import PinnedBuffer, Stream
from slotd.daemon.ops.delta_plan import MOST_BLOCKS, Piece, pack_tables, plan_prompt
from slotd.daemon.ops.interface import DeltaWeights
from slotd.daemon.ops.tree_order import walk_order
from slotd.daemon.row_checks import row_counts
from slotd.daemon.rows import MAX_STEP_ROWS, Rows
from slotd.daemon.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CudaState:
    """A state in device memory.

    Attributes:
        flat: float32 [state bytes / 4], as `recurrent_state.RecurrentState` has it.
    """

    flat: Any

    @property
    def address(self) -> int:
        """Of the first number."""
        return int(self.flat.data.ptr)


@dataclass(slots=True, eq=False)
class OpenedStep:
    """What a step leaves for a commit of one sequence.

    Attributes:
        after: the state behind its row, when it is alone and the step has run; None: a commit replays inputs.
        kept: where these lie; None until the step has run.
        run: which of the steps that keep their inputs there.
        first: place of the sequence's first row.
    """

    after: CudaState | None = None
    kept: KeptInputs | None = None
    run: int = 0
    first: int = 0


class KeptInputs:
    """What the rows of a step put into the recurrence, of all layers: float32 [layers, rows, width] each.

    Attributes:
        rows: that there is room for.
        run: number of the step whose inputs these are.
    """

    def __init__(self, delta: CudaDelta, memory: Ledger, rows: int) -> None:
        s = delta.sizes
        widths = (delta.channels, delta.key_width, delta.value_width, s.n_value_heads, s.n_value_heads)
        self.rows = rows
        self.run = 0
        self._widths = widths
        self._arrays = [memory.empty((delta.n_layer, rows, width), tag="state") for width in widths]

    def of_layer(self, layer: int) -> Inputs:
        """Addresses of one layer's."""
        sizes = (4 * layer * self.rows * width for width in self._widths)
        return Inputs(*(array.data.ptr + size for array, size in zip(self._arrays, sizes, strict=True)))

    @property
    def all(self) -> Inputs:
        """Addresses of the first layer's; the others follow."""
        return self.of_layer(0)


class StepTables:
    """What changes from step to step: states in front of and behind the rows, order of the walk.

    Args:
        rows: bucket of the step.
    """

    def __init__(self, memory: Ledger, rows: int) -> None:
        self._pinned = PinnedBuffer(16 * MAX_STEP_ROWS + 4 * rows)
        self._buffer = memory.empty((len(self._pinned.array),), np.uint8, tag="state")
        states = self._pinned.array[: 16 * MAX_STEP_ROWS].view(np.uint64)
        self._read, self._write = states[:MAX_STEP_ROWS], states[MAX_STEP_ROWS:]
        self._order = self._pinned.array[16 * MAX_STEP_ROWS :].view(np.int32)

    def begin(self) -> None:
        """A new step."""
        self._order[:] = 0

    def set(self, s: int, read: CudaState, write: CudaState | None, first: int, parents: list[int]) -> None:
        """Of sequence s of the call: states, its first row, and the parents of its rows among them, or -1."""
        self._read[s], self._write[s] = read.address, 0 if write is None else write.address
        order = walk_order(parents)
        self._order[first : first + len(order)] = order

    def upload(self, stream: Stream) -> None:
        """Enqueue the copy to the device."""
        stream.upload(self._buffer.data.ptr, self._pinned, len(self._pinned.array))

    @property
    def read(self) -> int:
        """Address of uint64 [sequences]."""
        return int(self._buffer.data.ptr)

    @property
    def write(self) -> int:
        """The same of the states behind the rows."""
        return self.read + 8 * MAX_STEP_ROWS

    @property
    def order(self) -> int:
        """Address of int32 [rows]."""
        return self.read + 16 * MAX_STEP_ROWS


class StepRecurrence:
    """The recurrent layers of a captured step.

    Args:
        delta: the kernels.
        memory: the ledger.
        kept: where inputs of rows go.
    """

    def __init__(self, delta: CudaDelta, memory: Ledger, kept: KeptInputs) -> None:
        self._delta, self._memory, self._kept = delta, memory, kept
        self.tables = StepTables(memory, kept.rows)

    def fill(self, rows: Rows) -> None:
        """For the next run: tables, and what commits of its sequences will need.

        Raises:
            OutOfDeviceMemory: no room for a state behind a row.
        """
        afters = [self._new_state() if len(parents) == 1 else None for _, _, parents in _spans(rows)]
        self.tables.begin()
        self._kept.run += 1
        for s, (sequence, first, parents) in enumerate(_spans(rows)):
            opened = sequence.open_state
            opened.after, opened.kept, opened.run, opened.first = afters[s], self._kept, self._kept.run, first
            local = [int(parent) - first if parent >= 0 else -1 for parent in parents]
            self.tables.set(s, sequence.state, opened.after, first, local)

    def fill_ahead(self, rows: Rows) -> tuple[CudaState, ...]:
        """For a run behind the rows of plain decoding, which are under way: the states that it will leave.

        Raises:
            OutOfDeviceMemory: no room for them.
        """
        states = tuple(self._new_state() for _ in rows.sequences)
        self.tables.begin()
        self._kept.run += 1
        for s, (sequence, state) in enumerate(zip(rows.sequences, states, strict=True)):
            self.tables.set(s, sequence.open_state.after, state, s, [-1])
        return states

    def _new_state(self) -> CudaState:
        return CudaState(self._memory.empty((self._delta.state_bytes // 4,), np.float32, tag="state"))

    def layer(self, layer: int, projected: Any, weights: DeltaWeights, batch: DeviceBatch) -> Any:
        """As `interface.HybridOps.delta_net`."""
        delta, n = self._delta, batch.n_rows
        q, out = self._memory.empty((n, delta.key_width)), self._memory.empty((n, delta.value_width))
        tables, inputs = self.tables, self._kept.of_layer(layer)
        sequences = Sequences(
            tables.read, tables.write, batch.at("first_row"), batch.at("n_rows"), batch.at("counts")
        )
        rows = _tables_of(batch, batch.at("ancestors"))
        conv = _conv_weights(weights)
        delta.conv(layer, projected.data.ptr, conv, q.data.ptr, inputs, sequences, rows, n, step=True)
        order = tables.order if n > 1 else 0
        delta.delta(layer, q.data.ptr, inputs, out.data.ptr, sequences, order, n, n)
        return out


class PromptRecurrence:
    """The recurrent layers of a prompt call.

    Args:
        delta: the kernels.
        memory: the ledger.
        rows: of the call, whose sequences are open.

    Raises:
        OutOfDeviceMemory: no room for what the layers need beside their rows.
    """

    def __init__(self, delta: CudaDelta, memory: Ledger, rows: Rows) -> None:
        self._delta, self._memory = delta, memory
        pieces = [
            Piece(
                first, len(parents), len(sequence),
                0 if sequence.state is None else sequence.state.address, sequence.open_state.address,
            )
            for sequence, first, parents in _spans(rows)
        ]  # fmt: skip
        self._launches = plan_prompt(pieces, chunked=delta.columns > 0)
        tables, self._places = pack_tables(self._launches)
        pointers = np.array([[p.read for p in pieces], [p.write for p in pieces]], np.uint64)
        self._states_at = len(tables)
        self._host = np.concatenate([tables, pointers.view(np.uint8).reshape(-1)])
        self._n_sequences = len(pieces)
        self._tables = memory.empty((len(self._host),), np.uint8)
        most = max((launch.n_blocks for launch in self._launches), default=0)
        self._work = memory.empty((max(1, min(most, MOST_BLOCKS)) * delta.work_bytes,), np.uint8)

    def upload(self) -> None:
        """Copy the tables to the device."""
        self._tables.set(self._host)

    def layer(self, layer: int, projected: Any, weights: DeltaWeights, batch: DeviceBatch) -> Any:
        """As `interface.HybridOps.delta_net`."""
        delta, n, empty = self._delta, batch.n_rows, self._memory.empty
        s = delta.sizes
        q, out = empty((n, delta.key_width)), empty((n, delta.value_width))
        k, v = empty((n, delta.key_width)), empty((n, delta.value_width))
        g, beta = empty((n, s.n_value_heads)), empty((n, s.n_value_heads))
        inputs = Inputs(0, k.data.ptr, v.data.ptr, g.data.ptr, beta.data.ptr)
        states = self._tables.data.ptr + self._states_at
        sequences = Sequences(
            states,
            states + 8 * self._n_sequences,
            batch.at("first_row"),
            batch.at("n_rows"),
            batch.at("counts"),
        )
        conv, rows = _conv_weights(weights), _tables_of(batch, 0)
        delta.conv(layer, projected.data.ptr, conv, q.data.ptr, inputs, sequences, rows, n, step=False)
        delta.delta_prompt(
            layer, q.data.ptr, inputs, out.data.ptr, self._work.data.ptr, self._tables.data.ptr,
            self._launches, self._places,
        )  # fmt: skip
        return out


def _spans(rows: Rows) -> list[tuple[Sequence, int, npt.NDArray[np.int32]]]:
    """Each sequence of a call, its first row, and the parents of its rows."""
    counts = row_counts(rows)
    firsts = itertools.accumulate(counts, initial=0)
    return [
        (sequence, first, rows.parents[first : first + n])
        for sequence, first, n in zip(rows.sequences, firsts, counts, strict=False)
    ]


def _tables_of(batch: DeviceBatch, ancestors: int) -> RowTables:
    return RowTables(batch.at("sequence"), batch.at("positions"), batch.at("committed"), ancestors)


def _conv_weights(weights: DeltaWeights) -> ConvWeights:
    return ConvWeights(weights.conv.data.ptr, weights.a.data.ptr, weights.dt_bias.data.ptr)
