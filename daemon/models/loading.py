"""Weights from a model file into the ledger."""

from __future__ import annotations

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.batch import Array
from slotd.daemon.weights.reader import ModelFile


def load(memory: DeviceMemory, file: ModelFile, *names: str) -> Array:
    """The tensors as one float32 array, one below the other: a vector, or a matrix [n_out, n_in].

    Raises:
        OutOfDeviceMemory: they do not fit.
    """
    shapes = [file.header.tensors[name].shape for name in names]
    rows = [shape[-1] for shape in shapes]
    out = memory.empty((sum(rows), *shapes[0][:-1]), tag="weights")
    first = 0
    for name, n in zip(names, rows, strict=True):
        out[first : first + n] = file.dequantise(name)
        first += n
    return out
