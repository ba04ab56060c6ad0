"""Text to token ids and back, from the vocabulary inside a GGUF file.

Byte-level BPE only (``tokenizer.ggml.model = gpt2``). The merging is done by the `tokenizers` library; what
is ours is the reading of the metadata, the splitting rules per family of models, BOS, and decoding, which
works on raw bytes so that a stream can be cut anywhere.
"""

from __future__ import annotations

import functools
import mmap
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from slotd.protocol.errors import ConfigError, ModelError
from slotd.protocol.gguf_header import DEFAULT_ALIGNMENT, Header, parse_header
from slotd.protocol.gguf_vocabulary import OWN_TYPES, TYPES_KEY, read_vocabulary

if TYPE_CHECKING:
    import tokenizers

_KEY = "tokenizer.ggml."

# Values of tokenizer.ggml.token_type that are not plain text (the GGUF specification).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


class Tokenizer:
    """Vocabulary of one model. Made by `from_file` or `from_metadata`.

    Attributes:
        vocab_size: number of tokens; ids are 0 .. vocab_size - 1.
        bos_id, eos_id: ids, or None where the file names none.
        bos_token, eos_token: their texts, "" where there is none (for chat templates).
        add_bos: whether the vocabulary wants BOS before a prompt.
        stop_ids: ids that end an answer: end of text, of turn, of message.
        chat_template: source of the file's chat template, or None.
    """

    def __init__(self, header: Header, *, pre_override: str | None = None) -> None:
        self._name = header.name
        self._texts, self._types = _read_tokens(header)
        self.vocab_size = len(self._texts)
        self._ids = _index_tokens(self._texts, header.name)
        self._merges = _read_merges(header, self._ids)
        self._pre = _choose_pre(header, pre_override)
        self._backend = self._build(self._ids, self._merges, OWN_TYPES)

        vocabulary = read_vocabulary(header, self._pre)
        if vocabulary.bos_id is None and header.flag(_KEY + "add_bos_token", False):
            raise ModelError(f"{header.name}: {_KEY}add_bos_token is true, but {_KEY}bos_token_id is missing")
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.bos_token = "" if self.bos_id is None else self._texts[self.bos_id]
        self.eos_token = "" if self.eos_id is None else self._texts[self.eos_id]
        self.add_bos = vocabulary.add_bos
        self.stop_ids = vocabulary.stop_ids
        self.chat_template = header.string("tokenizer.chat_template", "") or None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, pre_override: str | None = None) -> Tokenizer:
        """The tokenizer of a GGUF file; only its header is read.

        Raises:
            ModelError: the file cannot be read, is no GGUF, or its tokenizer cannot be used.
            ConfigError: `pre_override` is not a known pre-tokenizer.
        """
        name = os.fspath(path)
        try:
            with open(name, "rb") as file:
                if not os.fstat(file.fileno()).st_size:  # mmap refuses a file without bytes
                    raise ModelError(f"{name}: the file is empty")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                    header = parse_header(buffer, name)
        except OSError as error:
            raise ModelError(f"{name}: {error.strerror or error}") from None
        return cls(header, pre_override=pre_override)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, pre_override: str | None = None) -> Tokenizer:
        """The tokenizer of GGUF metadata (key -> value).

        Args:
            metadata: as in `Header.metadata`; `token_type` may also be a plain list of ints.
            pre_override: used instead of `tokenizer.ggml.pre`.

        Raises:
            ModelError: no tokenizer, an unsupported kind, or tables that do not fit together.
            ConfigError: `pre_override` is not a known pre-tokenizer.
        """
        types = metadata.get(TYPES_KEY)
        if isinstance(types, list) and all(type(kind) is int for kind in types):
            metadata = {**metadata, TYPES_KEY: array("i", types)}  # as a parsed file has it
        header = Header("GGUF metadata", 3, metadata, {}, DEFAULT_ALIGNMENT, 0)
        return cls(header, pre_override=pre_override)

    # ----- text to ids

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_bos: whether BOS stands first; None: as the vocabulary says. A BOS that the text itself
                begins with (chat templates write it) is not doubled.
            parse_special: whether the text of a control token becomes that token. False for text that is
                not trusted; tokens that the vocabulary calls user-defined are ordinary text in both cases.

        A byte that the vocabulary has no token for is dropped, as the models' own tokenizers do (SmolLM2
        lacks six control characters and the first bytes of unassigned planes).

        Raises:
            ConfigError: `text` is not Unicode text, or BOS is asked for and there is none.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text is not Unicode: lone surrogate at character {error.start}") from None
        backend = self._backend if parse_special else self._literal
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise ConfigError(f"{self._name}: BOS asked for, the vocabulary has none")
            if not (parse_special and ids and ids[0] == self.bos_id):
                ids.insert(0, self.bos_id)
        return ids

    # ----- ids to text

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `special`: show special tokens too."""
        return b"".join(self.token_bytes(id, special=special) for id in ids).decode("utf-8", "replace")

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:
        """Raw bytes of one token, possibly a fragment of a character.

        Special tokens give no bytes unless `special`.

        Raises:
            ModelError: `id` is not in the vocabulary.
        """
        self._check(id)
        text, kind = self._texts[id], self._types[id]
        if kind in (_UNKNOWN, _CONTROL, _UNUSED):
            return text.encode() if special else b""
        if kind == _USER_DEFINED:  # stored as plain text, not in the byte alphabet
            return text.encode()
        try:
            return bytes([_BYTE_OF[character] for character in text])
        except KeyError:  # not in the byte alphabet either: the text as it stands
            return text.encode()

    def is_special(self, id: int) -> bool:
        """Whether the token is no text of its own: control, unknown or unused. Raises as `token_bytes`."""
        self._check(id)
        return self._types[id] in (_UNKNOWN, _CONTROL, _UNUSED)

    def hidden_ids(self, texts: Iterable[str]) -> dict[int, str]:
        """Which of these texts are special tokens, that `decode` shows nothing of: id -> text."""
        found = {self._ids[text]: text for text in texts if text in self._ids}
        return {id: text for id, text in found.items() if self.is_special(id)}

    def _check(self, id: int) -> None:
        if not 0 <= id < self.vocab_size:
            last = self.vocab_size - 1
            raise ModelError(f"{self._name}: token id {id} is not in the vocabulary (0..{last})")

    # ----- building

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """Backend for text that may not name control tokens: they are not in its vocabulary at all."""
        kinds = zip(self._ids.items(), self._types, strict=True)
        ids = {text: id for (text, id), kind in kinds if kind not in (_UNKNOWN, _CONTROL)}
        merges = [(a, b) for a, b in self._merges if a in ids and b in ids and a + b in ids]
        return self._build(ids, merges, (_USER_DEFINED,))

    def _build(
        self, ids: dict[str, int], merges: list[tuple[str, str]], added_types: Collection[int]
    ) -> tokenizers.Tokenizer:
        from tokenizers import AddedToken, decoders, models
        from tokenizers import Tokenizer as Backend

        backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=self._pre == "llama-bpe"))
        _PRE_TOKENIZERS[self._pre](backend)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens(
            [
                AddedToken(text, normalized=False, special=kind != _USER_DEFINED)
                for text, kind in zip(self._texts, self._types, strict=True)
                if kind in added_types
            ]
        )
        return backend


# ----- reading the metadata


def _read_tokens(header: Header) -> tuple[list[str], list[int]]:
    if _KEY + "model" not in header.metadata:
        raise ModelError(f"{header.name}: the file has no tokenizer (key {_KEY}model is missing)")
    model = header.string(_KEY + "model")
    if model != "gpt2":
        raise ModelError(f"{header.name}: tokenizer model {model!r} is not supported, only 'gpt2' is")
    texts = header.strings(_KEY + "tokens")
    if not texts:
        raise ModelError(f"{header.name}: key {_KEY}tokens is empty")
    types = header.integers(TYPES_KEY)
    if len(types) != len(texts):
        raise ModelError(f"{header.name}: {len(texts)} {_KEY}tokens, but {len(types)} {_KEY}token_type")
    return texts, types


def _index_tokens(texts: list[str], name: str) -> dict[str, int]:
    ids = {text: id for id, text in enumerate(texts)}
    if len(ids) != len(texts):
        first = next(id for id, text in enumerate(texts) if ids[text] != id)
        raise ModelError(f"{name}: tokens {first} and {ids[texts[first]]} are both {texts[first]!r}")
    return ids


def _read_merges(header: Header, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens, best first. Checked here: the library panics on what does not fit the vocabulary."""
    pairs = []
    for rank, merge in enumerate(header.strings(_KEY + "merges")):
        left, _, right = merge.partition(" ")
        if not (left and right and left in ids and right in ids and left + right in ids):
            raise ModelError(f"{header.name}: merge {rank} {merge!r} does not join two tokens to a third one")
        pairs.append((left, right))
    return pairs


