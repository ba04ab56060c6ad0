"""Products of many rows by cuBLAS (``--math fast``): weights are unpacked, part by part, as they are needed.

One power of two per matrix, any order of sums: bits depend on the number of rows and on the library.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from slotd.daemon.memory import Ledger
from slotd.daemon.ops.cuda_linear import Prepared
from slotd.daemon.ops.cuda_weights import TILE_COLUMNS, TILE_ROWS, Matrix, MatrixPart
from slotd.daemon.ops.kernels import kernel
from slotd.protocol.errors import ConfigError

#: Fewer rows take less time by the exact kernels: unpacking costs as much as some hundred rows.
LEAST_ROWS = 256

#: A smaller matrix takes the host longer to launch than the device to multiply: SmolLM2's, all of them, were
#: three times slower here than by the exact kernels.
LEAST_WEIGHTS = 1 << 23

#: Unpacked weights at a time: they stay in the cache of the device between the two kernels.
SLICE_BYTES = 32 << 20

PIECE_BYTES = 16

TILES_THREADS, ROWS_THREADS, SCALES_THREADS = 128, 256, 1024


class Cublas:
    """Products of halves with sums in float32.

    Args:
        memory: the ledger.

    Raises:
        ConfigError: the library is not there.
    """

    def __init__(self, memory: Ledger) -> None:
        try:
            self._library = cupy.cuda.cublas
        except ImportError as error:
            raise ConfigError(f"--math fast needs cuBLAS, and CuPy does not find it: {error}") from None
        self._memory = memory
        self._handle = self._library.create()  # one of our own: CuPy's expects factors in host memory
        self._library.setPointerMode(self._handle, self._library.CUBLAS_POINTER_MODE_DEVICE)
        self._betas = memory.empty((2,), np.float32, tag="weights")
        self._betas.set(np.array([0, 1], np.float32))

    def suits(self, x: Prepared, weight: Matrix) -> bool:
        """Whether this product is expected to be faster here than by the exact kernels."""
        return x.n >= LEAST_ROWS and weight.n_out * weight.n_in >= LEAST_WEIGHTS

    def multiply(self, x: Prepared, weight: Matrix, y: Any, *, add: bool) -> None:
        """y = x weight^T, or y += it. y: float32 [x.n, weight.n_out], rows contiguous."""
        width = weight.n_segments * TILE_COLUMNS
        step = max(1, SLICE_BYTES // (TILE_ROWS * width * 2))  # row tiles of a slice
        most = min(step, max(part.n_tiles for part in weight.parts))
        scales = self._memory.empty((3,), np.float32)
        rows = self._memory.empty((x.n, width), np.float16)
        unpacked = self._memory.empty((most * TILE_ROWS, width), np.float16)
        for part in weight.parts:
            _find_scales(x, part, scales)
            _unpack_rows(x, scales, rows)
            for first in range(0, part.n_tiles, step):
                n_tiles = min(step, part.n_tiles - first)
                unpack(part, first, n_tiles, scales, unpacked)
                start = part.first + first * TILE_ROWS
                n_out = min(n_tiles * TILE_ROWS, part.rows - first * TILE_ROWS)
                self._product(rows, unpacked[:n_out], y[:, start : start + n_out], scales, add)

    def _product(self, x: Any, weight: Any, y: Any, factor: Any, add: bool) -> None:
        """y = factor[0] x weight^T, or y += it: row-major matrices are the library's transposed ones."""
        cublas, runtime = self._library, cupy.cuda.runtime
        cublas.gemmEx(
            self._handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, len(weight), len(x), x.shape[1],
            factor.data.ptr, weight.data.ptr, runtime.CUDA_R_16F, x.shape[1], x.data.ptr, runtime.CUDA_R_16F,
            x.shape[1], self._betas[int(add) :].data.ptr, y.data.ptr, runtime.CUDA_R_32F, y.strides[0] // 4,
            cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip


def _find_scales(x: Prepared, part: MatrixPart, scales: Any) -> None:
    args = (x.scale, x.n, part.row_scale, part.rows, scales)
    kernel("unpack_scales").launch(1, SCALES_THREADS, args, pdl=True)


def _unpack_rows(x: Prepared, scales: Any, out: Any) -> None:
    """Rows as a plain matrix. out: float16 [x.n, width]."""
    args = (x.halves, x.scale, x.n, x.room, out.shape[1] // TILE_COLUMNS, scales, out)
    blocks = -(-out.nbytes // PIECE_BYTES // ROWS_THREADS)
    kernel("unpack_rows").launch(blocks, ROWS_THREADS, args, pdl=True)


def unpack(part: MatrixPart, first: int, n_tiles: int, scales: Any, out: Any) -> None:
    """Row tiles from `first` on as a plain matrix, scaled as `scales` says. out: float16 [rows, width]."""
    segments = out.shape[1] // TILE_COLUMNS
    tiles = part.tiles[first * segments * part.format.tile_bytes :]
    args = (tiles, part.row_scale[first * TILE_ROWS :], segments, scales, out)
    kernel(f"unpack_{part.format.name}").launch((-(-segments // 4), n_tiles), TILES_THREADS, args, pdl=True)
