"""What a launch hands to the driver: a driver made of Python reads it back."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from slotd.daemon.ops.kernels.launch import Driver, Kernel, KernelLaunchError

PDL_ATTRIBUTE = 6


@dataclass
class Launched:
    """One call of cuLaunchKernelEx."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem: int
    stream: int
    pdl: bool
    values: list[bytes]


@dataclass
class PretendedLibrary:
    """libcuda as far as it is used: one kernel with parameters of `sizes` bytes."""

    sizes: list[int]
    static_shared: int = 0
    statuses: list[int] = field(default_factory=list)  # of the next launches
    launched: list[Launched] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)

    def cuFuncGetAttribute(self, value: Any, number: Any, function: Any) -> int:
        value._obj.value = {0: 1024, 1: self.static_shared, 3: 0, 4: 40}[number.value]
        return 0

    def cuFuncSetAttribute(self, function: Any, number: Any, value: Any) -> int:
        assert number.value == 8
        self.allowed.append(value.value)
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuGetErrorName(self, status: Any, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_OF_TEST"
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        *sizes, smem, stream, attributes, n_attributes = struct.unpack("<7I4xQQI4x", config.raw)
        pdl = False
        if n_attributes:
            number, value = struct.unpack("<i4xi", ctypes.string_at(attributes, 12))
            assert (n_attributes, number) == (1, PDL_ATTRIBUTE)
            pdl = value == 1
        values = [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=False)]
        self.launched.append(Launched(tuple(sizes[:3]), tuple(sizes[3:]), smem, stream, pdl, values))
        return self.statuses.pop(0) if self.statuses else 0


class DeviceArray:
    """An array as CuPy's: its address is data.ptr."""

    class data:
        ptr = 0x7F0012345600


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_float), ("second", ctypes.c_int64))


def make(library: PretendedLibrary, pdl: bool = True) -> tuple[Kernel, list[str]]:
    """A kernel on that library, and a list that grows by one for each binding of the context."""
    bound: list[str] = []
    driver = Driver(lambda: bound.append("bound"), lambda: 0xABC, library)
    return Kernel("probe", driver, ctypes.c_void_p(1), pdl), bound


def test_arguments_arrive_with_the_bits_of_their_types() -> None:
    library = PretendedLibrary([8, 4, 4, 8, 8, 16, 1, 8, 2, 4, 8])
    kernel, _ = make(library)
    pair = Pair(1.5, -7)
    args = (DeviceArray(), np.int32(-5), np.float32(0.1), 2**45, None, pair)
    args += (np.uint8(200), np.float64(0.1), np.float16(0.5), -9, ctypes.c_int64(-3))
    kernel.launch((3, 2, 1), (64, 4), args, smem=1024, stream=77, pdl=True)
    (launched,) = library.launched
    assert launched.values == [
        struct.pack("<Q", DeviceArray.data.ptr),
        struct.pack("<i", -5),
        struct.pack("<f", 0.1),
        struct.pack("<Q", 2**45),
        bytes(8),
        bytes(pair),
        b"\xc8",
        struct.pack("<d", 0.1),
        struct.pack("<e", 0.5),
        struct.pack("<i", -9),
        struct.pack("<q", -3),
    ]
    assert (launched.grid, launched.block) == ((3, 2, 1), (64, 4, 1))
    assert (launched.smem, launched.stream, launched.pdl) == (1024, 77, True)


def test_values_of_the_same_types_are_packed_anew() -> None:
    library = PretendedLibrary([4, 8])
    kernel, _ = make(library)
    for number in range(3):
        kernel.launch(number + 1, 32, (np.int32(number), number * 1000))
    assert [struct.unpack("<i", one.values[0])[0] for one in library.launched] == [0, 1, 2]
    assert [struct.unpack("<q", one.values[1])[0] for one in library.launched] == [0, 1000, 2000]
    assert [one.grid for one in library.launched] == [(1, 1, 1), (2, 1, 1), (3, 1, 1)]


def test_stream_is_the_current_one_unless_named() -> None:
    library = PretendedLibrary([])
    kernel, _ = make(library)
    kernel.launch(1, 1, ())
    kernel.launch(1, 1, (), stream=type("Stream", (), {"ptr": 5})())
    kernel.launch(1, 1, (), stream=0)
    assert [one.stream for one in library.launched] == [0xABC, 5, 0]


@pytest.mark.parametrize(("asked", "able"), [(True, False), (False, True)])
def test_no_early_start_unless_asked_for_and_able(asked: bool, able: bool) -> None:
    library = PretendedLibrary([])
    kernel, _ = make(library, pdl=able)
    kernel.launch(1, 1, (), pdl=asked)
    assert not library.launched[0].pdl


def test_much_shared_memory_is_asked_for_once() -> None:
    library = PretendedLibrary([], static_shared=1024)
    kernel, _ = make(library)
    for smem in (0, 47 * 1024, 47 * 1024 + 1, 100_000, 99_000, 100_000):
        kernel.launch(1, 1, (), smem=smem)
    assert library.allowed == [47 * 1024 + 1, 100_000]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ((np.int32(1),), "takes 2 arguments, got 1"),
        ((1, np.float64(1)), "argument 1 of probe: the parameter has 4 bytes, a float64 has 8"),
        ((1, 1.0), "argument 1 of probe: cannot pass a float"),
        ((np.zeros(3), 1), "argument 0 of probe: cannot pass a ndarray"),
        ((1, 2**31), "an argument does not fit"),
        ((1, None), "the parameter has 4 bytes, a NoneType has 8"),
    ],
)
def test_what_does_not_fit_is_refused(args: tuple[Any, ...], complaint: str) -> None:
    library = PretendedLibrary([8, 4])
    kernel, _ = make(library)
    with pytest.raises(TypeError, match=complaint):
        kernel.launch(1, 1, args)
    assert library.launched == []


def test_a_refused_launch_names_the_kernel_and_the_cause() -> None:
    kernel, _ = make(PretendedLibrary([], statuses=[700]))
    with pytest.raises(KernelLaunchError, match=r"probe, grid 4, .*CUDA_ERROR_OF_TEST \(700\)") as caught:
        kernel.launch(4, 1, ())
    assert caught.value.status == 700


def test_the_first_call_of_a_thread_binds_the_context() -> None:
    library = PretendedLibrary([], statuses=[201, 0])
    kernel, bound = make(library)
    kernel.launch(1, 1, ())
    assert (len(library.launched), len(bound)) == (2, 1)


def test_an_old_driver_does_not_tell_the_sizes() -> None:
    """cuFuncGetParamInfo came with CUDA 12.4: before it an int is passed with eight bytes."""
    library = PretendedLibrary([8, 4])
    library.cuFuncGetParamInfo = lambda *_: 801  # type: ignore[method-assign]
    kernel, _ = make(library)
    kernel.launch(1, 1, (2**40, -2))
    assert library.launched[0].values == [struct.pack("<q", 2**40), struct.pack("<i", -2)]