def _choose_pre(header: Header, override: str | None) -> str:
    known = ", ".join(sorted(_PRE_TOKENIZERS))
    if override is not None:
        override = _OTHER_NAMES.get(override, override)
        if override not in _PRE_TOKENIZERS:
            raise ConfigError(f"pre-tokenizer {override!r} is unknown; known are {known}")
        return override
    pre = header.string(_KEY + "pre", "")
    pre = _OTHER_NAMES.get(pre, pre)
    if pre not in _PRE_TOKENIZERS:
        what = f"pre-tokenizer {pre!r} ({_KEY}pre) is unknown" if pre else f"key {_KEY}pre is missing"
        raise ModelError(f"{header.name}: {what}; known are {known}; choose one with --pre NAME")
    return pre


# ----- the byte alphabet


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: printable bytes stand for themselves, the other 68 are U+0100 and up, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


# ----- splitting text before the merges, per family (the patterns are facts of the models)

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Combining marks join letters.
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split_gpt2(backend: tokenizers.Tokenizer) -> None:
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_smollm(backend: tokenizers.Tokenizer) -> None:
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _split_by(pattern: str, backend: tokenizers.Tokenizer) -> None:
    from tokenizers import Regex, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _split_qwen(pattern: str, backend: tokenizers.Tokenizer) -> None:
    from tokenizers import normalizers

    # NFC is how these models were trained (llama.cpp leaves it out).
    backend.normalizer = normalizers.NFC()
    _split_by(pattern, backend)


_PRE_TOKENIZERS: Mapping[str, Callable[[tokenizers.Tokenizer], None]] = {
    "gpt-2": _split_gpt2,
    "llama-bpe": functools.partial(_split_by, _LLAMA),
    "qwen2": functools.partial(_split_qwen, _QWEN2),
    "qwen35": functools.partial(_split_qwen, _QWEN35),
    "smollm": _split_smollm,
}

#: Names that older converters wrote -> the name of today. Nothing differs but the name.
_OTHER_NAMES: Mapping[str, str] = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
