"""THE table of command lines: every verb, its words, its fields, types, limits, and its end.

Parser and formatter (`command_lines`), PROTOCOL.md's tests and the completion of the REPL read it; a verb
or field that is not here does not exist. `event_grammar` is the same for the daemon's lines.

A command line is ``VERB word ... key=value ...``. The bare prompt has no verb of its own: its path stands
first. Nothing here parses: a `Field` says what a value must be, `values` reads and writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slotd.protocol import messages

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

#: How a value is written. `values` has one reader and one writer for each.
Kind = Literal[
    "int",  # decimal digits, a minus sign where the range allows it
    "real",  # decimal number, finite; an exponent is allowed
    "flag",  # 0 or 1
    "choice",  # one of `choices`
    "name",  # a-z, digits, _ and -
    "text",  # any text; a JSON string where it has blanks, quotes, control characters
    "path",  # text that can be a file name
    "request_id",  # 1-64 characters of A-Za-z0-9._:-
    "ids",  # prompt: int32 numbers separated by commas, also none
    "tokens",  # one or more token ids separated by commas
    "numbers",  # integers separated by commas, also none
    "biases",  # ID:BIAS,ID:BIAS
    "snap",  # AT:SLOT
    "hash",  # 32 hexadecimal digits, small letters
    "slots",  # slot numbers separated by commas, or - for none
    "span",  # START,END
    "sampler",  # the sampler tail of version 1
    "progress",  # AT/OF
    "logprobs",  # JSON, see messages.TokenLogprob
]


@dataclass(frozen=True, slots=True)
class Field:
    """One value: its name, how it is written, and its limits.

    Attributes:
        low, high: bounds of the number (of each number in a list); both belong to the range.
        above: `low` itself is outside.
        most: how many entries a list may have.
        choices: the words a `choice` may be.
        sampling: the value lives in `messages.Sampling`, not in the command.
        required: its absence is an error (words and event fields only).
        attributes: where the value lives in the message; empty means one attribute named `name`.
    """

    name: str
    kind: Kind
    meaning: str = ""
    low: int = 0
    high: int = INT32_MAX
    above: bool = False
    most: int = 0
    choices: tuple[str, ...] = ()
    sampling: bool = False
    required: bool = True
    attributes: tuple[str, ...] = ()

    @property
    def limit(self) -> str:
        """What is allowed, as errors and PROTOCOL.md write it: ``0..20``, ``(0..1]``, ``all|draft``."""
        if self.kind == "flag":
            return "0|1"
        if self.kind == "choice":
            return "|".join(self.choices)
        return f"({self.low}..{self.high}]" if self.above else f"{self.low}..{self.high}"


# --------------------------------------------------------------------------------------------------
# Words (by position)

SLOT = Field("slot", "int", "slot number; the daemon also checks it against its own count")
PATH = Field("path", "path", "file of ids, or - where ids= brings them")
N_GEN = Field("n_gen", "int", "how many tokens to generate; 0 only prefills")
IN = Field("path", "path", "file of ids with a leading count")
OUT = Field("out", "path", "file that gets the generated ids, with a leading count")
WHAT = Field(
    "what", "choice", "which weights; all when left out", choices=("all", "draft", "target"), required=False
)
THICK = Field("thick", "int", "slot that the chain starts with, -1 for none", low=-1)
THINS = Field("thins", "slots", "slots of SNAPSHOT_THIN, in order, or - for none")
KV_START = Field("kv_start", "int", "first position of the span")
KV_END = Field("kv_end", "int", "position behind the span", low=1)

#: Parts of `snap` and of `logit_bias`; their errors carry the name of the whole field.
SNAP_AT = Field("snap", "int", low=1)
SNAP_SLOT = Field("snap", "int")
BIAS_ID = Field("logit_bias", "int")

# --------------------------------------------------------------------------------------------------
# Fields (key=value, in any order behind the words)

_SAMPLING = (
    Field("temperature", "real", "0 takes the best token", high=100, sampling=True),
    Field("top_k", "int", "keep the k best tokens; 0 = off", sampling=True),
    Field("top_p", "real", "keep the smallest set with this probability; 1 = off", high=1, above=True,
          sampling=True),
    Field("min_p", "real", "drop tokens below this share of the best one; 0 = off", high=1, sampling=True),
    Field("repetition_penalty", "real", "divides positive, multiplies negative logits of seen ids; 1 = off",
          high=100, above=True, sampling=True),
    Field("penalty_window", "int", "how many last tokens the three penalties look at", sampling=True),
    Field("frequency_penalty", "real", "subtracted once for each time a token was seen", low=-100, high=100,
          sampling=True),
    Field("presence_penalty", "real", "subtracted when a token was seen", low=-100, high=100, sampling=True),
    Field("logit_bias", "biases", "added to the logits of these ids", low=-1000, high=1000, most=1024,
          sampling=True),
    Field("seed", "int", "of the random draw; else the daemon draws one and reports it", high=UINT64_MAX,
          sampling=True),
)  # fmt: skip

_OTHERS = (
    Field("id", "request_id", "name of the request; every line about it carries the name"),
    Field("ids", "ids", "the prompt itself, where - stands for the path", low=-INT32_MAX - 1),
    Field("snap", "snap", "keep the first AT tokens of the prompt in slot SLOT; AT is 1 or more"),
    Field("samp", "sampler", "sampler tail of version 1: up to seven numbers by position, the first needed",
          most=7),
    Field("stop", "tokens", "token ids that also end the answer", most=64),
    Field("logprobs", "int", "how many alternatives to report with each token; 0 = none", high=20),
    Field("min_tokens", "int", "no end-of-text or stop id before so many tokens; at most n_gen"),
    Field("ignore_eos", "flag", "the model's own end-of-text ids do not end the answer"),
    Field("fit", "flag", "generate what the context has room for instead of refusing"),
    Field("tier", "choice", "where the snapshot goes: device, host or disk",
          choices=("device", "host", "disk")),
    Field("of", "request_id", "the request whose sequence to keep; else the last one of the token stream"),
    Field("held", "flag", "keep nothing new: put what the slot holds into the tier"),
    Field("hash", "hash", "name of a stored snapshot; must be given"),
)  # fmt: skip

FIELDS: dict[str, Field] = {field.name: field for field in (*_OTHERS, *_SAMPLING)}

#: What the numbers of `samp` mean, by position.
SAMPLER_ORDER = (
    "temperature", "top_p", "top_k", "repetition_penalty", "seed", "frequency_penalty", "presence_penalty",
)  # fmt: skip

_SAMPLING_NAMES = tuple(field.name for field in _SAMPLING)
_PROMPT_NAMES = (
    "id", "ids", "snap", "samp", *_SAMPLING_NAMES, "stop", "logprobs", "min_tokens", "ignore_eos", "fit",
    "tier",
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Verbs


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        message: the class of its messages.
        spellings: first word (or two) of its lines, the one that is written first; none for the bare prompt.
        words: values by position, behind the spelling.
        fields: names (of `FIELDS`) of the key=value fields it takes, in the order in which they are written.
        meaning: one sentence.
        ends_stream: a -1 on the token stream ends it, in error too, when the line has no id.
        at_once: answered when it is read; the others without an id wait in the serial lane.
        supported: False: parsed to `messages.Unsupported`, whatever its words are.
    """

    message: type[messages.Command]
    spellings: tuple[str, ...]
    words: tuple[Field, ...]
    fields: tuple[str, ...]
    meaning: str
    ends_stream: bool
    at_once: bool = False
    supported: bool = True

    @property
    def name(self) -> str:
        """The verb as errors and PROTOCOL.md name it."""
        return self.message.verb or self.spellings[0]

    @property
    def usage(self) -> str:
        """``RESTORE SLOT PATH N_GEN``: the spelling and the words; a word in brackets may be left out."""
        words = [_usage_of(word) for word in self.words]
        return " ".join([*self.spellings[:1], *words])


