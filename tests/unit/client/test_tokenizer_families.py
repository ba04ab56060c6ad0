"""Splitting and merging of each family of models, against other ways to the same ids.

The oracle is the `tokenizers` library fed with a tokenizer.json as the models ship it. Its merges are trained
on text that was not split, so that they lie across every border: a border in the wrong place changes the ids.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from slotd.client.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

#: Behind the trained tokens: (text, type), as the Qwen converters write them.
OWN_TOKENS = [
    ("<|endoftext|>", CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
    ("[PAD0]", UNUSED),
]

NASTY = [
    "",
    " ",
    "   ",
    "word ",
    "word  ",
    "word   \n",
    "\n\n\n  a\n \n b\r\n\r\n c\r d\t\te",
    "  12 spaces            deep",
    "0123456789 12 345 6789 1,234,567.89 3.14159e-10 v2.0.1 2024-01-01T12:34:56Z",
    "abc123def 4x4 x1y22z333 ½ ² ٣٤٥ Ⅷ 一二三 ₀₁",
    "I'm you're we've they'll he'd it's don't 'tis 'TIS YOU'LL It'S o'clock ''s 'sss 'Re",
    "don\u2019t rock\u2019n\u2019roll",
    "e\u0301 a\u0300\u0301 n\u0303o \u0301start \u0915\u094d\u0937",
    "\u0e01\u0e33 \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
    "naïve café — “quotes”… ¿qué? ¡no! £5 €10 ©",
    "\U0001f600\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u2764\ufe0f \U0001f1eb\U0001f1f7!",
    "日本語 テスト。中文\uff0c测试\uff01한국어 텍스트 ภาษาไทย हिन्दी العربية",
    "日本語123テスト 中文\n\n中文 ",
    "def f(x):\n    return x+1  # ok\n\n\tif a!=b&&c||d: {}[]();//\\",
    "foo_bar::Baz<int>&&!=...!!! --- === ### $$$ ???",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u0085g\x0bh\x0ci",
    "\x00\x01\x07\x1b\x7f",
    " \t \n \r\n  \n",
    "\n",
    "\r\n\r\n",
    "!\n\n? \n. \r\n;\n",
    "ABCdefGHI camelCase PascalCase snake_case SHOUT",
    "\ufeffBOM \ufffd \U0010ffff \U000e0001",
    "ﬁ ﬂ Å \u212b \u1e9b\u0323 \ufb1d \u2126",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>",
    "a<think>b</think>c <think> x </think>",
    "text<|im_end|>text <|im_end|> <|im_end|><|im_end|>\n<|im_en",
    "[PAD0] x[PAD0]",
]

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NFC = {"type": "NFC"}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def split(pattern: str) -> list[dict[str, Any]]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [step, byte_level(use_regex=False)]


#: Name -> (normalizer, pre-tokenizers, ignore_merges) of the models' own tokenizer.json.
FAMILIES: dict[str, tuple[dict[str, str] | None, list[dict[str, Any]], bool]] = {
    "qwen2": (NFC, split(QWEN2), False),
    "qwen35": (NFC, split(QWEN35), False),
    "llama-bpe": (None, split(LLAMA3), True),
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)], False),
}


@functools.cache
def trained() -> tuple[list[str], list[list[str]]]:
    """Tokens and merges of the nasty texts, each taken as one piece."""
    trainee = tokenizers.Tokenizer(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainee.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, min_frequency=1, initial_alphabet=sorted(alphabet), show_progress=False
    )
    own = re.compile("|".join(re.escape(text) for text, _ in OWN_TOKENS))
    trainee.train_from_iterator([own.sub("", text) for text in NASTY] * 2, trainer)
    state = json.loads(trainee.to_str())["model"]
    return sorted(state["vocab"], key=state["vocab"].get), state["merges"]


@functools.cache
def ours(pre: str) -> Tokenizer:
    tokens, merges = trained()
    return Tokenizer.from_metadata(
        {
            KEY + "model": "gpt2",
            KEY + "pre": pre,
            KEY + "tokens": tokens + [text for text, _ in OWN_TOKENS],
            KEY + "token_type": [NORMAL] * len(tokens) + [kind for _, kind in OWN_TOKENS],
            KEY + "merges": [" ".join(pair) for pair in merges],
            KEY + "eos_token_id": len(tokens) + 2,
            KEY + "bos_token_id": len(tokens),
        }
    )


@functools.cache
def oracle(pre: str) -> tokenizers.Tokenizer:
    tokens, merges = trained()
    normalizer, steps, ignore_merges = FAMILIES[pre]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(tokens) + index, "content": text, "special": kind == CONTROL, **flags}
        for index, (text, kind) in enumerate(OWN_TOKENS)
        if kind != UNUSED
    ]
    model = {"type": "BPE", "ignore_merges": ignore_merges, "byte_fallback": False, "merges": merges}
    # Converters make up [PAD..] tokens for rows of the embedding that have none: no model's file has them.
    model["vocab"] = {text: id for id, text in enumerate(tokens)}
    whole = {"version": "1.0", "normalizer": normalizer, "added_tokens": added, "model": model}
    whole |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


@pytest.mark.parametrize("pre", FAMILIES)
def test_ids_are_those_of_the_models_own_tokenizer(pre: str) -> None:
    for text in NASTY:
        ids = ours(pre).encode(text, add_bos=False)
        assert ids == oracle(pre).encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", FAMILIES)
def test_text_comes_back(pre: str) -> None:
    composed = FAMILIES[pre][0] is not None
    for text in NASTY:
        expected = unicodedata.normalize("NFC", text) if composed else text
        assert ours(pre).decode(ours(pre).encode(text, add_bos=False), special=True) == expected


def test_the_families_differ_on_these_texts() -> None:
    """So that the comparison above would see one family taken for another."""
    found = {pre: [tuple(ours(pre).encode(text, add_bos=False)) for text in NASTY] for pre in FAMILIES}
    assert len({tuple(ids) for ids in found.values()}) == len(FAMILIES)


#: Pieces by hand. What is one token in a vocabulary that has every piece, is one piece.
PIECES = {
    "qwen2": {
        "12345 a": ["1", "2", "3", "4", "5", " a"],
        "you'LL  go": ["you", "'LL", " ", " go"],
        "x\n\n  y": ["x", "\n\n", " ", " y"],
        "a!\n\nb": ["a", "!\n\n", "b"],
        "end  ": ["end", "  "],
        "(word": ["(word"],
    },
    "qwen35": {"\u0915\u094d\u0937 !": ["\u0915\u094d\u0937", " !"], "x \u094dy": ["x", " \u094dy"]},
    "llama-bpe": {"12345 a": ["123", "45", " a"], "a!\n\nb": ["a", "!\n\n", "b"]},
    "smollm": {
        "12345 a": ["1", "2", "3", "4", "5", " a"],
        "you'LL  go": ["you", "'", "LL", " ", " go"],
        "a!\n\nb": ["a", "!", "\n", "\n", "b"],
        "(word 7": ["(", "word", " ", "7"],
    },
}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [(pre, text, pieces) for pre, cases in PIECES.items() for text, pieces in cases.items()],
)
def test_pieces_by_hand(pre: str, text: str, pieces: list[str]) -> None:
    backend = ours(pre)._backend
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


@pytest.mark.parametrize("name", ["llama3", "llama-v3"])
def test_older_names_of_a_family(name: str) -> None:
    """BOS too: llama.cpp puts it in front where the file does not say."""
    text = "12345 you'LL\n\n"
    assert ours(name).encode(text) == ours("llama-bpe").encode(text)
    assert ours(name).add_bos
