"""Opening files: views, dequantised tensors, and every fault of the container by name."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from slotd.daemon.weights.reader import ModelFile, open_gguf, open_model
from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import parse_header
from tests.fakes.tiny_gguf import write_tiny_llama


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def patched(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    return path


def table_line(path: Path, name: str) -> bytes:
    """The bytes of one line of the tensor table."""
    info = parse_header(path.read_bytes(), "x").tensors[name]
    n = len(info.shape)
    raw = name.encode()
    rest = struct.pack(f"<I{n}QIQ", n, *info.shape, info.type_id, info.offset)
    return struct.pack("<Q", len(raw)) + raw + rest


# ----- what is read


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantised_tensors_equal_those_of_the_gguf_package(tmp_path: Path, weight_type: str) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", weight_type=weight_type)
    with open_model(path) as model:
        tensors = gguf.GGUFReader(path).tensors
        assert [tensor.name for tensor in tensors] == list(model.header.tensors)
        for tensor in tensors:
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            found = model.dequantise(tensor.name)
            assert found.dtype == np.float32
            assert found.shape == tuple(map(int, tensor.shape[::-1]))
            assert found.flags.writeable
            np.testing.assert_array_equal(found, expected)
            assert model.n_bytes(tensor.name) == tensor.n_bytes


def test_views_do_not_copy(tmp_path: Path) -> None:
    types = {"output.weight": "Q8_0", "token_embd.weight": "F16"}
    path = write_tiny_llama(tmp_path / "m.gguf", weight_types=types)
    model = open_model(path)
    norm, output = model.tensor("output_norm.weight"), model.tensor("output.weight")
    embedding = model.tensor("token_embd.weight")
    assert (norm.dtype, norm.shape) == (np.float32, (64,))
    assert (embedding.dtype, embedding.shape) == (np.float16, (320, 64))
    assert (output.dtype, output.shape) == (np.uint8, (320, 64 // 32 * 34))
    for view in (norm, output, embedding):
        assert not view.flags.owndata
        assert not view.flags.writeable
    with pytest.raises(BufferError):
        model.close()
    del norm, output, embedding, view
    model.close()


def test_dequantised_tensors_outlive_the_file(tiny_llama: Path) -> None:
    with open_model(tiny_llama) as model:
        weights = model.dequantise("output.weight")
    assert np.isfinite(weights).all()


def test_an_error_is_not_hidden_by_a_living_view(tiny_llama: Path) -> None:
    model = open_model(tiny_llama)
    view = model.tensor("output.weight")
    with pytest.raises(KeyError), model:
        model.tensor("no such tensor")
    assert np.isfinite(view).all()


def test_model_file(tiny_llama: Path) -> None:
    with open_model(str(tiny_llama)) as model:
        assert isinstance(model, ModelFile)
        assert model.path == tiny_llama
        assert model.file_bytes == tiny_llama.stat().st_size
        assert model.hyper.n_embd == 64
        assert len(model.identity) == 32


# ----- faults


def test_files_that_are_none(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.gguf") == "there is no such file"
    assert refusal(tmp_path) == "is not a regular file"
    empty = tmp_path / "empty"
    empty.touch()
    assert refusal(empty) == "the file is empty"
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "is not a regular file"
    (tmp_path / "text").write_text("hello")
    assert refusal(tmp_path / "text").startswith("not a GGUF file (it starts with b'hell'")
    assert refusal(tmp_path / "text" / "below").startswith("cannot be read: ")


def test_unknown_tensor_type(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    line = table_line(path, "blk.1.ffn_up.weight")
    patched(path, line, line[:-12] + struct.pack("<I", 255) + line[-8:])
    assert refusal(path) == "tensor blk.1.ffn_up.weight has unknown type 255"


def test_type_that_cannot_be_dequantised(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    line = table_line(path, "output.weight")
    patched(path, line, line[:-12] + struct.pack("<I", int(gguf.GGMLQuantizationType.Q8_1)) + line[-8:])
    assert refusal(path) == "tensor output.weight has type Q8_1, which cannot be dequantised"


def test_row_that_is_not_whole_blocks(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    line = table_line(path, "output.weight")
    patched(path, line, line[:-12] + struct.pack("<I", int(gguf.GGMLQuantizationType.Q4_K)) + line[-8:])
    assert refusal(path) == "tensor output.weight has rows of 64 elements, Q4_K needs a multiple of 256"


def test_overflowing_dimension(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    line = table_line(path, "output.weight")
    patched(path, line, line.replace(struct.pack("<2Q", 64, 320), struct.pack("<2Q", 2**42, 320)))
    assert refusal(path).startswith("truncated: tensor output.weight ends at byte ")
    line = table_line(path, "output.weight")
    patched(path, line, line.replace(struct.pack("<2Q", 2**42, 320), struct.pack("<2Q", 2**42, 2**42)))
    assert "output.weight has dimensions [4398046511104, 4398046511104]: more than" in refusal(path)


def test_overlapping_tensors(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    line = table_line(path, "blk.0.attn_v.weight")
    offset = parse_header(path.read_bytes(), "x").tensors["blk.0.attn_k.weight"].offset
    patched(path, line, line[:-8] + struct.pack("<Q", offset))
    assert refusal(path).startswith("tensors blk.0.attn_k.weight and blk.0.attn_v.weight overlap at byte ")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.1.ffn_norm.weight", "output_norm.weight"])
def test_norm_that_is_not_finite(tmp_path: Path, name: str, value: float) -> None:
    weights = np.ones(64, np.float32)
    weights[7] = value
    path = write_tiny_llama(tmp_path / "m.gguf", tensors={name: weights})
    assert refusal(path) == f"tensor {name}[7] is not finite (NaN or infinity)"
    with open_gguf(path) as file:  # the container is sound
        assert name in file.header.tensors


# ----- cuts and flips


def test_cut_anywhere_is_a_model_error(tmp_path: Path) -> None:
    data = write_tiny_llama(tmp_path / "m.gguf", n_layer=1, weight_type="Q8_0").read_bytes()
    data_start = parse_header(data, "x").data_start
    rng = random.Random(1)
    cuts = [*range(0, data_start, 97), *rng.sample(range(data_start, len(data)), 150)]
    # The last tensor may be followed by padding, which nothing reads.
    with open_gguf(tmp_path / "m.gguf") as file:
        end = max(data_start + info.offset + file.n_bytes(info.name) for info in file.header.tensors.values())
    path = tmp_path / "cut.gguf"
    for n_bytes in [*(cut for cut in cuts if cut < end), data_start - 1, data_start, end - 1]:
        path.write_bytes(data[:n_bytes])
        message = refusal(path)
        assert "truncated" in message or "empty" in message


def test_flips_in_the_header_are_a_model_error_or_a_model(tmp_path: Path) -> None:
    data = write_tiny_llama(tmp_path / "m.gguf", n_layer=1, n_vocab=260).read_bytes()
    data_start = parse_header(data, "x").data_start
    rng = random.Random(2)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(800):
        flipped = bytearray(data)
        flipped[rng.randrange(data_start)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            open_model(path).close()
        except ModelError:
            refused += 1
    assert 0 < refused < 800
