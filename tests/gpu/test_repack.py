"""kernels/repack.cu: tiles hold what the GGUF blocks say."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from slotd.daemon.ops.cuda_prepare import embed
from slotd.daemon.ops.cuda_weights import FORMAT_OF, WeightLoader
from tests.bench.random_blocks import TYPES
from tests.gpu.blocks import RowsFile, random_rows, values_of
from tests.gpu.device_numbers import held_values

SHAPES = [(16, 256), (37, 768), (200, 5120)]


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("n_rows", "n_in"), SHAPES)
def test_tiles_unpack_to_the_numbers_of_the_file(memory, type_name, n_rows, n_in) -> None:
    rows = random_rows(type_name, n_rows, n_in, n_rows)
    matrix = WeightLoader(memory).matrix(RowsFile({"w": (type_name, rows)}), "w")
    tokens = cupy.arange(n_rows, dtype=cupy.int32)
    out = embed(memory, tokens, matrix).get()
    expected = values_of(type_name, rows)
    # Halves of scale, minimum and result: three roundings of 2^-11, relative to the largest of the row.
    bound = 3 * 2.0**-11 * np.abs(expected).max(axis=1, keepdims=True)
    if type_name in ("Q2_K", "Q4_K", "Q5_K", "Q4_1", "Q5_1"):  # code * s and m may cancel
        bound = bound * 4
    wrong = np.abs(out - expected) > bound
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first at {np.argwhere(wrong)[:4].tolist()}"


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "F32"])
@pytest.mark.parametrize("n_in", [32, 96, 576, 1536])
def test_widths_that_fill_no_tile(memory, type_name, n_in) -> None:
    rows = random_rows(type_name, 21, n_in, 3)
    matrix = WeightLoader(memory).matrix(RowsFile({"w": (type_name, rows)}), "w")
    out = embed(memory, cupy.arange(21, dtype=cupy.int32), matrix).get()
    expected = values_of(type_name, rows)
    assert np.abs(out - expected).max() <= 2.0**-7 * np.abs(expected).max()


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "BF16", "F32"])
@pytest.mark.parametrize("n_in", [256, 768])
def test_tiles_hold_what_numpy_works_out(memory, type_name, n_in) -> None:
    """Bit by bit: what logits are compared with is made of these numbers (device_numbers.py)."""
    rows = random_rows(type_name, 37, n_in, 9)
    matrix = WeightLoader(memory).matrix(RowsFile({"w": (type_name, rows)}), "w")
    out = embed(memory, cupy.arange(37, dtype=cupy.int32), matrix).get()
    expected = held_values(type_name, rows, n_in)
    wrong = out != expected
    first = np.argwhere(wrong)[:4]
    assert not wrong.any(), (wrong.sum(), first.tolist(), out[wrong][:4], expected[wrong][:4])


def test_tile_sizes_are_those_of_the_kernels(memory) -> None:
    for type_name, form in FORMAT_OF.items():
        rows = random_rows(type_name, 16, 512)
        matrix = WeightLoader(memory).matrix(RowsFile({"w": (type_name, rows)}), "w")
        # The last bytes of the last tile are written: nothing but the poison would stand there otherwise.
        assert matrix.parts[0].tiles.nbytes == 2 * form.tile_bytes


def test_a_matrix_that_is_sent_in_pieces(memory, monkeypatch) -> None:
    monkeypatch.setattr("slotd.daemon.ops.cuda_weights.CHUNK_BYTES", 1 << 16)
    rows = random_rows("Q4_K", 1000, 1024, 5)
    matrix = WeightLoader(memory).matrix(RowsFile({"w": ("Q4_K", rows)}), "w")
    out = embed(memory, cupy.arange(1000, dtype=cupy.int32), matrix).get()
    expected = values_of("Q4_K", rows)
    assert (np.abs(out - expected) <= 2.0**-7 * np.abs(expected).max(axis=1, keepdims=True)).all()


def test_negative_tokens_are_rows_of_zeros(memory) -> None:
    rows = random_rows("Q6_K", 32, 256, 1)
    matrix = WeightLoader(memory).matrix(RowsFile({"w": ("Q6_K", rows)}), "w")
    out = embed(memory, cupy.array([3, -1, 5], dtype=cupy.int32), matrix).get()
    assert not out[1].any()
    assert out[0].any()
    assert out[2].any()
