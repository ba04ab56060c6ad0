"""Gated DeltaNet on the GPU: short convolution, delta rule of step rows and of prompts, commits.

Arrays are device addresses here: in a captured graph they never change, and what changes from call to call
is read from device memory: which rows there are, how they follow each other, and where states lie. A state is
one block of float32: for each layer the last K - 1 inputs of the convolution, then for each layer the
matrices [value heads, S keys, S values].

Where a kernel may start early (pdl), it reads the batch, weights and, in `delta`, the states in front of the
rows before the kernel ahead of it has ended: these must be older than that one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from slotd.daemon.ops.cuda_attention import DeviceLimits
from slotd.daemon.ops.delta_plan import BLOCK, Launch, Tables
from slotd.daemon.ops.kernels import kernel
from slotd.daemon.ops.tree_order import places_for
from slotd.protocol.errors import ConfigError

THREADS, WARP = 128, 32

#: Columns of a matrix that a warp has; rows of a prompt that a warp of the convolution takes.
COLUMNS, RUN = 8, 8

#: Widths of heads that there are kernels for, and most taps of the convolution.
HEAD_SIZES, MOST_TAPS = (16, 32, 64, 128), 8

#: Sequences of a step that get blocks of their own; more take turns.
MOST_AT_ONCE = 8

_u64, _i32 = ctypes.c_uint64, ctypes.c_int32


#: Threads of the chunked form, and by width of heads the columns that it comes with.
PROMPT_THREADS = 256
COLUMN_CHOICES = {16: (16,), 32: (32,), 64: (32,), 128: (32, 64)}


def walk_bytes(size: int, columns: int) -> int:
    """Shared memory of a block of threads that walks over blocks of rows: W, Q, K, P, M and R twice."""
    rows = BLOCK * (2 * (size + 4) + size + 8 + BLOCK + 4)
    return 4 * (rows + (size + 2 * BLOCK) * (columns + 8))


class DeltaSizes(Protocol):
    """The numbers of a model's DeltaNet layers."""

    @property
    def conv_kernel(self) -> int: ...
    @property
    def state_size(self) -> int: ...
    @property
    def n_key_heads(self) -> int: ...
    @property
    def n_value_heads(self) -> int: ...


class Sequences(ctypes.Structure):
    """Addresses of arrays by sequence.

    read: uint64, state in front of the rows, 0 = all zero. write: uint64, where the one behind the last row
    goes, 0 = nowhere. first, n_rows: int32, its rows; of a commit the length of its path. count: int32 [1].
    """

    _fields_ = (("read", _u64), ("write", _u64), ("first", _u64), ("n_rows", _u64), ("count", _u64))


class Inputs(ctypes.Structure):
    """Addresses of what rows put into the recurrence: float32 [rows, width] each.

    u [channels] (0: not kept), k [Hk S], v [Hv S], g [Hv], beta [Hv].
    """

    _fields_ = (("u", _u64), ("k", _u64), ("v", _u64), ("g", _u64), ("beta", _u64))


@dataclass(frozen=True, slots=True)
class RowTables:
    """Addresses of what the rows of a call are.

    Attributes:
        sequence: int32 [rows].
        positions: int32 [rows], -1: padding.
        committed: int32 by sequence.
        ancestors: uint8 [rows, 64], of a step.
    """

    sequence: int
    positions: int
    committed: int
    ancestors: int = 0


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """Addresses of float32 arrays: taps [channels, K], a [Hv], dt_bias [Hv]."""

    taps: int
    a: int
    dt_bias: int


class _Conv(ctypes.Structure):
    _fields_ = (
        ("projected", _u64), ("taps", _u64), ("a", _u64), ("dt_bias", _u64), ("q", _u64),
        ("inputs", Inputs), ("sequences", Sequences),
        ("sequence", _u64), ("positions", _u64), ("committed", _u64), ("ancestors", _u64),
        ("tail_offset", _u64), ("n_rows", _i32), ("stride", _i32),
        ("n_key_heads", _i32), ("n_value_heads", _i32), ("n_taps", _i32),
    )  # fmt: skip


class _Delta(ctypes.Structure):
    _fields_ = (
        ("q", _u64), ("inputs", Inputs), ("out", _u64), ("sequences", Sequences), ("order", _u64),
        ("offset", _u64), ("n_key_heads", _i32), ("n_value_heads", _i32), ("early", _i32),
    )  # fmt: skip


