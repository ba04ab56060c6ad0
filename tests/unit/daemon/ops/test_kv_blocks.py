"""The stored formats of K and V: bytes of the reference quantiser, error bounds of section 8 (P51)."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import quants

from slotd.daemon.kv.element_types import KV_TYPES, KvType
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.ops.kv_blocks import (
    as_float32,
    item_numbers,
    read_stored,
    stored_bytes,
    width,
    write_stored,
)

Array = npt.NDArray[np.float32]
#: What gguf's quantiser knows; for tq3_0 see test_tq3_blocks.
GGUF_TYPES = tuple(name for name in KV_TYPES if name != "tq3_0")
BLOCK_TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
DIM = 64


def write(x: Array, kind: KvType) -> npt.NDArray[np.void]:
    stored = np.empty((*x.shape[:-1], kind.items(x.shape[-1])), kind.dtype)
    write_stored(x, stored)
    return stored


def read(stored: npt.NDArray[np.void]) -> Array:
    return as_float32(DeviceMemory(), stored)


def through(x: Array, name: str) -> Array:
    return read(write(x, KV_TYPES[name]))


def samples() -> Array:
    """Rows of every size and kind: also zeros, one number only, ties in magnitude, halves, constants."""
    rng = np.random.default_rng(3)
    scales = np.exp2(rng.integers(-12, 13, (4000, 1))).astype(np.float32)
    rows = rng.standard_normal((4000, DIM), dtype=np.float32) * scales
    whole = rng.integers(-8, 9, (2000, DIM)).astype(np.float32)
    halves = rng.integers(-254, 255, (1000, DIM)).astype(np.float32) / 2
    halves[:, ::32] = 127  # d = 1: each half is a tie
    special = np.zeros((7, DIM), dtype=np.float32)
    special[1] = 3.25
    special[2] = -3.25
    special[3, 5] = -7
    special[4, 6] = 7
    special[5] = np.tile([2, -2], DIM // 2)
    special[6] = np.tile([-0.0, 0.0], DIM // 2)
    return np.concatenate([rows, whole, halves, special])


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_bytes_and_values_are_those_of_the_reference(name: str) -> None:
    x = samples()
    stored = write(x, KV_TYPES[name])
    kind = gguf.GGMLQuantizationType[name.upper()]
    expected = quants.quantize(x, kind).view(np.uint8)
    assert stored_bytes(stored).tobytes() == expected.tobytes()
    assert read(stored).tobytes() == quants.dequantize(expected, kind).astype(np.float32).tobytes()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_values_that_are_not_finite(name: str) -> None:
    x = np.array([[np.inf, -np.inf, np.nan, -np.nan]], dtype=np.float32)
    np.testing.assert_array_equal(through(x, name), x)


def test_bf16_rounds_to_nearest_even_at_the_edges() -> None:
    bits = np.array(
        [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7F8000, 0x7F800001, 0xFFFFFFFF],
        dtype=np.uint32,
    )
    stored = write(bits.view(np.float32)[None], KV_TYPES["bf16"])
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF]
    assert stored[0].tolist() == expected


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("sick", [np.nan, np.inf, -np.inf, 1e38])
def test_a_block_that_cannot_be_kept_shows_and_disturbs_no_other(name: str, sick: float) -> None:
    x = samples()[:4]
    x[2, 40] = sick
    with np.errstate(over="ignore", invalid="ignore"):
        y = through(x, name)
    assert not np.isfinite(y[2, 32:]).all()
    y[2, 32:] = 0
    assert np.isfinite(y).all()


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_planes_may_lie_anywhere(name: str) -> None:
    """As in the pages: written into and read from turned views with gaps, read into a view."""
    kind, x = KV_TYPES[name], samples()[: 3 * 10].reshape(10, 3, DIM)
    plane = np.zeros((3, 16, kind.items(DIM)), kind.dtype)
    places = plane[:, 3:13].swapaxes(0, 1)
    write_stored(x, places)
    assert places.tobytes() == write(x, kind).tobytes()
    assert not np.delete(stored_bytes(plane), range(3, 13), axis=1).any()
    out = np.zeros((10, 5, DIM), dtype=np.float32)
    read_stored(DeviceMemory(), places, out[:, 1:4])
    assert out[:, 1:4].tobytes() == through(x, name).tobytes()
    assert not out[:, [0, 4]].any()
    assert (item_numbers(kind.dtype), width(plane)) == (kind.format.block_elements, DIM)


@pytest.mark.parametrize("name", KV_TYPES)
def test_bytes_of_zero_are_zero(name: str) -> None:
    """Pages are cleared as bytes."""
    assert not read(np.zeros((5, KV_TYPES[name].items(DIM)), KV_TYPES[name].dtype)).any()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_scratch_comes_from_the_ledger(name: str) -> None:
    memory = DeviceMemory()
    stored = write(samples(), KV_TYPES[name])
    read_stored(memory, stored, np.empty((len(stored), DIM), dtype=np.float32))
    assert memory.live() == 0
    assert memory.cached >= len(stored) * DIM


# ----- P51

N_ROWS = 20_000

#: Relative root mean square errors without rotation. q8_0 and q4_0 stand in section 8 of the reference, the
#: others were measured here with the quantiser of the gguf package.
ERRORS = {
    "gaussian": {"q8_0": 0.0054, "q4_0": 0.086, "q4_1": 0.078, "q5_0": 0.0427, "q5_1": 0.0379},
    "outlier": {"q8_0": 0.011, "q4_0": 0.148, "q4_1": 0.107, "q5_0": 0.0874, "q5_1": 0.051},
    "student": {"q8_0": 0.0085, "q4_0": 0.127, "q4_1": 0.0998, "q5_0": 0.0652, "q5_1": 0.0487},
}


def data(kind: str) -> Array:
    """Rows of 128; one channel x 20; Student's t with 3 degrees of freedom."""
    rng = np.random.default_rng(51)
    if kind == "student":
        return rng.standard_t(3, (N_ROWS, 128)).astype(np.float32)
    x = rng.standard_normal((N_ROWS, 128), dtype=np.float32)
    if kind == "outlier":
        x[:, 17] *= 20
    return x


@pytest.mark.parametrize("kind", ERRORS)
def test_p51_error_bounds(kind: str) -> None:
    x = data(kind)
    for name, expected in ERRORS[kind].items():
        error = np.sqrt(np.square(through(x, name) - x).mean() / np.square(x).mean())
        assert error == pytest.approx(expected, rel=0.1), name


@pytest.mark.parametrize(("name", "most"), [("f16", 2.0**-11), ("bf16", 2.0**-8)])
def test_p51_error_of_a_float_is_half_its_last_bit(name: str, most: float) -> None:
    x = data("gaussian")
    x = x[np.abs(x) > 2.0**-14]  # normal float16
    error = np.abs(through(x[None], name) - x).ravel() / np.abs(x)
    assert most / 2 < error.max() <= most
