"""Which device a process uses: what is hidden from CUDA, what is refused, and what is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slotd.daemon.memory.cuda_device import VISIBLE, choose, describe
from slotd.protocol.errors import ConfigError

GIB = 1 << 30


class Runtime:
    """CuPy's runtime with so many devices; the context takes half a GiB of the first."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.used = 0

    def getDeviceCount(self) -> int:
        return self.count

    def free(self, address: int) -> None:
        self.used = GIB // 2

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:0{device}:00.0"

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": b"NVIDIA H200", "major": 9, "minor": 0}

    def memGetInfo(self) -> tuple[int, int]:
        return 3 * GIB, 4 * GIB

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 12090


def cupy(runtime: Runtime) -> Callable[[], Any]:
    return lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), __version__="14.2.0")


def no_cupy() -> Any:
    raise ImportError("No module named 'cupy'")


@pytest.fixture(autouse=True)
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_cpu_asks_nobody() -> None:
    assert choose("cpu", {}, lambda: pytest.fail("imported")) is None


@pytest.mark.parametrize("visible", [None, "3,1", "GPU-5a1"])
def test_auto_takes_the_first_that_is_visible(visible: str | None) -> None:
    environment = {} if visible is None else {VISIBLE: visible}
    before = dict(environment)
    assert choose("auto", environment, cupy(Runtime())) is not None
    assert environment == before


@pytest.mark.parametrize("load", [no_cupy, cupy(Runtime(0))])
def test_auto_without_a_device_is_the_cpu(load: Callable[[], Any]) -> None:
    assert choose("auto", {}, load) is None


def test_auto_with_a_driver_that_is_too_old_is_the_cpu() -> None:
    runtime = Runtime()
    runtime.getDeviceCount = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert choose("auto", {}, cupy(runtime)) is None


@pytest.mark.parametrize(
    ("visible", "number", "left"), [(None, "2", "2"), ("3,1", "1", "1"), (" GPU-a , GPU-b", "0", "GPU-a")]
)
def test_a_number_hides_the_others(visible: str | None, number: str, left: str) -> None:
    environment = {} if visible is None else {VISIBLE: visible}
    assert choose(number, environment, cupy(Runtime())) is not None
    assert environment[VISIBLE] == left


@pytest.mark.parametrize(
    ("number", "visible", "load", "reason"),
    [
        ("0", None, no_cupy, "CuPy cannot be imported: No module named 'cupy'"),
        ("5", None, cupy(Runtime(0)), "CUDA finds no device"),
        ("2", "0,1", cupy(Runtime(2)), f"{VISIBLE}=0,1 shows 2"),
        ("0", "", cupy(Runtime(2)), f"{VISIBLE}= shows 0"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_the_reason(
    number: str, visible: str | None, load: Callable[[], Any], reason: str
) -> None:
    environment = {} if visible is None else {VISIBLE: visible}
    with pytest.raises(ConfigError) as caught:
        choose(number, environment, load)
    assert str(caught.value) == f"--device {number}: no such CUDA device ({reason})"


def test_the_context_is_measured_when_somebody_can(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    unmeasured = choose("auto", {}, cupy(runtime))
    nvml = ModuleType("pynvml")
    asked: list[str] = []
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByPciBusId = lambda bus: asked.append(bus) or bus  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=GIB + runtime.used)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    runtime.used = 0
    measured = choose("auto", {}, cupy(runtime))
    assert unmeasured is not None
    assert measured is not None
    assert (unmeasured.overhead, measured.overhead, asked) == (0, GIB // 2, ["0000:00:00.0"])


def test_what_props_says() -> None:
    assert describe(cupy(Runtime())) == {
        "device": "NVIDIA H200", "compute_capability": "9.0", "driver": "13.0", "runtime": "12.9",
        "cupy": "14.2.0", "memory_free": 3 * GIB, "memory_total": 4 * GIB,
    }  # fmt: skip
