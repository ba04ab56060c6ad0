"""Kernels by name on the current device: compile or find the file, load it, keep what was loaded."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

from slotd.daemon.ops.kernels.build import Compiled, build_all, compile_cubin
from slotd.daemon.ops.kernels.launch import Driver, Kernel
from slotd.daemon.ops.kernels.sources import file_of

#: First compute capability with programmatic dependent launch.
_PDL = 90

_lock = threading.RLock()
_modules: dict[tuple[int, str], ctypes.c_void_p] = {}
_kernels: dict[tuple[int, str], Kernel] = {}


def kernel(name: str) -> Kernel:
    """The kernel `name` of the current device; the same object each time.

    Raises:
        LookupError: no .cu file for that name.
        KernelCompileError: the file does not compile, or there is no compiler.
        KernelLaunchError: the file has no such kernel, or the driver refuses the module.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    if found := _kernels.get((device, name)):
        return found
    with _lock:
        found = _kernels.get((device, name))
        if found is None:
            capability = int(cupy.cuda.Device(device).compute_capability)
            function = _driver().function(_module(device, capability, name), name)
            found = Kernel(name, _driver(), function, pdl=capability >= _PDL)
            _kernels[device, name] = found
        return found


def load_all() -> list[Compiled]:
    """Compile what is not on disk yet for the current device, all files side by side.

    Raises:
        KernelCompileError: a file does not compile, or there is no compiler.
    """
    import cupy

    return build_all([f"sm_{cupy.cuda.Device().compute_capability}"])


def _module(device: int, capability: int, name: str) -> ctypes.c_void_p:
    path = file_of(name)
    found = _modules.get((device, path.stem))
    if found is None:
        cubin = compile_cubin(path, f"sm_{capability}")
        _driver().bind()
        found = _modules[device, path.stem] = _driver().load(cubin, path.name)
    return found


@cache
def _driver() -> Driver:
    import cupy

    return Driver(
        bind=lambda: cupy.cuda.runtime.free(0),
        current_stream=lambda: cupy.cuda.get_current_stream().ptr,
    )
