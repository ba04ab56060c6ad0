"""Blocks by size class: rounding, reuse, trim."""

from __future__ import annotations

import numpy as np
import pytest

from slotd.daemon.memory.pool import ALIGNMENT, SMALLEST, Pool, new_block, size_class


def test_size_classes_lose_at_most_an_eighth() -> None:
    for n in [1, 511, 512, 513, 1000, 1025, 4097, 10**6, 10**9, 2**20, 2**20 + 1]:
        size = size_class(n)
        assert size >= n
        assert size % ALIGNMENT == 0
        assert size <= max(SMALLEST, n * 9 / 8 + ALIGNMENT)
        assert size_class(size) == size


def test_there_are_eight_classes_in_an_octave() -> None:
    assert len({size_class(n) for n in range(1025, 2049)}) == 8


def test_blocks_are_aligned() -> None:
    for size in (512, 576, 1024):
        block = new_block(size)
        assert block.nbytes == size
        assert np.frombuffer(block, np.uint8).ctypes.data % ALIGNMENT == 0


def test_only_the_same_class_is_reused() -> None:
    pool = Pool()
    block = new_block(1024)
    pool.put(block)
    assert pool.cached == 1024
    assert pool.take(512) is None
    assert pool.take(1024) is block
    assert pool.take(1024) is None
    assert pool.cached == 0


def test_trim_gives_everything_back() -> None:
    pool = Pool()
    for size in (512, 1024, 1024):
        pool.put(new_block(size))
    assert pool.trim() == 2560
    assert pool.cached == 0
    assert pool.take(1024) is None


@pytest.mark.parametrize("size", [512, 1024])
def test_the_last_one_freed_comes_first(size: int) -> None:
    pool = Pool()
    first, second = new_block(size), new_block(size)
    pool.put(first)
    pool.put(second)
    assert pool.take(size) is second
    assert pool.take(size) is first