class _Commit(ctypes.Structure):
    _fields_ = (
        ("inputs", Inputs), ("sequences", Sequences), ("path", _u64), ("tail_offset", _u64), ("offset", _u64),
        ("inputs_rows", _i32), ("n_key_heads", _i32), ("n_value_heads", _i32), ("n_taps", _i32),
        ("state_blocks", _i32),
    )  # fmt: skip


class _Work(ctypes.Structure):
    _fields_ = (("u", _u64), ("w", _u64), ("p", _u64), ("factors", _u64))


class _Prompt(ctypes.Structure):
    _fields_ = (
        ("q", _u64), ("inputs", Inputs), ("out", _u64), ("work", _Work), ("sequences", Sequences),
        ("first_rows", _u64), ("offset", _u64), ("n_key_heads", _i32), ("n_value_heads", _i32),
    )  # fmt: skip


class CudaDelta:
    """The kernels for one model.

    Args:
        sizes: of its layers.
        n_layer: how many there are.
        limits: of the device.
        find: gives a kernel by name.

    Attributes:
        columns: of a matrix, for each block of threads of the chunked form; 0: the device has no room for it.

    Raises:
        ConfigError: sizes that there are no kernels for.
    """

    def __init__(
        self, sizes: DeltaSizes, n_layer: int, limits: DeviceLimits, find: Callable[[str], Any] = kernel
    ) -> None:
        if sizes.state_size not in HEAD_SIZES:
            raise ConfigError(f"linear heads of {sizes.state_size} numbers: CUDA has {HEAD_SIZES}")
        if not 2 <= sizes.conv_kernel <= MOST_TAPS:
            raise ConfigError(f"a convolution of {sizes.conv_kernel} taps: CUDA has 2 to {MOST_TAPS}")
        self.sizes, self.n_layer, self._find = sizes, n_layer, find
        self.key_width = sizes.n_key_heads * sizes.state_size
        self.value_width = sizes.n_value_heads * sizes.state_size
        self.channels = 2 * self.key_width + self.value_width
        self.projected_width = self.channels + self.value_width + 2 * sizes.n_value_heads
        self.columns = self._best_columns(limits)

    # ----- where a layer's part of a state lies, in bytes

    @property
    def state_bytes(self) -> int:
        """Of one state."""
        return self.matrix_offset(self.n_layer)

    def tail_offset(self, layer: int) -> int:
        """The last inputs of the convolution, [K - 1, channels]."""
        return 4 * layer * (self.sizes.conv_kernel - 1) * self.channels

    def matrix_offset(self, layer: int) -> int:
        """The matrices, [Hv, S, S]."""
        return self.tail_offset(self.n_layer) + 4 * layer * self.value_width * self.sizes.state_size

    # ----- launches

    def conv(
        self, layer: int, projected: int, weights: ConvWeights, q: int, inputs: Inputs, sequences: Sequences,
        rows: RowTables, n_rows: int, *, step: bool,
    ) -> None:  # fmt: skip
        """Convolution, SiLU, unit heads -> q [rows, Hk S] and inputs; last inputs where a state is written.

        projected: float32 [rows, projected_width]: queries, keys, values; z; beta; alpha.
        A prompt's sequences are chains, and a new state must not lie where the old one does.
        """
        s = self.sizes
        warps = 2 * s.n_key_heads + s.n_value_heads + 1
        args = _Conv(
            projected, weights.taps, weights.a, weights.dt_bias, q, inputs, sequences,
            rows.sequence, rows.positions, rows.committed, rows.ancestors,
            self.tail_offset(layer), n_rows, self.projected_width,
            s.n_key_heads, s.n_value_heads, s.conv_kernel,
        )  # fmt: skip
        kind, height = ("step", n_rows) if step else ("prompt", -(-n_rows // RUN))
        grid = (-(-warps * WARP // THREADS), height)
        self._find(f"conv_{kind}_{s.state_size}").launch(grid, THREADS, (args,), pdl=True)

    def delta(
        self, layer: int, q: int, inputs: Inputs, out: int, sequences: Sequences, order: int, most_rows: int,
        most_sequences: int, *, early: bool = True,
    ) -> None:  # fmt: skip
        """The delta rule, row after row -> out [rows, Hv S]; a chain's new state where one is wanted.

        order: int32 [rows], each sequence's `tree_order.walk_order`; 0: all are chains.
        most_rows: rows that a sequence can have, at most 64; most_sequences: of the call.
        early: the states are older than the kernel ahead of this one.
        """
        s = self.sizes
        args = _Delta(
            q, inputs, out, sequences, order, self.matrix_offset(layer), s.n_key_heads, s.n_value_heads, early
        )
        places = places_for(most_rows) if order else 0
        smem = places * (THREADS // WARP) * s.state_size * COLUMNS * 4
        grid = self._state_blocks * min(most_sequences, MOST_AT_ONCE)
        self._find(f"delta_step_{s.state_size}").launch(grid, THREADS, (args,), smem=smem, pdl=True)

    def delta_commit(
        self, inputs: Inputs, inputs_rows: int, sequences: Sequences, path: int, most_sequences: int
    ) -> None:
        """Replay a path of a step in all layers: the bits that steps of one row each would have left.

        inputs: of all layers, [n_layer, inputs_rows, width] each, as `conv` left them.
        path: int32, rows of each path counted in its sequence, starting at the place of its first row.
        A state may be written where it was read.
        """
        s = self.sizes
        args = _Commit(
            inputs, sequences, path, self.tail_offset(0), self.matrix_offset(0),
            inputs_rows, s.n_key_heads, s.n_value_heads, s.conv_kernel, self._state_blocks,
        )  # fmt: skip
        grid = (self._state_blocks + -(-self.channels // THREADS), self.n_layer, most_sequences)
        self._find(f"delta_commit_{s.state_size}").launch(grid, THREADS, (args,), pdl=True)

    @property
    def work_bytes(self) -> int:
        """Room that a block of 64 rows needs in the chunked form."""
        return 4 * self.sizes.n_value_heads * BLOCK * (2 * self.sizes.state_size + BLOCK + 2)

    def delta_prompt(
        self, layer: int, q: int, inputs: Inputs, out: int, work: int, tables: int, launches: list[Launch],
        places: list[Tables],
    ) -> None:  # fmt: skip
        """The delta rule of a prompt call -> out [rows, Hv S] and the states that its pieces ask for.

        work: room of work_bytes for each of the blocks that a launch has at most.
        tables: address of what `delta_plan.pack_tables` made of the launches; places: where each one's lie.
        """
        for launch, at in zip(launches, places, strict=True):
            sequences = Sequences(*(tables + x for x in (at.read, at.write, at.first, at.n_rows, at.count)))
            n = len(launch.pieces)
            if launch.first_rows is None:
                self.delta(layer, q, inputs, out, sequences, 0, launch.most_rows, n, early=launch.early)
            else:
                self._blocks(
                    layer, q, inputs, out, work, sequences, tables + at.first_rows, launch.n_blocks, n
                )

    def _blocks(
        self, layer: int, q: int, inputs: Inputs, out: int, work: int, sequences: Sequences, first_rows: int,
        n_blocks: int, n_sequences: int,
    ) -> None:  # fmt: skip
        """Whole blocks: what does not need the states of all at once, then a walk over each sequence's."""
        s, size = self.sizes, self.sizes.state_size
        each = 4 * n_blocks * s.n_value_heads * BLOCK
        parts = (work, work + each * size, work + 2 * each * size, work + each * (2 * size + BLOCK))
        args = _Prompt(
            q, inputs, out, _Work(*parts), sequences, first_rows, self.matrix_offset(layer),
            s.n_key_heads, s.n_value_heads,
        )  # fmt: skip
        smem = 8 * BLOCK + 4 * BLOCK * (2 * (size + 4) + BLOCK + 4 + 2)
        self._find(f"delta_prompt_blocks_{size}").launch(
            (n_blocks, s.n_value_heads), PROMPT_THREADS, (args,), smem=smem, pdl=True
        )
        self._find(f"delta_prompt_walk_{size}_{self.columns}").launch(
            (s.n_value_heads * size // self.columns, n_sequences), PROMPT_THREADS, (args,),
            smem=walk_bytes(size, self.columns), pdl=True,
        )  # fmt: skip

    def _best_columns(self, limits: DeviceLimits) -> int:
        """More of those that fit while blocks outnumber multiprocessors; which does not change a bit."""
        size, best = self.sizes.state_size, 0
        for columns in COLUMN_CHOICES[size]:
            if walk_bytes(size, columns) <= limits.shared_per_block and (
                not best or self.value_width // best > limits.multiprocessors
            ):
                best = columns
        return best

    @property
    def _state_blocks(self) -> int:
        parts = self.sizes.n_value_heads * (self.sizes.state_size // COLUMNS)
        return -(-parts * WARP // THREADS)
