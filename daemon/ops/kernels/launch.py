"""Kernels of the current device, and how they are launched: the CUDA driver through ctypes.

CuPy's own launch takes 7 to 10 us of Python and cannot set launch attributes; this one packs the arguments
with one `struct` call and hands them to cuLaunchKernelEx, in a capture as well. It keeps the GIL: giving it
away for a call of 2 us would mean to wait for it behind every busy thread.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Numbers from cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_THREADS, _SHARED_BYTES, _LOCAL_BYTES, _REGISTERS, _MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8
_INVALID_VALUE, _INVALID_CONTEXT = 1, 201

#: Shared memory that a block may have without asking.
_SHARED_WITHOUT_ASKING = 48 * 1024

_CONFIG = struct.Struct(
    "<7I4xQQI4x"
)  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number
_ATTRIBUTE = struct.Struct("<i4xi60x")  # CUlaunchAttribute: id, then a union of 64 bytes

#: Kind and bytes of a NumPy scalar -> its character in `struct`.
_CODES = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
_CODES |= {"f2": "e", "f4": "f", "f8": "d"}

Size = int | tuple[int, ...]


class KernelLaunchError(RuntimeError):
    """The driver refused a call.

    Attributes:
        status: its CUresult.
    """

    def __init__(self, what: str, status: int, name: str) -> None:
        super().__init__(f"{what}: {name} ({status})")
        self.status = status


class Driver:
    """The functions of libcuda that load and launch.

    Args:
        bind: makes the device's context current for the calling thread.
        current_stream: address of the stream that launches without one go to.
        library: the loaded library; default: libcuda.so.1.

    Raises:
        OSError: no driver on this machine.
    """

    def __init__(
        self, bind: Callable[[], object], current_stream: Callable[[], int], library: Any = None
    ) -> None:
        self._library = ctypes.PyDLL("libcuda.so.1") if library is None else library
        self.bind, self.current_stream = bind, current_stream
        self.launch = self._library.cuLaunchKernelEx

    def check(self, status: int, what: str) -> None:
        """Raises: KernelLaunchError, unless status is success."""
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
            raise KernelLaunchError(what, status, (name.value or b"unknown error").decode())

    def load(self, cubin: bytes, what: str) -> ctypes.c_void_p:
        """A module of machine code, in the current context."""
        module = ctypes.c_void_p()
        self.check(self._library.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(cubin)), what)
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """A kernel of a module."""
        found = ctypes.c_void_p()
        status = self._library.cuModuleGetFunction(
            ctypes.byref(found), module, ctypes.c_char_p(name.encode())
        )
        self.check(status, f"kernel {name}")
        return found

    def attribute(self, function: ctypes.c_void_p, number: int) -> int:
        """An attribute of a kernel, numbered as in cuda.h."""
        value = ctypes.c_int()
        self.check(
            self._library.cuFuncGetAttribute(ctypes.byref(value), ctypes.c_int(number), function),
            f"attribute {number} of a kernel",
        )
        return value.value

    def set_dynamic_shared(self, function: ctypes.c_void_p, size: int) -> None:
        """Let a kernel be launched with so many bytes of dynamic shared memory."""
        status = self._library.cuFuncSetAttribute(
            function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(size)
        )
        self.check(status, f"{size} bytes of dynamic shared memory")

    def parameter_sizes(self, function: ctypes.c_void_p) -> list[int] | None:
        """Bytes of each parameter of a kernel; None where the driver (before CUDA 12.4) cannot tell."""
        try:
            info = self._library.cuFuncGetParamInfo
        except AttributeError:
            return None
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        sizes: list[int] = []
        while True:
            status = info(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size))
            if status:  # there is no such parameter; anything else means that it was not counted
                return sizes if status == _INVALID_VALUE else None
            sizes.append(size.value)


@dataclass(slots=True)
class _Packing:
    """How the arguments of one tuple of types are laid out; its buffers are reused by every such launch."""

    pack_into: Callable[..., None]
    values: Any
    pointers: Any
    convert: tuple[tuple[int, Callable[[Any], object]], ...]


class Kernel:
    """One kernel of the current device. Made by `kernel(name)`.

    Attributes:
        name: its entry point.
        pdl: whether the device can start it before the kernel ahead of it has ended.
        registers, local_bytes, shared_bytes: per thread, per thread (spills), per block (static).
        most_threads: of a block.
    """

    def __init__(self, name: str, driver: Driver, function: ctypes.c_void_p, pdl: bool) -> None:
        self.name, self.pdl = name, pdl
        self._driver, self._function = driver, function
        self._current_stream, self._launch = driver.current_stream, driver.launch
        self.registers = driver.attribute(function, _REGISTERS)
        self.most_threads = driver.attribute(function, _MAX_THREADS)
        self.local_bytes = driver.attribute(function, _LOCAL_BYTES)
        self.shared_bytes = driver.attribute(function, _SHARED_BYTES)
        self._allowed = _SHARED_WITHOUT_ASKING - self.shared_bytes
        self._sizes = driver.parameter_sizes(function)
        self._packings: dict[tuple[type, ...], _Packing] = {}
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._attributes = ctypes.create_string_buffer(
            _ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1), _ATTRIBUTE.size
        )
        self._attributes_at = ctypes.addressof(self._attributes)
        self._lock = threading.Lock()  # the buffers are one set

    def launch(
        self,
        grid: Size,
        block: Size,
        args: Sequence[Any],
        smem: int = 0,
        stream: Any = None,
        pdl: bool = False,
    ) -> None:
        """Enqueue one run.

        grid, block: up to three numbers, x first.
        args: a value for each parameter: a NumPy scalar of the parameter's size, an int for any integer or
            pointer, a device array (its address), None (a null pointer), or a ctypes value or structure.
        smem: bytes of dynamic shared memory.
        stream: its address, or an object with it as `ptr`; default: CuPy's current stream.
        pdl: it may start while the kernel before it on the stream still runs: the kernel itself waits
            (griddepcontrol) before it reads what that one writes. Without effect below sm_90.

        Raises:
            TypeError: a wrong number of arguments, or one that does not fit its parameter.
            KernelLaunchError: the driver refused it, or an earlier kernel has failed.
        """
        at = self._current_stream() if stream is None else stream if type(stream) is int else stream.ptr
        x, y, z = _three(grid)
        u, v, w = _three(block)
        if smem > self._allowed:
            self._driver.set_dynamic_shared(self._function, smem)
            self._allowed = smem
        types = tuple(map(type, args))
        with self._lock:
            packing = self._packings.get(types) or self._new_packing(types, args)
            if packing.convert:
                args = list(args)
                for index, convert in packing.convert:
                    args[index] = convert(args[index])
            try:
                packing.pack_into(packing.values, 0, *args)
            except struct.error as error:
                raise TypeError(f"kernel {self.name}: an argument does not fit: {error}") from None
            n_attributes = 1 if pdl and self.pdl else 0
            _CONFIG.pack_into(self._config, 0, x, y, z, u, v, w, smem, at, self._attributes_at, n_attributes)
            status = self._launch(self._config, self._function, packing.pointers, None)
            if status == _INVALID_CONTEXT:  # the first CUDA call of this thread
                self._driver.bind()
                status = self._launch(self._config, self._function, packing.pointers, None)
        if status:
            self._driver.check(status, f"kernel {self.name}, grid {grid}, block {block}, smem {smem}")

    def _new_packing(self, types: tuple[type, ...], args: Sequence[Any]) -> _Packing:
        sizes = self._sizes
        if sizes is not None and len(sizes) != len(args):
            raise TypeError(f"kernel {self.name} takes {len(sizes)} arguments, got {len(args)}")
        codes: list[str] = []
        offsets: list[int] = []
        convert: list[tuple[int, Callable[[Any], object]]] = []
        at = 0
        for index, arg in enumerate(args):
            code, how = _code(
                arg, None if sizes is None else sizes[index], f"argument {index} of {self.name}"
            )
            if how is not None:
                convert.append((index, how))
            padding = -struct.calcsize("<" + code) % 16
            codes.append(f"{code}{padding}x")
            offsets.append(at)
            at += struct.calcsize("<" + codes[-1])
        values = ctypes.create_string_buffer(max(at, 1))
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * max(len(args), 1))(*(base + offset for offset in offsets))
        packing = _Packing(struct.Struct("<" + "".join(codes)).pack_into, values, pointers, tuple(convert))
        self._packings[types] = packing
        return packing


def _code(arg: Any, size: int | None, what: str) -> tuple[str, Callable[[Any], object] | None]:
    """Format character of a value in `struct`, and what turns the value into one that `struct` takes."""
    how: Callable[[Any], object] | None = None
    if isinstance(arg, np.generic):
        code = _CODES.get(arg.dtype.str[1:], "")
    elif isinstance(arg, int):
        code = _CODES.get(f"i{8 if size is None else size}", "")
    elif arg is None:
        code, how = "q", lambda _: 0
    elif hasattr(type(arg), "from_buffer_copy"):  # every ctypes type
        code, how = f"{ctypes.sizeof(arg)}s", bytes
    elif hasattr(getattr(arg, "data", None), "ptr"):
        code, how = "Q", lambda array: array.data.ptr
    else:
        code = ""
    if not code:
        raise TypeError(f"{what}: cannot pass a {type(arg).__name__}")
    given = struct.calcsize("<" + code)
    if size is not None and given != size:
        raise TypeError(f"{what}: the parameter has {size} bytes, a {type(arg).__name__} has {given}")
    return code, how


def _three(size: Size) -> tuple[int, ...]:
    if type(size) is int:
        return size, 1, 1
    assert not isinstance(size, int)
    return size if len(size) == 3 else (*size, 1, 1)[:3]
