"""Weight matrices on the GPU: GGUF blocks, repacked at load into the tiles that the linear kernels read.

Repacking keeps codes and scales as they are in the file, so a matrix takes about what it takes there: it only
puts what a warp reads at once side by side. `kernels/weight_tiles.cuh` describes the tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.kernels import kernel
from slotd.daemon.weights.block_types import BlockType
from slotd.daemon.weights.reader import GgufFile

log = logging.getLogger(__name__)

#: Outputs of a tile, and columns (k) of one: also the segment in which a sum over k is cut.
TILE_ROWS, TILE_COLUMNS = 16, 256

#: Bytes that go to the GPU at a time.
CHUNK_BYTES = 64 << 20

THREADS = 256
WARP = 32


@dataclass(frozen=True, slots=True)
class Format:
    """How a tile is stored.

    Attributes:
        number: its number in weight_tiles.cuh.
        name: its name there, in small letters.
        tile_bytes: bytes of a tile.
    """

    number: int
    name: str
    tile_bytes: int


FORMATS = (
    Format(0, "u4_h32", 2560),
    Format(1, "u4_k32", 2368),
    Format(2, "u5_h32", 3072),
    Format(3, "u5_k32", 2880),
    Format(4, "u6_s16", 3360),
    Format(5, "u4_h16", 3072),
    Format(6, "u8_h32", 4608),
    Format(7, "f16", 8192),
)

_U4_H32, _U4_K32, _U5_H32, _U5_K32, _U6_S16, _U4_H16, _U8_H32, _F16 = FORMATS

#: The format of each GGUF type that is multiplied from its codes.
FORMAT_OF = {
    "Q4_0": _U4_H32, "Q4_1": _U4_H32, "Q5_0": _U5_H32, "Q5_1": _U5_H32, "Q8_0": _U8_H32, "Q2_K": _U4_H16,
    "Q3_K": _U4_H16, "Q4_K": _U4_K32, "Q5_K": _U5_K32, "Q6_K": _U6_S16, "IQ4_NL": _U8_H32,
    "IQ4_XS": _U8_H32, "F16": _F16, "BF16": _F16, "F32": _F16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """The rows of one tensor.

    Attributes:
        format: how its tiles are stored.
        tiles: uint8 [row tiles, segments, tile bytes], flat.
        row_scale: float32 [row tiles * 16], the power of two of each row.
        first, rows: which outputs of the matrix these are.
    """

    format: Format
    tiles: Any
    row_scale: Any
    first: int
    rows: int

    @property
    def n_tiles(self) -> int:
        """Row tiles."""
        return -(-self.rows // TILE_ROWS)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [n_out, n_in].

    Attributes:
        parts: its tensors, one below the other.
        n_out, n_in: its shape.
    """

    parts: tuple[MatrixPart, ...]
    n_out: int
    n_in: int

    @property
    def n_segments(self) -> int:
        """Tiles beside each other."""
        return -(-self.n_in // TILE_COLUMNS)

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles and scales."""
        return sum(part.tiles.nbytes + part.row_scale.nbytes for part in self.parts)


def repack(raw: Any, row_bytes: int, type_name: str, part: MatrixPart, start: int, n: int, n_in: int) -> None:
    """n rows of GGUF blocks on the GPU into the tiles of a part, from row `start`, a multiple of 16."""
    segments = -(-n_in // TILE_COLUMNS)
    tiles = part.tiles[start // TILE_ROWS * segments * part.format.tile_bytes :]
    args = (raw, row_bytes, n, n_in, part.row_scale[start:])
    kernel(f"repack_scale_{type_name}").launch(-(-n // (THREADS // WARP)), THREADS, args)
    threads = -(-n // TILE_ROWS) * TILE_ROWS * segments * 4
    kernel(f"repack_{type_name}").launch(-(-threads // THREADS), THREADS, (*args, tiles, segments))


class WeightLoader:
    """Takes tensors from a file to the GPU, through two pinned buffers in turn.

    Args:
        memory: the ledger.
    """

    def __init__(self, memory: Ledger) -> None:
        self._memory = memory
        self._staging: list[_Staging] = []

    def matrix(self, file: GgufFile, *names: str) -> Matrix:
        """Tensors of one width, one below the other.

        Raises:
            OutOfDeviceMemory: they do not fit.
        """
        parts: list[MatrixPart] = []
        first = 0
        for name in names:
            part = self._part(file, name, first)
            parts.append(part)
            first += part.rows
        return Matrix(tuple(parts), first, file.header.tensors[names[0]].shape[0])

    def close(self) -> None:
        """Wait for the copies and let the buffers go."""
        for staging in self._staging:
            staging.wait()
        self._staging.clear()

    def _part(self, file: GgufFile, name: str, first: int) -> MatrixPart:
        n_in, n_rows = file.header.tensors[name].shape
        kind = file.block_type(name)
        data = _rows_of(file, name, kind)
        type_name, form = kind.name.lower(), FORMAT_OF.get(kind.name)
        if form is None:
            type_name, form = "f32", _F16
            log.warning("%s: %s is kept as 16-bit numbers, %d bytes instead of %d",
                        name, kind.name, 2 * n_in * n_rows, file.n_bytes(name))  # fmt: skip
        segments, tiles = -(-n_in // TILE_COLUMNS), -(-n_rows // TILE_ROWS)
        part = MatrixPart(
            form,
            self._memory.empty((tiles * segments * form.tile_bytes,), np.uint8, tag=file.memory_tag),
            self._memory.empty((tiles * TILE_ROWS,), np.float32, tag=file.memory_tag),
            first,
            n_rows,
        )
        for start, stop in _chunks(n_rows, data.shape[1]):
            repack(self._upload(data[start:stop]), data.shape[1], type_name, part, start, stop - start, n_in)
        return part

    def _upload(self, rows: npt.NDArray[np.uint8]) -> Any:
        """Bytes on the GPU, valid until the next call but one."""
        if not self._staging:
            self._staging = [_Staging(self._memory), _Staging(self._memory)]
        staging = self._staging.pop(0)
        self._staging.append(staging)
        return staging.send(rows)


class _Staging:
    """A pinned buffer and one of the same size on the GPU."""

    def __init__(self, memory: Ledger) -> None:
        self._memory = memory
        self._sent = cupy.cuda.Event(disable_timing=True)
        self._sent.record()
        self._reserve(CHUNK_BYTES)

    def _reserve(self, n_bytes: int) -> None:
        self._pinned = cupy.cuda.alloc_pinned_memory(n_bytes)
        self._host = np.frombuffer(self._pinned, np.uint8, n_bytes)
        self._device = self._memory.empty((n_bytes,), np.uint8, tag="scratch")

    def send(self, rows: npt.NDArray[np.uint8]) -> Any:
        """Enqueue a copy of the rows. What was sent before is overwritten, in the order of the stream."""
        self.wait()
        if rows.nbytes > len(self._host):  # one row alone is longer than a chunk
            self._reserve(rows.nbytes)
        self._host[: rows.nbytes] = rows.reshape(-1)
        target = self._device[: rows.nbytes]
        target.set(self._host[: rows.nbytes])
        self._sent.record()
        return target

    def wait(self) -> None:
        """Until the pinned buffer may be written again."""
        self._sent.synchronize()


def _rows_of(file: GgufFile, name: str, kind: BlockType) -> npt.NDArray[np.uint8]:
    """The rows of a matrix as bytes [n_rows, bytes of a row]; unpacked when no kernel reads the type."""
    data = file.tensor(name) if kind.name in FORMAT_OF else file.dequantise(name)
    n_rows = file.header.tensors[name].shape[1]
    rows: npt.NDArray[np.uint8] = data.reshape(n_rows, -1).view(np.uint8)
    return rows


def _chunks(n_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Rows start .. stop-1 of whole tiles, about CHUNK_BYTES each."""
    step = max(1, CHUNK_BYTES // row_bytes // TILE_ROWS) * TILE_ROWS
    for start in range(0, n_rows, step):
        yield start, min(n_rows, start + step)