def _usage_of(word: Field) -> str:
    text = word.limit if word.kind == "choice" else word.name.upper()
    return text if word.required else f"[{text}]"


def _verb(
    message: type[messages.Command],
    spellings: tuple[str, ...],
    words: tuple[Field, ...],
    meaning: str,
    fields: tuple[str, ...] = ("id",),
    at_once: bool = False,
) -> Verb:
    return Verb(message, spellings, words, fields, meaning, message.ends_stream, at_once)


def _unsupported(name: str, meaning: str, ends_stream: bool) -> Verb:
    return Verb(messages.Unsupported, (name,), (), ("id",), meaning, ends_stream, supported=False)


PROMPT = _verb(messages.Prompt, (), (PATH, N_GEN), "generate after a prompt", _PROMPT_NAMES)

VERBS: tuple[Verb, ...] = (
    PROMPT,
    _verb(messages.Restore, ("RESTORE",), (SLOT, PATH, N_GEN),
          "generate after a prompt that starts with the tokens of a slot", _PROMPT_NAMES),
    _verb(messages.RestoreChain, ("RESTORE_CHAIN",), (THICK, THINS, PATH, N_GEN),
          "generate after a prompt that starts with the tokens of a chain of slots", _PROMPT_NAMES),
    _verb(messages.Generate, ("generate",), (IN, N_GEN, OUT), "generate from file to file",
          ("id", "samp", *_SAMPLING_NAMES)),
    _verb(messages.Snapshot, ("SNAPSHOT",), (SLOT,), "keep the sequence that ended last in a slot",
          ("id", "of", "tier", "held")),
    _verb(messages.SnapshotThin, ("SNAPSHOT_THIN",), (SLOT, KV_START, KV_END),
          "keep positions KV_START to KV_END-1 of a sequence in a slot, for a chain", ("id", "of")),
    _verb(messages.FreeSnapshot, ("FREE_SNAPSHOT",), (SLOT,), "empty a slot"),
    _verb(messages.ListSlots, ("LIST_SLOTS",), (), "name the slots that hold something"),
    _verb(messages.Stored, ("STORED",), (), "list the snapshots on disk"),
    _verb(messages.LoadSnapshot, ("LOAD_SNAPSHOT",), (SLOT,), "fill a slot from disk", ("id", "hash")),
    _verb(messages.Drop, ("DROP",), (), "remove a snapshot from disk", ("id", "hash")),
    _verb(messages.Park, ("park",), (WHAT,), "give the device memory of the weights back"),
    _verb(messages.Unpark, ("unpark",), (WHAT,), "load parked weights again"),
    _verb(messages.FreeDrafter, ("free drafter", "drafter free"), (), "unload the prompt scorer"),
    _verb(messages.Hello, ("HELLO",), (), "ask for versions and limits, turn to version 2", at_once=True),
    _verb(messages.Cancel, ("CANCEL",), (), "cancel the request id=, or the one on the token stream",
          at_once=True),
    _verb(messages.Status, ("STATUS",), (), "ask what the daemon does now", at_once=True),
    _verb(messages.Props, ("PROPS",), (), "ask how the daemon was started", at_once=True),
    _verb(messages.Quit, ("quit", "exit"), (), "cancel what runs, free everything, exit 0", at_once=True),
    _unsupported("compress", "shorten a prompt with a scorer model", True),
)  # fmt: skip

_BY_SPELLING = {spelling: verb for verb in VERBS for spelling in verb.spellings}
_BY_NAME = {verb.name: verb for verb in VERBS}
_BY_MESSAGE = {verb.message: verb for verb in VERBS if verb.supported}

#: First words of all spellings: a path that is one of them must be quoted.
FIRST_WORDS = frozenset(spelling.split()[0] for spelling in _BY_SPELLING)


def find_verb(words: list[str]) -> tuple[Verb, int] | None:
    """The verb that the first words spell, and how many words that takes. The spelling is exact."""
    for count in (2, 1):
        verb = _BY_SPELLING.get(" ".join(words[:count])) if len(words) >= count else None
        if verb is not None:
            return verb, count
    return None


def verb_of(command: messages.Command) -> Verb | None:
    """The verb of a message; None for a class or an unsupported name that the table does not have."""
    if isinstance(command, messages.Unsupported):
        verb = _BY_NAME.get(command.name)
        return None if verb is None or verb.supported else verb
    return _BY_MESSAGE.get(type(command))


def ends_stream(verb: str) -> bool:
    """Whether a line without id that was refused owes a -1. A verb that could not be read does."""
    known = _BY_NAME.get(verb)
    return known is None or known.ends_stream
