"""Safetensors files: what is in them, and files that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.weights.safetensors_file import Checkpoint
from slotd.protocol.errors import ModelError
from tests.fakes.draft_checkpoint import write_safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    return tmp_path


def write_header(folder: Path, entries: Any, data: bytes = b"", length: int | None = None) -> None:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    n = len(text) if length is None else length
    (folder / "m.safetensors").write_bytes(n.to_bytes(8, "little") + text + data)


def test_values_of_every_type(folder: Path) -> None:
    values = np.array([[1.5, -2.0, 3.0], [0.0, 65504.0, -0.125]], np.float32)
    integers = np.array([3, -1], np.int64)
    write_safetensors(folder / "m.safetensors", {
        "f32": ("F32", values), "f16": ("F16", values.astype("<f2")),
        "bf16": ("BF16", (values[:1].view("<u4") >> 16).astype("<u2")), "i64": ("I64", integers),
        "i32": ("I32", integers.astype("<i4")), "bool": ("BOOL", np.array([True, False])),
    })  # fmt: skip
    checkpoint = Checkpoint(folder)
    assert checkpoint.config == {"a": 1}
    read = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    assert read["f32"].dtype == read["f16"].dtype == read["bf16"].dtype == np.float32
    assert read["f32"].tolist() == read["f16"].tolist() == values.tolist()
    assert read["bf16"].tolist() == values[:1].tolist()
    assert (read["i64"].tolist(), read["i32"].dtype, read["bool"].tolist()) == (
        [3, -1],
        np.int32,
        [True, False],
    )
    assert checkpoint.tensors["f16"].read(1, 2).tolist() == values[1:].tolist()


def test_one_file_is_enough(folder: Path) -> None:
    write_safetensors(folder / "m.safetensors", {"x": ("F32", np.zeros(1, np.float32))})
    write_safetensors(folder / "other.safetensors", {"y": ("F32", np.zeros(1, np.float32))})
    assert list(Checkpoint(folder / "m.safetensors").tensors) == ["x"]
    assert list(Checkpoint(folder).tensors) == ["x", "y"]


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"", b"", "is not JSON"),
        (b"[]", b"", "is not a JSON object"),
        (b"[" * 100_000, b"", "is not JSON"),
        ({"x": 5}, b"", "entry of tensor x is damaged"),
        ({"x": {"dtype": "F32"}}, b"", "entry of tensor x is damaged"),
        (entry(shape=[-2]), bytes(8), "entry of tensor x is damaged"),
        (entry(shape=[2.0]), bytes(8), "entry of tensor x is damaged"),
        (entry(data_offsets=[0]), bytes(8), "entry of tensor x is damaged"),
        (entry(dtype="F8_E4M3"), bytes(8), "tensor x has type F8_E4M3, only F32, F16, BF16"),
        (entry(shape=[3]), bytes(8), "the data of tensor x do not fit"),
        (entry(), bytes(7), "the data of tensor x do not fit their shape, or the file is truncated"),
        (entry(data_offsets=[8, 0]), bytes(8), "the data of tensor x do not fit"),
    ],
)
def test_a_damaged_header(header: Any, data: bytes, said: str, folder: Path) -> None:
    write_header(folder, header, data)
    with pytest.raises(ModelError) as error:
        Checkpoint(folder)
    assert said in str(error.value)


def test_files_that_are_none(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors file in this folder"):
        Checkpoint(folder)
    with pytest.raises(ModelError, match="there is no such file"):
        Checkpoint(folder / "x.safetensors")
    for length in (3, 2**63):
        write_header(folder, b"{}", length=length)
        with pytest.raises(ModelError, match="is no safetensors file, or truncated"):
            Checkpoint(folder)
    (folder / "m.safetensors").write_bytes(b"123")
    with pytest.raises(ModelError, match="is no safetensors file, or truncated"):
        Checkpoint(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    for name in ("a", "b"):
        write_safetensors(folder / f"{name}.safetensors", {"x": ("F32", np.zeros(1, np.float32))})
    with pytest.raises(ModelError, match=r"b\.safetensors: tensor x is in another file too"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no such file"), ("{", "not JSON"), ("3", "not a JSON object")]
)
def test_a_config_that_is_none(text: str | None, said: str, folder: Path) -> None:
    write_safetensors(folder / "m.safetensors", {"x": ("F32", np.zeros(1, np.float32))})
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=f"config.json: .*{said}"):
        Checkpoint(folder)
