"""From the configuration to a backend. What a device is, and which one, is in memory/test_cuda_device.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slotd.daemon.config import Config
from slotd.daemon.device_backend import open_backend
from slotd.daemon.memory import DeviceMemory, Faults
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.protocol.errors import ConfigError


def config(**options: Any) -> Config:
    return Config(model=Path("m.gguf"), **options)


@pytest.mark.parametrize(("exact", "math"), [(False, "float32"), (True, "exact")])
def test_the_cpu(exact: bool, math: str) -> None:
    faults = Faults("decode", 1)
    backend = open_backend(config(device="cpu", exact=exact, memory_limit=1 << 20), faults)
    assert isinstance(backend, NumpyBackend)
    assert (backend.name, backend.math, backend.kv_type, backend.chunk) == ("numpy", math, "f32", 128)
    assert isinstance(backend.memory, DeviceMemory)
    assert (backend.memory.limit, backend.memory._faults) == (1 << 20, faults)


def test_the_cpu_computes_exactly_or_as_fast_as_it_can() -> None:
    assert open_backend(config(device="cpu", math="exact"), None).math == "exact"
    for math in ("q8", "fast"):
        with pytest.raises(ConfigError, match=f"--math {math} is for CUDA devices"):
            open_backend(config(device="cpu", math=math), None)


def test_the_cpu_has_no_driver_pool() -> None:
    with pytest.raises(ConfigError, match="--pool vmm is for CUDA devices"):
        open_backend(config(device="cpu", pool="vmm"), None)


def test_auto_without_a_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotd.daemon.memory.cuda_device.choose", lambda choice: None)
    assert open_backend(config(), None).name == "numpy"
