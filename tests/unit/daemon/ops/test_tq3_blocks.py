"""tq3_0: its rotation (P50), errors (P51) and bytes, against the format written out in plain float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from slotd.daemon.kv.element_types import KV_TYPES
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.kv_blocks import as_float32, is_rotated, read_stored, stored_bytes, width, write_stored
from slotd.daemon.ops.rotation import SIGNS_1, SIGNS_2, rotate, rotate_back, rotate_unmetered
from slotd.daemon.ops.tq3_blocks import CENTROIDS, THRESHOLDS, TQ3_0

Array = npt.NDArray[np.float32]


def write(x: Array) -> npt.NDArray[np.void]:
    stored = np.empty((*x.shape[:-1], x.shape[-1] // 32), TQ3_0)
    write_stored(x, stored)
    return stored


def back(x: Array) -> Array:
    out = np.empty_like(x)
    rotate_back(DeviceMemory(), x, out)
    return out


def through(x: Array) -> Array:
    return back(as_float32(DeviceMemory(), write(x)))


def normal(*shape: int, seed: int = 50) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def hadamard() -> npt.NDArray[np.float64]:
    """Sylvester's matrix of 128 rows."""
    matrix = np.ones((1, 1))
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


# ----- P50


def test_p50_back_and_forth_is_the_identity() -> None:
    x = normal(1000, 3, 256)
    turned = rotate(DeviceMemory(), x)
    assert np.abs(back(turned) - x).max() < 1e-6 * np.abs(x).max()
    assert np.abs(turned - x).max() > 1
    assert turned.tobytes() == rotate_unmetered(x).tobytes()


def test_p50_products_are_preserved() -> None:
    x, y = normal(500, 256, seed=1).astype(np.float64), normal(500, 256, seed=2).astype(np.float64)
    memory = DeviceMemory()
    turned = rotate(memory, x.astype(np.float32)) * rotate(memory, y.astype(np.float32)).astype(np.float64)
    scale = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    assert (np.abs(turned.sum(axis=-1) - (x * y).sum(axis=-1)) / scale).max() < 1e-6


def test_p50_the_rotation_is_signs_hadamard_signs() -> None:
    x = normal(7, 128)
    expected = (x * SIGNS_1.astype(np.float64)) @ hadamard() / np.sqrt(128) * SIGNS_2
    np.testing.assert_allclose(rotate_unmetered(x), expected, atol=2e-6)
    for signs in (SIGNS_1, SIGNS_2):
        assert set(signs) == {-1, 1}
        assert 40 < (signs > 0).sum() < 88


def test_an_outlier_is_spread() -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, 77] = 1
    np.testing.assert_allclose(np.abs(rotate_unmetered(x)), 128**-0.5, rtol=1e-6)


# ----- P51

ERRORS = {"gaussian": 0.184, "outlier": 0.172, "student": 0.180}


