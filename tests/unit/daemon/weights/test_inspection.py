"""What inspect says: figures that can be counted by hand, and the reason when a model cannot be run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slotd.daemon.kv.numpy_need import numpy_need
from slotd.daemon.weights.inspection import TypeTotal, inspect_file
from slotd.protocol.errors import ConfigError, ModelError
from tests.fakes.tiny_gguf import write_tiny_llama

MATRIX_PARAMETERS = 2 * 320 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
VECTOR_PARAMETERS = 5 * 64


def test_figures(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", weight_type="Q8_0")
    found = inspect_file(path, numpy_need)
    assert (found.name, found.arch, found.gguf_version, found.tensors) == ("Tiny", "llama", 3, 21)
    assert found.file_bytes == path.stat().st_size
    assert found.parameters == MATRIX_PARAMETERS + VECTOR_PARAMETERS
    assert found.types == (
        TypeTotal("Q8_0", 16, MATRIX_PARAMETERS, MATRIX_PARAMETERS // 32 * 34),
        TypeTotal("F32", 5, VECTOR_PARAMETERS, VECTOR_PARAMETERS * 4),
    )
    assert (found.runnable, found.reason) == (True, "")
    memory = found.memory
    assert memory is not None
    per_token = 2 * 2 * (16 + 16) * 4
    assert (memory.context, memory.k_type, memory.v_type) == (512, "f32", "f32")
    assert memory.kv_per_token == per_token
    assert memory.kv == 1024 * per_token  # one segment of 16 pages
    assert found.parameters * 4 <= memory.weights < found.parameters * 4.5
    assert memory.total == memory.kv + memory.weights + memory.working


def test_context_and_kv_type(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    memory = inspect_file(path, numpy_need, ctx=1000, k_type="f16", v_type="f16").memory
    assert memory is not None
    assert (memory.context, memory.kv_per_token, memory.kv) == (1000, 256, 2 * 1024 * 256)
    for ctx in (0, 1, -5, 2**24 + 1):  # as the daemon
        with pytest.raises(ConfigError, match=f"^--max-ctx {ctx}: must be 2 to 16777216$"):
            inspect_file(path, numpy_need, ctx=ctx)
    for options in ({"k_type": "q3"}, {"v_type": "q3"}):
        with pytest.raises(ConfigError, match=r"^'q3' is not a K/V type \(supported: f32, f16, .*\)$"):
            inspect_file(path, numpy_need, **options)


def test_keys_and_values_of_different_width_and_type(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", metadata={"llama.attention.value_length": 24})
    # The shapes do not fit, the figures do.
    memory = inspect_file(path, numpy_need, ctx=10, k_type="f16").memory
    assert memory is not None
    assert memory.kv_per_token == 2 * 2 * (16 * 2 + 24 * 4)


def test_block_types(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", n_embd=128)
    found = inspect_file(path, numpy_need, ctx=100, k_type="q8_0", v_type="q5_1")
    assert found.memory is not None
    assert found.memory.kv_per_token == 2 * 2 * (34 + 24)
    assert "K/V in q8_0/q5_1" in found.to_text()
    assert "(232 bytes per token, taken in pieces)" in found.to_text()


def test_a_type_that_does_not_fit_the_heads(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    with pytest.raises(
        ConfigError,
        match=r"^V type q4_0 .*value_length is 16, which f32, f16, bf16 can have$",
    ):
        inspect_file(path, numpy_need, v_type="q4_0")


def test_a_length_that_does_not_fit_is_said(tmp_path: Path) -> None:
    """In what a daemon may have, and in what the model was trained for (512 tokens here)."""
    path = write_tiny_llama(tmp_path / "m.gguf")
    need = inspect_file(path, numpy_need, ctx=512).memory
    assert need is not None
    assert need.total < need.available  # of this machine
    for limit, ctx, fits, trained in (
        (need.total, 512, True, True),
        (need.total - 1, 512, False, True),
        (need.total - 1, 10, True, True),
        (1 << 40, 513, True, False),
        (1 << 20, 2**24, False, False),
    ):
        found = inspect_file(path, numpy_need, ctx=ctx, memory_limit=limit)
        assert found.memory is not None
        assert (found.runnable, found.memory.available) == (True, limit)
        text = found.to_text()
        assert (f"but not a request of {ctx} tokens on the NumPy backend" not in text) == fits
        assert ("beyond the 512 positions" not in text) == trained


def test_unsupported_arch_is_described(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", metadata={"general.architecture": "mamba"})
    found = inspect_file(path, numpy_need)
    assert (found.runnable, found.arch, found.hyper, found.memory) == (False, "mamba", None, None)
    assert found.reason == "architecture 'mamba' is not supported (supported: llama, qwen3, qwen35)"
    assert found.parameters == MATRIX_PARAMETERS + VECTOR_PARAMETERS
    assert found.to_text().endswith(f"slotd cannot run it: {found.reason}")


def test_missing_tensor_keeps_the_figures(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": None})
    found = inspect_file(path, numpy_need)
    assert not found.runnable
    assert found.reason.startswith("tensor blk.0.ffn_up.weight is missing")
    assert found.hyper is not None
    assert found.memory is not None


def test_not_gguf_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("not a model")
    with pytest.raises(ModelError, match="not a GGUF file"):
        inspect_file(tmp_path / "m", numpy_need)


def test_text(tmp_path: Path) -> None:
    name = {"general.name": "Ti\x1b[31mny"}
    path = write_tiny_llama(tmp_path / "m.gguf", metadata=name, weight_type="Q4_0")
    text = inspect_file(path, numpy_need, ctx=512).to_text()
    assert "\x1b" not in text
    assert text.startswith(str(path))
    for part in ["Ti?[31mny", "llama, GGUF version 3", "Q4_0", "a request of 512 tokens", "512 bytes per"]:
        assert part in text
    assert text.endswith("slotd can run it")


def test_json(tmp_path: Path) -> None:
    found = inspect_file(write_tiny_llama(tmp_path / "m.gguf"), numpy_need)
    data = json.loads(found.to_json())
    assert data["hyper"]["stop_ids"] == [0, 2]
    assert data["types"][0]["type"] == "F32"
    assert data["memory"]["context"] == 512
