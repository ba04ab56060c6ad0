"""The table of models: `general.architecture` -> class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slotd.daemon.models.llama import Llama
from slotd.daemon.models.model import Model
from slotd.daemon.models.qwen3 import Qwen3
from slotd.daemon.models.qwen35 import Qwen35
from slotd.daemon.ops.interface import Ops
from slotd.daemon.weights.reader import ModelFile
from slotd.protocol.errors import ModelError

#: The architectures of `weights.architectures`. Each backend has the ops of all of them.
MODELS: Mapping[str, Callable[[ModelFile, Any, int], Model]] = {
    "llama": Llama,
    "qwen3": Qwen3,
    "qwen35": Qwen35,
}


def load_model(file: ModelFile, ops: Ops, max_ctx: int) -> Model:
    """Read all weights of a model, for sequences of up to max_ctx positions.

    Raises:
        ModelError: no code for its architecture.
        OutOfDeviceMemory: the weights do not fit.
    """
    arch = file.hyper.arch
    if arch not in MODELS:
        supported = ", ".join(sorted(MODELS))
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported (supported: {supported})")
    return MODELS[arch](file, ops, max_ctx)
