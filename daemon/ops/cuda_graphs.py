"""What the CUDA runner needs beside ops: the stream, pinned memory and copies, captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2


class PinnedBuffer:
    """Host memory that the device copies from and to at full speed.

    Attributes:
        array: uint8 [n_bytes].
    """

    def __init__(self, n_bytes: int) -> None:
        self._memory = cupy.cuda.alloc_pinned_memory(max(n_bytes, 1))
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, n_bytes)
        self.address = int(self.array.ctypes.data)


class Mark:
    """A point in a stream."""

    def __init__(self, stream: Any) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)

    def wait(self) -> None:
        """Until the stream is past it. Spins."""
        self._event.synchronize()


class Stream:
    """The stream that the engine computes on; made current for the calling thread by `use`."""

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)

    @property
    def ptr(self) -> int:
        """Its address, as launches and events take it."""
        return int(self._stream.ptr)

    def use(self) -> None:
        """Work of this thread goes here from now on."""
        self._stream.use()

    def wait(self) -> None:
        """Until everything is done. Spins: 5 to 10 us later than the device, not 65."""
        self._stream.synchronize()

    def mark(self) -> Mark:
        """What is enqueued until now."""
        return Mark(self._stream)

    def upload(self, target: int, source: PinnedBuffer, n_bytes: int) -> None:
        """Enqueue a copy to address `target` of the device."""
        cupy.cuda.runtime.memcpyAsync(target, source.address, n_bytes, _HOST_TO_DEVICE, self._stream.ptr)

    def download(self, target: PinnedBuffer, source: int, n_bytes: int) -> None:
        """Enqueue a copy from address `source` of the device."""
        cupy.cuda.runtime.memcpyAsync(target.address, source, n_bytes, _DEVICE_TO_HOST, self._stream.ptr)

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` enqueues. Nothing of it runs now.

        The mode is CuPy's default, relaxed: an allocation of another thread does not disturb it.
        """
        self._stream.begin_capture()
        try:
            work()
        except BaseException:
            self._abandon_capture()
            raise
        return self._stream.end_capture()

    def launch(self, graph: Any) -> None:
        """Enqueue a graph."""
        graph.launch(self._stream)

    def broken(self) -> bool:
        """Whether the context is gone: an error that every later call would meet again."""
        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError:
            return True
        return False

    def _abandon_capture(self) -> None:
        try:
            self._stream.end_capture()
        except cupy.cuda.runtime.CUDARuntimeError:
            pass  # the capture was invalid already: the error of `work` says why


def device_properties() -> dict[str, Any]:
    """What the runtime says of the current device."""
    properties: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return properties
