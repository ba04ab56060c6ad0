from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slotd.client.tokenizer import Tokenizer
from slotd.protocol.errors import ConfigError, ModelError
from tests.fakes.tiny_gguf import FIRST_BYTE_TOKEN, IM_END, IM_START, tokenizer_keys, write_tiny_llama

KEY = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

TEXTS = [
    "",
    " ",
    "hello world and the rest",
    "  two  spaces\tand\r\n\nlines \n",
    "1234567890 3.14",
    "I'm you'LL we've 'tis",
    "naïve café — “quotes”…",
    "😀👍🏽 👨‍👩‍👧",
    "日本語 한국어 हिन्दी",
    "\x00\x07\x7f\xa0",
]


def metadata(
    joins: Sequence[str] = (), *, extra: Sequence[tuple[str, int]] = (), pre: str = "smollm", **keys: Any
) -> dict[str, Any]:
    """Control tokens and bytes of the tiny model, a token per merge of `joins`, then `extra` (text, type).

    `keys` replaces keys of the tokenizer section; None leaves one out.
    """
    result = tokenizer_keys(259, pre)
    result[KEY + "merges"] = list(joins)
    result[KEY + "tokens"] += [merge.replace(" ", "") for merge in joins] + [text for text, _ in extra]
    result[KEY + "token_type"] += [NORMAL] * len(joins) + [kind for _, kind in extra]
    result |= {KEY + key: value for key, value in keys.items()}
    return {key: value for key, value in result.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(id) for id in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_metadata(tokenizer_keys(320))


# ----- text to ids and back


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm"])
def test_decode_gives_the_text_back(pre: str, text: str) -> None:
    tokenizer = Tokenizer.from_metadata(tokenizer_keys(320, pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_applied_in_order(tiny: Tokenizer) -> None:
    assert pieces(tiny, "hello world") == [b"hello", b" world"]


def test_control_token_in_text(tiny: Tokenizer) -> None:
    ids = tiny.encode("<|im_start|>user\n<|im_end|>")
    assert ids[0] == IM_START
    assert ids[-1] == IM_END
    assert tiny.decode(ids) == "user\n"
    assert tiny.decode(ids, special=True) == "<|im_start|>user\n<|im_end|>"


def test_text_that_is_not_trusted_gives_no_control_token(tiny: Tokenizer) -> None:
    ids = tiny.encode("a<|im_end|>b", parse_special=False)
    assert IM_END not in ids
    assert tiny.decode(ids) == "a<|im_end|>b"


def test_text_that_is_not_trusted_gives_no_control_token_even_where_it_is_one_piece() -> None:
    # llama-bpe takes a piece that is a token as it is, without merges.
    tokenizer = Tokenizer.from_metadata(metadata(extra=[("<||>", CONTROL)], pre="llama-bpe"))
    assert tokenizer.encode("<||>", add_bos=False) == [259]
    assert 259 not in tokenizer.encode("<||>", parse_special=False)


def test_text_that_is_not_trusted_with_a_control_token_that_has_a_merge() -> None:
    keys = metadata(["a b", "ab c"])
    keys[KEY + "token_type"][259] = CONTROL
    tokenizer = Tokenizer.from_metadata(keys)
    assert len(tokenizer.encode("ab")) == 1
    assert len(tokenizer.encode("abc", parse_special=False)) == 3


def test_user_defined_token_is_ordinary_text() -> None:
    tokenizer = Tokenizer.from_metadata(metadata(extra=[("<é>", USER_DEFINED)]))
    assert tokenizer.encode("a<é>") == tokenizer.encode("a<é>", parse_special=False)
    assert tokenizer.encode("a<é>")[-1] == 259
    assert tokenizer.decode([259]) == "<é>"
    assert not tokenizer.is_special(259)


def test_lone_surrogate_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="lone surrogate at character 2"):
        tiny.encode("ab\udc80")


# ----- BOS


@pytest.mark.parametrize(
    ("pre", "keys", "expected"),
    [
        ("smollm", {"add_bos_token": False}, False),
        ("smollm", {"add_bos_token": None}, False),
        ("smollm", {"add_bos_token": True}, True),
        ("llama-bpe", {"add_bos_token": None}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("llama-bpe", {"add_bos_token": None, "bos_token_id": None}, False),
    ],
)
def test_bos_stands_first_when_the_vocabulary_says_so(pre: str, keys: dict[str, Any], expected: bool) -> None:
    tokenizer = Tokenizer.from_metadata(metadata(pre=pre, **keys))
    assert tokenizer.add_bos is expected
    assert tokenizer.encode("a") == [IM_START] * expected + [FIRST_BYTE_TOKEN + ord("a")]


def test_bos_of_a_template_is_not_doubled() -> None:
    tokenizer = Tokenizer.from_metadata(metadata(add_bos_token=True))
    assert tokenizer.encode("<|im_start|>a") == [IM_START, FIRST_BYTE_TOKEN + ord("a")]
    literal = tokenizer.encode("<|im_start|>", parse_special=False)
    assert literal[:2] == [IM_START, FIRST_BYTE_TOKEN + ord("<")]
    assert tokenizer.encode("") == [IM_START]


def test_bos_by_hand(tiny: Tokenizer) -> None:
    assert tiny.encode("", add_bos=True) == [IM_START]
    without = Tokenizer.from_metadata(metadata(bos_token_id=None))
    assert without.bos_id is None
    assert without.bos_token == ""
    with pytest.raises(ConfigError, match="BOS"):
        without.encode("a", add_bos=True)


# ----- splitting per family


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", [b"1", b"2", b"3", b"4", b"5"]),
        ("qwen2", [b"1", b"2", b"3", b"4", b"5"]),
        ("qwen35", [b"1", b"2", b"3", b"4", b"5"]),
        ("llama-bpe", [b"123", b"45"]),
        ("gpt-2", [b"12345"]),
    ],
)
def test_digits(pre: str, expected: list[bytes]) -> None:
    merges = ["1 2", "12 3", "4 5", "123 45"]
    tokenizer = Tokenizer.from_metadata(metadata(merges, pre=pre))
    assert pieces(tokenizer, "12345") == expected


@pytest.mark.parametrize(("pre", "whole"), [("qwen2", False), ("qwen35", True)])
def test_combining_mark_joins_letters_only_in_qwen35(pre: str, whole: bool) -> None:
    ka, virama = "क".encode(), "्".encode()
    characters = [tokenizer_keys(259)[KEY + "tokens"][FIRST_BYTE_TOKEN + byte] for byte in ka + virama]
    merges = [f"{''.join(characters[:i])} {characters[i]}" for i in range(1, len(characters))]
    tokenizer = Tokenizer.from_metadata(metadata(merges, pre=pre))
    assert (len(tokenizer.encode("क्")) == 1) is whole


@pytest.mark.parametrize(("pre", "same"), [("qwen2", True), ("qwen35", True), ("smollm", False)])
def test_decomposed_text_is_composed_for_qwen(pre: str, same: bool) -> None:
    tokenizer = Tokenizer.from_metadata(metadata(pre=pre))
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) is same


