"""Tensors of a checkpoint in the safetensors format: a folder of such files with a config.json.

A file is the length of a JSON header (uint64), the header (name -> dtype, shape, place) and the data. Files
are mapped; nothing is copied until a tensor is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.protocol.errors import ModelError

#: Longest header that is read, in bytes.
MOST_HEADER = 100 * 2**20

#: What tensors are made of; numpy has no bfloat16, which is the upper half of a float32.
_DTYPES: Mapping[str, npt.DTypeLike] = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I64": "<i8", "BOOL": "?"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: where it lies, what it is made of, its shape in numpy order.

    `path` is its file, `start` its first byte in it.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, first: int = 0, last: int | None = None) -> npt.NDArray[Any]:
        """Rows first to last (the outermost dimension): float32 for what is floating, else as it is."""
        stored = np.memmap(self.path, _DTYPES[self.dtype], "r", self.start, self.shape)[first:last]
        if self.dtype == "BF16":
            return (np.asarray(stored, dtype=np.uint32) << 16).view(np.float32)
        return np.asarray(stored, dtype=np.float32 if self.dtype in ("F32", "F16") else None)


class Checkpoint:
    """A checkpoint's configuration and tensors.

    Attributes:
        path: the folder.
        config: its config.json.
        tensors: of all its files, by name.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError: there is no such checkpoint, or a file of it is damaged."""
        self.path = path if path.is_dir() else path.parent
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ModelError(f"{path}: no .safetensors file in this folder")
        self.config = _object(_read(self.path / "config.json"), self.path / "config.json")
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            for tensor in _tensors(file):
                if tensor.name in self.tensors:
                    raise ModelError(f"{file}: tensor {tensor.name} is in another file too")
                self.tensors[tensor.name] = tensor


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _object(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: is not JSON") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value


def _tensors(path: Path) -> list[StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if size >= 8 and length <= min(size - 8, MOST_HEADER) else None
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if header is None:
        raise ModelError(f"{path}: is no safetensors file, or truncated")
    entries = _object(header, path)
    entries.pop("__metadata__", None)
    return [_tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()]


def _tensor(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ModelError(f"{path}: the header's entry of tensor {name} is damaged")
    if dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ModelError(f"{path}: tensor {name} has type {dtype}, only {known} are read")
    if end - start != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize or data_start + end > size:
        raise ModelError(
            f"{path}: the data of tensor {name} do not fit their shape, or the file is truncated"
        )
    return StoredTensor(path, name, dtype, shape, data_start + start)
