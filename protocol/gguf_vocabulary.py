"""The ids that begin and end a text, from the tokenizer keys of a GGUF header. Both sides go by them."""

from __future__ import annotations

from dataclasses import dataclass

from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header

TOKENS_KEY = "tokenizer.ggml.tokens"
TYPES_KEY = "tokenizer.ggml.token_type"
_ID_KEY = "tokenizer.ggml.{}_token_id"

#: Values of token_type that are tokens of their own, not pieces of text: unknown, control, user-defined.
OWN_TYPES = frozenset({2, 3, 4})

#: Keys of ids that end an answer (the last three: fill-in-the-middle padding, repository, file separator).
_STOP_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

#: Texts of tokens that end an answer although no key says so (uploaders often leave the keys out).
STOP_TEXTS = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "<end_of_utterance>", "</s>", "<eos>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
})  # fmt: skip

#: Splitters and models whose text starts with BOS when the file does not say (llama.cpp's defaults).
_BOS_BY_PRE = frozenset({"llama-bpe", "llama3", "llama-v3"})
_BOS_BY_MODEL = frozenset({"llama"})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids below `n_tokens`; None and empty when the file has no tokenizer.

    Attributes:
        n_tokens: number of token texts, None without a tokenizer.
        bos_id: begin of text.
        eos_id: end of text.
        add_bos: whether a prompt starts with `bos_id`; False when there is none.
        stop_ids: every id that ends an answer, `eos_id` included.
    """

    n_tokens: int | None
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    stop_ids: frozenset[int]


def read_vocabulary(header: Header, pre: str | None = None) -> Vocabulary:
    """Read the tokenizer keys; `pre` stands in for the file's own splitter.

    Raises:
        ModelError: a key of the wrong type, an id outside the vocabulary.
    """
    if TOKENS_KEY not in header.metadata:
        return Vocabulary(None, None, None, False, frozenset())
    tokens = header.strings(TOKENS_KEY)
    named = {_token_id(header, name, len(tokens)) for name in _STOP_KEYS}
    by_text = {index for index, text in enumerate(tokens) if text in STOP_TEXTS and _is_own(header, index)}
    bos_id = _token_id(header, "bos", len(tokens))
    return Vocabulary(
        n_tokens=len(tokens),
        bos_id=bos_id,
        eos_id=_token_id(header, "eos", len(tokens)),
        add_bos=bos_id is not None
        and header.flag("tokenizer.ggml.add_bos_token", _default_add_bos(header, pre)),
        stop_ids=frozenset(by_text | {index for index in named if index is not None}),
    )


def _token_id(header: Header, name: str, n_tokens: int) -> int | None:
    key = _ID_KEY.format(name)
    if key not in header.metadata:
        return None
    token = header.integer(key)
    if not 0 <= token < n_tokens:
        raise ModelError(f"{header.name}: key {key} is {token}, the vocabulary has {n_tokens} tokens")
    return token


def _is_own(header: Header, index: int) -> bool:
    """Whether it is a token of its own: "</s>" may also be an ordinary piece of HTML. Untyped: it is."""
    if TYPES_KEY not in header.metadata:
        return True
    types = header.integers(TYPES_KEY)
    return index >= len(types) or types[index] in OWN_TYPES


def _default_add_bos(header: Header, pre: str | None) -> bool:
    return (pre or header.string("tokenizer.ggml.pre", "")) in _BOS_BY_PRE or header.string(
        "tokenizer.ggml.model", ""
    ) in _BOS_BY_MODEL