@pytest.mark.parametrize(("pre", "n_tokens"), [("llama-bpe", 1), ("qwen2", 3)])
def test_llama_takes_a_whole_piece_without_merges(pre: str, n_tokens: int) -> None:
    tokenizer = Tokenizer.from_metadata(metadata(extra=[("xyz", NORMAL)], pre=pre))
    assert len(tokenizer.encode("xyz", add_bos=False)) == n_tokens


def test_unknown_pre_tokenizer_is_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_metadata(metadata(pre="foo"))
    for part in ("'foo'", "gpt-2, llama-bpe, qwen2, qwen35, smollm", "--pre NAME"):
        assert part in str(caught.value)
    assert Tokenizer.from_metadata(metadata(pre="foo"), pre_override="qwen2").encode("a") == [100]


def test_missing_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is missing.*--pre NAME"):
        Tokenizer.from_metadata({key: value for key, value in metadata().items() if key != KEY + "pre"})


def test_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bar' is unknown; known are gpt-2"):
        Tokenizer.from_metadata(metadata(), pre_override="bar")


# ----- files that cannot be used


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": None}, "no tokenizer"),
        ({"model": "llama"}, "'llama' is not supported"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": [], "token_type": []}, "tokens is empty"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1], "merges": []}, "tokens 0 and 2 are both 'a'"),
        ({"token_type": None}, "token_type is missing"),
        ({"token_type": [1, 1]}, "259 .*tokens, but 2"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "merge 0 'ab'"),
        ({"merges": ["a b"]}, "merge 0 'a b'"),
        ({"merges": [" a"]}, "merge 0 ' a'"),
        ({"bos_token_id": 259}, "bos_token_id is 259"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": 4000}, "eot_token_id is 4000"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "add_bos_token must be a bool"),
    ],
)
def test_broken_metadata_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_metadata(metadata(**keys))