@pytest.mark.parametrize("kind", ERRORS)
def test_p51_errors_are_those_of_the_reference(kind: str) -> None:
    x = normal(20_000, 128, seed=51)
    if kind == "outlier":
        x[:, 17] *= 20
    elif kind == "student":
        x = np.random.default_rng(51).standard_t(3, x.shape).astype(np.float32)
    y = through(x)
    error = np.sqrt(np.square(y - x).mean() / np.square(x).mean())
    assert error == pytest.approx(ERRORS[kind], rel=0.1)
    cosine = (x * y).sum() / np.sqrt(np.square(x).sum() * np.square(y).sum())
    assert cosine == pytest.approx(0.983, abs=0.003)
    lengths = np.linalg.norm(y, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(lengths, 1, atol=2.0**-10)  # half a bit of float16


# ----- the format


def test_bytes_are_those_of_the_format() -> None:
    """From the rotated numbers on, one by one."""
    x = normal(300, 128)
    bytes_ = stored_bytes(write(x)).reshape(300, 4, 14)
    length = np.linalg.norm(x.astype(np.float64), axis=-1)
    turned = rotate_unmetered((x / length[:, None]).astype(np.float32))
    for row in range(300):
        nearest = np.abs(turned[row, :, None] - CENTROIDS).argmin(axis=-1)
        clear = np.abs(turned[row, :, None] - THRESHOLDS).min(axis=-1) > 1e-6  # else rounding may decide
        d = length[row] / np.linalg.norm(CENTROIDS[nearest].astype(np.float64))
        for block in range(4):
            raw = bytes_[row, block]
            assert float(raw[:2].view("<f2")[0]) == pytest.approx(d, rel=2**-10)
            for i in np.flatnonzero(clear[32 * block : 32 * block + 32]):
                low = raw[2 + i // 4] >> 2 * (i % 4) & 3
                high = raw[10 + i // 8] >> i % 8 & 1
                assert low + 4 * high == nearest[32 * block + i]
    assert np.abs((CENTROIDS[:-1] + CENTROIDS[1:]) / 2 - THRESHOLDS).max() < 1e-6


def test_every_code_reads_as_its_centroid() -> None:
    blocks = np.zeros((1, 4), TQ3_0)
    blocks["d"] = [[1, 2, -0.5, 0]]
    raw = stored_bytes(blocks).reshape(4, 14)
    raw[:, 2:10] = np.random.default_rng(0).integers(0, 256, (4, 8))
    raw[:, 10:] = np.random.default_rng(1).integers(0, 256, (4, 4))
    values = as_float32(DeviceMemory(), blocks).reshape(4, 32)
    for block, d in enumerate((1, 2, -0.5, 0)):
        for i in range(32):
            code = (raw[block, 2 + i // 4] >> 2 * (i % 4) & 3) + 4 * (raw[block, 10 + i // 8] >> i % 8 & 1)
            assert values[block, i] == np.float32(d) * CENTROIDS[code]


def test_type_and_sizes() -> None:
    kind = KV_TYPES["tq3_0"]
    stored = write(normal(5, 256))
    assert (kind.dtype, kind.dtype.itemsize, kind.items(256)) == (TQ3_0, 14, 8)
    assert stored_bytes(stored).shape == (5, 112)  # 3.5 bits a number
    assert (width(stored), is_rotated(stored)) == (256, True)
    assert not is_rotated(np.zeros(4, KV_TYPES["q8_0"].dtype))


# ----- as the others


def test_planes_may_lie_anywhere() -> None:
    """As in the pages: written into and read from turned views with gaps, read into a view."""
    x = normal(10, 3, 256)
    plane = np.zeros((3, 16, 8), TQ3_0)
    places = plane[:, 3:13].swapaxes(0, 1)
    write_stored(x, places)
    assert places.tobytes() == write(x).tobytes()
    assert not np.delete(stored_bytes(plane), range(3, 13), axis=1).any()
    out = np.zeros((10, 5, 256), dtype=np.float32)
    read_stored(DeviceMemory(), places, out[:, 1:4])
    assert out[:, 1:4].tobytes() == as_float32(DeviceMemory(), places).tobytes()
    assert not out[:, [0, 4]].any()


def test_bits_of_a_row_do_not_depend_on_its_neighbours() -> None:
    x = normal(70, 256)
    together = write(x)
    turned = rotate(DeviceMemory(), x)
    for row in (0, 33, 69):
        assert write(x[row : row + 1]).tobytes() == together[row : row + 1].tobytes()
        assert rotate(DeviceMemory(), x[row : row + 1]).tobytes() == turned[row : row + 1].tobytes()


def test_zeros_and_small_numbers() -> None:
    x = normal(4, 256)
    x[0] = 0
    x[1, :128] = 0
    x[2] *= 1e-30  # its squares are 0 in float32, its factor is 0 in float16
    y = through(x)
    assert not y[0].any()
    assert not y[1, :128].any()
    assert y[1, 128:].any()
    assert not y[2].any()


@pytest.mark.parametrize("sick", [np.nan, np.inf, -np.inf, 1e38, 1e6])
def test_a_group_that_cannot_be_kept_shows_and_disturbs_no_other(sick: float) -> None:
    x = normal(4, 256)
    x[2, 200] = sick
    with np.errstate(over="ignore", invalid="ignore"):
        y = through(x)
    assert not np.isfinite(y[2, 128:]).any()
    y[2, 128:] = 0
    assert np.isfinite(y).all()


def test_scratch_comes_from_the_ledger() -> None:
    memory = DeviceMemory()
    stored = write(normal(2000, 128))
    read_stored(memory, stored, np.empty((2000, 128), dtype=np.float32))
    rotate(memory, normal(2000, 128))
    assert memory.live() == 0
    assert memory.cached >= 2000 * 128 * 4
