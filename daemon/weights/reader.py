"""A GGUF file, opened: memory-mapped, checked, its tensors at hand.

`open_gguf` checks the container (types, sizes, places of the tensors), `open_model` also that it is a model
slotd can run. Nothing is copied until a tensor is asked for as float32.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from slotd.daemon.weights.architectures import (
    HyperParameters,
    check_tensors,
    expected_tensors,
    read_hyper_parameters,
)
from slotd.daemon.weights.block_types import BlockType, block_type, can_dequantise, dequantise_blocks
from slotd.daemon.weights.identity import model_identity
from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header, TensorInfo, parse_header

#: Types whose elements numpy knows; all others are seen as rows of bytes.
_PLAIN: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2"}


class GgufFile:
    """An open GGUF file. Close it when the tensors are taken, or use it as a context manager.

    Attributes:
        path: where it lies.
        header: metadata and tensor table.
    """

    #: What its weights count as in the ledger of the device.
    memory_tag: ClassVar[str] = "weights"

    def __init__(self, path: Path, data: mmap.mmap, header: Header) -> None:
        self.path = path
        self.header = header
        self._data = data

    def block_type(self, name: str) -> BlockType:
        """The element type of a tensor."""
        kind = block_type(self.header.tensors[name].type_id)
        assert kind is not None  # checked when the file was opened
        return kind

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return len(self._data)

    @property
    def n_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(info.n_elements for info in self.header.tensors.values())

    def n_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return _tensor_bytes(self.header.tensors[name], self.block_type(name))

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of a tensor in the file, dimensions in numpy order (the contiguous one last).

        Returns:
            float32 or float16 for F32 and F16; uint8 for all other types, the last dimension in bytes.
            The file cannot be closed while a view is alive.
        """
        info, kind = self.header.tensors[name], self.block_type(name)
        *outer, inner = reversed(info.shape)
        dtype = np.dtype(_PLAIN.get(kind.name, np.uint8))
        row_bytes = inner // kind.block_elements * kind.block_bytes
        shape = (*outer, row_bytes // dtype.itemsize)
        start = self.header.data_start + info.offset
        # frombuffer, unlike ndarray(buffer=...), keeps the map from being closed under the view.
        return np.frombuffer(self._data, dtype, math.prod(shape), start).reshape(shape)

    def dequantise(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as an own float32 array, dimensions in numpy order: a linear weight is (n_out, n_in)."""
        return dequantise_blocks(self.tensor(name).view(np.uint8), self.block_type(name))

    @functools.cached_property
    def identity(self) -> str:
        """Hash of header, tensor table and samples of the data: 32 hexadecimal digits."""
        return model_identity(self._data, self.header)

    def close(self) -> None:
        """Unmap the file. Raises BufferError while a view from `tensor` is alive."""
        self._data.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # frames of the error may still hold a view; the error is what the caller must see
            with contextlib.suppress(BufferError):
                self.close()


class ModelFile(GgufFile):
    """A GGUF file with a model that slotd can run.

    Attributes:
        hyper: its hyper-parameters.
    """

    def __init__(self, path: Path, data: mmap.mmap, header: Header, hyper: HyperParameters) -> None:
        super().__init__(path, data, header)
        self.hyper = hyper

    def __enter__(self) -> ModelFile:
        return self


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file whatever model is in it.

    Raises:
        ModelError: it cannot be read, is not GGUF, or a tensor is of an unknown type or out of place.
    """
    location = Path(path)
    data = _map(location)
    header = parse_header(data, str(location))
    _check_tensor_data(header, len(data))
    return GgufFile(location, data, header)


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a model and check all that can be checked before its weights are read.

    Raises:
        ModelError: as `open_gguf`, or slotd cannot run this model: the message names key or tensor.
    """
    file = open_gguf(path)
    return ModelFile(file.path, file._data, file.header, check_model(file))


def check_model(file: GgufFile) -> HyperParameters:
    """The hyper-parameters of an open file. Raises ModelError when slotd cannot run the model."""
    hyper = read_hyper_parameters(file.header)
    check_tensors(file.header, hyper)
    names = expected_tensors(hyper)
    check_types(file, names)
    check_vectors(file, names)
    return hyper


def check_types(file: GgufFile, names: Iterable[str]) -> None:
    """Raises ModelError when a tensor is of a type that cannot be turned into float32."""
    for name in names:
        if not can_dequantise(file.block_type(name)):
            kind = file.block_type(name).name
            raise ModelError(f"{file.path}: tensor {name} has type {kind}, which cannot be dequantised")


def check_vectors(file: GgufFile, names: Iterable[str]) -> None:
    """Raises ModelError when a vector (norm weights, rope divisors) has a NaN or an infinity in it."""
    for name in names:
        if len(file.header.tensors[name].shape) > 1:
            continue
        values = file.dequantise(name)
        if name.endswith(".ssm_a") and (values > 0).any():
            index = int(np.argmax(values > 0))
            raise ModelError(
                f"{file.path}: tensor {name}[{index}] is {values[index]:g}, "
                "it must be negative: the converter stores -exp(A_log)"
            )
        finite = np.isfinite(values)
        if not finite.all():
            index = int(np.argmin(finite))
            raise ModelError(f"{file.path}: tensor {name}[{index}] is not finite (NaN or infinity)")


def _map(path: Path) -> mmap.mmap:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise ModelError(f"{path}: is not a regular file")
        if status.st_size == 0:
            raise ModelError(f"{path}: the file is empty")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _tensor_bytes(info: TensorInfo, kind: BlockType) -> int:
    return info.n_elements // kind.block_elements * kind.block_bytes


def _check_tensor_data(header: Header, file_bytes: int) -> None:
    """Types are known, rows are whole blocks, tensors lie inside the file and beside each other."""
    spans: list[tuple[int, int, str]] = []
    for info in header.tensors.values():
        kind = block_type(info.type_id)
        if kind is None:
            raise ModelError(f"{header.name}: tensor {info.name} has unknown type {info.type_id}")
        if info.shape[0] % kind.block_elements:
            raise ModelError(
                f"{header.name}: tensor {info.name} has rows of {info.shape[0]} elements, "
                f"{kind.name} needs a multiple of {kind.block_elements}"
            )
        start = header.data_start + info.offset
        end = start + _tensor_bytes(info, kind)
        if end > file_bytes:
            raise ModelError(
                f"{header.name}: truncated: tensor {info.name} ends at byte {end}, the file has {file_bytes}"
            )
        spans.append((start, end, info.name))
    spans.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ModelError(f"{header.name}: tensors {name} and {other} overlap at byte {start}")
