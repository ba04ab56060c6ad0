"""The identity hash: equal for equal files, different after any change it promises to notice."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from slotd.daemon.weights.reader import open_gguf
from tests.fakes.tiny_gguf import llama_weights, write_tiny_llama


def identity(path: Path) -> str:
    with open_gguf(path) as file:
        return file.identity


def test_same_file_same_identity(tmp_path: Path) -> None:
    first, copy = write_tiny_llama(tmp_path / "a.gguf"), write_tiny_llama(tmp_path / "b.gguf")
    assert identity(first) == identity(copy)
    assert len(identity(first)) == 32


def test_other_weights_metadata_or_length(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "a.gguf")
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(base.read_bytes() + b"\0")
    others = [
        longer,
        write_tiny_llama(tmp_path / "seed.gguf", seed=2),
        write_tiny_llama(tmp_path / "name.gguf", metadata={"general.name": "Tinx"}),
    ]
    assert len({identity(path) for path in [base, *others]}) == 4


def test_length_counts_where_all_data_is_the_same(tmp_path: Path) -> None:
    weights = llama_weights(1, 1, 64, 4, 2, 96, 320, tied=False)
    zeros = {name: np.zeros_like(values) for name, values in weights.items()}
    path = write_tiny_llama(tmp_path / "a.gguf", n_layer=1, tensors=zeros)
    before = identity(path)
    path.write_bytes(path.read_bytes() + b"\0")
    assert identity(path) != before


def test_every_tensor_is_sampled(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "a.gguf", n_embd=128, n_ff=512, n_vocab=4096)
    original = path.read_bytes()
    with open_gguf(path) as file:
        spans = {
            name: (file.header.data_start + info.offset, file.n_bytes(name))
            for name, info in file.header.tensors.items()
        }
        found = {file.identity}
    for start, n_bytes in spans.values():
        middle = start + n_bytes // 2
        path.write_bytes(original[:middle] + bytes([original[middle] ^ 1]) + original[middle + 1 :])
        found.add(identity(path))
    assert len(found) == 1 + len(spans)


@pytest.mark.model
def test_fast_on_the_default_model(default_model: Path) -> None:
    with open_gguf(default_model) as file:
        start = time.process_time()
        assert len(file.identity) == 32
        assert time.process_time() - start < 0.2
