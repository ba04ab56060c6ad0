"""What can be said: one frozen dataclass per command and per event.

A command is one line on the daemon's stdin, an event one line on its stdout. Nothing here parses or
formats (`wire` does), nothing here does I/O. Numbers are plain ints and floats, ids are `Sequence[int]`
(usually ``array('i')``), so that a 200,000-token prompt costs no object per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slotd.protocol.errors import Value

# --------------------------------------------------------------------------------------------------
# Parts of commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits. The defaults are greedy decoding.

    The order is fixed: logit_bias, repetition penalty, frequency and presence penalty, top_k,
    softmax at temperature, top_p, min_p, draw. Temperature 0 takes the best logit after the penalties.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    penalty_window: int = 256  # last tokens of prompt + answer that the three penalties look at
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: the daemon draws one and reports it in [done]


@dataclass(frozen=True, slots=True)
class Snap:
    """Inline snapshot ``snap=AT:SLOT``: keep the first `at` tokens of the prompt in `slot`."""

    at: int
    slot: int


# --------------------------------------------------------------------------------------------------
# Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Base of all commands. `ends_stream`: a -1 on the token stream ends it when it has no id."""

    verb: ClassVar[str] = ""
    ends_stream: ClassVar[bool] = False
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Command):
    """The bare prompt: ``PATH N_GEN [fields]``, or ``- N_GEN ids=1,2,3 [fields]``.

    Exactly one of `path` (file of raw little-endian int32 ids) and `ids` is set. `n_gen` = 0 only
    prefills. `fit`: when prompt + n_gen is over the context, generate what fits instead of refusing.
    """

    verb: ClassVar[str] = "PROMPT"
    ends_stream: ClassVar[bool] = True
    path: str | None = None
    ids: Sequence[int] | None = None
    n_gen: int = 0
    snap: Snap | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[int, ...] = ()  # ids that end the answer beside the model's own end-of-text ids
    logprobs: int = 0  # how many alternatives to report with every token; 0 = none
    min_tokens: int = 0  # generated tokens before an end-of-text or stop id is allowed
    ignore_eos: bool = False
    fit: bool = False
    tier: str | None = None  # where the inline snapshot goes: device, host, disk; None: device, not said


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(Prompt):
    """``RESTORE SLOT PATH N_GEN [fields]``: as Prompt, but the slot's tokens are not computed again.

    The ids are the whole prompt; it must start with the slot's tokens.
    """

    verb: ClassVar[str] = "RESTORE"
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChain(Prompt):
    """``RESTORE_CHAIN THICK THINS PATH N_GEN [fields]``: as Restore, from a slot and spans behind it.

    `thick` is the slot that the chain starts with, -1 for none; `thins` are slots that SNAPSHOT_THIN
    filled, in order, each one going on where the one before it ends. The ids are the whole prompt.
    """

    verb: ClassVar[str] = "RESTORE_CHAIN"
    thick: int = -1
    thins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Command):
    """``generate IN.counted N_GEN OUT.counted``: file to file, nothing on the token stream."""

    verb: ClassVar[str] = "generate"
    path: str = ""
    n_gen: int = 0
    out: str = ""
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Command):
    """``SNAPSHOT SLOT [of=ID] [tier=T] [held=1]``: keep the sequence that ended last, or that of `of`.

    `held`: keep nothing new, but put what the slot holds into the tier.
    """

    verb: ClassVar[str] = "SNAPSHOT"
    slot: int = 0
    of: str | None = None
    tier: str | None = None  # device, host, disk; None: device, not said
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotThin(Command):
    """``SNAPSHOT_THIN SLOT KV_START KV_END [of=ID]``: keep positions kv_start .. kv_end-1 of a sequence."""

    verb: ClassVar[str] = "SNAPSHOT_THIN"
    slot: int = 0
    kv_start: int = 0
    kv_end: int = 1
    of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSnapshot(Command):
    """``FREE_SNAPSHOT SLOT``."""

    verb: ClassVar[str] = "FREE_SNAPSHOT"
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSlots(Command):
    """``LIST_SLOTS``."""

    verb: ClassVar[str] = "LIST_SLOTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Command):
    """``STORED``: asks for ``[stored] {json}``, the snapshots on disk."""

    verb: ClassVar[str] = "STORED"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot(Command):
    """``LOAD_SNAPSHOT SLOT hash=H``: fill a slot from disk."""

    verb: ClassVar[str] = "LOAD_SNAPSHOT"
    slot: int = 0
    hash: str | None = None  # must be given


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Command):
    """``DROP hash=H``: remove a snapshot from disk; slots keep what they hold."""

    verb: ClassVar[str] = "DROP"
    hash: str | None = None  # must be given


