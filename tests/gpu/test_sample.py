"""kernels/sample.cu: the candidates of rows of logits against NumPy, and their independence of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
import pytest

from slotd.daemon.candidates import BANNED, BIASED, PENALISED, Adjustments, Candidates, View
from slotd.daemon.ops.cuda_sample import ROOM, SampleLayout, pack, sample, unpack
from tests.fakes.far_outputs import look_at

VOCABS = (1, 31, 259, 4096, 5000, 32000, 49152, 151936, 262144)


def look(memory: Any, logits: np.ndarray, views: Sequence[View]) -> list[Candidates | None]:
    """What the kernels say; logits must stay as they are."""
    layout = SampleLayout.of(views)
    host = np.zeros(layout.n_bytes_in, np.uint8)
    pack(layout, views, host)
    device = memory.empty(logits.shape)
    device[...] = cupy.asarray(logits)
    work = memory.empty((layout.offsets[-1],), np.uint8)
    work[: len(host)] = cupy.asarray(host)
    sample(device, layout, work.data.ptr)
    out = work[layout.offsets[1] : layout.offsets[1] + layout.n_bytes_out].get()
    assert device.get().tobytes() == logits.tobytes(), "logits were changed"
    return unpack(layout, views, logits.shape[1], out)


def adjustments(rng: np.random.Generator, n_vocab: int, n: int) -> Adjustments:
    """Of n random ids, every combination of steps among them."""
    ids = np.sort(rng.choice(n_vocab, min(n, n_vocab), replace=False)).astype(np.int32)
    kinds = rng.integers(1, BIASED + PENALISED + BANNED + 1, len(ids)).astype(np.int32)
    biases = rng.normal(0, 5, len(ids)).astype(np.float32)
    frequencies = rng.uniform(-2, 2, len(ids)).astype(np.float32)
    return Adjustments(ids, kinds, biases, frequencies, np.float32(1.3), np.float32(0.7))


def rows_of(rng: np.random.Generator, n: int, n_vocab: int) -> np.ndarray:
    """Random logits with the shapes that a row may have; a few high ones over many low ones."""
    logits = rng.normal(0, 2.5, (n, n_vocab)).astype(np.float32)
    for row in range(n):
        kind = row % 6
        if kind == 1:
            logits[row] = np.round(logits[row] * 8) / 8  # many equal ones
            logits[row, rng.integers(0, n_vocab, 200)] += np.float32(8)
        elif kind == 2:
            logits[row, rng.random(n_vocab) < 0.6] = -np.inf
        elif kind == 3:
            logits[row, rng.random(n_vocab) < 0.5] *= np.float32(-0.0)  # zeros of both signs
            logits[row, : n_vocab // 2] -= np.float32(20)
        elif kind == 4:
            keep = rng.integers(0, n_vocab)
            logits[row] = -np.inf
            logits[row, keep] = 3
        elif kind == 5:
            logits[row] *= np.float32(1e37 if row // 6 % 2 else 1e-40)
    return logits


def assert_same(got: Candidates | None, logits: np.ndarray, view: View) -> None:
    expected = look_at(logits, view)
    if expected is None:
        assert got is None
        return
    if got is None:  # allowed where more values lie near the bound than there is room for
        adjusted = logits if view.adjustments is None else view.adjustments.apply(logits)
        near = np.sort(adjusted)[::-1][: view.most][-1]
        assert np.count_nonzero(adjusted >= near - abs(near) * 2e-5) > ROOM / 2, "no candidates, no reason"
        return
    assert got.ids.tolist() == expected.ids.tolist()
    assert got.values.tolist() == expected.values.tolist()
    assert got.raw.tobytes() == expected.raw.tobytes()
    if view.temperature is None:
        assert got.total is None
    else:
        assert got.total == pytest.approx(expected.total, rel=1e-12)
    assert got.complete == expected.complete or (not got.complete and len(got.ids) == view.most)


def views_of(rng: np.random.Generator, n: int, n_vocab: int) -> list[View]:
    most, temperatures = (1, 20, 64, 1024), (None, 1.0, 0.8, 1e-3, 2.5)
    return [
        View(
            row, most[(row + i) % 4], temperatures[(row + 2 * i) % 5],
            adjustments(rng, n_vocab, (3, 300, 4096)[row % 3]) if i else None,
        )
        for row in range(n) for i in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("n_vocab", VOCABS)
@pytest.mark.parametrize("n", [1, 2, 23])
def test_candidates_are_those_of_numpy(memory, n_vocab: int, n: int) -> None:
    rng = np.random.default_rng(n_vocab + n)
    logits, views = rows_of(rng, n, n_vocab), views_of(rng, n, n_vocab)
    for view, got in zip(views, look(memory, logits, views), strict=True):
        try:
            assert_same(got, logits[view.row], view)
        except AssertionError as error:
            raise AssertionError(f"row {view.row} of kind {view.row % 6}, {view}") from error


def test_random_rows_have_candidates(memory) -> None:
    """Room is not what they fail for, at any size, with as many candidates as may be asked for."""
    for n_vocab in VOCABS:
        logits = np.random.default_rng(n_vocab).normal(0, 3, (4, n_vocab)).astype(np.float32)
        assert None not in look(memory, logits, [View(row, 1024, 0.8) for row in range(4)]), n_vocab


def test_rows_that_are_not_finite_have_none_and_the_others_do(memory) -> None:
    n_vocab = 49152
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, n_vocab)).astype(np.float32)
    logits[0, 777] = np.nan
    logits[1, n_vocab - 1] = np.inf
    logits[2] = -np.inf
    logits[3, 5] = -np.nan
    ids = np.array([5, 777, n_vocab - 1], np.int32)
    zeros = np.zeros(3, np.float32)
    bans = Adjustments(ids, np.full(3, BANNED, np.int32), zeros, zeros, np.float32(1), np.float32(0))
    views = [View(row, 64, 1.0, how) for row in range(6) for how in (None, bans)]
    found = look(memory, logits, views)
    assert [got is None for got in found] == [True] * 8 + [False] * 4


def test_more_equal_values_than_there_is_room_for(memory) -> None:
    logits = np.zeros((2, 32000), np.float32)
    logits[1, 100] = 1
    one, other = look(memory, logits, [View(0, 20, 1.0), View(1, 1, 1.0)])
    assert one is None
    assert other is not None
    assert other.ids.tolist() == [100]


def test_a_view_alone_is_the_same_among_others_and_again(memory) -> None:
    n_vocab = 151936
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (64, n_vocab)).astype(np.float32)
    views = views_of(rng, 64, n_vocab)
    together = look(memory, logits, views)
    again = look(memory, logits, views)
    for i in (*range(0, 128, 9), 127):
        view = views[i]
        moved = View(0, view.most, view.temperature, view.adjustments)
        (alone,) = look(memory, logits[view.row : view.row + 1], [moved])
        for got in (together[i], again[i]):
            assert got is not None, i
            assert alone is not None, i
            assert got.total == alone.total, i
            assert got.ids.tobytes() == alone.ids.tobytes(), i
            assert got.values.tobytes() == alone.values.tobytes(), i
            assert got.raw.tobytes() == alone.raw.tobytes(), i
