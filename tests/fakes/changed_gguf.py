"""Model files that differ from a given one in some keys or tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.weights.reader import open_gguf
from tests.fakes.tiny_gguf import write_gguf


def write_changed(
    path: Path,
    source: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[np.float32] | None] | None = None,
    weight_types: Mapping[str, str] | None = None,
) -> Path:
    """A copy of a model with other keys and tensors; None leaves one out. Returns `path`."""
    with open_gguf(source) as file:
        keys = {key: list(v) if isinstance(v, array) else v for key, v in file.header.metadata.items()}
        weights: dict[str, Any] = {name: file.dequantise(name) for name in file.header.tensors}
    write_gguf(path, keys | dict(metadata or {}), weights | dict(tensors or {}), weight_types=weight_types)
    return path