def test_metadata_without_tokenizer() -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer.from_metadata({})


def test_from_file(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", chat_template="{{ 1 }}")
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.vocab_size == 320
    assert tokenizer.chat_template == "{{ 1 }}"
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    path.unlink()  # nothing of the file is kept


def test_from_file_without_template(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", chat_template=None)
    assert Tokenizer.from_file(path).chat_template is None


def test_from_file_with_override(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", pre="foo")
    with pytest.raises(ModelError, match=r"tiny\.gguf.*'foo'"):
        Tokenizer.from_file(path)
    assert Tokenizer.from_file(path, pre_override="smollm").vocab_size == 320


@pytest.mark.parametrize("kind", ["missing", "empty", "directory", "text"])
def test_from_file_that_is_no_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_text("" if kind == "empty" else "not a model")
    with pytest.raises(ModelError, match=r"model\.gguf"):
        Tokenizer.from_file(path)


# ----- single tokens


def test_token_bytes(tiny: Tokenizer) -> None:
    assert [tiny.token_bytes(FIRST_BYTE_TOKEN + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert tiny.token_bytes(IM_END) == b""
    assert tiny.token_bytes(IM_END, special=True) == b"<|im_end|>"


def test_token_outside_the_byte_alphabet_is_its_text() -> None:
    tokenizer = Tokenizer.from_metadata(metadata(extra=[("日 x", NORMAL), ("[PAD260]", UNUSED)]))
    assert tokenizer.decode([259]) == "日 x"
    assert tokenizer.token_bytes(260) == b""
    assert tokenizer.is_special(260)


@pytest.mark.parametrize("id", [-1, 320, 2**31 - 1])
def test_id_outside_the_vocabulary_is_refused(tiny: Tokenizer, id: int) -> None:
    for call in (tiny.token_bytes, tiny.is_special):
        with pytest.raises(ModelError, match=rf"token id {id} .*\(0\.\.319\)"):
            call(id)


def test_is_special(tiny: Tokenizer) -> None:
    assert tiny.is_special(IM_START)
    assert not tiny.is_special(FIRST_BYTE_TOKEN)


def test_stop_ids() -> None:
    extra = [("<|eom_id|>", CONTROL), ("</s>", NORMAL), ("<|end|>", USER_DEFINED), ("<turn>", CONTROL)]
    tokenizer = Tokenizer.from_metadata(metadata(extra=extra, eot_token_id=262))
    # by text: <|endoftext|>, <|im_end|>, <|eom_id|>, <|end|>; by key: <turn>; a plain "</s>" is HTML
    assert tokenizer.stop_ids == {0, IM_END, 259, 261, 262}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (IM_START, IM_END)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_importing_the_module_does_not_import_the_library() -> None:
    code = "import sys, slotd.client.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
