"""Rope tables."""

from __future__ import annotations

import numpy as np

from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.rope import BLOCK, RopeTable


def test_angles() -> None:
    table = RopeTable(DeviceMemory(), base=10000.0, dims=8)
    positions = np.array([0, 1, 700, 5000])
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(table.at(positions), np.exp(1j * angles), atol=1e-7)


def test_divisors() -> None:
    table = RopeTable(DeviceMemory(), 10000.0, 4, np.array([1, 8], dtype=np.float32))
    np.testing.assert_allclose(table.at(np.array([3])), [np.exp(3j * np.array([1, 0.01 / 8]))], atol=1e-7)


def test_a_table_does_not_depend_on_how_it_grew() -> None:
    slowly, at_once = (RopeTable(DeviceMemory(), 5e5, 16) for _ in range(2))
    for top in (0, 1, BLOCK, 3 * BLOCK + 5):
        slowly.at(np.array([top]))
    positions = np.arange(3 * BLOCK + 6)
    assert slowly.at(positions).tobytes() == at_once.at(positions).tobytes()


def test_the_table_is_in_the_ledger() -> None:
    memory = DeviceMemory()
    table = RopeTable(memory, 10000.0, 64)
    table.at(np.array([10]))
    assert memory.live("weights") == BLOCK * 32 * 8
