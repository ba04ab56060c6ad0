"""Stop ids and BOS: by key, by text, and with neither."""

from __future__ import annotations

from typing import Any

import pytest

from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header
from slotd.protocol.gguf_vocabulary import Vocabulary, read_vocabulary

TOKENS = ["a", "b", "<|im_end|>", "c", "<|eot_id|>", "<|fim_pad|>"]


def read(**keys: Any) -> Vocabulary:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return read_vocabulary(Header("x.gguf", 3, metadata, {}, 32, 0))


def test_stop_ids_come_from_keys_and_texts() -> None:
    found = read(tokens=TOKENS, eos_token_id=0, eom_token_id=3)
    assert found.stop_ids == {0, 2, 3, 4, 5}
    assert (found.n_tokens, found.eos_id) == (6, 0)


def test_no_stop_ids_at_all() -> None:
    found = read(tokens=["a"])
    assert (found.stop_ids, found.eos_id, found.bos_id) == (frozenset(), None, None)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"bos_token_id": 1}, False),
        ({"bos_token_id": 1, "add_bos_token": True}, True),
        ({"bos_token_id": 1, "add_bos_token": False, "pre": "llama-bpe"}, False),
        ({"bos_token_id": 1, "pre": "llama-bpe"}, True),
        ({"bos_token_id": 1, "model": "llama"}, True),
        ({"bos_token_id": 1, "pre": "qwen2", "model": "gpt2"}, False),
        ({"add_bos_token": True}, False),  # no BOS named: none is invented
    ],
)
def test_add_bos(keys: dict[str, Any], expected: bool) -> None:
    assert read(tokens=TOKENS, **keys).add_bos is expected


@pytest.mark.parametrize(("name", "value"), [("eos", 6), ("bos", -1), ("eot", 2**32 - 1)])
def test_id_outside_the_vocabulary(name: str, value: int) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    with pytest.raises(ModelError, match=f"^x.gguf: key {key} is {value}, the vocabulary has 6 tokens$"):
        read(tokens=TOKENS, **{f"{name}_token_id": value})
