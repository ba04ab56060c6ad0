"""The backend that the configuration asks for."""

from __future__ import annotations

from slotd.daemon.backend import Backend
from slotd.daemon.config import Config
from slotd.daemon.memory import DeviceMemory, Faults, cuda_device
from slotd.daemon.memory.interface import PoolKind
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.protocol.errors import ConfigError


def open_backend(config: Config, faults: Faults | None) -> Backend:
    """The device of `--device`, with its ledger.

    Raises:
        ConfigError: it is not there, or has no such pool.
    """
    found = cuda_device.choose(config.device)
    if found is None:
        if config.pool != "legacy":
            raise ConfigError(f"--pool {config.pool} is for CUDA devices, and this computes on the CPU")
        if config.math not in (None, "exact"):
            raise ConfigError(f"--math {config.math} is for CUDA devices, and this computes on the CPU")
        exact = config.exact or config.math == "exact"
        return NumpyBackend(DeviceMemory(config.memory_limit, faults), exact)
    from slotd.daemon.cuda_backend import CudaBackend
    from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice

    pool: PoolKind = "vmm" if config.pool == "vmm" else "legacy"
    memory = CudaMemory(CupyDevice(), config.memory_limit, faults, pool_kind=pool, overhead=found.overhead)
    return CudaBackend(memory, config.math or "exact")