@dataclass(frozen=True, slots=True, kw_only=True)
class Park(Command):
    """``park [all|draft|target]``: release device memory of the weights. No word means all."""

    verb: ClassVar[str] = "park"
    ends_stream: ClassVar[bool] = True
    what: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpark(Command):
    """``unpark [all|draft|target]``."""

    verb: ClassVar[str] = "unpark"
    ends_stream: ClassVar[bool] = True
    what: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeDrafter(Command):
    """``free drafter`` or ``drafter free``."""

    verb: ClassVar[str] = "free drafter"
    ends_stream: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Command):
    """``HELLO``: asks for ``[hello] {json}`` and turns the connection to version 2."""

    verb: ClassVar[str] = "HELLO"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Command):
    """``CANCEL id=R`` (R is the target, not an id of its own) or ``CANCEL``: the token-stream request."""

    verb: ClassVar[str] = "CANCEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Command):
    """``STATUS``: ``[status] {json}`` within 100 ms."""

    verb: ClassVar[str] = "STATUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Props(Command):
    """``PROPS``: ``[props] {json}`` within 100 ms."""

    verb: ClassVar[str] = "PROPS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit(Command):
    """``quit`` or ``exit``: cancel what runs, free everything, exit 0."""

    verb: ClassVar[str] = "quit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported(Command):
    """A verb of the source protocol that this build answers with ``err unsupported verb=..``."""

    name: str = ""  # compress
    needs_stream_end: bool = False  # whether the source ends this verb with a -1


# --------------------------------------------------------------------------------------------------
# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. `id` is the request it belongs to, None for the token stream or for nobody."""

    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Event):
    """``[daemon] ready``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Json(Event):
    """``[hello] {json}`` and likewise status, props, stored; `kind` is the word in brackets.

    A request id travels inside the object, as ``"id"``.
    """

    kind: str = "status"
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapTaken(Event):
    """``[snap] slot=S cur_pos=N [tier=T [hash=H]]``: the answer to SNAPSHOT; `tier` when it was asked for."""

    slot: int
    cur_pos: int
    tier: str | None = None
    hash: str | None = None  # of the file, in tier disk


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapThin(Event):
    """``[snap] thin slot=S kv=START,END``: the answer to SNAPSHOT_THIN."""

    slot: int
    kv_start: int
    kv_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapInline(Event):
    """``[snap] inline slot=S cur_pos=N [tier=T [hash=H]]``: an inline snapshot was taken during prefill.

    `tier` (when it was asked for) is where it really is: one that could not be saved is on the device.
    """

    slot: int
    cur_pos: int
    tier: str | None = None
    hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapInlineFailed(Event):
    """``[snap] inline-failed slot=S reason=R``: it was not taken; the slot is as it was."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """``[snap] restored slot=S cur_pos=N``"""

    slot: int
    cur_pos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRestored(Event):
    """``[snap] chain restored thick=T thins=COUNT cur_pos=N``; thick is -1 when the chain had none."""

    thick: int
    thins: int
    cur_pos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapLoaded(Event):
    """``[snap] loaded slot=S cur_pos=N hash=H``: the answer to LOAD_SNAPSHOT."""

    slot: int
    cur_pos: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapDropped(Event):
    """``[snap] dropped hash=H``: the answer to DROP."""

    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapFreed(Event):
    """``[snap] freed slot=S``"""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotList(Event):
    """``[snap] slots=0,3`` (nothing after ``=`` when none is occupied)"""

    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared(Event):
    """``[snap] all-cleared epoch=N freed=i,j kept=k bytes=B``"""

    epoch: int
    freed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(Event):
    """``[park] target released``"""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unparked(Event):
    """``[unpark] target restored``"""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFreed(Event):
    """``[drafter] freed``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok(Event):
    """``ok N=.. gen=.. prefill_s=.. decode_s=.. decode_tok_s=.. out=..``: the answer to generate."""

    fields: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Event):
    """``err CODE key=value ...``"""

    code: str
    fields: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(Event):
    """``[prefill] id=R at=A/OF``: A of OF prompt tokens are in the cache (reused ones included)."""

    at: int
    of: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one generated token, and the best alternatives, before any sampling rule."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """``[tok] id=R at=A ids=5,6 [logprobs=JSON]``: `at` is the index of the first id in the answer."""

    at: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one per id, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Event):
    """``[cancel] id=R found=0|1``: the answer to CANCEL (its terminal line)."""

    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Event):
    """``[done] id=R status=S key=value ...``: the terminal line of one command.

    status: ``ok`` no text was asked for, ``stop`` (field stop=ID), ``length`` (field limit=n_gen or
    limit=max_ctx), ``cancelled``, ``err`` (field code=CODE and the fields of the error).
    Further fields: prompt, reused, gen, epoch, seed, and the time account in seconds (``*_s``, which
    sum to wall_s).
    """

    status: str
    fields: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown(Event):
    """Any other line; kept as text, so that a newer daemon does not break an older client."""

    text: str
