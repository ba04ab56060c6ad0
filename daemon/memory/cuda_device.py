"""Which CUDA device this process uses, and what it is. Nothing here needs CuPy until a device is asked for.

A process sees one device: choosing another than the first is done by hiding the others (CUDA_VISIBLE_DEVICES)
before CUDA starts, so that every thread and library of the process means the same one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from slotd.protocol.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"

#: What `--device` takes beside a number.
AUTO, CPU = "auto", "cpu"


@dataclass(frozen=True, slots=True)
class Found:
    """The device that was chosen.

    Attributes:
        overhead: bytes that its context takes, as far as they could be measured (that needs nvidia-ml-py).
    """

    overhead: int


def choose(
    choice: str, environment: MutableMapping[str, str] = os.environ, load: Callable[[], Any] | None = None
) -> Found | None:
    """Make the device of `--device` the one of this process; None: compute on the CPU.

    Args:
        choice: auto (a CUDA device if there is one), cpu, or the number of a device.
        environment: of this process.
        load: imports CuPy.

    Raises:
        ConfigError: the device of this number is not there, with the reason.
    """
    if choice == CPU:
        return None
    if choice != AUTO:
        _show_only(int(choice), environment)
    try:
        cupy = (load or _cupy)()
        found = int(cupy.cuda.runtime.getDeviceCount())
        if found:
            return Found(_start(cupy))
        reason = "CUDA finds no device"
    except ImportError as error:
        reason = f"CuPy cannot be imported: {error}"
    except Exception as error:  # a driver that is missing or too old has an error type of CuPy's
        reason = str(error)
    if choice == AUTO:
        return None
    raise ConfigError(f"--device {choice}: no such CUDA device ({reason})")


def describe(load: Callable[[], Any] | None = None) -> Mapping[str, Any]:
    """For PROPS: name, compute capability, CUDA versions, bytes free now and in all."""
    cupy = (load or _cupy)()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    free, total = runtime.memGetInfo()
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": _version(runtime.driverGetVersion()), "runtime": _version(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__, "memory_free": int(free), "memory_total": int(total),
    }  # fmt: skip


def _show_only(number: int, environment: MutableMapping[str, str]) -> None:
    """Hide all devices but one, counted among those that are visible."""
    visible = environment.get(VISIBLE)
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    if names is not None and number >= len(names):
        raise ConfigError(f"--device {number}: no such CUDA device ({VISIBLE}={visible} shows {len(names)})")
    environment[VISIBLE] = str(number) if names is None else names[number]


def _start(cupy: Any) -> int:
    """Make the context. Returns the bytes it takes, 0 when nobody can tell."""
    runtime, used = cupy.cuda.runtime, _used_bytes(cupy)
    before = used()
    runtime.free(0)
    return max(0, used() - before)


def _used_bytes(cupy: Any) -> Callable[[], int]:
    """Asks how many bytes of the device are in use. Needs no context."""
    with contextlib.suppress(Exception):  # not installed, or it does not know this device: 0 then
        import pynvml

        pynvml.nvmlInit()
        bus = cupy.cuda.runtime.deviceGetPCIBusId(0)
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return lambda: 0


def _version(number: int) -> str:
    """CUDA writes 13.0 as 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _cupy() -> Any:
    import cupy

    return cupy
