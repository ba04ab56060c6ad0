"""GPU tests: everything here needs a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


class GuardedMemory:
    """Arrays on the device, filled with NaN, with bands around them that must stay as they are."""

    BAND = 256

    def __init__(self) -> None:
        self._blocks: list = []

    def empty(self, shape: tuple[int, ...], dtype: str = "float32", tag: str = "scratch") -> Any:
        import cupy
        import numpy as np

        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        block = cupy.full(n_bytes + 2 * self.BAND, 0xFF, cupy.uint8)
        self._blocks.append((block, n_bytes))
        return block[self.BAND : self.BAND + n_bytes].view(dtype).reshape(shape)

    def check(self) -> None:
        for block, n_bytes in self._blocks:
            assert (block[: self.BAND] == 0xFF).all(), "written in front of an array"
            assert (block[self.BAND + n_bytes :] == 0xFF).all(), "written behind an array"


@pytest.fixture
def memory() -> Iterator[GuardedMemory]:
    guarded = GuardedMemory()
    yield guarded
    guarded.check()
