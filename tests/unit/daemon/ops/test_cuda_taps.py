"""The ring of features: what is held is read before another step leaves its rows there."""

from __future__ import annotations

import numpy as np
import pytest

from slotd.daemon.memory import DeviceMemory, OutOfDeviceMemory
from slotd.daemon.ops.cuda_taps import RING, CudaFeatures

NUMBERS = np.arange(3)


class Reader:
    """Holds rows of steps; notes the ring's content, number by number, when it has to read them."""

    def __init__(self, features: CudaFeatures) -> None:
        self.features = features
        self.held: list[tuple[int, int]] = []  # number of a row, its place
        self.reads = 0

    def hold(self, numbers: list[int], places: list[int]) -> None:
        self.features.hold(self.read)
        self.held += zip(numbers, places, strict=True)

    def read(self) -> None:
        self.reads += 1
        self.held.clear()
        self.features.held_no_more()


def test_no_row_that_is_held_is_written_over() -> None:
    features = CudaFeatures(DeviceMemory(), (1, 2), 8)
    reader = Reader(features)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n = int(rng.choice([1, 1, 2, 7, 23, 64]))
        places = np.full(64, 99, np.int32)
        first = features.places(places, n)
        assert (places[n:] == -1).all()
        assert set(places[:n].tolist()).isdisjoint(place for _, place in reader.held)
        features.left_by_step(first)
        rows = np.sort(rng.choice(n, int(rng.integers(0, min(n, 4) + 1)), replace=False))
        array, index = features.of(rows)
        assert array is features.of_steps
        assert index.tolist() == places[rows].tolist()
        if len(rows):
            reader.hold((first + rows).tolist(), index.tolist())
    assert 0 < reader.reads < 200  # of 28,000 rows


def test_what_a_call_did_not_leave_cannot_be_had() -> None:
    features = CudaFeatures(DeviceMemory(limit=100_000), (0,), 8)
    with pytest.raises(OutOfDeviceMemory):
        features.of(NUMBERS)
    assert features.prompt_taps(5) is not None
    array, index = features.of(NUMBERS)
    assert array.shape == (5, 8)
    assert index.tolist() == [0, 1, 2]
    features.forget()
    assert features.prompt_taps(10_000) is None
    with pytest.raises(OutOfDeviceMemory):
        features.of(NUMBERS)


def test_a_reader_that_is_gone_is_not_waited_for() -> None:
    features = CudaFeatures(DeviceMemory(), (0,), 8)
    places = np.zeros(64, np.int32)
    features.left_by_step(features.places(places, 64))
    Reader(features).hold([0], [0])
    for _ in range(2 * RING // 64):
        features.places(places, 64)
